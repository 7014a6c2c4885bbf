"""What the exchanges of several processes cost: `python -m benchmarks.scale.hosts`.

It measures them with 2, 4 and 8 processes on this machine, fits seconds = a + b N, with c N x N for the bytes of
arrays, and prints what 64 and 512 processes would take by these constants: process 0 reads N values and sends N times
all of them. Then it counts the exchanges of a step, with two processes, and with completions that are twice as long.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
COUNTS, MORE = (2, 4, 8), (64, 512)
ROWS = 2**16  # bytes of an array that a process gives to `gather`: 256 x 16 lengths are 32 KiB
TINY = (
    "num_steps=8", "optim.warmup_steps=0", "optim.decay=constant", "prompts_per_step=8", "prompts_per_update=4",
    "group_size=4", "eval=none", "checkpoint.every=100", "checkpoint.keep_best=0", "mesh.data=-1",
    "mesh.fsdp=1", "health.self_test=False", "epochs=1", "log.to=()",
)  # fmt: skip
LENGTHS = {"grpo": (12, 24), "dapo": (12, 24), "search_grpo": (128, 256)}  # tokens of a completion at most


def in_processes(count: int, *words: str) -> Any:
    """Runs this module in so many processes, and returns what the first one prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.scale.hosts", *words, "--place"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment)
    each = [subprocess.Popen([*command, f"{address},{i}/{count}"], **pipes) for i in range(count)]
    said = [process.communicate()[0] for process in each]
    assert not any(process.returncode for process in each), said
    return next(json.loads(line[6:]) for line in said[0].splitlines() if line.startswith("found "))


def measure(place: str) -> dict[str, float]:
    """Returns the median seconds of each exchange."""
    from jaxrl_llm.machine import distributed, meshes, transfers

    def seconds(act: Callable[[], object]) -> float:
        times = []
        for _ in range(30):
            distributed.wait("begin")
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    with distributed.join_processes(place):
        mesh, rows = meshes.make_mesh(data=-1, fsdp=1, tensor=1), np.zeros((1, ROWS), np.uint8)
        return {
            "exchange of a number": seconds(lambda: distributed.exchange(1.0)),
            "barrier": seconds(lambda: distributed.wait("barrier")),
            "gather of 64 KiB each": seconds(lambda: distributed.gather(rows)),
            "the same by the devices": seconds(lambda: transfers.gather(rows, mesh)),
            "largest of 100 numbers, by the devices": seconds(
                lambda: transfers.max_over_processes(np.arange(100), mesh)
            ),
        }


def count(place: str, config: str, tokens: int, workdir: str) -> dict[str, float]:
    """Returns the exchanges of a step of process 0 through the store, and the bytes that it gives to them."""
    from jaxrl_llm import train
    from jaxrl_llm.config.load import parse_arguments
    from jaxrl_llm.machine import distributed
    from jaxrl_llm.machine.distributed import store

    sent: list[int] = []
    exchanged = store._exchange
    store._exchange = lambda value, channel: sent.append(len(value)) or exchanged(value, channel)
    fields = [f"--config.{field}" for field in (*TINY, f"rollout.max_completion_tokens={tokens}")]
    words = ["--config", str(ROOT / "configs" / f"{config}.py"), "--workdir", workdir, "--distributed", place, *fields]
    given = parse_arguments("benchmarks.scale.hosts", "", words)
    with distributed.join_processes(place):
        at = [(len(sent), sum(sent)) for _ in train.steps(given.config, given.workdir)]
    (first, first_bytes), (last, last_bytes) = at[1], at[-2]  # the last step also ends the run
    steps = len(at) - 3
    return {"exchanges": (last - first) / steps, "bytes": (last_bytes - first_bytes) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", help="of a process that this program starts")
    parser.add_argument("--count", nargs=3, metavar=("CONFIG", "TOKENS", "WORKDIR"), help="likewise")
    args = parser.parse_args()
    if args.place:
        found = (
            count(args.place, args.count[0], int(args.count[1]), args.count[2]) if args.count else measure(args.place)
        )
        print("found " + json.dumps(found), flush=True)
        return
    measured = {n: in_processes(n) for n in COUNTS}
    print(f"{'milliseconds':40}" + "".join(f"{n:>10}" for n in (*COUNTS, *MORE)))
    for name in measured[COUNTS[0]]:
        here = [measured[n][name] for n in COUNTS]
        more = ["-"] * len(MORE) if "devices" in name else [f"{1e3 * x:.1f}" for x in predicted(measured, name)]
        print(f"{name:40}" + "".join(f"{1e3 * x:>10.1f}" for x in here) + "".join(f"{x:>10}" for x in more))
    print(f"\n{'of a step, two processes':40}{'exchanges':>10}{'bytes':>10}")
    for config, lengths in LENGTHS.items():
        for tokens in lengths:
            with tempfile.TemporaryDirectory() as folder:
                found = in_processes(2, "--count", config, str(tokens), f"{folder}/run")
            print(f"{f'{config}, {tokens} tokens':40}{found['exchanges']:>10.1f}{found['bytes']:>10.0f}")


def predicted(measured: dict[int, dict[str, float]], name: str) -> list[float]:
    """Returns the seconds with MORE processes: a line in N for a number, and what an array adds in its N x N bytes."""
    small = np.polyfit(COUNTS, [measured[n]["exchange of a number"] for n in COUNTS], 1)
    line = small if "gather" in name else np.polyfit(COUNTS, [measured[n][name] for n in COUNTS], 1)
    if "gather" not in name:
        return [float(np.polyval(line, n)) for n in MORE]
    added = [max(measured[n][name] - np.polyval(line, n), 0.0) for n in COUNTS]
    squares = np.square(COUNTS, dtype=float)
    each = float(squares @ added / (squares @ squares))  # seconds for each pair of processes
    return [float(np.polyval(line, n)) + each * n * n for n in MORE]


if __name__ == "__main__":
    main()
