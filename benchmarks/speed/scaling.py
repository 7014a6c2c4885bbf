"""How the cost of a step grows when one thing is doubled: `python -m benchmarks.speed.scaling`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.speed.ours import one_run, step_function
from benchmarks.speed.step import PHASES, make_model
from benchmarks.speed.workloads import Workload
from jaxrl_llm.machine.compilation import Compilations

BASE = Workload(
    "base", width=256, layers=4, heads=4, kv_heads=2, mlp_width=704, vocab_size=2048, prompts=4, group=8,
    prompt_tokens=64, completion_tokens=64,
)  # fmt: skip
DOUBLED = {
    "base": BASE,
    "B x 2": replace(BASE, prompts=8),
    "G x 2": replace(BASE, group=16),
    "P x 2": replace(BASE, prompt_tokens=128),
    "C x 2": replace(BASE, completion_tokens=128),
    "layers x 2": replace(BASE, layers=8),
    "B, G x 4": replace(BASE, prompts=16, group=32),
    "C x 4": replace(BASE, completion_tokens=256),
}


GROUP = replace(BASE, group=16)
FLAT = replace(BASE, prompts=GROUP.prompts * GROUP.group, group=1)  # every completion with a prompt of its own


def medians(workload: Workload, steps: int) -> dict[str, float]:
    """Seconds of each phase of a step, in two micro-batches or more."""
    with tempfile.TemporaryDirectory() as folder:
        microbatch = max(32 // workload.group, 2)
        with one_run(workload, make_model(workload, Path(folder)), "dots", microbatch) as run:
            one_step = step_function(*run, Compilations())
            measured = [one_step(step) for step in range(steps + 1)][1:]
    return {phase: statistics.median(step[phase] for step in measured) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    table = Table(title="medians in milliseconds; work and time as multiples of the base")
    for column in ("", *PHASES, "useful work", "time"):
        table.add_column(column, justify="left" if not column else "right")
    base_seconds = base_work = 0.0
    for name, workload in DOUBLED.items():
        seconds, work = medians(workload, args.steps), workload.useful_gflop(1)
        base_seconds, base_work = base_seconds or seconds["total"], base_work or work
        table.add_row(
            name, *(f"{1000 * s:,.0f}" for s in seconds.values()),
            f"{work / base_work:.2f}", f"{seconds['total'] / base_seconds:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)

    added = {}
    for name, workload in {"shared by 16": GROUP, "one each": FLAT}.items():
        short, long = (medians(replace(workload, prompt_tokens=p), args.steps) for p in (64, 256))
        added[name] = long["total"] - short["total"]
        print(f"prompts {name}: from 64 to 256 tokens, {short['total']:.2f}s -> {long['total']:.2f}s a step")
    print(f"a longer prompt costs {added['shared by 16'] / added['one each']:.0%} of what it costs with one each")


if __name__ == "__main__":
    main()
