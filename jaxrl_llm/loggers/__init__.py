"""Where the numbers of a run go besides metrics.jsonl: the functions that `config.log.to` names.

Each is `function(run: LoggedRun) -> Logger`, here or in a module of your own. It imports its library only when it is
named. A run that continues at an earlier step, after a kill or a rollback, opens its loggers again.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError, briefly
from jaxrl_llm.loggers.sample import Sample
from jaxrl_llm.machine import extras

__all__ = ["mlflow", "tensorboard", "trackio", "wandb"]

TRACKERS = ("mlflow", "trackio", "wandb")  # they need a package of the same name, and a project
CLOSING = 60.0  # seconds in which a logger must send what it still has at the end
PAUSES = (1.0, 60.0)  # seconds: the first and the longest before a logger that failed is tried again
TRIES = 8  # of one call, in about two minutes; then others are tried in between
SILENT = 60.0  # seconds of one call after which a line says that the logger does not answer
WAITING = 10_000  # calls that wait for a logger: records of some hundred numbers each
T = TypeVar("T")
Call: TypeAlias = tuple[Any, ...]  # method, step and more arguments


class Logger(Protocol):
    """Gets the numbers of a run. Its methods may raise: then the same call comes again later, and the run goes on."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def write_text(self, step: int, name: str, text: str) -> None: ...

    def write_samples(self, step: int, samples: list[Sample]) -> None: ...

    def close(self) -> None: ...


class LoggedRun(NamedTuple):
    """What a logger may know of a run."""

    workdir: Path
    step: int  # the run continues after it; what an earlier attempt has written of later steps is written again
    project: str  # config.log.project
    config: dict[str, Any]
    name: str = ""  # config.log.name
    tags: tuple[str, ...] = ()  # config.log.tags

    def title(self) -> str:
        """Returns the name of the run: config.log.name, or that of its workdir."""
        return self.name or self.workdir.resolve().name

    def id(self) -> str:
        """Returns the random id of the run in this workdir. It stays the same when the run is resumed, or moved."""
        file = self.workdir / "run_id"
        if not file.is_file():
            file.write_text(uuid.uuid4().hex[:16])
        return file.read_text()


class Background:
    """A logger in a thread of its own: a slow one delays no step.

    After an error it is tried again with the same numbers, with pauses that grow, because a server may be gone for a
    while. A call that it does not take in TRIES tries is dropped as soon as it takes another one, so that one record
    does not hold back the others. At most WAITING calls wait; then the oldest are dropped. The first error, the
    recovery, what is refused and what is lost at the end are told.
    """

    def __init__(self, name: str, open: Callable[[LoggedRun], Logger], run: LoggedRun, tell: Callable[[str], None]):
        """tell: shows a line to the user."""
        self._logger_name, self._name = name, f"config.log.to: {name}"
        self._open, self._run, self._tell = open, run, tell
        # A call is taken out only after the logger has it: what is still in here at the end is what was lost.
        self._calls: deque[Call] = deque(maxlen=WAITING)
        self._changed = Condition()
        self._fails = False  # since the last call that it took
        self._began, self._told = math.inf, False  # time.monotonic() when the current call began; that it hangs
        self._end, self._dropped = math.inf, 0  # end: time.monotonic() until which it may still try
        # A daemon: a logger that hangs must not keep the process.
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Hands over the numbers of a step. Does not wait."""
        self._enqueue("write", step, numbers)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Hands over a text. Does not wait."""
        self._enqueue("write_text", step, name, text)

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Hands over completions. Does not wait."""
        self._enqueue("write_samples", step, samples)

    def close(self) -> None:
        """Waits, at most CLOSING seconds, until the logger has everything."""
        with self._changed:
            self._end = time.monotonic() + CLOSING
            self._changed.notify()
        self._thread.join(CLOSING)
        late = f"did not end within {CLOSING:g} s" if self._thread.is_alive() else ""
        lost = f"has not got {n} of its records" if (n := len(self._calls) + self._dropped) else ""
        if late or lost:
            later = f": jaxrl log WORKDIR --send {self._logger_name} sends them" if lost else ""
            self._tell(f"warning: {self._name} {' and '.join(text for text in (late, lost) if text)}{later}")

    def _enqueue(self, *call: Any) -> None:
        # A library may try a server again by itself for minutes, without an error.
        if time.monotonic() - self._began > SILENT and not self._told:
            self._told = True
            self._tell(
                f"warning: {self._name} has not answered for {SILENT:g} s; the run goes on, and its records wait"
            )
        with self._changed:
            # The count comes before the append, because a full deque drops its oldest call without a word.
            self._dropped += len(self._calls) == WAITING
            self._calls.append(call)
            self._changed.notify()

    def _work(self) -> None:
        logger = self._persist(lambda: self._open(self._run))
        while logger:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._end < math.inf)
                if not self._calls:
                    break
                # The call stays in the queue and is sent without the lock: a send may last minutes, and a step that
                # writes must not wait for it.
                call = self._calls[0]
            sent = not _takes(logger, call) or self._persist(
                lambda: _send(logger, call),  # noqa: B023
                lambda tries: self._is_refused(logger, call, tries),  # noqa: B023
            )
            with self._changed:
                # `_enqueue` may have dropped it meanwhile, and has counted it.
                if self._calls and self._calls[0] is call:
                    self._calls.popleft()
                    self._dropped += not sent
            # `close` has stopped waiting and has told how many calls are lost: one that is sent now would make that
            # wrong.
            if time.monotonic() > self._end:
                return
        if logger:
            # A close that succeeds is no sign that the logger takes records again.
            self._persist(lambda: (logger.close(),), answers=False)

    def _is_refused(self, logger: Logger, call: Call, tries: int) -> bool:
        """Returns whether the logger takes another call, in turn the ones that wait. Then the server is there."""
        with self._changed:
            others = [other for other in self._calls if other is not call and _takes(logger, other)]
        if not others:
            return False
        # Another one each time: a second call that is refused as well must not make a living server look dead.
        other = others[(tries - TRIES) % len(others)]
        try:
            _send(logger, other)
        except Exception:
            return False
        # ValueError: `_enqueue` may have dropped it meanwhile.
        with self._changed, suppress(ValueError):
            self._calls.remove(other)
        self._tell(f"warning: {self._name} does not take the numbers of step {call[1]} and goes on without them")
        return True

    def _persist(
        self, action: Callable[[], T], is_refused: Callable[[int], bool] = lambda tries: False, *, answers: bool = True
    ) -> T | None:
        """Returns action(), repeated after errors; None if the run has ended before it succeeded, or it is refused.

        is_refused(tries): asked after TRIES. answers: whether a success shows that the logger works again.
        """
        pause, tries = PAUSES[0], 0
        while True:
            self._began = time.monotonic()
            try:
                result = action()
            # Whatever a library or a server does, the run goes on.
            except Exception as error:
                tries += 1
                # One line for an outage, not one for each of its tries.
                if not self._fails and time.monotonic() < self._end:
                    message = " ".join(briefly(error).split())[:300]
                    self._tell(f"warning: {self._name} failed and is tried again: {message}")
                self._fails = True
            else:
                if answers and (self._fails or self._told):
                    self._tell(f"{self._name} works again")
                self._fails = self._told = False
                return result
            finally:
                self._began = math.inf
            if tries >= TRIES and is_refused(tries):
                self._fails = False
                return None
            with self._changed:
                # Each call has one try at the end, because pauses would use up the seconds that are left for the
                # others.
                if self._end < math.inf:
                    return None
                # The pause is a wait and no sleep, because `close` must be able to end it.
                self._changed.wait_for(lambda: self._end < math.inf, pause)
            pause = min(2 * pause, PAUSES[1])


def _takes(logger: Logger, call: Call) -> bool:
    """Returns whether a logger has the method of a call: one of a user need not show completions."""
    return call[0] != "write_samples" or hasattr(logger, "write_samples")


def _send(logger: Logger, call: Call) -> bool:
    method, *arguments = call
    getattr(logger, method)(*arguments)
    return True


def check_named(names: tuple[str, ...], project: str) -> None:
    """Checks config.log.to and config.log.project together. Raises: UserError."""
    if len(set(names)) < len(names):
        raise UserError(f"config.log.to = {names} has a name twice: remove one")
    for name in (name for name in names if name in TRACKERS):
        extras.require(name, name, "config.log.to")
        if not project:
            raise UserError(f"config.log.project is missing: config.log.to names {name}, which needs one")
        if name == "wandb" and (refused := set(project) & set("/\\#?%:")):
            raise UserError(f"config.log.project = {project!r}: W&B takes no {min(refused)!r} in a name: leave it out")
    if project and set(names) <= {"tensorboard"}:
        raise UserError(f"config.log.project = {project!r} does nothing: no logger in {names} needs one; set it to ''")


def tensorboard(run: LoggedRun) -> Logger:
    """Event files in WORKDIR/tensorboard. TensorBoard drops the steps of an earlier attempt."""
    from jaxrl_llm.loggers.events import TensorBoardWriter

    return TensorBoardWriter(run.workdir / "tensorboard", run.step)


class Wandb:
    """A run of Weights & Biases. Its environment variables hold, such as WANDB_MODE=offline.

    Writes with `step` as a number of its own: W&B's own step must not go back, and a resumed run does.
    """

    def __init__(self, run: LoggedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        where: dict[str, Any] = dict(project=run.project, name=run.title(), tags=run.tags, dir=str(run.workdir))
        # "allow" goes on with this id if W&B knows it, and begins it otherwise. "must" would fail at the first start.
        self._run: Any = wandb.init(**where, id=run.id(), config=run.config, resume="allow")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers | {"step": step})

    def write_text(self, step: int, name: str, text: str) -> None:
        # W&B refuses titles of 64 characters and more.
        self._run.alert(title=name[:63], text=f"step {step}: {text}")

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["step", *Sample._fields], data=[[step, *sample] for sample in samples])
        self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio: on this disk, or in a Space if TRACKIO_SPACE_ID names one.

    The run has the id in its name, by which trackio finds it again.
    """

    def __init__(self, run: LoggedRun):
        import trackio  # pyright: ignore[reportMissingImports]

        name = f"{run.title()}-{run.id()}"
        # trackio has no tags. Without embed=False it opens a dashboard in the notebook that trains.
        config = run.config | ({"tags": list(run.tags)} if run.tags else {})
        self._run: Any = trackio.init(run.project, name, config=config, resume="allow", embed=False)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._run.alert(title=name, text=text, step=step)

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        table = trackio.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"completions": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow in the experiment `project`, where MLFLOW_TRACKING_URI says.

    Uses the client alone: the run of `mlflow.start_run` belongs to one thread. The run has the id as a tag.
    """

    TAG = "jaxrl_llm.run_id"
    PARAMS = 100  # in one request

    def __init__(self, run: LoggedRun):
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client, self._metric = MlflowClient(), Metric
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        same = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.id()}'")
        if same:
            self._id = same[0].info.run_id
            # MLflow never changes a parameter: the config of a resumed run, which may differ, would be refused. So it
            # stays.
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.TAG: run.id()} | dict.fromkeys(run.tags, "")
        new_run = self._client.create_run(experiment, run_name=run.title(), tags=tags)
        self._id = new_run.info.run_id
        params = [Param(self._named(name), str(value)) for name, value in flatten(run.config).items()]
        # MLflow refuses a request with more.
        for first in range(0, len(params), self.PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self.PARAMS])

    def write(self, step: int, numbers: dict[str, float]) -> None:
        # MLflow takes whole milliseconds.
        now = int(time.time() * 1000)
        named = {self._named(name): value for name, value in numbers.items()}
        self._client.log_batch(self._id, metrics=[self._metric(name, x, now, step) for name, x in named.items()])

    @staticmethod
    def _named(name: str) -> str:
        # MLflow refuses names with other characters.
        return re.sub(r"[^\w./ -]", "_", name)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._id, name, f"step {step}: {text}")

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        columns = {"step": [step] * len(samples)}
        columns |= {name: [getattr(sample, name) for sample in samples] for name in Sample._fields}
        # A table for each step: to append to one MLflow downloads it, and draws a bar on the console.
        self._client.log_table(self._id, columns, f"completions/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


wandb, trackio, mlflow = Wandb, Trackio, Mlflow  # as configs name them
