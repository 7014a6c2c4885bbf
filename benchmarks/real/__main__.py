"""SmolLM2-135M-Instruct learns sums of two numbers below 50: `python -m benchmarks.real --quick`.

Without --quick there are three seeds, one after the other. --case NAME is another config of this folder: the same sums
by adapters alone (lora_addition), by another family (gemma_addition), after fine-tuning (after_sft), or by plain GRPO
(plain_addition), or other tasks (reasoning, tldr). plain_addition and tldr have --trl N: after each run, the first N
steps of the same work by TRL's GRPOTrainer, whose environment (benchmarks/speed/environments.txt) is made at the first
run. Our runs begin with an empty cache of compiled programs; with --trl each is made again, with the programs that it
has compiled. Each run that has ended is kept in OUT/CASE and not made again. Prints a table, checks that all did the
same work, and writes OUT/CASE.png. --config.FIELD=VALUE changes the config for both trainers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.real.model import MODELS, fine_tune, fine_tuned, make
from benchmarks.speed.step import environment
from jaxrl_llm.config import load as configs
from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import run_main

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
TRL_MICROBATCH = 16  # sequences
SOLVED = "share of held-out sums solved"
OURS, AGAIN, TRL = "jaxrl_llm", "jaxrl_llm, compiled before", "TRL"
COLOURS = {OURS: "tab:blue", AGAIN: "tab:cyan", TRL: "tab:orange"}
# Fields that TRL is told.
TOLD = (
    "model.path", "num_steps", "prompts_per_step", "group_size", "rollout.max_completion_tokens",
    "rollout.temperature", "optim.learning_rate", "optim.warmup_steps", "optim.decay", "eval.every", "eval.problems",
)  # fmt: skip


class Case(NamedTuple):
    """A task, and what is shown of its runs."""

    name: str  # of its config, and of its rows and reward in peer_trl.py
    curve: str  # key of a record
    label: str
    goals: tuple[float, ...]  # values of the curve to which the seconds are counted
    lowest: float  # of the axis
    highest: float

    def config(self) -> Path:
        return HERE / f"{self.name}.py"


CASES = {
    "addition": Case("addition", "eval/accuracy", SOLVED, (0.5, 0.85), 0, 1),
    "lora_addition": Case("lora_addition", "eval/accuracy", SOLVED, (0.5, 0.85), 0, 1),
    "gemma_addition": Case("gemma_addition", "eval/accuracy", SOLVED, (0.5, 0.85), 0, 1),
    "after_sft": Case("after_sft", "eval/accuracy", SOLVED, (0.85, 0.9), 0, 1),
    "reasoning": Case("reasoning", "eval/accuracy", "share of held-out problems solved", (0.3,), 0, 1),
    "plain_addition": Case("plain_addition", "eval/accuracy", SOLVED, (0.3, 0.5), 0, 1),
    "tldr": Case("tldr", "reward/mean", "mean reward: distance from 20 characters", (-60,), -120, 0),
}


class Run(NamedTuple):
    """A run that has ended."""

    trainer: str
    seed: int
    records: list[dict[str, Any]]  # of each step, from 0
    peak_mb: float
    wall: float  # seconds, with evaluations, from the start of the process to its end
    compiled_before: float = 0.0  # seconds of compiling outside of the steps, of a run that was made twice

    def points(self, curve: str) -> list[tuple[int, float, float]]:
        """Returns step, seconds of all compiling and all steps until then, and the value of a curve."""
        seconds, found = self.compiled_before, []
        for record in self.records:
            seconds += record.get("time/step", 0.0)
            if curve in record:
                found.append((record["step"], seconds, record[curve]))
        return found

    def seconds_to(self, curve: str, goal: float) -> float:
        """Returns the seconds to the goal, between two points of the curve in proportion; infinite: not reached."""
        for (_, before, low), (_, after, high) in pairwise(self.points(curve)):
            if high >= goal:
                return before + (after - before) * (goal - low) / (high - low)
        return math.inf

    def steps(self) -> list[dict[str, Any]]:
        """Returns the records of steps; that of step 0 is of an evaluation alone."""
        return [record for record in self.records if "time/step" in record]

    def outside(self) -> float:
        """Returns the seconds outside of the steps: start, self-test and evaluations."""
        return self.wall - sum(record["time/step"] for record in self.steps())


def measured(command: list[str], log: Path, cache: Path | str = "") -> tuple[float, float]:
    """Runs a command, whose output goes to a file, and returns its seconds and its peak memory in MB.

    cache: folder of JAX's compiled programs; "": none are kept.
    """
    began, environ = time.perf_counter(), os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=HERE.parent.parent, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}: see {log}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def run_ours(case: Case, seed: int, out: Path, changes: list[str], trainer: str) -> Run:
    """Makes a run of `jaxrl train`: as OURS with an empty cache of compiled programs, as AGAIN with that run's."""
    name = f"ours_{seed}" if trainer == OURS else f"ours_{seed}_again"
    workdir, cache = (out / name).absolute(), (out / f"programs_{seed}").absolute()
    if trainer == OURS:
        shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(case.config()), "--workdir", str(workdir)]
    command += [f"--config.seed={seed}", *changes]
    wall, peak = measured(command, out / f"{name}.log", cache)
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "time/step", "reward/mean", "completion/length", "eval/accuracy")
    group = fields_of(case, changes)["group_size"]
    sequences = [{"sequences": int(r["groups/count"]) * group} if "groups/count" in r else {} for r in records]
    shown = [{k: r[k] for k in kept if k in r} | more for r, more in zip(records, sequences, strict=True)]
    return Run(trainer, seed, shown, peak, wall)


def run_trl(case: Case, seed: int, out: Path, changes: list[str], steps: int) -> Run:
    """Makes the first steps of the same run by TRL."""
    fields = fields_of(case, changes)
    microbatch = min(TRL_MICROBATCH, fields["prompts_per_step"] * fields["group_size"])
    settings = {name: fields[name] for name in TOLD} | {"case": case.name, "seed": seed, "microbatch": microbatch}
    settings["last"] = steps  # the schedule of the rate has all of them
    settings["state"] = str((out / f"trl_{seed}_trainer_state.json").absolute())
    command = [str(environment("trl")), "-m", "benchmarks.real.peer_trl", json.dumps(settings)]
    log = out / f"trl_{seed}.log"
    wall, peak = measured(command, log)
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
    return Run(TRL, seed, records, peak, wall)


def fields_of(case: Case, changes: list[str]) -> dict[str, Any]:
    """Returns the fields of a case's config, with the changes."""
    config = configs.load(case.config())
    for change in changes:
        configs.override(config, *change.removeprefix("--config.").split("=", 1))
    return flatten(config)


def kept(file: Path, make: Callable[[], Run]) -> Run:
    """Returns the run in a file, which is made if it is not there."""
    if not file.exists():
        file.write_text(json.dumps(make()._asdict()))
    return Run(**json.loads(file.read_text()))


def table(runs: list[Run], case: Case) -> Table:
    """Returns the table of runs."""
    columns = ("trainer", "seed", "held out, before", "at the end", "steps", "sequences", "tokens, step 1", "s a step")
    shown = Table(*columns, *(f"s to {goal:g}" for goal in case.goals), "first step, s", "wall, s", "peak, GB")
    for run in runs:
        held_out, steps = run.points("eval/accuracy"), run.steps()
        reached = [run.seconds_to(case.curve, goal) for goal in case.goals]
        seconds, first = [record["time/step"] for record in steps], steps[0]
        shown.add_row(
            run.trainer, str(run.seed), f"{held_out[0][2]:.1%}", f"{held_out[-1][2]:.1%}", str(len(steps)),
            str(first["sequences"]), f"{first['sequences'] * first['completion/length']:.0f}",
            f"{statistics.median(seconds):.1f}", *(f"{x:.0f}" if x < math.inf else "-" for x in reached),
            f"{seconds[0]:.1f}", f"{run.wall:.0f}", f"{run.peak_mb / 1024:.1f}",
        )  # fmt: skip
    return shown


def compared(runs: list[Run], case: Case) -> list[str]:
    """Returns lines with the mean seconds to each goal. Raises: SystemExit, if the work was not the same."""
    for seed in {run.seed for run in runs}:
        same = [run for run in runs if run.seed == seed]
        before = [run.points("eval/accuracy")[0][2] for run in same]
        sequences = {record["sequences"] for run in same for record in run.steps()}
        if len(sequences) > 1 or max(before) - min(before) > 0.01:
            raise SystemExit(f"seed {seed}: not the same work: {sequences} sequences, accuracies before {before}")
    lines = []
    for goal in case.goals:
        mean = {
            trainer: statistics.mean(run.seconds_to(case.curve, goal) for run in runs if run.trainer == trainer)
            for trainer in COLOURS
        }
        lines += [
            f"mean seconds to {goal:g}: {trainer} {mean[trainer]:.0f}, TRL {mean[TRL]:.0f}"
            + (f", ratio {mean[TRL] / mean[trainer]:.2f}" if max(mean.values()) < math.inf else ": not reached by all")
            for trainer in (OURS, AGAIN)
        ]
    return lines


def draw(runs: list[Run], case: Case, file: Path) -> None:
    """Draws the curve against seconds and against steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for run in runs:
        steps, seconds, values = zip(*run.points(case.curve), strict=True)
        label = run.trainer if run.seed == runs[0].seed else None
        for axis, x in zip(axes, (seconds, steps), strict=True):
            axis.plot(x, values, color=COLOURS[run.trainer], marker=".", label=label, alpha=0.8)
    axes[0].set(xlabel="seconds of steps", ylabel=case.label, ylim=(case.lowest, case.highest))
    axes[1].set(xlabel="steps")
    axes[0].legend(loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="addition")
    parser.add_argument("--quick", action="store_true", help="the first seed alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--trl", type=int, default=0, metavar="N", help="also N steps by TRL")
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    args, changes = parser.parse_known_args()
    if unknown := [word for word in changes if not re.match(r"--config\.[\w.]+=", word)]:
        parser.error(f"unknown: {' '.join(unknown)}")
    case, folder = CASES[args.case], args.out / args.case
    fields = fields_of(case, changes)
    if args.trl and fields["rollout.resample_rounds"]:
        parser.error("--trl: TRL cannot sample groups again (rollout.resample_rounds): give --case plain_addition")
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if fields["model.path"] == str(model.folder()):
            make(model)
    if fields["model.path"] == str(fine_tuned()):
        fine_tune()
    runs = list[Run]()
    for seed in args.seeds[: 1 if args.quick else None]:
        given = case, seed, folder, changes
        run = kept(folder / f"ours_{seed}.json", partial(run_ours, *given, OURS))
        if args.trl:
            again = kept(folder / f"ours_{seed}_again.json", partial(run_ours, *given, AGAIN))
            # The self-test and the first evaluation compile too: what they save when they find the programs.
            runs += [run._replace(compiled_before=run.outside() - again.outside()), again]
            runs.append(kept(folder / f"trl_{seed}.json", partial(run_trl, *given, args.trl)))
        else:
            runs.append(run)
    Console(width=140).print(table(runs, case))
    draw(runs, case, args.out / f"{case.name}.png")
    if args.trl:
        print(*compared(runs, case), sep="\n")


if __name__ == "__main__":
    run_main(main)
