"""kill -9 at seeded random moments of a trainer with agents, of an agent's program, and of an environment's server."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import pytest
from test_agent_runs import agents, branching
from test_steps import ROOT, SHORT, tiny

from jaxrl_llm.build import build
from jaxrl_llm.config import load as configs
from jaxrl_llm.config.names import USER_FUNCTIONS
from jaxrl_llm.tasks import encyclopedia
from jaxrl_llm.train import steps, train

pytestmark = [pytest.mark.needs("fastapi", "uvicorn", "bm25s"), pytest.mark.slow]
EPISODES = 32  # of a step of test_steps.tiny
STEPS, TRAINER_KILLS, OTHER_KILLS = 8, 6, 7

TRAINER = """
import sys
sys.path[:0] = ["tests", "."]
import conftest, test_agent_kills
from pathlib import Path
test_agent_kills.train_and_note(Path(sys.argv[1]))
"""


def train_and_note(workdir: Path) -> None:
    """Trains, and appends the step, the prompts and the trained tokens of each update to a file."""
    configs.load("agent")
    USER_FUNCTIONS["mine.branching"] = branching
    config = agents(**{"env.agent": "mine.branching", "num_steps": STEPS, "rollout.max_lag": 1})
    with build(config, workdir) as (session, parts):
        assign_credit, finish_step, batches = parts.learning.assign_credit, parts.learning.finish_step, []

        def note_batch(batch: Any, *arguments: Any) -> Any:
            batches.append(batch)
            return assign_credit(batch, *arguments)

        def note_step(states: Any, step: int) -> Any:
            batch = batches.pop()
            trained = np.where(batch.loss_mask, batch.completions, -1)
            line = {"step": step, "prompts": np.asarray(batch.prompts).tolist(), "trained": trained.tolist()}
            with (workdir / "learned.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return finish_step(states, step)

        parts.learning.assign_credit, parts.learning.finish_step = note_batch, note_step
        for _ in train(session, parts):
            pass


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def start_trainer(workdir: Path) -> subprocess.Popen:
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, "-c", TRAINER, str(workdir)], cwd=ROOT, **quiet)


def test_a_killed_trainer_with_agents_learns_each_token_once(tmp_path):
    draw, whole, workdir, kills = random.Random(0), tmp_path / "whole", tmp_path / "run", 0
    assert start_trainer(whole).wait(600) == 0
    for step in sorted(draw.choices(range(STEPS - 1), k=TRAINER_KILLS)):
        trainer = start_trainer(workdir)
        while trainer.poll() is None and max((x["step"] for x in lines(workdir / "learned.jsonl")), default=0) < step:
            time.sleep(0.01)
        with suppress(subprocess.TimeoutExpired):
            trainer.wait(draw.uniform(0, 1.0))
        kills += trainer.poll() is None
        trainer.kill()
        trainer.wait()
    assert start_trainer(workdir).wait(600) == 0
    expected, learned = (lines(x / "learned.jsonl") for x in (whole, workdir))
    assert [x["step"] for x in expected] == [*range(1, STEPS + 1)]
    # A step whose checkpoint was lost is learned again from the state before it, with the same rows and tokens.
    assert all(x == expected[x["step"] - 1] for x in learned)
    assert kills >= TRAINER_KILLS // 2 and {x["step"] for x in learned} == {*range(1, STEPS + 1)}
    records = lines(workdir / "metrics.jsonl")
    assert [x["step"] for x in records] == [*range(1, STEPS + 1)]
    repeated = len(learned) - STEPS
    assert repeated <= 2 * kills
    gradients = [[x["grad_norm"] for x in lines(run / "metrics.jsonl")] for run in (whole, workdir)]
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-3)
    print(f"{kills} kills; {repeated} steps repeated")


AGENT = """
import json, os, sys, urllib.request
folder, pid = sys.argv[1], str(os.getpid())
open(f"{folder}/started_{pid}", "w").close()
row = json.load(open(os.environ["JAXRL_ROW"]))
for _ in range(2):
    body = json.dumps({"model": os.environ["JAXRL_MODEL"], "messages": row["prompt"]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("content-type", "application/json")
    json.load(urllib.request.urlopen(request))
json.dump(1.0, open(os.environ["JAXRL_REWARD"], "w"))
open(f"{folder}/ended_{pid}", "w").close()
"""


def run_with_kills(kill: Callable[[random.Random], bool], config: Any, workdir: Path) -> list[dict[str, Any]]:
    """The records of a run in which `kill` is called at random moments, until it has succeeded OTHER_KILLS times.

    The first call comes after the first record, because a run checks its server before it starts. A record comes when
    the next step is done, so the third one after the last kill is that of a step without kills.
    """
    draw, done, stopped, records, last_records = random.Random(1), Event(), Event(), list[dict[str, Any]](), 0

    def work() -> None:
        kills = 0
        while kills < OTHER_KILLS and not stopped.wait(draw.uniform(0, 0.4)):
            kills += kill(draw)
        done.set()

    thread = Thread(target=work)
    try:
        with closing(steps(config, workdir)) as run:  # pyright: ignore[reportArgumentType]
            for record in run:
                if not records:
                    thread.start()
                records.append(record)
                last_records += done.is_set()
                if last_records == 3:
                    break
    finally:
        stopped.set()
        thread.join()
    assert [record["step"] for record in records] == [*range(1, len(records) + 1)]
    return records


@pytest.mark.filterwarnings("ignore:an agent failed")
def test_a_killed_agent_costs_its_own_episode_and_is_counted(tmp_path):
    program, marks = tmp_path / "agent.py", tmp_path / "marks"
    program.write_text(AGENT)
    marks.mkdir()

    def running() -> list[int]:
        names = {path.name for path in marks.iterdir()}
        pids = [int(name.removeprefix("started_")) for name in names if name.startswith("started_")]
        return sorted(pid for pid in pids if f"ended_{pid}" not in names and pid not in killed)

    def kill(draw: random.Random) -> bool:
        if pids := running():
            killed.append(draw.choice(pids))
            os.kill(killed[-1], signal.SIGKILL)
        return bool(pids)

    killed: list[int] = []
    config = agents(num_steps=500)
    with config.unlocked():
        config.env = dict(
            name="agents.Command", command=f"{sys.executable} {program} {marks}", workers=4, timeout=60.0, calls=4
        )
        config.reward.functions = ("agents.reward",)
    records = run_with_kills(kill, config, tmp_path / "run")
    errors = round(EPISODES * sum(record["episode/errors"] for record in records))
    unended = sum(not (marks / f"ended_{pid}").exists() for pid in killed)
    # A program may be killed between its last mark and its exit. The step in progress has no record.
    assert unended - 2 <= errors <= len(killed) == OTHER_KILLS and errors > 0
    assert errors == round(EPISODES * sum(record["episode/unscored"] for record in records))
    assert records[-1]["episode/errors"] == 0
    print(f"{len(killed)} kills; {errors} errors; {len(records)} steps")


def test_a_killed_server_of_an_environment_costs_searches_that_are_counted(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in encyclopedia.documents()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jaxrl_llm.tools.serve_retriever", "--corpus", str(corpus), "--port", str(port)]

    def start() -> subprocess.Popen:
        server, end = subprocess.Popen(command, cwd=ROOT), time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health", trust_env=False)
                return server
            time.sleep(0.05)
        raise TimeoutError

    def kill(draw: random.Random) -> bool:
        time.sleep(draw.uniform(0, 1.5))  # a new server needs this long to read the corpus
        servers[-1].kill()
        servers[-1].wait()
        servers.append(start())
        return True

    shipped = configs.load("search_grpo")
    config = tiny(**SHORT, num_steps=500, prompts_per_step=4, prompts_per_update=4)
    config.model.path, config.data.source = shipped.model.path, shipped.data.source
    config.data.max_prompt_tokens = shipped.data.max_prompt_tokens
    with config.unlocked():
        config.env, config.turns = shipped.env, shipped.turns
        config.reward.functions, config.reward.weights = ("search.exact_match",), (1.0,)
    config.env.corpus, config.env.url, config.env.retries = "", f"{url}/retrieve", 0
    config.rollout.max_completion_tokens = 96
    servers = [start()]
    try:
        records = run_with_kills(kill, config, tmp_path / "run")
    finally:
        servers[-1].kill()
        servers[-1].wait()
    errors, searches = (sum(record[f"episode/{name}"] for record in records) for name in ("errors", "searches"))
    assert 0 < errors < searches and len(servers) == OTHER_KILLS + 1
    assert records[-1]["episode/errors"] == 0 < records[-1]["episode/searches"]
    print(f"{OTHER_KILLS} kills; {errors / searches:.0%} of the searches failed; {len(records)} steps")
