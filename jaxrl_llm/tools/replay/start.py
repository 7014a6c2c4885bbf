"""Finds the checkpoint from which a step can be made again, and restores it in a temporary work directory."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import Parts, make_run, opened_run
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import resolve, split_call
from jaxrl_llm.errors import UserError, check_local
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import bucket, disk
from jaxrl_llm.recipe.missing import collected
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.rollout.actor import Actor, WeightLease
from jaxrl_llm.session import alike, changes, checkpoint
from jaxrl_llm.session.changes import Change, ChangedInputs
from jaxrl_llm.session.opening import WorkDirectory
from jaxrl_llm.session.rollback import Decision, Rollbacks
from jaxrl_llm.session.sample_files import FOLDER, SampleFiles
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.session.session import Session
from jaxrl_llm.tasks import REWARDS
from jaxrl_llm.tools.replay.stored import StoredActor
from jaxrl_llm.tools.report.runs import read_config

JUDGE = "jaxrl_llm.tasks.judge"  # module of rewards that ask a server


@dataclass(frozen=True, kw_only=True)
class ReplayStart:
    """The point of a run from which a step is made again."""

    run: str  # folder or address of the run
    folder: Path  # local folder with config and log
    step: int  # step to make again
    start: int  # step of the checkpoint; 0 = the start of the run
    decisions: list[Decision]  # rollbacks of the run before it made the step for the last time
    logged: dict[str, Any]  # record of the step in metrics.jsonl
    saved: SavedRun | None  # the run's checkpoints, None if it has none
    notes: dict[str, Any] | None  # notes of a checkpoint: models, rows, code and machine of the run
    files: SampleFiles | None  # files with the samples of all steps from the checkpoint on; None: sample them again

    def announcement(self) -> str:
        """Returns one line that says how many steps will run."""
        count = self.step - self.start
        origin = f"the checkpoint of step {self.start}" if self.start else "the start of the run"
        line = f"step {self.step} of {self.run}: running {count} step{'s' * (count > 1)} from {origin}"
        return f"{line}, with the samples that the run kept" if self.files else line

    def other_machine(self) -> str:
        """Returns the differences between the machine of the run and this one, such as "JAX 0.10.1, now 0.10.2"."""
        run_machine, this_machine = (self.notes or {}).get("machine", {}), alike.machine()
        differences = [
            f"{name} {value}, now {this_machine.get(name)}"
            for name, value in run_machine.items()
            if value != this_machine.get(name)
        ]
        return ", ".join(differences)


def find_start(run: Path, step: int) -> ReplayStart:
    """Finds the newest checkpoint before a step. Reads the run's folder, and writes nothing into it.

    Raises: UserError, if the folder holds no run, the run has not made the step, or the step cannot be made again.
    """
    check_local("--run", str(run))
    address = bucket.address(run)
    folder = bucket.fetch_run(run, "--run")
    records = {record["step"]: record for record in json_lines.read(folder / "metrics.jsonl")}
    config = read_config(folder)
    if not hasattr(config, "group_size"):
        raise UserError(f"--run {folder} is a run of sft, which samples nothing: use a run of train")
    if step not in records or step < 1:
        progress = f"its last step is {max(records)}" if records else "it has made no step yet"
        raise UserError(
            f"--step {step}: metrics.jsonl of {address or run} has no such record, and {progress}: use another step"
        )
    # If the run kept the samples of all steps after the checkpoint, the replay reads them; else it makes them again.
    root = bucket.as_path(address) if address else run
    checkpoints, files = root / "checkpoints", SampleFiles(root / FOLDER)
    saved = SavedRun(run) if checkpoint.has_checkpoint(checkpoints) else None
    steps, decisions = saved.steps if saved else [], Rollbacks(folder).read()
    start, rollback_count = choose_start(step, steps, decisions, changes.read(folder))
    steps_without_samples = sorted({*range(start + 1, step + 1)} - files.steps())
    if steps_without_samples and (reason := why_unrepeatable(config.engine.name, config.reward.functions)):
        raise UserError(
            f"--step {step}: {reason} cannot be made again, and step {steps_without_samples[0]} has no file of them: "
            "set config.log.keep_samples = 1 in the next run"
        )
    # The first checkpoint after the step was saved by the process that made the step.
    later_steps = [saved_step for saved_step in steps if saved_step >= step] or steps[-1:]
    return ReplayStart(
        run=address or str(run),
        folder=folder,
        step=step,
        start=start,
        decisions=decisions[:rollback_count],
        logged=records[step],
        saved=saved,
        notes=saved.notes(later_steps[0]) if saved else None,
        files=None if steps_without_samples else files,
    )


def why_unrepeatable(engine: str, functions: Sequence[str]) -> str:
    """Returns the config field and the samples or verdicts that a server made, which may differ; "" without any."""
    if engine == "vllm":
        return "config.engine.name = 'vllm': the samples of a vLLM server"
    field = "config.reward.functions"
    for text in functions:
        if resolve(split_call(text)[0], REWARDS, field).__module__ == JUDGE:
            return f"{field}: the verdicts of {text}"
    return ""


def choose_start(
    step: int, kept_steps: Sequence[int], decisions: Sequence[Decision], accepted: Sequence[Change]
) -> tuple[int, int]:
    """Returns the step of the checkpoint to restore (0 = the start), and the number of rollbacks before `step`.

    step: step to replay. kept_steps: steps of the checkpoints. decisions: rollbacks of the run. accepted: changes of
    rows and code that the run accepted.
    Raises: UserError, if no checkpoint is left from which the step can be made again.
    """
    if change := next((change for change in accepted if change.after_step >= step), None):
        raise UserError(
            f"--step {step} cannot be replayed, because after step {change.after_step} the run accepted this change: "
            f"{change}: replay a step after step {change.after_step}"
        )
    # A rollback to an earlier step made the run repeat `step`. The log has only the record of the last time, so all
    # rollbacks up to the last one of this kind came before it.
    rollback_count = max((i for i, decision in enumerate(decisions, 1) if decision.to < step), default=0)
    # From checkpoints before step `oldest`, the run continued with other samples, rows or code, so they cannot be used.
    rollback_steps = [decision.to for decision in decisions[:rollback_count]]
    oldest = max([*rollback_steps, *(change.after_step for change in accepted), 0])
    usable = [saved for saved in {0, *kept_steps} if oldest <= saved < step]
    if not usable:
        kept_text = ", ".join(map(str, kept_steps)) or "none"
        raise UserError(
            f"--step {step}: the run needs its checkpoint of step {oldest} or a later one before step {step}, because "
            f"it rolled back or changed rows or code there, but keeps {kept_text}: replay a later "
            "step, and raise config.checkpoint.keep in the next run"
        )
    return max(usable), rollback_count


@contextmanager
def restored_run(start: ReplayStart) -> Iterator[tuple[Session, Parts, WeightLease]]:
    """Yields the run of a replay in a temporary work directory, restored at its start. Prints nothing.

    Raises: UserError, if models, rows or code have changed since the run, or this machine cannot run it.
    """
    config = read_config(start.folder)
    # The replay ends with its step, so that nothing is sampled for later steps, and it uses no logger. A config is
    # refused if all of its steps belong to the warm-up of the critic, so the replay ends at least one step after it.
    config.num_steps = max(start.step, flatten(config).get("critic.warmup_steps", 0) + 1)
    config.log.to, config.log.project, config.log.profile = (), "", ""
    # Files of samples replace the engine and the judge, so it is no error if this machine lacks these two.
    checked = collected() if start.files else nullcontext()
    with TemporaryDirectory(prefix="jaxrl-replay-") as temporary, redirect_stdout(io.StringIO()), checked:
        workdir = Path(temporary)
        copy_run(start, workdir)
        try:
            start_actor = partial(StoredActor, start.files) if start.files else None
            make = partial(make_unsaved_run, start_actor=start_actor)
            with opened_run(config, workdir, recipes.read, make) as (session, parts):
                if start.notes and not start.start:
                    session.checkpoints.check_inputs(flatten(config), start.start, start.notes)
                lease = session.restore()
                session.stop.finish = lambda: None  # a replay that is interrupted saves nothing
                yield session, parts, lease
        except ChangedInputs as error:
            raise UserError(f"--step {start.step}: {error.change}: restore it to replay the step") from None


def copy_run(start: ReplayStart, workdir: Path) -> None:
    """Fills a work directory from which the run resumes at the start of a replay: config, checkpoint and rollbacks.

    A checkpoint on a disk is linked and not copied, because the replay only reads it.
    """
    checkpoints, rollbacks = workdir / "checkpoints", workdir / "rollbacks"
    shutil.copyfile(start.folder / "config.json", workdir / "config.json")
    checkpoints.mkdir()
    if start.start and start.saved:
        folder = start.saved.folder(start.start)
        if address := bucket.address(str(folder)):
            bucket.download_folder(address, checkpoints / str(start.start), "--run")
        else:
            (checkpoints / str(start.start)).symlink_to(folder.absolute(), target_is_directory=True)
    rollbacks.mkdir()
    for number, decision in enumerate(start.decisions, 1):
        disk.replace(rollbacks / f"{number}.json", json.dumps(asdict(decision)))


def make_unsaved_run(
    work_directory: WorkDirectory, recipe: Recipe, start_actor: Callable[..., Actor] | None
) -> tuple[Session, Parts]:
    """Builds the run of a replay, which saves no checkpoint. start_actor: argument of `make_run`."""
    unsaved = replace(recipe, checkpoint=replace(recipe.checkpoint, keep=0))
    return make_run(work_directory, unsaved, start_actor)
