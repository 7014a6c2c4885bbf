"""Seconds to put a policy's weights into a vLLM server, by model size: `python -m benchmarks.speed.push`.

Float32 on a CPU, the whole of `VllmEngine.update_weights`: tensors gathered and written, pause, pull, checks, load,
resume. The server is that of launch/vllm_cpu.sh --install.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.speed.step import environment, make_model
from benchmarks.speed.workloads import WORKLOADS
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.protocol import EngineInputs
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer

SMALL = WORKLOADS["even"]
SIZES = [
    SMALL,
    replace(SMALL, width=640, layers=12, heads=10, mlp_width=1792, vocab_size=16_384),
    replace(SMALL, width=768, layers=16, heads=12, kv_heads=4, mlp_width=2048, vocab_size=32_768),
    replace(SMALL, width=1024, layers=18, heads=16, kv_heads=4, mlp_width=2816, vocab_size=32_768),
    replace(SMALL, width=1280, layers=24, heads=20, kv_heads=4, mlp_width=3584, vocab_size=32_768),
]
ARGUMENTS = ("--enforce-eager", "--no-enable-chunked-prefill", "--skip-tokenizer-init")


def measure(folder: Path, workdir: Path, push: str, times: int) -> tuple[int, list[float]]:
    """Bytes of a model, and seconds of each of so many pushes after a first."""
    model = hf.load_model(folder)
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    params = hf.load_params(folder, model, mesh)
    python = str(environment("vllm"))
    server = ManagedServer(
        python, folder, dtype="float32", max_model_len=64, log=workdir / "vllm.log", config_args=ARGUMENTS
    )
    engine = VllmEngine(
        (server.url,), EngineInputs(model, mesh, folder, workdir, 16, 16, (1,), 0), run="benchmark",
        weights_dir="/dev/shm", push_address="127.0.0.1" if push == "http" else "", concurrency=8, timeout=300.0,
        patience=300.0, managed=server,
    )  # fmt: skip
    seconds = []
    try:
        for version in range(times + 1):
            params = jax.block_until_ready(jax.tree.map(lambda x: x * 1.001, params))
            begin = time.perf_counter()
            engine.update_weights(params, version)
            seconds.append(time.perf_counter() - begin)
    finally:
        engine.close()
    return sum(leaf.size for leaf in jax.tree.leaves(params)), seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--push", choices=("file", "http"), default="file")
    parser.add_argument("--largest", type=int, default=len(SIZES), help="how many of the sizes")
    args = parser.parse_args()
    table = Table(title=f"push = {args.push!r}, median of {args.times}")
    for column in ("parameters", "float32", "seconds", "GB/s"):
        table.add_column(column, justify="right")
    sizes, medians = [], []
    for i, workload in enumerate(SIZES[: args.largest]):
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_model(replace(workload, name=f"size{i}"), Path(scratch))
            count, seconds = measure(folder, Path(scratch), args.push, args.times)
        sizes.append(4 * count / 1e9)
        medians.append(statistics.median(seconds))
        rate = sizes[-1] / medians[-1]
        table.add_row(f"{count / 1e6:.0f} M", f"{sizes[-1]:.2f} GB", f"{medians[-1]:.3f}", f"{rate:.2f}")
    Console(width=100).print(table)
    if len(sizes) > 2:
        slope, fixed = np.polyfit(sizes, medians, 1)
        print(f"a line through them: {fixed:.3f} s and {slope:.3f} s a GB; r = {np.corrcoef(sizes, medians)[0, 1]:.4f}")


if __name__ == "__main__":
    main()
