"""Where a step's time goes, by kind of operation: `python -m benchmarks.speed.breakdown even`.

Operations of one kind run beside each other, so that their sum may exceed the wall clock.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.speed.ours import one_run, step_function
from benchmarks.speed.step import make_model
from benchmarks.speed.workloads import WORKLOADS
from jaxrl_llm.machine.compilation import Compilations

NOT_OPERATIONS = re.compile(r"^(\$|Thunk|np\.|Pjit|Common|Slinky|Execute|jit_)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--remat", default="dots")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    folder = make_model(workload)
    with one_run(workload, folder, args.remat, args.microbatch) as run:
        show(step_function(*run, Compilations()))


def show(one_step: Callable[[int], dict]) -> None:
    """Seconds by kind of operation of one step, the second one."""
    one_step(0), one_step(1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            measured = one_step(1)
        trace = next(Path(folder).rglob("*.xplane.pb"))
        seconds: Counter[str] = Counter()
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for line in plane.lines:
                for event in line.events:
                    if not NOT_OPERATIONS.match(event.name):
                        seconds[re.sub(r"[.\d]+$", "", event.name)] += event.duration_ns / 1e9
    print({name: round(float(measured[name]), 2) for name in ("rollout", "score", "update", "total")})
    for name, spent in seconds.most_common(15):
        print(f"{spent:8.2f}s  {name}")


if __name__ == "__main__":
    main()
