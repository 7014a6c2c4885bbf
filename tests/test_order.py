"""The order of prompts: mixtures by weight, the curriculum, and how both go on after an interruption."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_configs import checked
from test_steps import numbers, tiny, written

from benchmarks.health.curriculum import simulate
from jaxrl_llm import recipe as recipes
from jaxrl_llm.data import order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.curriculum import Curriculum, from_text, to_text
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.train import steps

PARTS = {"a": range(30), "b": range(30, 40), "c": range(40, 45)}


def mixed(weights: tuple[float, ...], seed: int = 0, draws=None, batch: int = 10):
    return order.mix(PARTS, dict(zip(PARTS, weights, strict=True)), batch, seed, list, draws)


def source_of(number: int) -> str:
    return next(name for name, rows in PARTS.items() if number in rows)


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (5.0, 3.0, 2.0), (1e-3, 6e-4, 4e-4)])
def test_a_mixture_draws_from_its_sources_by_weight(weights):
    iterator = mixed(weights)
    drawn = [number for _ in range(30) for number in next(iterator)]
    assert Counter(map(source_of, drawn)) == {"a": 150, "b": 90, "c": 60}
    for name, rows in PARTS.items():  # each source in epochs of its own, shuffled again in each
        own = [number for number in drawn if source_of(number) == name]
        epochs = [own[i : i + len(rows)] for i in range(0, len(own) - len(rows) + 1, len(rows))]
        assert all(sorted(epoch) == list(rows) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_sources_of_one_size_have_orders_of_their_own():
    iterator = order.mix({"a": range(20), "b": range(20, 40)}, {"a": 1.0, "b": 1.0}, 40, 0, list)
    drawn = next(iterator)
    assert [x for x in drawn if x < 20] != [x - 20 for x in drawn if x >= 20]


def test_a_mixture_set_to_a_state_goes_on_as_the_one_that_gave_it():
    def draws(turn: int, number: int) -> bool:
        return (turn + number) % 3 > 0

    first = mixed((3.0, 2.0, 1.0), draws=draws)
    for _ in range(7):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    second = mixed((3.0, 2.0, 1.0), draws=draws)
    second.set_state(state)
    assert [next(first) for _ in range(9)] == [next(second) for _ in range(9)]


def test_what_is_not_drawn_is_replaced_from_the_same_source():
    iterator = mixed((1.0, 1.0, 1.0), draws=lambda turn, number: number % 2 == 0, batch=9)
    drawn = [number for _ in range(20) for number in next(iterator)]
    assert not any(number % 2 for number in drawn)
    assert Counter(map(source_of, drawn)) == {"a": 60, "b": 60, "c": 60}


MIXTURES = {
    "of one source": (dict(a=dict(source="arithmetic.train", convert="", weight=1.0)), {}, "mixture has one source"),
    "with data.source as well": (None, {"data.source": "arithmetic.train"}, "data.source = 'arithmetic.train' does"),
    "with an unknown source": (dict(b=dict(source="arithmetic.no", convert="", weight=1.0)), {},
                               "config.data.mixture.b.source 'arithmetic.no' does not exist"),
    "with an unknown convert": (dict(b=dict(source="arithmetic.train", convert="no.convert", weight=1.0)), {},
                                "config.data.mixture.b.convert 'no.convert' does not exist"),
    "without a weight": (dict(b=dict(source="arithmetic.train", convert="")), {}, "data.mixture.b.weight is missing"),
    "with weight 0": (dict(b=dict(source="arithmetic.train", convert="", weight=0.0)), {}, "b.weight is 0.0: give a"),
    "with another field": (dict(b=dict(source="arithmetic.train", convert="", weight=1.0, wait=1)), {},
                           "data.mixture.b.wait is not a field; did you mean data.mixture.b.weight?"),
    "that is no section": (3, {}, "config.data.mixture is not a field"),
}  # fmt: skip
TWO = {name: dict(source=f"arithmetic.{name}", convert="", weight=1.0) for name in ("train", "held_out")}


@pytest.mark.parametrize(("changes", "more", "line"), MIXTURES.values(), ids=MIXTURES.keys())
def test_a_mixture_is_refused(changes, more, line):
    config = tiny(**{"data.source": "", **more})
    if isinstance(changes, int):
        config.data = ConfigDict(config.data.to_dict() | {"mixture": changes})
    else:
        alone = changes is not None and "a" in changes
        config.data.mixture = ConfigDict(changes if alone else TWO | (changes or {}))
    with pytest.raises(UserError, match=line):
        recipes.read(config)


def test_a_mixture_has_the_rows_of_its_sources_which_its_prompts_and_its_fingerprint_know():
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


REFUSED = {
    "group of one": ("ppo", dict(data__curriculum__skip=0.5, group_size=1), "a group of 1 never has a signal"),
    "advantage without rewards": ("distillation", dict(data__curriculum__skip=0.5, teachers__teacher__path="x"),
                                  "skip = 0.5 does nothing: advantage 'distillation' looks at no reward"),
    "certainty": ("grpo", dict(data__curriculum__skip=1.0), "curriculum.skip is 1.0: give a value of at most 0.95"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_a_curriculum_is_refused_with_a(config, changes, line):
    with pytest.raises(UserError, match=line):
        checked(config, **changes)


def visits(numbers: list[int], no_signal: list[bool], replaced: tuple[int, ...] = ()) -> tuple[Any, ...]:
    return np.array(numbers, np.int32), np.array(no_signal), list(replaced)


def test_a_row_is_passed_over_as_often_as_asked_after_a_visit_without_a_signal_alone():
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
    without, within = (simulate(skip, seed=0, rows=320, steps=40) for skip in (0.0, 0.9))
    assert without > 0.3
    assert within < 0.6 * without


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_with_mixture_and_curriculum_goes_on_bit_for_bit(tmp_path, monkeypatch, lag):
    monkeypatch.setattr("jaxrl_llm.tasks.arithmetic.train", lambda: ROWS[:24])
    monkeypatch.setattr("jaxrl_llm.tasks.arithmetic.held_out", lambda: ROWS[24:])

    def config() -> ConfigDict:
        c = tiny(**{
            "data.source": "", "num_steps": 7, "rollout.max_lag": lag, "data.curriculum.skip": 0.9, "eval": None,
            "checkpoint.every": 4,
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
    assert sum(record.get("curriculum/passed_over", 0) for record in whole[-2:]) > 0  # also after the resume
    for record in whole[1:]:
        assert (record["source/train/share"], record["source/held_out/share"]) == (0.75, 0.25)
        parts = [record[f"source/{name}/reward"] * record[f"source/{name}/share"] for name in TWO]
        assert sum(parts) == pytest.approx(record["reward/mean"], abs=1e-6)
