"""The reports of docs/stability.md with a published model: `python -m benchmarks.real.stability [--only WORD]`.

It makes the runs that --runs DIR does not have yet, one after the other, and writes their tables. Each run is
plain_addition.py with a few changes. The last column has what the health rules find.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.health.judging import judged
from benchmarks.health.studies import (
    PAGE,
    ROOT,
    Column,
    Study,
    alarms_in_words,
    at,
    largest,
    part,
    runs,
    swing,
    table,
    with_lies,
    write,
)
from benchmarks.real.model import SMOLLM2, make
from benchmarks.real.tasks import exact, small_sums
from jaxrl_llm.errors import run_main

HERE = "benchmarks.real.stability"
CONFIG = Path(__file__).parent / "plain_addition.py"  # 16 prompts x 8, rate 2e-5


def wrong_sums() -> list[dict[str, Any]]:
    """The 100 sums of two numbers below 10, of which 25 have an answer that nobody can find: 75 % is the most."""
    return [row | {"answer": "?"} if i % 4 == 0 else row for i, row in enumerate(small_sums())]


def noisy_exact(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The reward of the task, with the opposite verdict for one completion of ten."""
    return with_lies(exact(completions, answer), prompts, wrong=0.1)


def model(folder: Path) -> Path:
    """Returns the folder of the published model, which it makes if it is not there."""
    make(SMOLLM2)
    return SMOLLM2.folder()


def batch(update: int, rollout: int = 16) -> dict[str, Any]:
    """Returns the changes for prompts in an update and in a rollout."""
    return {"prompts_per_step": rollout, "prompts_per_update": update, "microbatch": min(update, 4)}


def quarters(title: str, metric: str, form: str) -> list[Column]:
    """Returns the columns of the means of a metric in the quarters of a run."""
    return [(f"{title}, quarter {i + 1}", part(metric, i, typical=mean), form) for i in range(4)]


study = partial(Study, CONFIG, starts_from=model, seeds=(0,))
SHORT = {"eval.every": 4, "eval.problems": 256}
ACCURACY = tuple((f"accuracy at {step}", at(step), ".1%") for step in (0, 4, 8, 12))
SWING = ("swing of the reward", swing, ".3f")
FAST = {"optim.learning_rate": 1e-4}  # five times that of the config

STUDIES: dict[str, Study] = {
    "real batch": study(
        SHORT,
        {
            "128 sequences in an update": {},
            "the same, microbatch 4": {"microbatch": 4},
            "32 in an update": batch(4),
            "32 in a rollout and an update": batch(4, 4),
            "128 in an update, rate 1e-4": FAST,
            "32 in an update, rate 1e-4": FAST | batch(4),
            "32 in a rollout and an update, rate 1e-4": FAST | batch(4, 4),
        },
        (*ACCURACY, SWING),
    ),
    "real ceiling": study(
        {"eval.every": 5, "eval.problems": 100, "num_steps": 20}
        | {"data.source": f"{HERE}.wrong_sums", "eval.source": f"{HERE}.wrong_sums"},
        {f"rate {rate:g}": {"optim.learning_rate": rate} for rate in (5e-6, 2e-5, 1e-4, 2e-4)},
        (*((f"accuracy at {step}", at(step), ".1%") for step in (0, 5, 10, 15, 20)), SWING),
    ),
    "real warm-up": study(
        SHORT | {"optim.warmup_steps": 0},
        {
            "0.95 of 12 steps": {"optim.warmup_ratio": 0.95},
            "0.285 of 40 steps": {"optim.warmup_ratio": 0.285, "schedule_steps": 40},
            "1 step": {"optim.warmup_steps": 1},
            "0.95 of 12 steps, rate 1e-4": FAST | {"optim.warmup_ratio": 0.95},
            "1 step, rate 1e-4": FAST | {"optim.warmup_steps": 1},
        },
        ACCURACY,
    ),
    "real climb": study(
        batch(2, 2)
        | {"epochs": 4, "num_steps": 500, "eval.every": 100, "eval.problems": 256}
        | {"importance.action": "none", "optim.learning_rate": 2e-6}
        | {"engine": {"name": "benchmarks.health.stability.rounded"}}
        | {"reward.functions": (f"{HERE}.noisy_exact", "benchmarks.real.tasks.exact"), "reward.weights": (1.0, 0.0)},
        {
            "4 epochs, rate 2e-6": {},
            "corrected": {"importance.action": "truncate"},
            "1 epoch": {"epochs": 1},
            "KL penalty 0.04": {"kl.coef": 0.04},
        },
        (
            *quarters("norm", "grad_norm", ".1f"),
            ("largest norm", largest("grad_norm"), ".0f"),
            *quarters("clip", "clip/fraction", ".3f"),
            *quarters("KL of sampler and trainer", "importance/kl", ".3f"),
            *((f"accuracy at {step}", at(step), ".1%") for step in range(0, 501, 100)),
        ),
    ),
}


def table_with_findings(study: Study, workdirs: dict[str, list[Path]]) -> list[str]:
    """Returns the table of a study, and in its last column what the health rules find in the first seed."""
    head, line, *rows = table(study, workdirs)
    found = [alarms_in_words(judged(first)) for first, *_ in workdirs.values()]
    return [f"{head} found |", f"{line}---|", *(f"{row} {x} |" for row, x in zip(rows, found, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_stability")
    parser.add_argument("--only", default="", choices=["", *STUDIES], help="make only the runs of this study")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in [name for name in STUDIES if args.only in ("", name)]:
        workdirs = runs(args.runs, STUDIES[name], name)
        write(PAGE, name, table_with_findings(STUDIES[name], workdirs))


if __name__ == "__main__":
    run_main(main)
