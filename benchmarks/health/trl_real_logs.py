"""Trains SmolLM2-135M-Instruct with TRL's GRPOTrainer, healthy or with an illness, and keeps what it logs.

python -m benchmarks.health.trl_real_logs MODEL OUT [--only NAME ...] [--rollouts N]

MODEL is the model's folder, OUT/NAME.json the log_history of a run. With all runs there, they are also written to
OUT/trl_real.json.gz, as in tests/references. Needs TRL (benchmarks/speed/environments.txt). One after the
other they take 20 minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 4, 4


def right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Pays 1 if the last number is right."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and int(found[-1]) == x) for found, x in zip(numbers, answer, strict=True)]


def near(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Pays from 0 to 1 for how near the last number is, so that most groups teach."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [
        max(0.0, 1 - abs(float(found[-1][:6]) - x) / 50) if found else 0.0
        for found, x in zip(numbers, answer, strict=True)
    ]


def constant(completions: list[Any], **_: Any) -> list[float]:
    """Pays the same for all: a parser that never finds an answer."""
    return [0.0] * len(completions)


def longer(completions: list[Any], **_: Any) -> list[float]:
    """Pays for characters, so that the best answer never ends."""
    return [len(completion[0]["content"]) / 50 for completion in completions]


HEALTHY = dict(rollouts=16, reward_funcs=[near, right], learning_rate=1e-5, max_completion_length=24)
RUNS: dict[str, dict[str, Any]] = {  # what differs from HEALTHY
    "healthy": {},
    "cut": dict(max_completion_length=2, rollouts=9),
    "constant_reward": dict(reward_funcs=[constant], rollouts=9),
    "high_rate": dict(learning_rate=2e-3, warmup_steps=20, rollouts=20),
    "long_is_better": dict(reward_funcs=[longer, right], learning_rate=1e-4, rollouts=14),
}
SYSTEM = {"role": "system", "content": "Add."}  # shorter than that of the chat template


class Keeper(TrainerCallback):
    """Writes the log after each step, to five digits and without times."""

    def __init__(self, file: Path):
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows = [{key: short(x) for key, x in row.items() if key != "step_time"} for row in state.log_history]
        self._file.write_text(json.dumps(rows))


def problems(count: int) -> list[dict[str, Any]]:
    random = Random(0)
    pairs = [(random.randrange(50), random.randrange(50)) for _ in range(count)]
    return [
        {"prompt": [SYSTEM, {"role": "user", "content": f"What is {a} + {b}? Only the number."}], "answer": a + b}
        for a, b in pairs
    ]


def train(name: str, model: Path, out: Path, rollouts: int = 0) -> list[dict[str, Any]]:
    """Makes one run and returns its log_history. rollouts: 0 takes the number that RUNS has."""
    given = HEALTHY | RUNS[name]
    rewards, steps = given.pop("reward_funcs"), given.pop("rollouts")
    steps = rollouts or steps
    set_seed(0)
    settings = dict(
        max_steps=steps, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, temperature=0.7,
        lr_scheduler_type="constant_with_warmup", seed=0, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        args=GRPOConfig(str(out / name), **settings | given),
        train_dataset=Dataset.from_list(problems(PROMPTS * steps)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Keeper(out / f"{name}.json"))
    trainer.train()
    return trainer.state.log_history


def short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--rollouts", type=int, default=0, help="of every run (default: the number of each)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        began = perf_counter()
        rows = train(name, args.model, args.out, args.rollouts)
        first, last = ([row["reward"] for row in rows if "reward" in row][at] for at in (0, -1))
        print(f"{name}: {len(rows)} rows, reward {first:.2f} to {last:.2f}, {perf_counter() - began:.0f} s", flush=True)
    files = {name: args.out / f"{name}.json" for name in RUNS}
    if all(file.is_file() for file in files.values()):
        logs = {name: json.loads(file.read_text()) for name, file in files.items()}
        (args.out / "trl_real.json.gz").write_bytes(gzip.compress(json.dumps(logs).encode(), mtime=0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
