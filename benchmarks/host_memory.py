"""Host memory of a process that loads, trains and exports a model: `python -m benchmarks.host_memory --gigabytes 1`.

It makes a model of random float32 weights, and runs each part with one process and with two. On a CPU the arrays of the
devices are in the host's memory too. So it reports what the process holds at most beyond them: the NumPy arrays and the
other memory of Python, as tracemalloc counts it, and for loading the whole memory that is not a file's. With `--lean`
the devices hold no reference and half of the moments, so that 24 GB are enough for `--gigabytes 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def make_folder(folder: Path, gigabytes: float) -> int:
    """Writes a Qwen2 model with random weights, a shard at a time, and returns its bytes."""
    from safetensors.numpy import save_file

    from jaxrl_llm.models import hf, names
    from jaxrl_llm.models.decoder import Decoder

    layers, width = 8, 1024
    of_layer = 4 * (2 * width * width + 2 * width * 256 + 3 * width * 4096)
    layers = max(int(gigabytes * 2**30 / of_layer), 1)
    assets = HERE.parent / "jaxrl_llm" / "assets" / "arithmetic"
    for file in assets.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((assets / "config.json").read_text())
    config |= {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    cfg, total, where = hf.load_model(folder).cfg, 0, {}
    draw = np.random.default_rng(0)
    for i, (name, shape) in enumerate(names.tensor_shapes(Decoder(cfg).shapes, names.family_table(cfg.family)).items()):
        values = np.ones(shape, np.float32) if len(shape) == 1 else draw.standard_normal(shape, np.float32) * 0.02
        file = f"model-{i:05d}.safetensors"
        save_file({name: values}, folder / file, metadata={"format": "pt"})
        where[name], total = file, total + values.nbytes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return total


class Peak:
    """The largest memory of this process that is not a file's, in bytes, since its creation."""

    def __init__(self) -> None:
        self.start = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, self._now())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.most - self.start


LEAN = {
    "kl": None, "model.dtype": "bfloat16", "optim.momentum_dtype": "bfloat16",
    "optim.gradient_dtype": "bfloat16",
}  # fmt: skip


def measure(folder: Path, workdir: Path, address: str, lean: bool) -> dict[str, Any]:
    """Loads, trains two steps with a checkpoint after each, and exports, in this process."""
    import jax

    from jaxrl_llm import train
    from jaxrl_llm.config.load import load
    from jaxrl_llm.machine import distributed, sharding
    from jaxrl_llm.models import hf

    with distributed.joined(address):
        mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1)
        model, peak = hf.load_model(folder, mesh), Peak()
        params = hf.load_params(folder, model, mesh)
        jax.block_until_ready(params)
        found: dict[str, Any] = {"loading": peak.stop()}
        del params
        config = load(HERE.parent / "configs" / "grpo.py")
        config.update_from_flattened_dict({
            "model.path": str(folder), "num_steps": 2, "prompts_per_step": 4, "prompts_per_update": 4, "group_size": 2,
            "eval": None, "checkpoint.keep_best": 0, "checkpoint.every": 1, "checkpoint.keep": 1,
            "optim.warmup_steps": 0, "log.to": (), "reward.timeout": 0.0, "model.remat": "full",
            "health.self_test": False,
        } | (LEAN if lean else {}))  # fmt: skip
        tracemalloc.start()
        for record in train.steps(config, workdir):
            if record["step"] == 1:
                found["training"] = tracemalloc.get_traced_memory()[1]
        found["exporting"] = tracemalloc.get_traced_memory()[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a process of the measurement
    parser.add_argument("--lean", action="store_true", help="train with less memory of the devices")
    parser.add_argument("--processes", nargs="+", type=int, default=(1, 2))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one[0]), Path(args.one[1]), args.one[2], args.lean)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        folder.mkdir()
        size = make_folder(folder, args.gigabytes)
        for count in args.processes:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            began, workdir = time.perf_counter(), f"{made}/run{count}"
            addresses = [f"127.0.0.1:{port},{i}/{count}" if count > 1 else "" for i in range(count)]
            lean = ["--lean"] if args.lean else []
            command = [sys.executable, "-m", "benchmarks.host_memory", *lean, "--one", str(folder), workdir]
            environ = os.environ | {"JAX_PLATFORMS": "cpu"}
            started = [
                subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True, env=environ)
                for address in addresses
            ]
            for process in started:
                said = process.communicate()[0].splitlines()
                if process.returncode:
                    raise SystemExit("a process failed: see above")
                ratios = {part: round(x / size, 2) for part, x in json.loads(said[-1]).items()}
                print(f"{count} process(es), model of {size / 2**30:.2f} GiB, shares of its size: {ratios}", flush=True)
            print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
