"""What a curriculum changes: `python -m benchmarks.health.curriculum [--rows 640] [--skips 0 0.9] [--seeds 0 1 2]`.

configs/grpo.py on few of its problems, so that each is visited several times in 100 steps, without and with a
curriculum. Prints the share of groups without a signal, over all steps and over the last quarter, the mean reward over
all steps, the greedy accuracy at the end, and how many prompts were passed over in a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from jaxrl_llm import train
from jaxrl_llm.config.load import load
from jaxrl_llm.data import order
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.tasks import arithmetic


def measure(folder: Path, skip: float, seed: int, steps: int) -> list[float]:
    """Trains on the rows in `folder`, and returns the columns of the table."""
    c = load(Path("configs/grpo.py"))
    c.data.source, c.seed, c.num_steps = f"{folder}/rows.jsonl", seed, steps
    c.data.curriculum = {"skip": skip} if skip else None
    c.eval.every, c.log.to, c.log.completions_every = steps, (), 0
    c.health.self_test = False
    records = [r for r in train.steps(c, folder / "run") if r["step"]]
    idle = [r["groups/no_signal"] for r in records]
    passed = [r.get("curriculum/passed_over", 0.0) for r in records]
    late = len(idle) // 4
    return [
        np.mean(idle),
        np.mean(idle[-late:]),
        np.mean([r["reward/mean"] for r in records]),
        records[-1]["eval/accuracy"],
        np.mean(passed),
    ]


def simulate(skip: float, seed: int, rows: int, steps: int) -> float:
    """Returns the share of groups of 8 without a signal, for prompts whose pass rates stay: many near 0 and near 1."""
    chance = np.random.default_rng(seed)
    rates, idle = chance.beta(0.5, 0.5, rows), []
    curriculum = Curriculum(rows, skip, seed)
    iterator = order.mix({"all": range(rows)}, {"all": 1.0}, 64, seed, np.array, curriculum.draws)
    for _ in range(steps):
        numbers = next(iterator)
        solved = chance.binomial(8, rates[numbers])
        no_signal = (solved == 0) | (solved == 8)
        curriculum.no_signal = curriculum.visited(curriculum.no_signal, numbers, no_signal, replaced=[])
        idle.append(no_signal.mean())
    return float(np.mean(idle))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--skips", type=float, nargs="+", default=[0.0, 0.9])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--simulate", action="store_true", help="without a model, on prompts whose pass rates stay")
    args = parser.parse_args()
    if args.simulate:
        for skip in args.skips:
            found = [simulate(skip, seed, args.rows, args.steps) for seed in args.seeds]
            print(f"skip {skip}: no signal in {', '.join(f'{x:.1%}' for x in found)} of the groups")
        return
    lines = "".join(json.dumps(row) + "\n" for row in arithmetic.train()[: args.rows])
    table = [
        "| skip | seed | no signal | last quarter | mean reward | accuracy | passed over in a step |",
        "|" + "---|" * 7,
    ]
    for seed in args.seeds:
        for skip in args.skips:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "rows.jsonl").write_text(lines)
                idle, late, reward, accuracy, passed = measure(Path(folder), skip, seed, args.steps)
            table.append(
                f"| {skip} | {seed} | {idle:.1%} | {late:.1%} | {reward:.3f} | {accuracy:.1%} | {passed:.0f} |"
            )
            print(table[-1], flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    main()
