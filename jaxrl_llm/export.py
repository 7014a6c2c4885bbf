"""Exports a checkpoint as a Hugging Face folder: `python -m jaxrl_llm.export WORKDIR [--step N|best|last] --to DIR`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from jaxrl_llm import sharding
from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.host import disk
from jaxrl_llm.models import hf, hf_export, peft
from jaxrl_llm.saved_run import SavedRun


def main() -> None:
    parser = Parser(prog="python -m jaxrl_llm.export", description=__doc__)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a run of train or sft, which may be going on")
    parser.add_argument("--step", default="last", help="of a checkpoint: a number, best or last (default)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the new folder")
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA: only its adapters, as a folder that PEFT loads"
    )
    args = parser.parse_args()
    run = SavedRun(args.workdir)
    step = run.find(args.step)
    if args.adapter and "lora" not in run.config:
        raise UserError(f"--adapter: {args.workdir} is a run without section lora: leave it out")
    if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
        raise UserError(f"--to {args.to} is there already and not empty: give a new folder")
    inside = args.workdir.resolve() in args.to.resolve().parents
    # Inside the workdir a running run may write at the same time, so the export takes the run's lock.
    with disk.locked(args.workdir) if inside else nullcontext(), run.model_folder(step) as folder:
        if args.adapter:
            peft.save(args.to, run.params(step), run.lora(hf.load_model(folder)), run.config.model.path)
        elif "lora" in run.config:  # the base has the dtype of the run
            mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1)
            model = hf.load_model(folder, mesh, dtype=run.config.model.dtype)
            hf_export.save(args.to, run.policy(step, folder, model, mesh), folder)
        else:
            hf_export.save(args.to, run.params(step), folder)
    reads = "PEFT loads" if args.adapter else "transformers and vLLM load"
    print(f"step {step} of {args.workdir}, as {reads} it, is {args.to}")


if __name__ == "__main__":
    run_main(main)
