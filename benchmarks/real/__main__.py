"""SmolLM2-135M-Instruct learns sums of two numbers below 50: `python -m benchmarks.real --quick`.

Without --quick there are three seeds, one after the other, and with --trl the same work by TRL's GRPOTrainer after each
(its environment is made at the first run, from benchmarks/environments.txt). Each run that has ended is kept in --out
and not made again. Prints a table, and writes OUT/addition.png. --config.FIELD=VALUE changes addition.py for both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.real.model import smollm2
from benchmarks.step import environment
from jaxrl_llm.config import load as configs
from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import run_main

HERE = Path(__file__).parent
CONFIG = HERE / "addition.py"
SEEDS = (0, 1, 2)
TRL_MICROBATCH = 16  # sequences
REACHED = 0.85  # accuracy, to which the seconds are counted
# Fields that TRL is told.
TOLD = (
    "model.path", "num_steps", "prompts_per_step", "group_size", "rollout.max_completion_tokens",
    "rollout.temperature", "optim.learning_rate", "optim.warmup_steps", "eval.every", "eval.problems",
)  # fmt: skip


class Run(NamedTuple):
    """A run that has ended."""

    trainer: str
    seed: int
    records: list[dict[str, Any]]  # of each step, from 0
    peak_mb: float
    wall: float  # seconds, with evaluations, from the start of the process to its end

    def accuracies(self) -> list[tuple[int, float, float]]:
        """Returns step, seconds of all steps until then, without evaluations, and held-out accuracy."""
        seconds, found = 0.0, []
        for record in self.records:
            seconds += record.get("time/step", 0.0)
            if "eval/accuracy" in record:
                found.append((record["step"], seconds, record["eval/accuracy"]))
        return found

    def reached(self) -> float | None:
        """Returns the seconds to REACHED, between two evaluations in proportion; None: it was not reached."""
        points = self.accuracies()
        for (_, before, low), (_, after, high) in pairwise(points):
            if high >= REACHED:
                return before + (after - before) * (REACHED - low) / (high - low)
        return None


def measured(command: list[str], log: Path) -> tuple[float, float]:
    """Runs a command, whose output goes to a file, and returns its seconds and its peak memory in MB."""
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=HERE.parent.parent)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}: see {log}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def run_ours(seed: int, out: Path, changes: list[str]) -> Run:
    """Makes a run of `jaxrl train`."""
    workdir = out / f"ours_{seed}"
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(CONFIG), "--workdir", str(workdir)]
    command += [f"--config.seed={seed}", *changes]
    wall, peak = measured(command, out / f"ours_{seed}.log")
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "time/step", "reward/mean", "completion/length", "eval/accuracy")
    return Run("jaxrl_llm", seed, [{k: r[k] for k in kept if k in r} for r in records], peak, wall)


def run_trl(seed: int, out: Path, changes: list[str]) -> Run:
    """Makes the same run by TRL."""
    config = configs.load(CONFIG)
    for change in changes:
        configs.override(config, *change.removeprefix("--config.").split("=", 1))
    fields = flatten(config)
    settings = {name: fields[name] for name in TOLD} | {"seed": seed, "microbatch": TRL_MICROBATCH}
    command = [str(environment("trl")), "-m", "benchmarks.real.peer_trl", json.dumps(settings)]
    log = out / f"trl_{seed}.log"
    wall, peak = measured(command, log)
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
    return Run("TRL", seed, records, peak, wall)


RUNNERS = {"ours": run_ours, "trl": run_trl}


def kept(name: str, seed: int, out: Path, changes: list[str]) -> Run:
    """Returns a run, which is made if it is not in `out` yet."""
    file = out / f"{name}_{seed}.json"
    if not file.exists():
        file.write_text(json.dumps(RUNNERS[name](seed, out, changes)._asdict()))
    return Run(**json.loads(file.read_text()))


def table(runs: list[Run]) -> Table:
    """Returns the table of runs."""
    shown = Table("trainer", "seed", "held out, before", "at the end", "steps", "s a step", f"s to {REACHED:.0%}")
    for column in ("first step, s", "wall, s", "peak, GB"):
        shown.add_column(column)
    for run in runs:
        points, steps = run.accuracies(), [r["time/step"] for r in run.records if "time/step" in r]
        reached = run.reached()
        shown.add_row(
            run.trainer, str(run.seed), f"{points[0][2]:.1%}", f"{points[-1][2]:.1%}", str(len(steps)),
            f"{statistics.median(steps):.1f}", "-" if reached is None else f"{reached:.0f}", f"{steps[0]:.1f}",
            f"{run.wall:.0f}", f"{run.peak_mb / 1024:.1f}",
        )  # fmt: skip
    return shown


def draw(runs: list[Run], file: Path) -> None:
    """Draws held-out accuracy against seconds and against steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    colours = {"jaxrl_llm": "tab:blue", "TRL": "tab:orange"}
    for run in runs:
        steps, seconds, accuracy = zip(*run.accuracies(), strict=True)
        label = run.trainer if run.seed == runs[0].seed else None
        for axis, x in zip(axes, (seconds, steps), strict=True):
            axis.plot(x, [100 * y for y in accuracy], color=colours[run.trainer], marker=".", label=label, alpha=0.8)
    axes[0].set(xlabel="seconds of steps", ylabel="held-out sums solved, %", ylim=(0, 100))
    axes[1].set(xlabel="steps")
    axes[0].legend(loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first seed alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--trl", action="store_true", help="also by TRL")
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    args, changes = parser.parse_known_args()
    if unknown := [word for word in changes if not re.match(r"--config\.[\w.]+=", word)]:
        parser.error(f"unknown: {' '.join(unknown)}")
    args.out.mkdir(parents=True, exist_ok=True)
    smollm2()
    names = ["ours", "trl"] if args.trl else ["ours"]
    seeds = args.seeds[: 1 if args.quick else None]
    runs = [kept(name, seed, args.out, changes) for seed in seeds for name in names]
    Console(width=120).print(table(runs))
    draw(runs, args.out / "addition.png")


if __name__ == "__main__":
    run_main(main)
