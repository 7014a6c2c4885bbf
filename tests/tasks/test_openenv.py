"""Environments on OpenEnv servers: its own server on this machine, and servers that fail in each way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_tools import LIMITS, TEMPLATE, call
from test_trl_environments import chat, played, results
from tiny import byte_tokenizer

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.tasks import environment
from jaxrl_llm.tasks.openenv import OpenEnv

pytestmark = pytest.mark.needs("websockets")
# A Python with the package openenv-core, which needs many others; as in OPENENV_PYTHON=.openenv/bin/python pytest ...
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable if find_spec("openenv") else "")
own_server = pytest.mark.skipif(not PYTHON, reason="needs openenv-core, or OPENENV_PYTHON")


@contextmanager
def openenv(kind: str, sessions: int = 8) -> Iterator[str]:
    """Runs OpenEnv's own server with room for some sessions, and gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [PYTHON, str(Path(__file__).with_name("openenv_server.py")), kind, str(port), str(sessions)]
    )
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def pool(url: str, **arguments: Any) -> EnvironmentPool:
    return EnvironmentPool(byte_tokenizer(TEMPLATE), lambda: OpenEnv(url=url, **arguments), **LIMITS)


def first_metrics(batch: Any, i: int) -> dict[str, float]:
    return {name: float(values.flat[i]) for name, values in batch.metrics().items() if name != "seconds"}


@own_server
@pytest.mark.slow
def test_an_mcp_environment_of_openenvs_own_server_is_played():
    with openenv("mcp") as url:
        made = pool(url)
        assert [schema["function"]["name"] for schema in made.schemas] == ["add", "fail"]
        rows = made.prepare_rows([chat()])
        assert rows[0]["prompt"] == chat()["prompt"]  # its first observation is empty
        batch = made.start_batch(rows, 2)
        turns = [call("add", text="a") + call("fail"), call("add", texts="b"), call("add", text="c")]
        said = played(made, batch, 0, *turns)
        assert results(said[0])[0] == "1" and "no paper is left" in results(said[0])[1]
        assert "error: " in results(said[1])[0]
        assert results(said[2]) == ["2"]
        assert played(made, batch, 0, call("add", text="d")) == [None]  # the server ends the episode
        batch.finish()
        metrics = first_metrics(batch, 0)
        assert metrics["reward"] == 2.5 and metrics["unscored"] == 0 and metrics["calls"] == 5
        assert first_metrics(batch, 1)["unscored"] == 1.0


@own_server
@pytest.mark.slow
def test_an_environment_with_actions_of_its_own_is_one_tool():
    with openenv("actions") as url:
        made = pool(url)
        (schema,) = made.schemas
        assert schema["function"]["name"] == "step" and {*schema["function"]["parameters"]["properties"]} == {"steps"}
        rows = made.prepare_rows([chat(seed=3), chat(seed=8)])
        assert ['{"place": 3}' in row["prompt"][-1]["content"] for row in rows] == [True, False]
        batch = made.start_batch(rows, 1)
        assert json.loads(results(played(made, batch, 0, call("step", steps=4))[0])[0]) == {"place": 7}
        assert "VALIDATION_ERROR" in results(played(made, batch, 0, call("step", step=4))[0])[0]
        assert played(made, batch, 1, call("step", steps=2)) == [None]
        batch.finish()
        assert [first_metrics(batch, i)["reward"] for i in range(2)] == [0.0, 1.0]
        assert first_metrics(batch, 0)["own_errors"] == 1.0
        held, other = pool(url).start_batch(rows[:1], 8), pool(url)  # it has room for 8 episodes
        with pytest.raises(UserError, match=r"config\.env\.url.*CAPACITY_REACHED"):
            other.prepare_rows(rows)
        held.finish()


TOOLS = {"tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]}


def answer(observation: Any = None, reward: Any = None, done: Any = False) -> str:
    data = {"observation": observation or {}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@contextmanager
def stand_in(step: Callable[[Any], None], reset: Callable[[Any], None] = lambda peer: peer.send(answer())):
    """A server that lists its tools, and then behaves as `step(peer)` and `reset(peer)` do. Gives its address."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    def handle(peer: Any) -> None:
        with suppress(ConnectionClosed):
            for text in peer:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    reset(peer)
                elif message["data"].get("type") == "list_tools":
                    peer.send(answer(TOOLS))
                else:
                    step(peer)

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def error(code: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": "no"}})


def end_after(peer: Any, sent: bytes) -> None:
    """Sends the beginning of a message, and closes the connection."""
    peer.socket.sendall(sent)
    peer.socket.shutdown(socket.SHUT_RDWR)


FAILURES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "dies": ("server_closed", lambda peer: peer.socket.shutdown(socket.SHUT_RDWR)),
    "stalls": ("server_stalled", lambda peer: None),
    "no JSON": ("server_nonsense", lambda peer: peer.send("<html>")),
    "a list": ("server_nonsense", lambda peer: peer.send("[1]")),
    "deeper than Python reads": ("server_nonsense", lambda peer: peer.send("[" * 10**6)),
    "bytes": ("server_nonsense", lambda peer: peer.send(b"\x00\xff")),
    "more than fits": ("server_closed", lambda peer: peer.send("x" * (2**24 + 1))),
    "ends in a message": ("server_closed", lambda peer: end_after(peer, b"\x81\x64{")),
    "no UTF-8": ("server_closed", lambda peer: peer.socket.sendall(b"\x81\x02\xff\xfe")),
    "no observation": ("server_nonsense", lambda peer: peer.send('{"type": "observation", "data": {}}')),
    "a text as reward": ("server_nonsense", lambda peer: peer.send(answer(reward="much"))),
    "no number as reward": ("server_nonsense", lambda peer: peer.send(answer(reward=float("nan")))),
    "no bool as end": ("server_nonsense", lambda peer: peer.send(answer(done="soon"))),
    "refuses": ("server_refused", lambda peer: peer.send(error("SESSION_ERROR"))),
}


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_costs_its_episode_under_a_name_of_its_own(failure, where):
    metric, fail = FAILURES[failure]
    broken = threading.Event()

    def reply(peer: Any, now: str) -> None:
        if broken.is_set() and now == where:
            fail(peer)
        else:
            peer.send(answer({"result": 1}, reward=1.0))

    with stand_in(lambda peer: reply(peer, "step"), lambda peer: reply(peer, "reset")) as url:
        made = pool(url, timeout=1.0 if failure == "stalls" else 30.0)
        rows = made.prepare_rows([chat()])
        whole = made.start_batch(rows, 1)
        assert results(played(made, whole, 0, call("add"))[0]) == ["1"]
        broken.set()
        with pytest.warns(UserWarning, match=metric):  # noqa: PT031
            batch = made.start_batch(rows, 1)
            assert played(made, batch, 0, call("add") + call("add")) == [None]
            # An episode that the server has paid before it fails is unscored too.
            assert (played(made, whole, 0, call("add")) == [None]) == (where == "step")
        for one in (whole, batch):
            one.finish()
    assert first_metrics(whole, 0)["unscored"] == float(where == "step")
    metrics = first_metrics(batch, 0)
    assert metrics[metric] == 1.0 and metrics["unscored"] == 1.0 and metrics["errors"] >= 1
    assert environment.reward([""], [metrics]) == [None]


def test_half_a_character_of_a_server_becomes_a_replacement():
    said = {"result": "漢 \ud800"}
    with stand_in(lambda peer: peer.send(answer(said)), lambda peer: peer.send(answer(said))) as url:
        made = pool(url)
        rows = made.prepare_rows([chat()])
        batch = made.start_batch(rows, 1)
        assert results(played(made, batch, 0, call("add"))[0]) == ["漢 \ufffd"]
        assert "漢" in made.tokenizer.decode(made.encode_observation(rows[0]["environment_text"], rows[0], ()))


def test_a_server_that_is_full_is_asked_again_for_a_moment():
    tries = iter([False, False, True])

    def reset(peer: Any) -> None:
        peer.send(answer() if next(tries, True) else error("CAPACITY_REACHED"))

    with stand_in(lambda peer: peer.send(answer({"result": 1}, reward=1.0)), reset) as url:
        made = pool(url)
        batch = made.start_batch([chat(environment_text=None)], 1)
        assert results(played(made, batch, 0, call("add"))[0]) == ["1"]
        batch.finish()


def test_a_server_that_cannot_serve_is_refused_before_a_run(refused):
    with refused("config.env.url = 'localhost:8000'"):
        pool("localhost:8000")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"config\.env\.url = 'http://127\.0\.0\.1:{port}'"):
        pool(f"http://127.0.0.1:{port}")
    full = stand_in(lambda peer: None, lambda peer: peer.send(error("FACTORY_ERROR")))
    with full as url, pytest.raises(UserError, match="FACTORY_ERROR"):
        pool(url).prepare_rows([chat()])


def test_a_missing_package_is_named_before_a_run(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with refused("jaxrl_llm[openenv]"):
        pool("http://127.0.0.1:1")
