"""Replays random steps of all kinds of runs: `python -m benchmarks.speed.replayed_steps [--kinds grpo] [--count 10]`.

Each kind trains on one device, and on 4 x 2 virtual devices of the CPU, with a checkpoint every 3 steps. Then it makes
random steps again, and compares each with the log of the run bit for bit. The columns are the kind, the mesh, the
steps that were equal, the values compared in the last of them, and the median seconds of a replay, with the time to
build the run again. A line names the values of a step that differs. Exit code 1: a step differs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from jaxrl_llm import train
from jaxrl_llm.config.load import load
from jaxrl_llm.tools import replay
from jaxrl_llm.tools.replay.steps import compared_names

SMALL = {
    "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 4, "log.to": (),
    "checkpoint.every": 3, "checkpoint.keep": 99, "checkpoint.keep_best": 0, "eval": None, "health.self_test": False,
    "log.completions_every": 0, "optim.warmup_steps": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # shipped config, and what differs from SMALL
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {"prompts_per_update": 4, "critic.warmup_steps": 3}),  # steps of the critic alone, and of both
    "dapo": ("dapo", {"rollout.resample_rounds": 2}),
    "lora": ("lora", {}),
    "search": ("search_grpo", {}),
    "pictures": ("pictures", {}),
    "epochs": ("grpo", {"prompts_per_step": 16, "epochs": 2, "microbatch": 4}),  # two updates of two micro-batches each
    "lag": ("grpo", {"rollout.max_lag": 1, "rollout.partial": 4}),
}
MESHES = {"1": {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}, "4 x 2": {"mesh.data": 4, "mesh.tensor": 2}}


def measure(kind: str, mesh: str, steps: int, count: int, folder: Path) -> bool:
    """Trains a run, replays `count` of its steps, and prints a row. Returns whether all were equal."""
    name, changes = KINDS[kind]
    config = load(name)
    config.update_from_flattened_dict(SMALL | changes | {"num_steps": steps, "mesh.fsdp": 1} | MESHES[mesh])
    list(train.steps(config, folder))
    seconds, equal, values = [], 0, 0
    for step in sorted(random.Random(f"{kind} {mesh}").sample(range(1, steps + 1), count)):
        began = time.perf_counter()
        record = replay.step(folder, step, with_gradient=False, show=lambda line: None)
        seconds.append(time.perf_counter() - began)
        equal += not record.differences and record.exact
        values = len(compared_names(record.logged, record.metrics))
        if record.differences:
            print(f"{kind}, {mesh}: step {step} differs: {record.differences}", flush=True)
    print(f"{kind:9} {mesh:6} {equal:3} of {count:2} {values:4} values {median(seconds):7.1f} s", flush=True)
    return equal == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES])
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--count", type=int, default=10, help="steps of each run that are made again")
    args = parser.parse_args()
    verdicts = []
    for kind in args.kinds:
        for mesh in args.meshes:
            with tempfile.TemporaryDirectory() as folder:
                verdicts.append(measure(kind, mesh, args.steps, args.count, Path(folder) / "run"))
    if not all(verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
