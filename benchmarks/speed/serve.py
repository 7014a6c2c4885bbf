"""Loads the server of the in-JAX engine: `python -m benchmarks.speed.serve [--sessions 64] [--seconds 60]`.

The server has the small model of the package. Each session asks a sum, reads the answer, asks the next sum in the same
chat, and ends after TURNS sums. Then its trace must have all tokens of its answers, and another session begins. The
clients share the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

import jaxrl_llm

MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"
TURNS = 3
BOUNDS = {"max-prompt-tokens": 96, "max-completion-tokens": 32, "max-sequences": 16, "dtype": "float32"}


class Load:
    """Sessions that run at once, and what they measured."""

    def __init__(self, client: httpx.AsyncClient, end: float):
        self.client, self.end = client, end
        self.seconds: list[float] = []  # of each request
        self.tokens = self.lost = self.restarts = self.sessions = 0

    async def run(self, number: int) -> None:
        """Runs sessions one after the other until the end."""
        rng, count = random.Random(number), 0
        while time.monotonic() < self.end:
            await self.session(f"/sessions/s{number}-{count}", rng)
            count += 1

    async def session(self, path: str, rng: random.Random) -> None:
        """Runs a session of TURNS questions, and compares its trace with the answers."""
        talk, sampled = [], 0
        for _ in range(TURNS):
            talk.append({"role": "user", "content": f"{rng.randrange(10, 100)}+{rng.randrange(10, 100)}"})
            started = time.perf_counter()
            answer = await self.client.post(f"{path}/v1/chat/completions", json={"model": "sums", "messages": talk})
            answer.raise_for_status()
            self.seconds.append(time.perf_counter() - started)
            talk.append(answer.json()["choices"][0]["message"])
            sampled += answer.json()["usage"]["completion_tokens"]
        trace = (await self.client.delete(path)).raise_for_status().json()
        self.lost += sampled - sum(len(node.get("logprobs", ())) for node in trace["nodes"])
        self.restarts += trace["restarts"]
        self.tokens += sampled
        self.sessions += 1


async def measure(url: str, sessions: int, seconds: float) -> tuple[Load, float]:
    """Returns the load after this time, and the seconds until its last session has ended."""
    limits = httpx.Limits(max_connections=sessions, max_keepalive_connections=sessions)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        started = time.monotonic()
        load = Load(client, started + seconds)
        await asyncio.gather(*(load.run(number) for number in range(sessions)))
        took = time.monotonic() - started
        gauges = (await client.get("/metrics")).text
    for name in ("running", "waiting", "sessions"):
        assert re.search(rf"^jaxrl_{name} 0$", gauges, re.MULTILINE), gauges
    return load, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    flags = [word for name, value in BOUNDS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jaxrl_llm.tools.serve", "--model", str(MODEL), "--name", "sums", "--port", "0"]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout
        line = server.stdout.readline().strip()
        print(line)
        load, took = asyncio.run(measure(line.split()[-1].removesuffix("/v1"), args.sessions, args.seconds))
    finally:
        server.terminate()
        server.wait()
    p50, p99 = (1000 * np.percentile(load.seconds, p) for p in (50, 99))
    print(
        f"{len(load.seconds) / took:.1f} requests/s and {load.tokens / took:.0f} sampled tokens/s of {args.sessions} "
        f"sessions at once; p50 {p50:.0f} ms, p99 {p99:.0f} ms; {len(load.seconds)} requests in {took:.0f} s, "
        f"{load.sessions} sessions, {load.lost} tokens lost, {load.restarts} restarts"
    )
    assert load.lost == 0, "a trace lacks tokens of its answers"


if __name__ == "__main__":
    main()
