"""Opens the workdir of a run, and the session in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.compilation import Compilations, keep_compilations
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.session import alike, changes
from jaxrl_llm.session import workdir as workdirs
from jaxrl_llm.session.changes import Change, Rows
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.run_store import RunFolder, store_of
from jaxrl_llm.session.session import ModelStates, Session, Trainer
from jaxrl_llm.session.settings import Plan
from jaxrl_llm.session.signals import Stop, stop_signals


@dataclass
class WorkDirectory:
    """Where a run works: its store, and what closes at its end."""

    store: RunFolder
    resources: ExitStack  # closes everything that the run opens, in reverse order
    stop: Stop
    compilations: Compilations
    compilation_cache: str  # folder of compiled programs, or "off"
    config: dict[str, Any]  # content of config.json
    code_hashes: dict[str, str] = field(default_factory=dict)  # hashes of the user's own functions
    check_lock: Callable[[], None] = lambda: None  # raises: UserError, if another process has taken the workdir

    @property
    def workdir(self) -> Path:
        """The local folder of the run: its work directory, or what a bucket has of it."""
        return self.store.folder

    def lock(self, record: type, *, shared: bool) -> None:
        """Checks that all processes have this config, and takes the workdir, which must be new or a run of it.

        record: class of the config. shared: whether all processes have this workdir.
        Raises: UserError.
        """
        fields = flatten(self.config)
        self.code_hashes = changes.code_hashes(fields)
        alike.check(fields)
        known = records.table(record, self.config)
        if distributed.first():
            check = partial(workdirs.check_workdir, self.workdir, fields, known)
            self.check_lock = self.resources.enter_context(self.store.locked(check))
        self.store.prepare_other_processes(shared=shared)


@contextmanager
def open_work_directory(workdir: Path, *, signals: bool, command: bool) -> Iterator[WorkDirectory]:
    """Yields the workplace of a run whose config is not known yet; `build.build` describes signals and command."""
    with ExitStack() as resources, stop_signals(resources, signals, command) as stop:
        resources.callback(WATCHDOG.close)
        compilations = resources.enter_context(closing(Compilations()))
        yield WorkDirectory(store_of(workdir), resources, stop, compilations, keep_compilations(), {})


def open_session(
    work_directory: WorkDirectory,
    plan: Plan,
    models: ModelStates,
    mesh: Mesh,
    began_with: dict[str, str],
    rows: Rows,
    announce: Callable[[int, Sequence[Change]], None],
) -> Callable[[Trainer], Session]:
    """Opens checkpoints of `models`, log and health rules, and returns `session(trainer)`.

    began_with: hashes of models and data. rows: rows of the run. announce(step, changes): called in the first process,
    with the step after which the run continues, and the accepted changes of rows and code.
    Raises: UserError, if model or data differ from those at the run's start, or the disk has no room.
    """
    workdir, store, enter = work_directory.workdir, work_directory.store, work_directory.resources.enter_context
    goes_back = plan.most_rollbacks > 0
    checkpoints = Checkpoints(store.checkpoints, began_with, plan.checkpoint, mesh, rows, goes_back=goes_back)
    checkpoints = enter(closing(checkpoints))
    start, accepted = checkpoints.check_beginning(flatten(work_directory.config))
    if distributed.first():
        with store.naming_workdir():
            workdirs.check_log(workdir, start, plan.checkpoint.every)
        checkpoints.check_room(models.shapes(), plan.steps)
        workdirs.write_config(workdir, work_directory.config)
        changes.write(workdir, accepted)
        store.sync()
        announce(start, accepted)
    log = enter(closing(Log(workdir, plan.log, plan.steps, work_directory.config, store.name)))
    health, rollbacks = Health(workdir, plan.health, log.tell), Rollbacks(workdir, store.sync)
    fields = workdir, work_directory.check_lock, store.sync, plan, log, health, rollbacks, checkpoints
    return partial(Session, *fields, work_directory.stop, work_directory.compilations, models)
