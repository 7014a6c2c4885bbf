"""Several environments in one run: each episode is that of a run with its environment alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from model_parts import parts, prompts, same
from model_parts import sampler as engine_of
from test_episodes import LIMITS, Echo, config_with_turns, run_records
from test_tools import LIMITS as TOOL_LIMITS
from test_tools import TEMPLATE
from tiny import byte_tokenizer

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.records import Call, KeywordArguments
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.named_environments import (
    EpisodeSettings,
    NamedEnvironments,
    NamedEnvironmentSettings,
    open_environments,
)
from jaxrl_llm.rollout.samples import CompletionTask, Samples
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import Trial
from jaxrl_llm.session.record import environment_metrics, episode_metrics
from jaxrl_llm.structs import Prompts
from jaxrl_llm.tasks.tools import Tools

HERE = "tests.rollout.test_named_environments."
ECHO = "tests.rollout.test_episodes."
BRIEF_LIMITS = LIMITS | dict(most=2, tokens=6, observation_tokens=3)
RUN_WITHOUT_SERVERS = SimpleNamespace(environments={})
CHAT = {"prompt": [{"role": "user", "content": "2 + 2?"}]}


class Brief(Echo):
    """Ends turns at other strings, and answers two of them."""

    stops = ("=", "1")

    def __init__(self):
        super().__init__(turns=3, length=8)


def named(row: dict[str, Any]) -> dict[str, Any]:
    """Gives a row of the arithmetic task its environment."""
    return row | {"environment": "echo" if sum(str(row["prompt"]).encode()) % 2 else "brief"}


def pools() -> dict[str, EnvironmentPool]:
    tokenizer = parts()[2]
    return {
        "echo": EnvironmentPool(tokenizer, Echo, **LIMITS),
        "brief": EnvironmentPool(tokenizer, Brief, **BRIEF_LIMITS),
    }


def sampled(environments: Any, asked: Prompts) -> Samples:
    engine, task = engine_of(length=40, observation_tokens=40), CompletionTask(parts()[2], None, environments)
    asked, rollouts = task.sample(engine, asked, jax.random.key(0), 4, Sampling(1.5), "test")
    named_ones = isinstance(environments, NamedEnvironments)
    return Samples(asked, rollouts, lambda: None, has_named_environments=named_ones)


def test_episodes_of_two_environments_are_those_of_each_alone():
    asked = prompts()
    asked = replace(asked, rows=[row | {"environment": ("echo", "brief")[i % 2]} for i, row in enumerate(asked.rows)])
    both = sampled(NamedEnvironments(pools()), asked)
    metrics = environment_metrics(both)
    for first, (name, pool) in enumerate(pools().items()):
        alone, own = sampled(pool, asked).rollouts, np.arange(8) % 2 == first
        same(both.rollouts, alone, own)
        expected = episode_metrics(jax.tree.map(lambda x, own=own: x[own], alone))
        for metric in ("turns", "asked", "policy_tokens", "environment_tokens"):
            assert metrics[f"episode/{name}/{metric}"] == pytest.approx(expected[f"episode/{metric}"])
    assert metrics["episode/echo/turns"] != metrics["episode/brief/turns"]


def test_the_self_test_finds_the_one_environment_whose_tools_fail():
    rows, shape = [{"environment": ("echo", "brief")[i % 2]} for i in range(8)], (8, 4)
    errors = np.where(np.arange(8)[:, None] % 2, np.full(shape, 3.0), 0.0)
    rollouts = SimpleNamespace(
        truncated=np.zeros(shape, bool), episodes={"turns": np.full(shape, 3.0), "errors": errors}
    )
    parts_of_run = SimpleNamespace(environments=NamedEnvironments(pools()), recipe_summary=RUN_WITHOUT_SERVERS)
    trial = SimpleNamespace(
        parts=parts_of_run, full=True, prompts=SimpleNamespace(rows=rows), episodes=lambda: (rollouts, [])
    )
    (finding,) = self_test.environment_is_masked(cast(Trial, trial)).findings
    assert finding.id == "tool_down" and "'brief'" in finding.evidence


def test_a_prompt_shows_the_tools_of_its_own_environment():
    tool_pool = EnvironmentPool(byte_tokenizer(TEMPLATE), lambda: Tools(functions=("tools.calculate",)), **TOOL_LIMITS)
    environments = NamedEnvironments(pools() | {"tools": tool_pool})
    rows = [CHAT | {"environment": name} for name in ("tools", "echo")]
    with_tools, without = environments.prepare_rows(rows)
    assert [tool["function"]["name"] for tool in with_tools["tools"]] == ["calculate"]
    assert "tools" not in without


@pytest.mark.parametrize("row", [{}, {"environment": "chess"}, {"environment": None}])
def test_a_row_that_names_no_environment_is_refused(row, refused):
    environments = NamedEnvironments(pools())
    for check in (environments.prepare_rows, environments.check):
        with refused("config.environments"):
            check([CHAT | {"environment": "echo"}, CHAT | row])


def test_an_error_of_an_environment_names_its_section(refused):
    broken = NamedEnvironmentSettings(env=Call("Brief", Brief, {"speed": 2}), turns=KeywordArguments(LIMITS))
    with ExitStack() as resources, refused("config.environments.game.env"):
        open_environments(EpisodeSettings(environments={"game": broken}), parts()[2], resources, {})


def config_with_two(**changes: Any) -> Any:
    """A run whose rows name one of two environments."""
    config = config_with_turns(**{"data.convert": HERE + "named", "eval.convert": HERE + "named"})
    kind = type(config)
    with config.unlocked():
        del config.env, config.turns
        config.environments = kind({
            "echo": dict(env=dict(name=ECHO + "Echo", turns=2, length=4), turns=LIMITS),
            "brief": dict(env=dict(name=HERE + "Brief"), turns=BRIEF_LIMITS),
        })  # fmt: skip
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env", dict(name=ECHO + "Echo")),
        ("turns", LIMITS),
        ("environments.echo.turns.tokens", 33),
        ("environments.echo.turns", None),
        ("environments.echo.env.speed", 2),
        ("environments.echo.env", dict(name="agents.Function", agent="my_agent.play", workers=1, timeout=1.0, calls=1)),
        ("environments.echo.env", dict(name="trl.Environments", factory=dict(chess="my_games.Chess"))),
    ],
)
def test_what_one_of_several_environments_cannot_be_is_refused(path, value, refused):
    config = config_with_two()
    section, _, field = path.rpartition(".")
    owner = config
    with config.unlocked():
        for name in section.split(".") if section else ():
            owner = owner[name]
        owner[field] = type(config)(value) if isinstance(value, dict) else value
    with refused("config." + path.removesuffix(".speed")):
        recipes.read(config)


@pytest.mark.slow
def test_a_run_with_two_environments_resumes_as_it_would_have_gone_on(tmp_path: Path):
    whole = run_records(config_with_two(), tmp_path / "whole")
    assert {"episode/echo/turns", "episode/brief/turns", "eval/accuracy"} <= set().union(*whole)
    assert run_records(config_with_two(), tmp_path / "parts", stop=3) == whole


def as_echo(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"environment": "echo"}


def as_brief(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"environment": "brief"}


def alone(name: str, config: Any, **changes: Any) -> Any:
    """Returns the config of a run with one environment of `config`, and no other."""
    config_alone = config_with_turns(**changes)
    with config_alone.unlocked():
        config_alone.env, config_alone.turns = config.environments[name].env, config.environments[name].turns
    return config_alone


def without(prefix: str, record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith(prefix)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["echo", "brief"])
def test_a_run_whose_rows_name_one_of_two_environments_is_its_run_alone(name: str, tmp_path: Path):
    convert = f"{HERE}as_{name}"
    changes = {"data.convert": convert, "eval.convert": convert, "eval.function": ECHO + "digits", "num_steps": 2}
    config, prefix = config_with_two(**changes), f"episode/{name}/"
    records = run_records(config, tmp_path / "both")
    records_alone = run_records(alone(name, config, **changes), tmp_path / "alone")
    assert [without(prefix, record) for record in records] == records_alone
    assert records[-1]["eval/accuracy"] > 0
    for record in records:
        own = {"episode/" + key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
        assert own == {key: value for key, value in without(prefix, record).items() if key.startswith("episode/")}


@pytest.mark.slow
def test_held_out_sets_of_two_environments_score_as_in_runs_alone(tmp_path: Path):
    """The weights stay equal, because so small a learning rate changes no float32 parameter."""
    changes = {"optim.learning_rate": 1e-30, "num_steps": 1, "eval.every": 1, "eval.function": ECHO + "digits"}
    changes |= {"data.convert": HERE + "named", "eval.convert": HERE + "named"}
    config = config_with_two(**changes)
    configs = {"both": config} | {name: alone(name, config, **changes) for name in ("echo", "brief")}
    last = {}
    for run, run_config in configs.items():
        with run_config.unlocked():
            for name in ("echo", "brief"):
                one_set = dict(
                    source=config.eval.source, function=ECHO + "digits", convert=f"{HERE}as_{name}", problems=8
                )
                run_config.eval.extra_sets[name] = type(config)(one_set)
        *_, last[run] = run_records(run_config, tmp_path / run)
    scores = {name: last["both"][f"eval/{name}/accuracy"] for name in ("echo", "brief")}
    assert scores == {name: last[name][f"eval/{name}/accuracy"] for name in scores}
    assert scores["echo"] != scores["brief"]
