"""The order of prompts: mixtures by weight, the curriculum, and how both go on after an interruption."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_configs import checked
from test_steps import SHORT, numbers, tiny, written

from benchmarks.health.curriculum import simulate
from jaxrl_llm import recipe as recipes
from jaxrl_llm.data import order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.curriculum import Curriculum, from_text, to_text
from jaxrl_llm.models import hf
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.train import steps

PARTS = {"a": range(12), "b": range(12, 18), "c": range(18, 22)}


def mixed(weights: tuple[float, ...], seed: int = 0, draws=None, batch: int = 10):
    return order.mix(PARTS, dict(zip(PARTS, weights, strict=True)), batch, seed, list, draws)


def source_of(number: int) -> str:
    return next(name for name, rows in PARTS.items() if number in rows)


@pytest.mark.parametrize("weights", [(5.0, 3.0, 2.0), (1e-3, 6e-4, 4e-4)])
def test_a_mixture_draws_from_its_sources_by_weight(weights):
    iterator = mixed(weights)
    drawn = [number for _ in range(10) for number in next(iterator)]
    assert Counter(map(source_of, drawn)) == {"a": 50, "b": 30, "c": 20}
    for name, rows in PARTS.items():  # each source in epochs of its own, shuffled again in each
        own = [number for number in drawn if source_of(number) == name]
        epochs = [own[i : i + len(rows)] for i in range(0, len(own) - len(rows) + 1, len(rows))]
        assert all(sorted(epoch) == list(rows) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_batches_of_one_row_have_the_order_of_larger_ones():
    rows = lambda iterator, count: [row for _ in range(count) for row in next(iterator)]  # noqa: E731
    assert rows(order.iterate(7, 1, 3, list), 28) == rows(order.iterate(7, 4, 3, list), 7)
    assert rows(mixed((3.0, 2.0, 1.0), batch=1), 20) == rows(mixed((3.0, 2.0, 1.0)), 2)


def test_sources_of_one_size_have_orders_of_their_own():
    iterator = order.mix({"a": range(20), "b": range(20, 40)}, {"a": 1.0, "b": 1.0}, 40, 0, list)
    drawn = next(iterator)
    assert [x for x in drawn if x < 20] != [x - 20 for x in drawn if x >= 20]


def test_what_is_not_drawn_is_replaced_from_the_same_source():
    iterator = mixed((1.0, 1.0, 1.0), draws=lambda turn, number: number % 2 == 0, batch=9)
    drawn = [number for _ in range(6) for number in next(iterator)]
    assert not any(number % 2 for number in drawn)
    assert Counter(map(source_of, drawn)) == {"a": 18, "b": 18, "c": 18}


VALUES = np.array([3, 1, 2, 1] * 5 + [9, 0], float)  # of the 22 rows of PARTS


@pytest.mark.parametrize("parts", [{"all": range(22)}, PARTS], ids=["one source", "a mixture"])
def test_an_order_column_sorts_each_epoch_of_each_source_and_shuffles_ties(parts):
    def drawn(seed: int) -> list[int]:
        weights = {name: float(len(rows)) for name, rows in parts.items()}
        alone = order.iterate(22, 22, seed, list, values=VALUES)
        together = order.mix(parts, weights, 22, seed, list, values=VALUES)
        return [row for _ in range(3) for row in next(alone if len(parts) == 1 else together)]

    for rows in parts.values():
        own, other = ([row for row in drawn(seed) if row in rows] for seed in (0, 1))
        epochs = [own[i : i + len(rows)] for i in range(0, len(own), len(rows))]
        assert [VALUES[epoch].tolist() for epoch in epochs] == [sorted(VALUES[rows])] * 3
        assert [sorted(epoch) for epoch in epochs] == [[*rows]] * 3
        assert own != other or len(rows) < 5


@pytest.mark.parametrize("kind", ["shuffled", "by a column", "mixed"])
def test_an_order_set_to_a_state_goes_on_as_the_one_that_gave_it(kind):
    def make() -> Any:
        if kind == "mixed":
            return mixed((3.0, 2.0, 1.0), draws=lambda turn, number: (turn + number) % 3 > 0)
        return order.iterate(22, 5, 3, list, values=VALUES if kind == "by a column" else None)

    first, second = make(), make()
    for _ in range(6):
        next(first)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert [next(first) for _ in range(9)] == [next(second) for _ in range(9)]


def loaded(place: Path, lines: dict[str, str], column: str) -> data.Dataset:
    """The rows of one file, or of a mixture of several, by name -> content."""
    for name, content in lines.items():
        (place / name).write_text(content)
    sources = {name.partition(".")[0]: dict(source=str(place / name), convert="", weight=1.0) for name in lines}
    config = tiny(**{"data.source": str(place / next(iter(lines))), "data.order_column": column})
    if len(lines) > 1:
        config.data.source, config.data.mixture = "", ConfigDict(sources)
    return data.load(recipes.read(config).data, hf.load_tokenizer(Path(config.model.path)))


def test_numbers_of_an_order_column_are_read_also_from_text_and_within_a_column(tmp_path):
    assert loaded(tmp_path, {"a.csv": "prompt,level\n1+1,3\n2+2,-1e1\n"}, "level").order_values.tolist() == [3, -10]
    nested = '{"prompt": "1+1", "extra": {"level": 2}}'
    assert loaded(tmp_path, {"a.jsonl": nested}, "extra.level").order_values.tolist() == [2]
    assert loaded(tmp_path, {"a.jsonl": nested}, "").order_values is None


GOOD_ROW = '{"prompt": "1+1", "level": 1}\n'


@pytest.mark.parametrize(("lines", "row"), [
    ({"a.jsonl": GOOD_ROW + '{"prompt": "2+2"}'}, "a.jsonl row 2"),
    ({"a.jsonl": GOOD_ROW + '{"prompt": "2+2", "level": "hard"}'}, "a.jsonl row 2"),
    ({"a.jsonl": '{"prompt": "2+2", "level": NaN}'}, "a.jsonl row 1"),
    ({"a.jsonl": GOOD_ROW, "b.jsonl": GOOD_ROW.replace("level", "hardness")}, "b row 1"),
], ids=["missing", "text", "not finite", "missing in a source"])  # fmt: skip
def test_an_order_column_without_a_number_in_each_row_is_refused(refused, tmp_path, lines, row):
    with refused("config.data.order_column = 'level'", row):
        loaded(tmp_path, lines, "level")


TWO = {name: dict(source=f"arithmetic.{name}", convert="", weight=1.0) for name in ("train", "held_out")}
GOOD = dict(source="arithmetic.train", convert="", weight=1.0)
MIXTURES = {  # -> sources, data.source, and the field that the line names
    "of one source": (dict(a=GOOD), "", "mixture"),
    "with data.source as well": (TWO, "arithmetic.train", "source"),
    "with an unknown source": (TWO | dict(b=GOOD | dict(source="arithmetic.no")), "", "mixture.b.source"),
    "with an unknown convert": (TWO | dict(b=GOOD | dict(convert="no.convert")), "", "mixture.b.convert"),
    "without a weight": (TWO | dict(b=dict(source="arithmetic.train", convert="")), "", "mixture.b.weight"),
    "with weight 0": (TWO | dict(b=GOOD | dict(weight=0.0)), "", "mixture.b.weight"),
    "with another field": (TWO | dict(b=GOOD | dict(wait=1)), "", "mixture.b.wait"),
    "that is no section": (3, "", "mixture"),
}


@pytest.mark.parametrize(("mixture", "source", "field"), MIXTURES.values(), ids=MIXTURES.keys())
def test_a_mixture_is_refused(refused, mixture, source, field):
    config = tiny(**{"data.source": source})
    config.data = ConfigDict(config.data.to_dict() | {"mixture": mixture})
    with refused(f"config.data.{field}"):
        recipes.read(config)


def test_prompts_and_fingerprint_of_a_mixture_know_the_sources_of_its_rows():
    parts = {
        name: data.Dataset([np.array([i], np.int32)], [{"prompt": name}], i, 1 + i, [7], 2, "as it says" * i)
        for i, name in enumerate(TWO)
    }
    made = data.join(parts)
    assert (made.dropped, made.width, made.refused, made.numbers) == (1, 2, 4, [7, 7])
    assert made.parts == {"train": range(1), "held_out": range(1, 2)}
    assert made.read_as == "held_out: as it says"
    assert data.make_prompts(made, [1, 0, 1], 0).sources == ["held_out", "train", "held_out"]
    assert made.fingerprint() != data.join(dict(reversed(parts.items()))).fingerprint()


def test_a_column_that_a_source_does_not_have_is_none_there():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "target": 2}]
    parts = {row["prompt"]: data.Dataset([np.zeros(1, np.int32)], [row], 0, 1, [1]) for row in rows}
    assert data.join(parts).rows == [rows[0] | {"target": None}, rows[1] | {"answer": None}]


# ---- the curriculum


@pytest.mark.parametrize(("config", "changes"), [
    ("ppo", dict(data__curriculum__skip=0.5, group_size=1)),
    ("distillation", dict(data__curriculum__skip=0.5, teachers__teacher__path="x")),  # looks at no reward
    ("grpo", dict(data__curriculum__skip=1.0)),
])  # fmt: skip
def test_a_curriculum_without_effect_or_end_is_refused(refused, config, changes):
    with refused("config.data.curriculum.skip"):
        checked(config, **changes)


def visits(numbers: list[int], no_signal: list[bool], replaced: tuple[int, ...] = ()) -> tuple[Any, ...]:
    return np.array(numbers, np.int32), np.array(no_signal), list(replaced)


def test_a_row_is_passed_over_as_often_as_asked_after_a_visit_without_signal():
    curriculum = Curriculum(4, 0.8, seed=0)
    assert all(curriculum.draws(turn, number) for turn in range(100) for number in range(4))
    curriculum.no_signal = curriculum.visited(curriculum.no_signal, *visits([0, 1], [True, False]))
    drawn = {number: sum(curriculum.draws(turn, number) for turn in range(2000)) for number in range(4)}
    assert drawn[0] == pytest.approx(400, abs=60)
    assert (drawn[1], drawn[2], drawn[3]) == (2000, 2000, 2000)
    assert curriculum.metrics() == {"curriculum/passed_over": 2000 - drawn[0], "curriculum/no_signal": 0.25}
    assert curriculum.metrics()["curriculum/passed_over"] == 0
    again = Curriculum(4, 0.8, seed=0)
    again.no_signal = curriculum.no_signal
    assert drawn[0] == sum(again.draws(turn, 0) for turn in range(2000))


def test_the_last_visit_counts_and_of_two_in_a_step_the_one_with_a_signal():
    curriculum = Curriculum(5, 0.5, seed=0)
    known = np.array([True, False, True, False, False])
    made = curriculum.visited(known, *visits([0, 1, 2, 2], [False, True, True, False], replaced=(3, 0)))
    assert made.tolist() == [False, True, False, True, False]
    assert known.tolist() == [True, False, True, False, False]


def test_what_is_known_of_100_000_rows_is_short_in_a_checkpoint():
    bits = np.random.default_rng(0).random(100_003) < 0.5
    assert (from_text(to_text(bits), len(bits)) == bits).all()
    assert len(to_text(bits)) < 17_000
    assert len(to_text(np.zeros(100_003, bool))) < 100


ROWS = arithmetic.held_out()[:64]  # few: each is visited several times


def test_of_prompts_whose_difficulty_stays_those_that_teach_something_are_drawn():
    without, within = (simulate(skip, seed=0, rows=96, steps=10) for skip in (0.0, 0.9))
    assert without > 0.3
    assert within < 0.6 * without


@pytest.mark.slow
def test_a_mixture_with_curriculum_lag_and_resampling_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.tasks.arithmetic.train", lambda: ROWS[:24])
    monkeypatch.setattr("jaxrl_llm.tasks.arithmetic.held_out", lambda: ROWS[24:])

    def config() -> ConfigDict:
        c = tiny(**{
            **SHORT, "data.source": "", "num_steps": 12, "rollout.max_lag": 1, "data.curriculum.skip": 0.9,
            "rollout.resample_rounds": 2, "data.order_column": "answer", "checkpoint.every": 4,
            "reward.timeout": 60.0,  # groups are replaced in the thread that samples ahead
        })  # fmt: skip
        c.data.mixture = ConfigDict(TWO)
        c.data.mixture.train.weight = 3.0
        return c

    whole = list(steps(config(), tmp_path / "whole"))
    for record in steps(config(), tmp_path / "part"):
        if record["step"] == 4:
            break  # the fifth step is learned by then, and not saved
    list(steps(config(), tmp_path / "part"))
    assert numbers(written(tmp_path / "part")) == numbers(written(tmp_path / "whole"))
    assert all(
        sum(record.get(key, 0) for record in whole[-2:]) for key in ("curriculum/passed_over", "groups/replaced")
    )
    for record in whole[1:]:
        parts = [record.get(f"source/{name}/reward", 0.0) * record.get(f"source/{name}/share", 0.0) for name in TWO]
        assert sum(parts) == pytest.approx(record["reward/mean"], abs=1e-6)
