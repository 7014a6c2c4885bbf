"""Episodes of several turns: what is sampled is what is trained on, the kept cache changes nothing, and limits hold."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from model_parts import ONE, parts, prompts, trainer_logprobs
from model_parts import sampler as engine_of
from test_steps import numbers, written

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import build
from jaxrl_llm.config.load import load
from jaxrl_llm.data import prompts as data
from jaxrl_llm.models import hf, new_model
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import make_trial
from jaxrl_llm.tasks import encyclopedia
from jaxrl_llm.tasks.protocol import Reply
from jaxrl_llm.train import steps
from tests.tiny import mesh_of

ROOT = Path(__file__).parents[2]
sampler = partial(engine_of, length=40, observation_tokens=40)
LIMITS = dict(most=4, tokens=10, observation_tokens=30, workers=8, timeout=10.0)


class Echo:
    """Answers each turn with digits that follow from it, and ends after some turns."""

    stops = (">", ",")

    def __init__(self, *, turns: int = 3, length: int = 5, delay: float = 0.0, fails: str = ""):
        self.turns, self.length, self.delay, self.fails = turns, length, delay, fails
        self.said: list[str] = []

    def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    def step(self, text: str) -> Reply:
        self.said.append(text)
        if self.fails == "raises":
            raise ValueError("no such tool")
        if self.fails == "hangs":
            threading.Event().wait()
        time.sleep(self.delay * (hash(text) % 7))
        if len(self.said) >= self.turns:
            return Reply(done=True, metrics={"asked": 1.0})
        number = sum(text.encode()) * 7919 + len(self.said)
        if not self.length and number % 3:
            return Reply("", metrics={"asked": 1.0, "silent": 1.0})
        size = 1 + number % self.length if self.length > 1 else 1
        return Reply("".join(str((number >> k) % 10) for k in range(size)), metrics={"asked": 1.0})


def episodes(engine: Sampler, group: int = 4, *, temperature: float = 1.5, limits: dict = LIMITS, seed: int = 0, **env):
    """Rollouts of episodes with `Echo`, at a temperature that makes them differ."""
    tokenizer = parts()[2]
    pool = EnvironmentPool(tokenizer, partial(Echo, **env), **limits)
    _, rollouts = CompletionTask(pool.tokenizer, None, pool).sample(
        engine, prompts(), jax.random.key(seed), group, Sampling(temperature), "test"
    )
    return rollouts


def test_an_episode_has_turns_and_observations_that_are_not_trained_on():
    rollouts = episodes(sampler())
    _, _, tokenizer = parts()
    turns = data.decode_turns(tokenizer, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    several = [one for group in turns for one in group if len(one) > 1]
    assert len(several) > 10
    for one in several:
        assert [turn["role"] for turn in one] == (["assistant", "environment"] * len(one))[: len(one)]
        for turn in one[1::2]:
            assert turn["content"].isdigit()
    observed = rollouts.completion_mask & ~rollouts.loss_mask
    assert observed.any()
    assert np.all(rollouts.logprobs[~rollouts.loss_mask] == 0)
    assert np.all(rollouts.versions == 3)
    np.testing.assert_array_equal(rollouts.episodes["asked"], rollouts.episodes["turns"])


@pytest.mark.parametrize("length", [0, 9])
def test_the_kept_cache_gives_the_log_probabilities_of_one_pass(length):
    """Also where an environment says nothing, which ends no episode."""
    rollouts = episodes(sampler(), length=length)
    trained, scored = rollouts.loss_mask, trainer_logprobs(prompts(), rollouts, Sampling(1.5))
    np.testing.assert_allclose(scored[trained], rollouts.logprobs[trained], 1e-5, 5e-5)
    if not length:
        silent = rollouts.episodes["silent"] > 0
        assert silent.sum() > 10
        assert ((rollouts.episodes["turns"] > 1) | rollouts.truncated)[silent].all()


@pytest.mark.slow
def test_eight_devices_and_batches_in_parts_sample_the_same_episodes():
    one, other = episodes(sampler()), episodes(sampler(shape=(2, 4, 1), max_sequences=16))
    np.testing.assert_array_equal(one.completions, other.completions)
    np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_an_episode_that_meets_a_limit_is_truncated():
    engine = sampler()
    turn = episodes(engine, limits=LIMITS | dict(tokens=2))
    assert turn.truncated.any()
    assert all(run <= 2 for run in longest_turns(turn))
    most = episodes(engine, turns=9, limits=LIMITS | dict(most=2))
    assert most.truncated[most.episodes["turns"] == 2].all()
    assert (most.episodes["turns"] == 2).any()
    whole = episodes(engine, turns=40, limits=LIMITS | dict(most=40))
    # The policy needs room for a token: an observation that fills an episode is not in it.
    assert whole.truncated.any() and (whole.completion_mask.sum(axis=-1) > 35).any()
    short = episodes(engine, length=9, limits=LIMITS | dict(observation_tokens=2))
    assert short.truncated.any()
    assert not episodes(engine, limits=LIMITS | dict(tokens=40)).truncated.all()


def longest_turns(rollouts) -> list[int]:
    own = np.pad(rollouts.loss_mask, ((0, 0), (0, 0), (1, 1))).astype(int)
    begins, ends = (np.argwhere(np.diff(own) == sign)[:, 2] for sign in (1, -1))
    return (ends - begins).tolist()


@pytest.mark.parametrize("fails", ["raises", "hangs"])
def test_a_tool_that_fails_or_hangs_is_counted_and_ends_no_run(fails):
    rollouts = episodes(sampler(), fails=fails, limits=LIMITS | dict(timeout=0.05, workers=32))
    assert rollouts.episodes["errors"].sum() >= 32
    if fails == "hangs":
        assert rollouts.truncated.all()


def test_the_end_of_a_turn_is_found_at_the_first_token_that_completes_it():
    tokenizer = parts()[2]
    batch = EnvironmentPool(tokenizer, Echo, **LIMITS).start_batch([{}], 1)
    ids = tokenizer("12>34>", add_special_tokens=False)["input_ids"]
    assert batch.find_turn_ends([0, 0, 0], [ids, ids[:2], ids[:3]]) == [3, 0, 3]


def config_with_turns(**changes: Any) -> Any:
    config = load(ROOT / "configs" / "grpo.py")
    kind = type(config)
    with config.unlocked():
        config.env = kind(dict(name="tests.rollout.test_episodes.Echo", turns=2, length=4))
        config.turns = kind(LIMITS)
    config.update_from_flattened_dict({
        "num_steps": 4, "optim.warmup_steps": 0, "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 4,
        "eval.every": 2, "eval.problems": 8, "rollout.max_completion_tokens": 32, "checkpoint.every": 2,
        "log.to": (), "log.completions_every": 2,
        "reward.functions": ("tests.rollout.test_episodes.digits",), "reward.weights": (1.0,),
        "reward.timeout": 0.0, "health.self_test": False, "rollout.temperature": 1.2, **changes,
    })  # fmt: skip
    return config


def run_records(config: Any, workdir: Path, *, stop: int = 0) -> list[dict]:
    """Runs a config, in two parts if it stops after a step. Returns its records without times."""
    if stop:
        with closing(steps(config, workdir)) as records:
            next(record for record in records if record["step"] == stop)
    list(steps(config, workdir))
    return numbers(written(workdir))


# Groups are replaced in the thread that samples ahead, for which rewards need a process.
RESAMPLED = {"rollout.max_lag": 1, "rollout.resample_rounds": 1, "reward.timeout": 60.0}
RESAMPLED |= {"reward.functions": ("arithmetic.thought",)}


def digits(completions: list, turns: list, **_: object) -> list[float]:
    """Pays for digits that the policy wrote itself."""
    return [
        float(sum(c.isdigit() for turn in one if turn["role"] == "assistant" for c in turn["content"])) for one in turns
    ]


@pytest.mark.slow
def test_a_run_with_an_environment_trains_and_evaluates(tmp_path):
    *_, last = steps(config_with_turns(**RESAMPLED), tmp_path / "run")
    assert last["episode/turns"] > 1 and last["episode/environment_tokens"] > 0 and last["rollout/lag"]
    assert {"eval/accuracy", "groups/replaced"} <= {*last}
    line = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[-1])
    assert {turn["role"] for one in line["turns"] for turn in one} == {"assistant", "environment"}
    assert [len(one) for one in (line["turns"], line["completions"], line["rewards"])] == [4, 4, 4]


@pytest.mark.parametrize(
    ("section", "value", "field"),
    [
        ("turns", LIMITS | dict(tokens=33), "config.turns.tokens"),
        ("env", dict(name="tests.rollout.test_episodes.Echo", speed=2), "config.env.speed"),
    ],
)
def test_turns_and_arguments_of_environments_are_refused(section, value, field, refused):
    config = config_with_turns()
    config[section] = type(config)(value)
    with refused(field):
        recipes.read(config)


def test_every_program_of_episodes_is_known_beforehand():
    model = parts()[1]
    made = list(sampler().programs(model.shapes, len(prompts().tokens), prompts().sizes, 4, Sampling(1.5)))
    names = [program.name for program in made]
    # Observations of at most 40 tokens need no program for 128.
    assert [name.split(",")[0] for name in names][-3:] == ["prompts", "observations", "decoding"]
    for program in made[-3:]:
        assert program.compile().memory_analysis().argument_size_in_bytes > 0


@pytest.mark.slow
def test_the_self_test_looks_at_what_an_environment_said(tmp_path):
    with build(config_with_turns(), tmp_path / "run") as (session, parts):
        session.restore()
        trial = make_trial(parts, session.run_state.states, full=True)
        good = self_test.environment_is_masked(trial)
        assert good.applicable and not good.findings
        rollouts, dialogs = trial.episodes()
        said = rollouts.completion_mask & ~rollouts.loss_mask
        one = np.zeros_like(said)
        one[tuple(np.argwhere(said)[0])] = True
        own = [[(turn, None) for turn, _ in dialog[:1]] for dialog in dialogs]
        other = np.where(one, rollouts.completions + 1, rollouts.completions)
        zeros = np.zeros_like(rollouts.episodes["turns"])
        dead = {"errors": zeros + 2, "turns": zeros + 3, "searches": zeros + 2}
        facts = trial.parts.recipe_summary
        (environment,) = facts.environments.values()
        with_url = {"env": replace(environment, arguments=environment.arguments | {"url": "http://127.0.0.1:9"})}
        trial.parts = replace(trial.parts, recipe_summary=facts._replace(environments=with_url))
        for changes, heard, found in [
            ({"loss_mask": rollouts.loss_mask | one}, dialogs, "environment_trained"),
            ({"loss_mask": rollouts.loss_mask | said}, dialogs, "environment_trained"),
            ({"completions": other}, dialogs, "observation_changed"),
            ({}, own, "environment_silent"),
            ({"episodes": dead}, dialogs, "tool_down"),
        ]:
            made = replace(rollouts, **changes)
            trial.episodes = lambda made=made, heard=heard: (made, heard)
            (finding,) = self_test.environment_is_masked(trial).findings
            assert finding.id == found
        assert "config.env.url = 'http://127.0.0.1:9'" in finding.cause
        parts.wait_until_idle()


class Rambler:
    """Answers with pieces of what was said, cut anywhere, so that its text often encodes in another way than before."""

    stops = (" ta",)

    def reset(self, row: dict[str, Any]) -> None:
        self.turns = 0

    def step(self, text: str) -> Reply:
        self.turns += 1
        middle = len(text) // 2
        return Reply(text[middle:] + text[:middle] or "nothing", done=self.turns > 2 + len(text) % 3)


def test_the_ids_of_episodes_are_those_that_were_sampled_never_encoded_again(tmp_path, monkeypatch):
    answers, answer = defaultdict(list), EnvironmentBatch.answer

    def recorded(batch: EnvironmentBatch, episode: int, turn: list[int]) -> Any:
        answers[episode].append((turn, answer(batch, episode, turn)))
        return answers[episode][-1][1]

    monkeypatch.setattr(EnvironmentBatch, "answer", recorded)
    rows = encyclopedia.train()[:50]
    sizes = dict.fromkeys(new_model.SIZE_KEYS, 32) | {"num_hidden_layers": 1, "num_attention_heads": 2}
    new_model.write_folder(tmp_path, sizes | {"num_key_value_heads": 1, "vocabulary": 128}, rows, "answer")
    mesh, tokenizer = mesh_of(ONE), hf.load_tokenizer(tmp_path)
    model = hf.load_model(tmp_path, mesh)
    pad = tokenizer.pad_token_id
    stops = (tokenizer.eos_token_id, *range(20, 34))  # so many that a turn of a random model is short
    engine = Sampler(model, mesh, max_completion_tokens=64, stop_ids=stops, pad_id=pad, observation_tokens=64)
    engine.update_weights(jax.jit(model.init)(jax.random.key(0)), 1)
    dataset = data.tokenize(rows, tokenizer, max_prompt_tokens=64, overlong="error")
    asked = data.make_prompts(dataset, range(50), pad)
    pool = EnvironmentPool(tokenizer, Rambler, **LIMITS | {"tokens": 16})
    task = CompletionTask(tokenizer, None, pool)
    _, rollouts = task.sample(engine, asked, jax.random.key(0), 8, Sampling(), "test")

    again = 0
    for i, turns in answers.items():
        place = divmod(i, 8)
        tokens, own = rollouts.completions[place], rollouts.loss_mask[place]
        at, real = 0, int(rollouts.completion_mask[place].sum())
        for turn, reply in turns:
            assert tokens[at : at + len(turn)].tolist() == turn
            assert own[at : at + len(turn)].all()
            at += len(turn)
            observation = reply.result()
            if observation and at < real:
                assert tokens[at : at + len(observation)].tolist() == observation
                assert not own[at : at + len(observation)].any()
                at += len(observation)
        assert own[at:real].all()  # a last turn that no environment answered
        text = tokenizer.decode(tokens[:real])
        again += tokenizer(text, add_special_tokens=False)["input_ids"] != tokens[:real].tolist()
    assert len(answers) > 320  # the others end before an environment is asked
    assert again > 80
