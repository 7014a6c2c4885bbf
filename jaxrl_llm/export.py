"""Exports a checkpoint as a Hugging Face folder: `python -m jaxrl_llm.export WORKDIR [--step N|best|last] --to DIR`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.host import disk
from jaxrl_llm.models import hf_export
from jaxrl_llm.saved_run import SavedRun


def main() -> None:
    parser = Parser(prog="python -m jaxrl_llm.export", description=__doc__)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a run of train or sft, which may be going on")
    parser.add_argument("--step", default="last", help="of a checkpoint: a number, best or last (default)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the new folder")
    args = parser.parse_args()
    run = SavedRun(args.workdir)
    step = run.find(args.step)
    if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
        raise UserError(f"--to {args.to} is there already and not empty: give a new folder")
    inside = args.workdir.resolve() in args.to.resolve().parents
    # Inside the workdir a running run may write at the same time, so the export takes the run's lock.
    with disk.locked(args.workdir) if inside else nullcontext(), run.model_folder(step) as folder:
        hf_export.save(args.to, run.params(step), folder)
    print(f"step {step} of {args.workdir}, as transformers and vLLM load it, is {args.to}")


if __name__ == "__main__":
    run_main(main)
