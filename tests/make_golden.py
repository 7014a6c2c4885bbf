"""Three steps of tiny runs, whose numbers are kept in references/golden/: `python tests/make_golden.py [NAMES]`.

They change when the mathematics, the sampling or the order of a step does: then on purpose, in a commit that says why.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from conftest import QUICK
from safetensors.numpy import load_file, save_file
from test_train import ROOT, train_here

FOLDER = Path(__file__).parent / "references" / "golden"
MODEL = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
TINY = (
    "num_steps=3", "optim.warmup_steps=1", "optim.decay=constant", "prompts_per_step=8", "prompts_per_update=4",
    "group_size=4", "eval=none", "checkpoint.keep_best=0", "log.completions_every=1", "log.to=()",
    "mesh.data=2", "mesh.fsdp=1",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("epochs=2", "microbatch=2"),
    "ppo": (
        "group_size=1", "critic.warmup_steps=1", "critic.optim.warmup_steps=0", "kl.adaptive.target=0.01", "epochs=2",
        "reward.overlong_tokens=4",
    ),
    "dapo": ("epochs=1",),
    "distillation": ("teachers.teacher.path=TEACHER", "prompts_per_update=8"),
    "top_entropy": ("epochs=2",),
    "lag": ("rollout.max_lag=1", "kl.refresh.every=2", "kl.refresh.mix=0.5"),
    "reinforce_pp": ("prompts_per_update=8",),
    "remax": ("prompts_per_update=8", "mask.truncated=true"),
}  # fmt: skip
CONFIGS = {"lag": "grpo"}
# Of the build of zlib, or nothing but rounding: at first, policy and reference are the same.
ROUNDING = ("completion/compressed", "sampler/gap", "reward/kl_pays")


def make_teacher(folder: Path) -> None:
    """The embedded model with larger numbers: it knows the same tokens, and is surer of what it says."""
    shutil.copytree(MODEL, folder)
    file = folder / "model.safetensors"
    save_file({name: x * np.float32(1.05) for name, x in load_file(file).items()}, file, metadata={"format": "pt"})


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A run's records, one sample of each step, and the norm of each of its tensors at the end."""
    teacher, workdir = folder / "teacher", folder / name
    if not teacher.exists():
        make_teacher(teacher)
    fields = [f"--config.{field.replace('TEACHER', str(teacher))}" for field in (*TINY, *RUNS[name])]
    records = train_here(workdir, *fields, config=f"configs/{CONFIGS.get(name, name)}.py")
    samples = [json.loads(line)["completions"] for line in (workdir / "completions.jsonl").read_text().splitlines()]
    weights = load_file(workdir / "hf" / "model.safetensors")
    return {
        "records": [{k: v for k, v in record.items() if not k.startswith(ROUNDING)} for record in records],
        "samples": samples,
        "norms": {key: float(np.linalg.norm(x.astype(np.float64))) for key, x in sorted(weights.items())},
    }


def main() -> None:
    os.environ["XLA_FLAGS"] += QUICK
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or RUNS:
            made = {"jax": jax.__version__} | measure(name, Path(folder))
            (FOLDER / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
            print(name)


if __name__ == "__main__":
    main()
