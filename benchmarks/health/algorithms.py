"""Runs each algorithm's config with several seeds: `python -m benchmarks.health.algorithms [NAME ...] [--seeds 0 1 2]`.

A run of `configs/grpo.py` comes first and is the teacher of `configs/distillation.py`. Prints the table of
docs/algorithms.md; runs and results are kept in .bench/algorithms, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
RUNS = ROOT / ".bench" / "algorithms"
NAMES = [
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gdpo",
    "pass_at_k", "ppo", "gspo", "gspo_token", "luspo", "gmpo", "cispo", "sapo", "vespo", "topr", "top_entropy",
    "distillation", "lora", "search_grpo", "search_ppo", "search_two_hops", "pictures",
]  # fmt: skip
SETTINGS = ("--config.log.to=()", "--config.checkpoint.every=1000")  # of every run
AT = (0, 10, 20, 30, 40)  # steps whose accuracy the table shows, before the last one's


def accuracies(name: str, seed: int) -> dict[int, float]:
    """Held-out accuracy by step of a run, made if it is not there yet."""
    workdir = RUNS / f"{name}-{seed}"
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", f"configs/{name}.py", "--workdir", str(workdir)]
    command += [f"--config.seed={seed}", *SETTINGS]
    if name == "distillation":
        accuracies("grpo", 0)
        command.append(f"--config.teachers.teacher.path={RUNS / 'grpo-0' / 'hf'}")
    if not (workdir / "hf" / "model.safetensors").exists():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {step["step"]: step["eval/accuracy"] for step in steps if "eval/accuracy" in step}


def row(name: str, runs: list[dict[int, float]]) -> str:
    """A line of the table: means over seeds by step, then mean and least at the end."""
    last = max(runs[0])
    curve = [f"{statistics.mean(run[at] for run in runs):.1%}" if at < last else "" for at in AT]
    final = [run[last] for run in runs]
    cells = [f"`{name}`", str(last), *curve, f"{statistics.mean(final):.1%}", f"{min(final):.1%}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="configs (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    jobs = [(name, seed) for name in args.names for seed in args.seeds]
    for name, seed in track(jobs, description="runs", console=Console(stderr=True)):
        accuracies(name, seed)
    print("| config | steps | " + " | ".join(f"at {at}" for at in AT) + " | end, mean | least |")
    print("|---" * (4 + len(AT)) + "|")
    for name in args.names:
        print(row(name, [accuracies(name, seed) for seed in args.seeds]))


if __name__ == "__main__":
    main()
