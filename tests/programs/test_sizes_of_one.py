"""Every size runs at 1, the smallest that a config may have, or is refused in a line that names it."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_code import earned
from test_judge import by_word, judged, serving
from test_steps import SHORT, tiny
from test_train import ROOT
from test_vllm_engine import Server, connected, params, sample  # noqa: F401 (params is a fixture)

from jaxrl_llm import evaluate, sft, train
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.config.load import load
from jaxrl_llm.tasks import length, repetition
from jaxrl_llm.tasks.calculator import Calculator
from jaxrl_llm.tasks.number_game import NumberGame
from jaxrl_llm.tasks.python import Python

ONE_STEP = {"num_steps": 1, "optim.warmup_steps": 0, "prompts_per_step": 1, "checkpoint.every": 1, "checkpoint.keep": 1}
ONE_PROBLEM = {"eval.every": 1, "eval.problems": 1}
HERE = {"mesh.fsdp": 1, "log.to": ()}


class Run(NamedTuple):
    """A run with sizes of 1: the names of their fields, as the code has them, and what makes the config."""

    fields: str
    config: Callable[[], ConfigDict]
    program: Any = train
    refused: str = ""  # field in the line that refuses it; "": it runs


def rl(**changes: object) -> ConfigDict:
    """A run of `train` with the adaptive penalty and a reference that moves at each step."""
    one = ONE_STEP | ONE_PROBLEM | {"prompts_per_update": 1, "group_size": 1, "rollout.max_completion_tokens": 1}
    c = tiny(**one | {"model.row_parts": 1, "epochs": 1} | changes)
    c.advantage = load("reinforce_pp").advantage
    if c.kl:
        c.kl.adaptive, c.kl.refresh = ConfigDict(dict(target=0.1, horizon=1)), ConfigDict(dict(every=1, mix=0.5))
    return c


def mixed() -> ConfigDict:
    sources = {name: dict(source="arithmetic.train", convert="", weight=1.0) for name in "ab"}
    return rl(**SHORT | {"data.mixture": sources, "data.source": ""})


def of_lora() -> ConfigDict:
    c = rl(**SHORT)
    c.adapters = load("lora").adapters
    c.adapters.rank = 1
    return c


def going_back() -> ConfigDict:
    back = {"health.rollback.rules": ("no_signal",), "health.rollback.most": 1, "checkpoint.keep": 9}
    return rl(**SHORT | back)


def shipped(name: str, **changes: object) -> ConfigDict:
    c = load(name)
    c.update_from_flattened_dict(HERE | ONE_STEP | ONE_PROBLEM | {"checkpoint.keep_best": 0} | changes)
    return c


def images(width: int, tower: int) -> ConfigDict:
    """A new model that reads images."""
    c = shipped("pictures_sft", **{"model.hidden_size": width, "model.vision_config.hidden_size": tower})
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        c.model[name] = 1
    for name in ("depth", "num_heads", "intermediate_size"):
        c.model.vision_config[name] = 1
    return c


TURNS = {"health.self_test": False} | {
    f"turns.{name}": 1 for name in ("most", "tokens", "observation_tokens", "workers")
}
UNCHECKED = {"kl": None, "health.self_test": False}
SEARCHED = {"prompts_per_update": 1, "group_size": 2, "env.topk": 1, "rollout.max_completion_tokens": 1, "kl": None}
RUNS = {
    "train": Run(
        "Settings.num_steps Settings.prompts_per_step Recipe.prompts_per_update Recipe.group_size Recipe.epochs"
        " CheckpointSettings.every CheckpointSettings.keep EvalSettings.every EvalSet.problems"
        " GroupModelSettings.row_parts adaptive_kl.horizon RefreshSettings.every LengthSettings.max_completion_tokens",
        rl,
    ),
    "lora": Run("Lora.rank", of_lora),
    "rollback": Run("RollbackSettings.most", going_back),
    "turns": Run(
        "EnvironmentPool.most EnvironmentPool.tokens EnvironmentPool.observation_tokens EnvironmentPool.workers"
        " Search.topk",
        lambda: shipped("search_grpo", **SEARCHED | TURNS),
    ),
    "agents": Run(
        "AgentSettings.workers",
        lambda: shipped("agent", **{"prompts_per_update": 1, "env.workers": 1, "env.calls": 1} | UNCHECKED),
    ),
    "sft": Run(
        "NewModelSettings.num_hidden_layers NewModelSettings.num_attention_heads NewModelSettings.intermediate_size"
        " NewModelSettings.num_key_value_heads TowerSettings.depth TowerSettings.num_heads"
        " TowerSettings.intermediate_size",
        lambda: images(2, 4),
        sft,
    ),
    "a mixture": Run("", mixed),
    "prompts": Run(
        "DataSettings.max_prompt_tokens", lambda: rl(**{"data.max_prompt_tokens": 1}), refused="max_prompt_tokens"
    ),
    "width": Run("NewModelSettings.hidden_size", lambda: images(1, 4), sft, "model.hidden_size"),
    "tower": Run("TowerSettings.hidden_size", lambda: images(2, 1), sft, "model.vision_config.hidden_size"),
    "completions of sft": Run(
        "", lambda: shipped("sft", **{"rollout.max_completion_tokens": 1}), sft, "rollout.max_completion_tokens"
    ),
}  # fmt: skip
FUNCTIONS = (
    "pass_at_k.k penalty.scale distance.scale cosine.max_tokens penalty.ngram_size Calculator.most_characters"
    " NumberGame.most_guesses Python.most_characters score.concurrency score.max_tokens"
    " vllm.concurrency rows.size"
)


def test_each_size_that_may_be_1_has_a_case_here():
    named = {name for run in RUNS.values() for name in run.fields.split()} | {*FUNCTIONS.split()}
    found = set()
    for file in (ROOT / "jaxrl_llm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            body = node.body if isinstance(node, ast.ClassDef) else []
            found |= {(node, x.target.id, x.annotation) for x in body if isinstance(x, ast.AnnAssign)}
            for function in [x for x in [node, *body] if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]:
                owner = node if isinstance(node, ast.ClassDef) else function
                found |= {(owner, x.arg, x.annotation) for x in function.args.kwonlyargs if x.annotation}
    sizes = {f"{owner.name}.{name}" for owner, name, kind in found if "AtLeastOne" in ast.unparse(kind)}
    assert {x for x in sizes if not x.startswith("__init__.")} == named


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_sizes_of_1_ends_or_is_refused(name, tmp_path, refused):
    run = RUNS[name]
    if run.refused:
        with refused(run.refused):
            list(run.program.steps(run.config(), tmp_path / "run"))
        return
    assert list(run.program.steps(run.config(), tmp_path / "run"))[-1]["step"] == 1


def test_a_function_with_sizes_of_1_returns():
    ids, texts = [[1, 1, 2]], [[{"role": "assistant", "content": "1"}]]
    assert np.isfinite(advantages.pass_at_k(np.float32([[1, 0, 0]]), k=1)).all()
    assert length.penalty(ids, free=0, scale=1) == length.distance(ids, target=0, scale=1) == [-1.0]
    assert length.cosine(texts, ["1"], ids, max_tokens=1) == [-0.5]
    assert repetition.penalty(texts, ids, ngram_size=1) == pytest.approx([-1 / 3])
    assert Calculator(most_characters=1).step("<calculator>7</calculator>").observation == "<result>7</result>"
    game = NumberGame(most_guesses=1)
    game.reset({"answer": 3})
    assert game.step("<guess>1</guess>").done
    with serving(by_word) as server:
        assert judged(server, concurrency=1, max_tokens=1)[0] == [0.9, 0.25, 0.9, 0.25]


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_a_program_with_a_mebibyte_or_a_character_is_told_so():
    assert "error" in Python(seconds=5.0, memory=1, most_characters=100).step("<python>print(1)</python>").observation
    assert "..." in Python(seconds=5.0, memory=512, most_characters=1).step("<python>print(12)</python>").observation
    rewards, reasons = earned("def f():\n    return 1", tests="assert f() == 1", memory=1)
    assert (rewards, sum(reasons.values())) == ([0.0], 1.0)


def test_a_server_is_asked_one_request_at_a_time(params, tmp_path, monkeypatch):  # noqa: F811
    with connected(tmp_path, monkeypatch, Server(4), concurrency=1) as engine:
        engine.update_weights(params, 1)
        assert (sample(engine).versions == 1).all()


@pytest.mark.slow
def test_an_evaluation_with_sizes_of_1_ends(monkeypatch, capsys):
    model, ones = str(ROOT / "jaxrl_llm" / "assets" / "arithmetic"), set(evaluate.COUNTS) - {"max_prompt_tokens"}
    flags = [text for name in ones for text in (f"--{name.replace('_', '-')}", "1")]
    given = ["--model", model, "--task", "arithmetic", "--function", "arithmetic.accuracy", "--json", *flags]
    monkeypatch.setattr(sys, "argv", ["evaluate", *given])
    evaluate.main()
    assert json.loads(capsys.readouterr().out)["problems"] == 1
