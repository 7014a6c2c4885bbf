"""Several evaluation sets in a run: `eval.extra_sets` beside the set that decides which checkpoint is best."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_report import figures, numbers, roles, write
from test_steps import SHORT, tiny, written
from tiny import log_of

from jaxrl_llm import evaluate
from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import build
from jaxrl_llm.config.load import load, override
from jaxrl_llm.data import columns
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.session import model_card
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.tools.report import page
from jaxrl_llm.train import steps, train

TRAIN = dict(source="arithmetic.train", convert="", function="arithmetic.accuracy", problems=5)
# Two evaluations, in which the further set says the opposite.
RECORDS = [{"step": i, "eval/accuracy": 0.5 + i / 10, "eval/sums/accuracy": 0.25 - i / 10} for i in (0, 2)]


def with_sets(config: ConfigDict, **sets: dict) -> ConfigDict:
    for name, each in sets.items():
        config.eval.extra_sets[name] = ConfigDict(each)
    return config


def falling(completions: list, **_: object) -> list[float]:
    return [0.25] * len(completions)


@pytest.mark.parametrize(("changes", "field"), [
    (dict(source="arithmetic.nothing"), "source"), (dict(convert="nowhere.f"), "convert"),
    (dict(function="arithmetic.accurate"), "function"), (dict(problems=0), "problems"),
    (dict(every=2), "every"),
])  # fmt: skip
def test_a_wrong_field_of_a_further_set_is_refused_by_its_path(refused, changes, field):
    with refused(f"config.eval.extra_sets.sums.{field}"):
        recipes.read(with_sets(load("grpo"), sums=TRAIN | changes))


def test_what_is_no_further_set_is_refused_with_what_to_give(refused):
    config = load("grpo")
    with refused("config.eval.extra_sets.x"):
        override(config, "eval.extra_sets.x.problems", "8")
    with refused("config.eval.extra_sets", "extra_sets.NAME"):
        config.eval.extra_sets = [TRAIN]
    for name in ("", "a.b"):  # its metric would be eval/accuracy; it would be a set b of a section a
        with refused("config.eval.extra_sets"):
            recipes.read(with_sets(load("grpo"), **{name: TRAIN}))
    config.eval.extra_sets.x = 3
    with refused("config.eval.extra_sets.x", "eval.extra_sets.x.source"):
        recipes.read(config)
    config.eval.extra_sets = None
    assert [*recipes.read(config).eval_sets] == ["eval"]


def test_a_further_set_without_a_column_that_its_judge_needs_is_refused(refused):
    recipe = recipes.read(with_sets(load("grpo"), sums=TRAIN))
    good = Dataset([np.zeros(1, np.int32)], [{"prompt": "1+1", "answer": "2"}], 0, 1, [1])
    bad = Dataset(good.ids, [{"prompt": "1+1"}], 0, 1, [1])
    held_out = {"eval": good, "eval.extra_sets.sums": bad}
    with refused("'answer'", "eval.extra_sets.sums.source"):
        columns.check_all(recipe.data, recipe.eval_sets, recipe.reward.functions, good, held_out, episodes=False)


def test_further_sets_take_function_objects_and_rows_in_memory():
    rows = [{"prompt": "1+1", "answer": "2"}]
    recipe = recipes.read(with_sets(load("grpo"), sums=TRAIN | dict(function=falling, source=rows)))
    one = recipe.eval_sets["eval.extra_sets.sums"]
    assert one.function == "test_eval_sets.falling"
    assert one.source.startswith("memory.rows")
    config = with_sets(load("grpo"), **{"of-sums": TRAIN})
    config.eval.extra_sets["of-sums"].function = falling
    assert recipes.read(config).eval_sets["eval.extra_sets.of-sums"].function == "test_eval_sets.falling"


def test_the_console_the_card_and_the_report_have_each_set(tmp_path):
    config = with_sets(load("grpo"), sums=TRAIN)
    config.log.to = ()
    with closing(log_of(tmp_path, config)) as log:
        log.start(0)
        assert "accuracy 70.0%  accuracy sums 5.0%" in log._step_line(2, RECORDS[1])
    workdir = write(tmp_path / "run", RECORDS)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    card = model_card.card(workdir, config.to_dict(), {"model.path": "1", "eval.extra_sets.sums.source": "2"})
    assert "| 2 | 70.0% | 5.0% |" in card
    assert "evaluation sums: `arithmetic.train`, SHA-256 `2`" in card
    found = {(x.dataset_name, x.metric_value) for x in model_card.ModelCard(card).data.eval_results}
    assert found == {("arithmetic.held_out", 0.7), ("arithmetic.train", 0.05)}
    (figure,) = (x for title, x in figures(page.render([workdir])).items() if "held-out" in title)
    assert [numbers(curve["y"]) for curve in roles(figure, "mean")] == [[0.5, 0.7], [0.25, pytest.approx(0.05)]]


@pytest.mark.slow
def test_a_further_set_is_measured_and_decides_nothing(tmp_path, refused):
    plain = {name: x for name, x in SHORT.items() if name != "eval"} | {"checkpoint.keep_best": 1, "eval.every": 1}
    sets = dict(sums=TRAIN, other=TRAIN | dict(function="test_eval_sets.falling", problems=3))
    alone, together, measured = tiny(**plain, num_steps=3), with_sets(tiny(**plain, num_steps=3), **sets), []
    list(steps(alone, tmp_path / "alone"))
    with build(together, tmp_path / "together") as (session, parts):
        measure = parts.evaluate

        def opposite(states) -> dict[str, float]:
            """Other numbers than the measured ones: each set has another best step."""
            measured.append(measure(states))
            ours, theirs = [(0.1, 0.2), (0.2, 0.1), (0.9, 0.3), (0.3, 0.9)][session.run_state.step]
            return measured[-1] | {"eval/accuracy": ours, "eval/sums/accuracy": theirs}

        parts.evaluate = opposite
        list(train(session, parts))
    assert [x["eval/accuracy"] for x in measured] == [x["eval/accuracy"] for x in written(tmp_path / "alone")]
    assert all((x["eval/sums/problems"], x["eval/other/problems"]) == (5, 3) for x in measured)
    assert {x["eval/other/accuracy"] for x in measured} == {0.25}
    assert [x["eval/sums/accuracy"] for x in written(tmp_path / "together")] == [0.2, 0.1, 0.3, 0.9]
    run = SavedRun(tmp_path / "together")
    assert run.find("best") == 2
    assert evaluate.chosen_set(run, "sums") == recipes.read(together).eval_sets["eval.extra_sets.sums"]
    assert evaluate.chosen_set(run, "") == recipes.read(together).eval
    with refused("--set sum", "other, sums"):
        evaluate.chosen_set(run, "sum")
    with refused("config.eval.extra_sets."):
        list(steps(alone, tmp_path / "together"))
