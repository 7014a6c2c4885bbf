"""Opens and locks the work directory of a run, and builds the session in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.compilation import Compilations, enable_compilation_cache
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.session import alike, changes
from jaxrl_llm.session import workdir as workdirs
from jaxrl_llm.session.changes import Change, Rows
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.run_store import RunFolder, store_of
from jaxrl_llm.session.sample_files import FOLDER, SampleFiles
from jaxrl_llm.session.session import ModelStates, Session
from jaxrl_llm.session.settings import Plan
from jaxrl_llm.session.signals import Stop, stop_signals


@dataclass
class WorkDirectory:
    """The work directory of a run, and the resources that close when the run ends."""

    store: RunFolder
    resources: ExitStack  # closes everything that the run opens, in reverse order
    stop: Stop
    compilations: Compilations
    compilation_cache: str  # folder of compiled programs, or "off"
    config: dict[str, Any]  # content of config.json
    code_hashes: dict[str, str] = field(default_factory=dict)  # hashes of the user's own functions by name
    check_lock: Callable[[], None] = lambda: None  # raises a UserError if another process has taken the lock

    @property
    def workdir(self) -> Path:
        """The local folder of the run: the work directory, or the local copy of one in a bucket."""
        return self.store.folder

    def lock(self, record: type, *, shared: bool) -> None:
        """Checks that all processes have the same config, and locks the directory, which process 0 does.

        record: class of the recipe, such as `Recipe`. shared: True if all processes use the same directory.
        Raises: UserError, if the directory holds a run of another config, or another process has locked it.
        """
        fields = flatten(self.config)
        self.code_hashes = changes.code_hashes(fields)
        alike.check(fields)
        field_table = records.table(record, self.config)
        if distributed.first():
            check = partial(workdirs.check_workdir, self.workdir, fields, field_table)
            self.check_lock = self.resources.enter_context(self.store.locked(check))
        self.store.prepare_other_processes(shared=shared)


@contextmanager
def open_work_directory(workdir: Path, *, signals: bool, command: bool) -> Iterator[WorkDirectory]:
    """Yields the work directory, which is not locked yet because the config is unknown at this point.

    signals: whether signals end the run. command: whether the run is a command of the shell (`build.build`).
    """
    with ExitStack() as resources, stop_signals(resources, signals, command) as stop:
        resources.callback(WATCHDOG.close)
        compilations = resources.enter_context(closing(Compilations()))
        yield WorkDirectory(
            store=store_of(workdir),
            resources=resources,
            stop=stop,
            compilations=compilations,
            compilation_cache=enable_compilation_cache(),
            config={},
        )


def open_session(
    work_directory: WorkDirectory, plan: Plan, models: ModelStates, mesh: Mesh, input_hashes: dict[str, str], rows: Rows
) -> tuple[Session, int, list[Change]]:
    """Opens the checkpoints of a run, its log and its health rules.

    models: shapes and loaders of what checkpoints hold. input_hashes: hashes of models and data by config field. rows:
    identity of the data rows, on which the position in the data depends.
    Returns the session, whose `trainer` the caller sets, the step after which the run continues (0 = a new run), and
    the changes of rows and code that the config accepts.
    Raises: UserError, if model or data differ from those at the run's start, or the disk has too little free space.
    """
    # `enter` registers what must be closed when the run ends.
    workdir, store, enter = work_directory.workdir, work_directory.store, work_directory.resources.enter_context
    goes_back = plan.most_rollbacks > 0
    opened_checkpoints = Checkpoints(
        store.checkpoints, input_hashes, plan.checkpoint, mesh, rows, goes_back=goes_back, check_lock=store.check_lock
    )
    checkpoints = enter(closing(opened_checkpoints))
    start, accepted_changes = checkpoints.check_beginning(flatten(work_directory.config))
    # Process 0 checks the work directory once more, and writes the config before the log and the checkpoints.
    if distributed.first():
        with store.naming_workdir():
            workdirs.check_log(workdir, start, plan.checkpoint.every)
        checkpoints.check_room(models.shapes(), plan.steps)
        workdirs.write_config(workdir, work_directory.config)
        changes.write(workdir, accepted_changes)
        store.sync()
    sample_files = SampleFiles(store.checkpoints.parent / FOLDER, plan.log.keep_samples, store.check_lock)
    opened_log = Log(workdir, plan.log, plan.steps, work_directory.config, sample_files=sample_files, name=store.name)
    log = enter(closing(opened_log))
    session = Session(
        workdir=workdir,
        check_lock=work_directory.check_lock,
        sync_workdir=store.sync,
        plan=plan,
        log=log,
        health=Health(workdir, plan.health, log.show_finding),
        rollbacks=Rollbacks(workdir, store.sync),
        checkpoints=checkpoints,
        stop=work_directory.stop,
        compilations=work_directory.compilations,
        models=models,
    )
    return session, start, accepted_changes
