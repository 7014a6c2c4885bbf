"""Every health rule on sick and on healthy runs: `python -m benchmarks.health_matrix [--runs DIR] [--only WORD]`.

It makes the runs that DIR does not have yet, one after the other (about a minute each), judges their logs with the
rules as they are now, and writes the tables into docs/health.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from jaxrl_llm import doctor
from jaxrl_llm.build import build
from jaxrl_llm.config.load import load
from jaxrl_llm.health import faults, logs
from jaxrl_llm.train import train

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "health.md"
BEGIN, END = "<!-- written by benchmarks.health_matrix -->", "<!-- end -->"
SHORT = {
    "num_steps": 40, "eval.every": 0, "checkpoint.keep_best": 0, "checkpoint.every": 10_000, "log.to": (),
}  # fmt: skip
ALGORITHMS = (
    "cispo", "dapo", "dr_grpo", "gdpo", "gmpo", "gspo", "gspo_token", "luspo", "opo", "pass_at_k", "reinforce",
    "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "sapo", "search_grpo", "search_ppo", "top_entropy",
    "topr", "vespo",
)  # fmt: skip
VLLM = {"engine.python": str(ROOT / ".vllm" / "bin" / "python")}
# Name -> config and changes.
HEALTHY: dict[str, tuple[str, dict]] = {
    "grpo, all 100 steps": ("grpo", {"num_steps": 100}),
    "grpo, seed 1": ("grpo", {"seed": 1}),
    "grpo, seed 2": ("grpo", {"seed": 2}),
    "grpo, lag 1": ("grpo", {"rollout.max_lag": 1}),
    "grpo, bfloat16": ("grpo", {"model.dtype": "bfloat16"}),
    "ppo": ("ppo", {}),
    "ppo, lag 1, seed 1": ("ppo", {"rollout.max_lag": 1, "seed": 1}),
    **{name: (name, {}) for name in ALGORITHMS},
    "grpo_vllm": ("grpo_vllm", VLLM),
    "grpo_vllm, lag 1": ("grpo_vllm", VLLM | {"rollout.max_lag": 1}),
}


def make_healthy(name: str, workdir: Path) -> None:
    """Makes a healthy run."""
    base, changes = HEALTHY[name]
    config = load(ROOT / "configs" / f"{base}.py")
    config.update_from_flattened_dict(SHORT | changes)
    with build(config, workdir) as run:
        for _ in train(run):
            pass


def make_sick(name: str, second: bool, workdir: Path) -> None:
    """Makes the run of a fault."""
    for _ in faults.demonstrate(name, workdir, second=second):
        pass


def made(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns the workdir of a run, which it makes if it is not there whole."""
    workdir = folder / name.replace(" ", "-").replace(",", "")
    if not workdir.exists():
        begun = workdir.with_name(workdir.name + ".partial")
        shutil.rmtree(begun, ignore_errors=True)
        with redirect_stdout(sys.stderr):
            make(begun)
        begun.rename(workdir)
    return workdir


def judged(workdir: Path) -> dict[str, tuple[str, int]]:
    """Returns {rule: (severity, first step)} of the rules that find something in a run."""
    spells = doctor.judge(logs.read(workdir), logs.bounds(workdir) or doctor.OTHERS)
    return {spell.finding.id: (spell.finding.severity, spell.first) for spell in spells}


def sick_rows(folder: Path, names: list[str]) -> list[str]:
    """Returns the table of faults: delays of the rule in both forms, and what else was found in the first."""
    rows, caught = [], [0, 0]
    for name in names:
        fault, cells, others = faults.FAULTS[name], [], set()
        for second in (False, True):
            workdir = made(folder, f"{name}{' 2' if second else ''}", partial(make_sick, name, second))
            found = judged(workdir)
            first = found.pop(name, (None, None))[1]
            took = None if first is None else first - fault.begins + 1
            in_time = took is not None and 0 < took <= fault.within
            caught[second] += in_time
            cells.append("not found" if took is None else f"{took}" + ("" if in_time else ", too late"))
            others |= set(found)
        also = ", ".join(sorted(others))
        rows.append(f"| `{name}` | {fault.story} | {fault.within} | {cells[0]} | {cells[1]} | {also} |")
    head = ["| rule | fault | may take | took | second form | found as well |", "|---|---|---|---|---|---|"]
    total = f"Found in time: {caught[0]} of {len(names)} faults, and {caught[1]} of {len(names)} in their second form."
    return [*head, *rows, "", total]


def healthy_rows(folder: Path, names: list[str]) -> list[str]:
    """Returns the table of healthy runs: the rewards at start and end, and what was found."""
    rows, alarms = [], 0
    for name in names:
        workdir = made(folder, name, partial(make_healthy, name))
        rewards = [record["reward/mean"] for record in logs.read(workdir) if "reward/mean" in record]
        found = {rule: of for rule, of in judged(workdir).items() if of[0] != "note"}
        alarms += bool(found)
        said = ", ".join(f"`{rule}` (step {step})" for rule, (_, step) in found.items())
        ends = [sum(part) / len(part) for part in (rewards[:4], rewards[-4:])]
        rows.append(f"| {name} | {len(rewards)} | {ends[0]:.2f} to {ends[1]:.2f} | {said} |")
    head = ["| run | steps | reward | found |", "|---|---|---|---|"]
    return [*head, *rows, "", f"Runs with a finding of severity warning or error: {alarms} of {len(names)}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "health_matrix")
    parser.add_argument("--only", default="", help="make only runs whose name has this word, and write no table")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    sick = [name for name in faults.FAULTS if args.only in name]
    healthy = [name for name in HEALTHY if args.only in name]
    lines = [*sick_rows(args.runs, sick), "", *healthy_rows(args.runs, healthy)]
    print("\n".join(lines))
    if not args.only:
        text = DOC.read_text()
        before, rest = text.split(BEGIN)
        DOC.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()
