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
class Workplace:
    """Where a run works: its store, and what closes at its end."""

    store: RunFolder
    opened: ExitStack  # closes everything that the run opens, in reverse order
    stop: Stop
    compilations: Compilations
    cache: str  # folder of compiled programs, or "off"
    config: dict[str, Any]  # content of config.json
    code: dict[str, str] = field(default_factory=dict)  # hashes of the user's own functions
    check_lock: Callable[[], None] = lambda: None  # raises: UserError, if another process has taken the workdir

    @property
    def workdir(self) -> Path:
        """The local folder of the run: its work directory, or what a bucket has of it."""
        return self.store.folder

    def take(self, record: type, *, shared: bool) -> None:
        """Checks that all processes have this config, and takes the workdir, which must be new or a run of it.

        record: class of the config. shared: whether all processes have this workdir.
        Raises: UserError.
        """
        fields = flatten(self.config)
        self.code = changes.code_hashes(fields)
        alike.check(fields)
        known = records.table(record, self.config)
        if distributed.first():
            check = partial(workdirs.check_workdir, self.workdir, fields, known)
            self.check_lock = self.opened.enter_context(self.store.taken(check))
        self.store.settle(shared=shared)


@contextmanager
def at_work(workdir: Path, *, signals: bool, command: bool) -> Iterator[Workplace]:
    """Yields the workplace of a run whose config is not known yet; `build.build` describes signals and command."""
    with ExitStack() as opened, stop_signals(opened, signals, command) as stop:
        opened.callback(WATCHDOG.close)
        compilations = opened.enter_context(closing(Compilations()))
        yield Workplace(store_of(workdir), opened, stop, compilations, keep_compilations(), {})


def open_session(
    place: Workplace,
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
    workdir, store, enter = place.workdir, place.store, place.opened.enter_context
    goes_back = plan.most_rollbacks > 0
    opened = Checkpoints(
        store.checkpoints, began_with, plan.checkpoint, mesh, rows, goes_back=goes_back, check_lock=store.check_lock
    )
    checkpoints = enter(closing(opened))
    start, accepted = checkpoints.check_beginning(flatten(place.config))
    if distributed.first():
        with store.named():
            workdirs.check_log(workdir, start, plan.checkpoint.every)
        checkpoints.check_room(models.shapes(), plan.steps)
        workdirs.open_workdir(workdir, place.config)
        changes.write(workdir, accepted)
        store.keep()
        announce(start, accepted)
    log = enter(closing(Log(workdir, plan.log, plan.steps, place.config, store.name)))
    health, rollbacks = Health(workdir, plan.health, log.tell), Rollbacks(workdir, store.keep)
    fields = workdir, place.check_lock, store.keep, plan, log, health, rollbacks, checkpoints
    return partial(Session, *fields, place.stop, place.compilations, models)
