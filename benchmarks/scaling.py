"""How the cost of a step grows when one thing is doubled: `python -m benchmarks.scaling`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.ours import step_function
from benchmarks.workloads import Workload, write
from jaxrl_llm.compiling import Compilations
from jaxrl_llm.models import hf, qwen2
from jaxrl_llm.models.decoder import Decoder

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    table = Table(title="medians in milliseconds; work and time as multiples of the base")
    for column in ("", "rollout", "score", "update", "total", "useful work", "time"):
        table.add_column(column, justify="left" if not column else "right")
    base_seconds = base_work = 0.0
    for name, workload in DOUBLED.items():
        with tempfile.TemporaryDirectory() as folder:
            write(workload, Path(folder))
            model = Decoder(qwen2.decoder_config(workload.model_config(), "float32", "none"))
            tensors = dict(hf.exported(model.init(jax.random.key(0)), np.float32))
            save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            one_step = step_function(workload, Path(folder), "dots", 4, Compilations())
            steps = [one_step(step) for step in range(args.steps + 1)][1:]
        medians = {
            key: statistics.median(step[key] for step in steps) for key in ("rollout", "score", "update", "total")
        }
        work = workload.useful_gflop(1)
        base_seconds, base_work = base_seconds or medians["total"], base_work or work
        table.add_row(
            name, *(f"{1000 * seconds:,.0f}" for seconds in medians.values()),
            f"{work / base_work:.2f}", f"{medians['total'] / base_seconds:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
