"""Agents that own their loop: what they sample, what becomes of it, and that a bad agent costs its own episode only."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from ml_collections import ConfigDict
from model_parts import WIDTH, parts, same, sampler, trainer_logprobs
from model_parts import prompts as first_questions
from tiny import SMALL

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import load as configs
from jaxrl_llm.config.names import USER_FUNCTIONS
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import keys
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.agents.pool import AgentPool
from jaxrl_llm.rollout.agents.trees import episode_trees
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.rollout.traces import Trace, TraceCall
from jaxrl_llm.structs import Prompts, Rollouts
from jaxrl_llm.tasks.agents import AgentEndpoint, AgentSettings, Command, Function, reward, verdict_metrics

pytestmark = pytest.mark.needs("fastapi", "uvicorn")
C, B, G = 24, 3, 2
prompts = partial(first_questions, B, SMALL)
KEY = keys.derived(0, 1)
MORE = {"role": "user", "content": "5+6"}


def sampled(settings: AgentSettings, group: int = G) -> tuple[Prompts, Rollouts]:
    _, model, tokenizer = parts(SMALL)
    pool = AgentPool(
        settings=settings, tokenizer=tokenizer, stop_ids=hf.stop_ids(SMALL, tokenizer), vocab_size=model.cfg.vocab_size,
        sampling=Sampling(), prompt_tokens=WIDTH, completion_tokens=C,
    )  # fmt: skip
    with closing(pool):
        return pool.sample(sampler(SMALL, length=C), prompts(), KEY, group, 1.0)


@pytest.fixture
def run(monkeypatch) -> Callable[..., tuple[Prompts, Rollouts]]:
    """Samples a batch with an agent function."""

    def run(agent: Callable, *, calls: int = 8, timeout: float = 60.0, group: int = G) -> tuple[Prompts, Rollouts]:
        monkeypatch.setitem(USER_FUNCTIONS, "mine.agent", agent)
        return sampled(Function(agent="mine.agent", workers=4, timeout=timeout, calls=calls), group)

    return run


def post(endpoint: AgentEndpoint, path: str = "/chat/completions", **fields: Any) -> dict[str, Any]:
    """The answer to a request. Raises: urllib.error.HTTPError."""
    body = json.dumps({"model": endpoint.model} | fields).encode()
    request = urllib.request.Request(endpoint.base_url + path, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def message(endpoint: AgentEndpoint, messages: list[dict], **fields: Any) -> dict[str, str]:
    return post(endpoint, messages=messages, **fields)["choices"][0]["message"]


def two_calls(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
    first = message(endpoint, row["prompt"])
    second = message(endpoint, [*row["prompt"], first, MORE])
    return float(second["content"] == "11")


@pytest.mark.needs("openai")
def test_an_agent_with_the_openai_package_is_sampled_as_the_trainer_scores(run):
    async def agent(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages = [*row["prompt"]]
            for _ in range(2):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), MORE]
        return float(answer.choices[0].message.content == row["answer"])

    batch_prompts, rollouts = run(agent)
    assert np.all(rollouts.episodes["calls"] == 2) and not rollouts.episodes["errors"].any()
    np.testing.assert_array_equal(batch_prompts.tokens, prompts().tokens)
    tokenizer = parts(SMALL)[2]
    turns = data.decode_turns(tokenizer, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    assert all([turn["role"] for turn in one] == ["assistant", "environment", "assistant"] for g in turns for one in g)
    np.testing.assert_array_equal(rollouts.versions[rollouts.loss_mask], 3)
    gap = np.abs(trainer_logprobs(batch_prompts, rollouts, Sampling(), SMALL) - rollouts.logprobs)[rollouts.loss_mask]
    assert gap.max() <= 1e-5


def test_an_agent_of_one_call_samples_what_the_engine_samples_without_it(run):
    _, rollouts = run(lambda endpoint, row: len(message(endpoint, row["prompt"])["content"]))
    plain = sampler(SMALL, length=C).sample(prompts(), KEY, group_size=G, sampling=Sampling())
    np.testing.assert_array_equal(rollouts.completions, plain.completions)
    np.testing.assert_allclose(rollouts.logprobs, plain.logprobs, atol=1e-5)


def test_neither_the_time_of_calls_nor_the_other_episodes_change_a_token(run):
    def late(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
        time.sleep(0.3 * (row["a"] % 3))
        return two_calls(endpoint, row)

    same(run(two_calls)[1], run(late)[1])


def test_a_call_that_continues_no_other_begins_a_branch(run):
    def agent(endpoint: AgentEndpoint, row: dict[str, Any]) -> None:
        first = message(endpoint, row["prompt"])
        message(endpoint, [*row["prompt"], first, MORE], max_tokens=2)
        message(endpoint, [*row["prompt"], MORE], max_tokens=2)

    batch_prompts, rollouts = run(agent)
    tree, lengths = rollouts.tree, rollouts.completion_mask.sum(axis=-1)
    assert tree is not None and np.all(rollouts.episodes["restarts"] == 1)
    for b, g in np.ndindex(B, G):
        roots = np.flatnonzero(tree.previous[b, g, : lengths[b, g]] < 0)
        assert len(roots) == 2  # the first answer, and the question that the third call asks instead
        assert tree.ends[b, g, roots[0]] == roots[1] and tree.depths[b, g, roots[1]] == 0
    gap = np.abs(trainer_logprobs(batch_prompts, rollouts, Sampling(), SMALL) - rollouts.logprobs)[rollouts.loss_mask]
    assert gap.max() <= 1e-5


async def hang(endpoint: AgentEndpoint) -> None:
    await asyncio.to_thread(message, endpoint, [MORE])
    await asyncio.sleep(1e6)


def block(endpoint: AgentEndpoint) -> None:
    while True:
        time.sleep(0.01)


def talk_nonsense(endpoint: AgentEndpoint) -> None:
    request = urllib.request.Request(endpoint.base_url + "/chat/completions", b"{", method="POST")
    urllib.request.urlopen(request, timeout=60)


BAD: dict[str, Callable] = {
    "crashes": lambda endpoint: 1 / 0,
    "ends the program": lambda endpoint: sys.exit(3),
    "hangs": hang,
    "blocks": block,
    "never calls": lambda endpoint: 1.0,
    "talks nonsense": talk_nonsense,
    "asks for another model": lambda endpoint: message(endpoint._replace(model="x"), [MORE]),
    "returns text": lambda endpoint: message(endpoint, [MORE])["content"],
    "returns infinity": lambda endpoint: message(endpoint, [MORE]) and float("inf"),
    "rewards other calls": lambda endpoint: message(endpoint, [MORE]) and {"turns": [1.0, 2.0]},
    "samples otherwise": lambda endpoint: message(endpoint, [MORE], temperature=0.5),
    "leaves its session": lambda endpoint: message(
        endpoint._replace(base_url=endpoint.base_url.replace("/sessions/" + endpoint.api_key, "")), [MORE]
    ),
}


def bad_agent(kind: str) -> Callable:
    """Row 0 has a bad agent, and the other rows have `two_calls`."""
    bad_row = prompts().rows[0]["prompt"]
    return lambda endpoint, row: BAD[kind](endpoint) if row["prompt"] == bad_row else two_calls(endpoint, row)


@pytest.mark.filterwarnings("ignore:an agent failed")
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_agent_costs_its_own_episodes_only(run, kind):
    _, good = run(two_calls)
    _, rollouts = run(bad_agent(kind), timeout=8.0 if kind in ("hangs", "blocks") else 60.0)
    same(good, rollouts, np.s_[1:])
    is_bad = np.arange(B)[:, None] == np.zeros(G)
    np.testing.assert_array_equal(rollouts.episodes["errors"], is_bad)
    np.testing.assert_array_equal(rollouts.episodes["unscored"], is_bad)
    np.testing.assert_array_equal(rollouts.episodes["timeouts"], is_bad & (kind in ("hangs", "blocks")))
    np.testing.assert_array_equal(np.isnan(rollouts.episodes["reward"]), is_bad)


@pytest.mark.filterwarnings("ignore:an agent failed")
def test_no_function_of_the_config_rewards_an_episode_whose_agent_failed(run):
    batch_prompts, rollouts = run(bad_agent("crashes"))
    score = RewardFn(("arithmetic.thought", "agents.reward"), (1.0, 0.0), 0)
    task = CompletionTask(parts(SMALL)[2], score, agents=cast(Any, "of a run"))
    for graded in (task.grade(batch_prompts, rollouts), task.start_grading(batch_prompts, rollouts)()):
        for rewards in (graded.rewards.total, *graded.rewards.channels.values()):
            np.testing.assert_array_equal(np.isnan(rewards), rollouts.episodes["errors"] > 0)


def test_limits_of_calls_and_tokens_cut_an_episode(run):
    def agent(endpoint: AgentEndpoint, row: dict[str, Any]) -> None:
        messages = [*row["prompt"]]
        while True:
            messages += [message(endpoint, messages), MORE]

    _, rollouts = run(agent, calls=2, group=1)
    assert rollouts.truncated.all() and np.all(rollouts.episodes["calls"] == 2)
    assert not rollouts.episodes["errors"].any()  # the limit is to blame, and not the agent
    _, rollouts = run(agent, calls=100, group=1)
    assert rollouts.truncated.all() and rollouts.completion_mask.sum(axis=-1).max() <= C
    assert not rollouts.episodes["lost_calls"].any()

    def endless(endpoint: AgentEndpoint, row: dict[str, Any]) -> None:
        first = message(endpoint, row["prompt"])
        post(endpoint, messages=[*row["prompt"], first, MORE], ignore_eos=True)

    # A completion without a stop token fills the episode.
    _, rollouts = run(endless, group=1)
    assert rollouts.truncated.all() and rollouts.completion_mask.all() and np.all(rollouts.episodes["calls"] == 2)
    assert not rollouts.episodes["lost_calls"].any()
    _, rollouts = run(lambda endpoint, row: message(endpoint, row["prompt"], max_tokens=1) and None, group=1)
    assert not rollouts.truncated.any()  # the agent's own limit
    long = [{"role": "user", "content": "1" * (WIDTH + C)}]
    _, rollouts = run(lambda endpoint, row: message(endpoint, row["prompt"]) and message(endpoint, long), group=1)
    assert rollouts.truncated.all() and np.all(rollouts.episodes["calls"] == 1)


PROGRAM = """
import json, os, subprocess, sys, urllib.request
row = json.load(open(os.environ["JAXRL_ROW"]))
body = json.dumps({"model": os.environ["JAXRL_MODEL"], "messages": row["prompt"]}).encode()
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
text = answer["choices"][0]["message"]["content"]
if "hang" in sys.argv:
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, file=open(sys.argv[-1], "a"), flush=True)
    child.wait()
if "fail" in sys.argv:
    sys.exit("no such luck")
if "nonsense" in sys.argv:
    print("{", file=open(os.environ["JAXRL_REWARD"], "w"))
elif "silent" not in sys.argv:
    json.dump({"right": float(text == row["answer"]), "short": None}, open(os.environ["JAXRL_REWARD"], "w"))
"""


@pytest.fixture
def command(tmp_path) -> Callable[..., Rollouts]:
    program = tmp_path / "my agent.py"
    program.write_text(PROGRAM)

    def command(*words: str, timeout: float = 60.0) -> Rollouts:
        text = f"{sys.executable} '{program}' {' '.join(words)}"
        return sampled(Command(command=text, workers=4, timeout=timeout, calls=4), 1)[1]

    return command


def test_a_program_calls_the_policy_and_writes_its_reward(command):
    rollouts = command()
    assert np.all(rollouts.episodes["calls"] == 1) and not rollouts.episodes["errors"].any()
    texts = data.decode(parts(SMALL)[2], rollouts.completions, rollouts.completion_mask)[0]
    right = [[float(text == row["answer"])] for row, (text,) in zip(prompts().rows, texts, strict=True)]
    np.testing.assert_array_equal(rollouts.episodes["reward_right"], right)
    assert command("silent").episodes["unscored"].all()


@pytest.mark.filterwarnings("ignore:an agent failed")
def test_a_program_that_fails_or_hangs_is_counted_and_leaves_no_process(command, tmp_path):
    for word in ("fail", "nonsense"):
        assert command(word).episodes["errors"].all()
    rollouts = command("hang", f"'{tmp_path / 'children'}'", timeout=4.0)
    assert rollouts.episodes["timeouts"].all() and rollouts.truncated.all()
    children = (tmp_path / "children").read_text().split()
    states = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(children)], capture_output=True, text=True).stdout
    assert children and all(state.startswith("Z") for state in states.split())
    assert sampled(Command(command="/no/such/program", workers=4, timeout=4.0, calls=4), 1)[1].episodes["errors"].all()


def call(prompt: str, completion: str) -> TraceCall:
    ids = tuple(map(ord, prompt)), tuple(map(ord, completion))
    return TraceCall(*ids, (-1.0,) * len(completion), (0,) * len(completion))


def trace(*calls: TraceCall) -> Trace:
    made = Trace()
    for each in calls:
        made.add(each)
    return made


def test_the_prompt_of_a_group_is_the_beginning_that_all_its_calls_share():
    rows = replace(prompts().take([0, 1]), tokens=np.full((2, 4), 7), mask=np.ones((2, 4), bool))
    traces = [trace(call("abcd", "x"), call("abcdxy", "z")), trace(call("abe", "w")), trace(), trace()]
    trees = episode_trees(rows, traces, 2, 6, pad_id=0)
    assert trees.prompts.tokens.tolist() == [[0, 0, ord("a"), ord("b")], [7] * 4]
    assert trees.prompts.mask.tolist() == [[False, False, True, True], [True] * 4]
    texts = [["".join(map(chr, row[m])) for row, m in zip(*group, strict=True)]
             for group in zip(trees.rollouts.completions, trees.rollouts.completion_mask, strict=True)]  # fmt: skip
    assert texts == [["cdxyz", "ew"], ["", ""]]
    # A prompt has at most P tokens, and calls at the end that do not fit are counted.
    long = episode_trees(
        rows, [trace(call("abcdef", "x"), call("abcdefxy", "z")), trace(), trace(), trace()], 2, 4, pad_id=0
    )
    assert long.prompts.tokens[0].tolist() == [ord(x) for x in "abcd"]
    assert long.lost_calls.tolist() == [[1, 0], [0, 0]] and long.rollouts.completion_mask.sum() == 3


def test_the_reward_is_the_number_or_the_weighted_sum_and_none_without_one():
    def episode(verdict: Any) -> dict[str, float]:
        metrics = verdict_metrics(verdict)
        return {"calls": 1.0, "unscored": float(not metrics)} | metrics

    episodes = [episode(x) for x in (2, {"a": 1.0, "b": np.float32(3)}, {"a": None}, None, 0)]
    assert reward([""] * 5, episodes) == [2.0, 4.0, None, None, 0.0]
    assert reward([""] * 5, episodes, weights={"b": 2.0}) == [2.0, 6.0, None, None, 0.0]
    assert reward([""]) == [None]  # without an episode, as in the self-test


def test_weights_that_no_agent_returns_are_refused(refused):
    with refused("agents.reward", "right"):
        reward([""], [{"unscored": 0.0} | verdict_metrics({"right": 1.0})], weights={"wrong": 1.0})


def config(**changes: Any) -> ConfigDict:
    c = configs.load("grpo")
    c.env = ConfigDict(dict(name="agents.Command", command="true", workers=4, timeout=60.0, calls=4))
    c.reward.functions, c.reward.weights = ("agents.reward",), (1.0,)
    c.eval = None
    with c.unlocked(), c.ignore_type():
        c.update_from_flattened_dict(changes)
    return c


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rollout.partial": 2}, "config.rollout.partial"),
        ({"advantage": dict(name="reinforce_pp")}, "config.advantage.name"),
        ({"engine": dict(name="my.engine")}, "config.engine.name"),
        ({"rollout.resample_rounds": 1}, "config.rollout.resample_rounds"),
        ({"log.keep_samples": 1}, "config.log.keep_samples"),
        ({"env.command": ""}, "config.env.command"),
        ({"env.command": "python 'a"}, "config.env.command"),
        ({"env.calls": 0}, "config.env.calls"),
        ({"env": dict(name="agents.Function", agent="no.where", workers=4, timeout=60.0, calls=4)}, "config.env.agent"),
        ({"turns": dict(most=1, tokens=4, observation_tokens=4, workers=1, timeout=1.0)}, "config.turns"),
        ({"engine": configs.load("grpo_vllm").engine.to_dict()}, "config.engine.name"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_with_agents_is_refused(refused, changes, field):
    recipes.read(config())
    with refused(field):
        recipes.read(config(**changes))


def test_a_run_without_agents_imports_no_server():
    code = "import sys, jaxrl_llm.build; print([x for x in ('fastapi', 'uvicorn', 'pydantic') if x in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
