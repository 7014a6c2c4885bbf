"""What a GPU or a TPU does here: `python -m benchmarks.speed.accelerator --out result.json`.

First whether it computes what `transformers` computed (stored logits and greedy tokens of small models), and whether
the kernel for pages computes what its plain form does. Then four steps of `jaxrl train` with random weights of a
published size, and beside their seconds what `jaxrl plan` estimates for the same step: its arithmetic at the published
speed is the share of the peak (MFU), and the bytes that it must read are the share of the bandwidth. Last, where torch
and TRL are installed, the same steps by TRL. Prints a table for docs/performance.md. --config.FIELD=VALUE changes the
step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import load as configs
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf, hf_export, new_model
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Prompt, Prompts

ROOT = Path(__file__).parents[2]
REFERENCES = ROOT / "tests" / "references"
FAMILIES = ("qwen2_tied", "qwen3_untied", "llama", "mistral", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")
NEAR = 2e-4  # of logits
SIZES = ("qwen2_5_0_5b", "qwen2_5_1_5b")  # folders of jaxrl_llm/assets
# Words in the names of devices, and what `jaxrl plan` calls one of these.
TOPOLOGIES = {
    "H100": "h100:1", "H200": "h200:1", "A100": "a100:1", "B200": "b200:1", "TPU v4": "v4:1x1x1",
    "TPU v5 lite": "v5e:1x1", "TPU v5e": "v5e:1x1", "TPU v5": "v5p:1x1x1", "TPU v6": "v6e:1x1",
}  # fmt: skip
STEP: dict[str, Any] = {
    "num_steps": 4, "prompts_per_step": 32, "prompts_per_update": 32, "group_size": 8, "microbatch": 4,
    "data.max_prompt_tokens": 256, "rollout.max_completion_tokens": 512, "model.dtype": "bfloat16",
    "model.remat": "full", "optim.warmup_steps": 0, "reward.timeout": 0, "reward.weights": (1.0,),
    "reward.functions": ("benchmarks.speed.workloads.parity_of_length",), "eval": None, "checkpoint.keep_best": 0,
    "log.to": (), "mesh.fsdp": 1, "health.stop": (),
}  # fmt: skip


class Timed(NamedTuple):
    """The steps of a size, without the first, which compiles."""

    rollout: float  # seconds, medians
    score: float
    update: float
    tokens_per_second: float
    gap: float  # largest difference of a log-probability between sampler and trainer
    first: float  # seconds of the first step


def parity(families: Iterable[str]) -> dict[str, Any]:
    """Returns the device, and the largest difference of a logit to that of transformers by family.

    It is infinite if a greedy token differs.
    """
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    differences = {name: _parity_of(REFERENCES / name, mesh) for name in families}
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "parity": differences}


def _parity_of(folder: Path, mesh: jax.sharding.Mesh) -> float:
    model, stored = hf.load_model(folder, mesh), np.load(folder / "reference.npz")
    params = hf.load_params(folder, model, mesh)
    tokens, mask = stored["tokens_left"], stored["mask_left"]
    # Float32 of a GPU is TF32, and that of a TPU bfloat16, unless one says so.
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda params, *batch: model.logits(params, model.prefill(params, Prompt(*batch))[0]))
        logits = np.asarray(run(params, tokens, mask))[mask]
        # These folders have no tokenizer.
        stops = hf.stop_ids(folder, SimpleNamespace(eos_token_id=None))
        engine = Sampler(model, mesh, max_completion_tokens=12, stop_ids=stops, pad_id=0)
        engine.update_weights(params)
        prompts = Prompts(tokens, mask, [{}] * len(tokens), np.arange(len(tokens), dtype=np.int32))
        greedy = engine.sample(prompts, jax.random.key(0), group_size=1, sampling=Sampling(temperature=0))
    if not np.array_equal(greedy.completions[:, 0], stored["greedy_left"]):
        return float("inf")
    return float(np.max(np.abs(logits - stored["logits_left"])))


def make_folder(size: str, folder: Path) -> Path:
    """Writes a model with random weights and the config.json in the folder `size`, a tokenizer of bytes, and rows."""
    config = (ROOT / "jaxrl_llm" / "assets" / size / "config.json").read_text()
    rows = [{"prompt": f"{i} " * 60, "answer": ""} for i in range(100, 400)]
    bare = folder / "bare"
    new_model.write_folder(bare, dict.fromkeys(new_model.SIZE_KEYS, 1), rows, "answer")
    (bare / "config.json").write_text(config)
    model = hf.load_model(bare)
    hf_export.save(folder / "model", jax.jit(model.init)(jax.random.key(0)), bare)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "model"


def fields(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the step that differ from those of configs/grpo.py."""
    return STEP | {"model.path": str(folder / "model"), "data.source": str(folder / "rows.jsonl")} | changes


def flags(folder: Path, changes: dict[str, Any]) -> list[str]:
    """Returns the flags of the step, for `train` and for `plan`."""
    config = str(ROOT / "configs" / "grpo.py")
    return ["--config", config, *(f"--config.{name}={x}" for name, x in fields(folder, changes).items())]


def run(module: str, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of this project in a process of its own."""
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)


def checked(module: str, words: list[str]) -> str:
    """Runs a module, and returns what it prints. Raises: SystemExit, with the end of that, if it fails."""
    done = run(module, words)
    if done.returncode:
        raise SystemExit(f"{module} ended with exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def train(folder: Path, changes: dict[str, Any]) -> Timed:
    """Times the steps."""
    checked("jaxrl_llm.train", [*flags(folder, changes), "--workdir", str(folder / "run")])
    first, *steps = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    of = lambda name: statistics.median(step[name] for step in steps)  # noqa: E731
    times = [of(f"time/{phase}") for phase in ("rollout", "score", "update")]
    return Timed(*times, of("tokens_per_second"), max(s["sampler/gap_max"] for s in steps), first["time/step"])


def plan(folder: Path, topology: str, changes: dict[str, Any]) -> dict[str, dict[str, float]] | str:
    """Returns the estimated seconds of each phase by resource, or why there is none."""
    words = ["--json", "--topology", topology, "--lengths", str((STEP | changes)["rollout.max_completion_tokens"])]
    done = run("jaxrl_llm.tools.plan", [*flags(folder, changes), *words], JAX_PLATFORMS="cpu")
    if not done.stdout.strip():
        return done.stderr.strip().splitlines()[-1]
    estimated: dict[str, dict[str, float]] = {name: {} for name in ("rollout", "score", "update")}
    for phase in json.loads(done.stdout)[0]["phases"]:
        kind = "update" if "update" in phase["name"] else "score" if "scoring" in phase["name"] else "rollout"
        resources = phase["estimated_seconds"]
        for name, seconds in {**resources, "in all": max(resources.values())}.items():
            estimated[kind][name] = estimated[kind].get(name, 0.0) + phase["times"] * seconds
    return estimated


def train_trl(folder: Path, changes: dict[str, Any]) -> dict[str, Any] | str:
    """Times the steps of TRL on the same device, or says why there are none."""
    if not all(map(find_spec, ("torch", "trl", "datasets"))):
        return "no TRL here"
    config = configs.load(ROOT / "configs" / "grpo.py")
    for name, x in fields(folder, changes).items():
        configs.override(config, name, str(x))
    done = run("benchmarks.speed.peer_trl_accelerator", [json.dumps(configs.flatten(config))])
    if done.returncode:
        return f"TRL ended with exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def topology_of(kind: str) -> str:
    """Returns what `jaxrl plan` calls one device of this kind; "": it knows none."""
    return next((name for word, name in TOPOLOGIES.items() if word in kind), "")


def line(size: str, timed: Timed, estimated: dict[str, dict[str, float]] | str, trl: dict[str, Any] | str) -> str:
    """Returns a row of the table."""
    cells = [size, f"{timed.rollout:.2f}", f"{timed.score:.2f}", f"{timed.update:.2f}"]
    if isinstance(estimated, str):
        cells += [estimated, "", ""]
    else:
        cells.append(" + ".join(f"{estimated[phase]['in all']:.2f}" for phase in ("rollout", "score", "update")))
        cells.append(f"{estimated['rollout']['memory'] / timed.rollout:.0%}")
        cells.append(f"{estimated['update']['arithmetic'] / timed.update:.0%}")
    cells += [f"{timed.gap:.1e}", f"{timed.first:.0f}", trl if isinstance(trl, str) else _of_trl(timed, trl["seconds"])]
    return f"| {' | '.join(cells)} |"


def _of_trl(timed: Timed, seconds: list[float]) -> str:
    """Returns the median of TRL's steps after the first, and how often ours fits into it."""
    median = statistics.median(seconds[1:])
    return f"{median:.2f} ({median / (timed.rollout + timed.score + timed.update):.1f} x)"


HEAD = (
    "| model | rollout s | score s | update s | plan, s | bandwidth in the rollout | MFU of the update | "
    "gap of sampler and trainer | first step s | TRL's step s |\n" + "|---" * 10 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="folders of jaxrl_llm/assets, or of your own")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="folders of tests/references")
    parser.add_argument("--parity", action="store_true", help="only the first comparison, as JSON")
    parser.add_argument("--out", type=Path, help="file for all numbers, as JSON")
    args, words = parser.parse_known_args()
    if unknown := [word for word in words if not re.match(r"--config\.[\w.]+=", word)]:
        parser.error(f"unknown: {' '.join(unknown)}")
    changes = dict(word.removeprefix("--config.").split("=", 1) for word in words)
    if args.parity:
        print(json.dumps(parity(args.families)))
        return
    began = time.perf_counter()
    # Each in a process of its own, and none in this one: on a TPU one process has the device, and on a GPU its memory.
    result: dict[str, Any] = json.loads(
        checked("benchmarks.speed.accelerator", ["--parity", "--families", *args.families]).splitlines()[-1]
    )
    worst, kind = max(result["parity"].values()), result["device"]
    print(f"{kind}, JAX {result['jax']}: {len(args.families)} families differ by {worst:.1e} at most", flush=True)
    kernel = run("benchmarks.speed.paged_attention", [])
    result["kernel"] = kernel.stdout.splitlines()
    print("\n".join(result["kernel"] or kernel.stderr.splitlines()[-3:]), f"\n{HEAD}", sep="", flush=True)
    for size in args.sizes:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make = f"from benchmarks.speed import accelerator as a; a.make_folder({size!r}, a.Path({temporary!r}))"
            subprocess.run(
                [sys.executable, "-c", make], cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            )
            timed = train(folder, changes)
            topology = topology_of(kind)
            estimated = plan(folder, topology, changes) if topology else "no plan for this device"
            trl = train_trl(folder, changes)
        result[size] = {"measured": timed._asdict(), "plan": estimated, "trl": trl}
        print(line(size, timed, estimated, trl), flush=True)
    result["seconds"] = time.perf_counter() - began
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    if worst > NEAR or kernel.returncode:
        raise SystemExit("parity: numbers differ too much, see above")


if __name__ == "__main__":
    main()
