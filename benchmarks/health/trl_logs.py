"""Trains the embedded model with TRL's GRPOTrainer, healthy or with an illness, and keeps what it logs.

python -m benchmarks.health.trl_logs OUT [--only NAME ...] [--rollouts N]

Needs TRL (benchmarks/speed/environments.txt). OUT/NAME is TRL's output folder: its TensorBoard files
and its last checkpoint, with trainer_state.json. OUT/NAME.json is the log_history alone, to five digits, as in
tests/references/trl.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.tasks.arithmetic import accuracy, thought

MODEL = Path(__file__).parents[2] / "jaxrl_llm" / "assets" / "arithmetic"
PROMPTS, GROUP, COMPLETION_TOKENS, END = 16, 8, 12, 3


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def brevity(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(completion[0]["content"])) for completion in completions]


def longer(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


HEALTHY = dict(rollouts=40, learning_rate=2e-4, reward_funcs=[accuracy, thought], reward_weights=[1.0, 0.0])
RUNS: dict[str, dict[str, Any]] = {  # what differs from HEALTHY
    "healthy": {},
    "healthy_logged_by_4": dict(logging_steps=4),
    "healthy_4_epochs": dict(num_iterations=4, learning_rate=5e-5, rollouts=20),
    "high_rate": dict(learning_rate=3e-3, rollouts=30),
    "constant_reward": dict(reward_funcs=[constant], reward_weights=[1.0], rollouts=20),
    "never_stops": dict(generation_kwargs={"suppress_tokens": [END]}, rollouts=20),
    "entropy_bonus": dict(entropy_coef=10.0, learning_rate=5e-4, rollouts=30),
    "short_is_better": dict(reward_funcs=[brevity, accuracy], learning_rate=5e-4, rollouts=50),
    "many_epochs": dict(num_iterations=8, learning_rate=5e-4, rollouts=20, beta=0.0, logging_steps=2),
    "long_is_better": dict(reward_funcs=[longer, accuracy], learning_rate=5e-4, rollouts=30),
    "high_rate_logged_by_2": dict(learning_rate=3e-3, logging_steps=2, rollouts=30),
}


def train(name: str, out: Path, rollouts: int = 0) -> list[dict[str, Any]]:
    """Makes one run and returns its log_history. rollouts: 0 takes the number that RUNS has."""
    given = HEALTHY | RUNS[name]
    rewards, rollouts = given.pop("reward_funcs"), rollouts or given["rollouts"]
    del given["rollouts"]
    updates = rollouts * given.get("num_iterations", 1)
    set_seed(0)
    settings = dict(
        max_steps=updates, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=COMPLETION_TOKENS,
        temperature=1.0, top_p=1.0, top_k=0, beta=1e-3, lr_scheduler_type="constant", max_grad_norm=1.0, seed=0,
        save_strategy="steps", save_steps=updates, save_only_model=True, report_to="tensorboard",
        disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(out / name / "runs")
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=rewards,
        args=GRPOConfig(str(out / name), **settings | given),
        train_dataset=Dataset.from_list(arithmetic.train()[: PROMPTS * rollouts]),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history


def short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--rollouts", type=int, default=0, help="of every run (default: the number of each)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        began = perf_counter()
        rows = train(name, args.out, args.rollouts)
        lines = ",\n".join(json.dumps({key: short(x) for key, x in row.items()}) for row in rows)
        (args.out / f"{name}.json").write_text(f'{{"log_history": [\n{lines}\n]}}\n')
        first, last = ([row["reward"] for row in rows if "reward" in row][at] for at in (0, -1))
        print(f"{name}: {len(rows)} rows, reward {first:.2f} to {last:.2f}, {perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
