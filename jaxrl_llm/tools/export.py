"""Exports a checkpoint as a Hugging Face folder: `jaxrl export WORKDIR [--step N|best|last] --to DIR`.

`--push-to ORG/NAME` also uploads it to a hub, with a model card.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.machine import bucket, disk, meshes
from jaxrl_llm.models import hf, hf_export, peft
from jaxrl_llm.session import model_card
from jaxrl_llm.session.lock import locked
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.tools import hub


def main() -> None:
    """Writes a checkpoint of a run as a Hugging Face folder, and uploads it if asked to."""
    parser = Parser("jaxrl_llm.tools.export", description=__doc__)
    parser.add_argument(
        "workdir", type=Path, metavar="WORKDIR", help="work directory of a run of train or sft, which may be running"
    )
    parser.add_argument("--step", default="last", help="step of the checkpoint: a number, best or last (default)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="new folder for the model (optional with --push-to)")
    parser.add_argument(
        "--adapter", action="store_true", help="export only the adapters of a run with LoRA, as a folder for PEFT"
    )
    parser.add_argument("--push-to", metavar="ORG/NAME", help="also upload the folder to this repository of the hub")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    args = parser.parse_args()
    if not args.to and not args.push_to:
        raise UserError("--to DIR or --push-to ORG/NAME is missing: set one of them, or both")
    if args.private and not args.push_to:
        raise UserError("--private has no effect without --push-to: remove it, or add --push-to ORG/NAME")
    disk.check_output_folder("--to", args.to)
    run = SavedRun(args.workdir)
    step = run.find(args.step)
    if args.adapter and not (run.adapters and run.adapters.peft):
        raise UserError(f"--adapter: the run in {args.workdir} has no adapters that PEFT can load: remove --adapter")
    if args.push_to:
        hub.open_repo(args.push_to, private=args.private)
    with ExitStack() as resources:
        to = args.to or Path(resources.enter_context(TemporaryDirectory())) / "hf"
        if run.workdir.resolve() in to.resolve().parents:
            # An export into the work directory needs the run's lock, because the run may write at the same time.
            resources.enter_context(locked(run.workdir))
        save(run, step, to, adapter=args.adapter)
        model_card.write(to, model_card.card(run.workdir, run.config, run.input_hashes(step), step))
        if args.to:
            loaded_by = "PEFT" if args.adapter else "transformers and vLLM"
            print(f"wrote step {step} of {bucket.address(args.workdir) or args.workdir} to {args.to}, for {loaded_by}")
        if args.push_to:
            print(f"pushed: {hub.push(to, args.push_to, f'step {step} of {args.workdir.resolve().name}')}")


def save(run: SavedRun, step: int, to: Path, *, adapter: bool) -> None:
    """Writes the policy of a checkpoint into a new folder. adapter: whether to write only its adapters.

    Raises: UserError, if the checkpoint cannot be read.
    """
    with run.model_folder(step) as folder:
        if adapter and run.adapters:
            adapters = hf.load_model(folder, family=run.family).adapters(run.adapters)
            peft.save(to, run.params(step), adapters, run.config["model"]["path"])
        elif run.has_partial_checkpoints:  # the base has the dtype of the run
            mesh = meshes.make_mesh(data=1, fsdp=-1, tensor=1)
            model = hf.load_model(folder, mesh, family=run.family, dtype=run.config["model"]["dtype"])
            hf_export.save(to, run.policy(step, folder, model, mesh), folder, family=run.family)
        else:
            hf_export.save(to, run.params(step), folder, family=run.family)


if __name__ == "__main__":
    run_main(main)
