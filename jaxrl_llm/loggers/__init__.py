"""The loggers to which a run sends its numbers besides metrics.jsonl: functions that `config.log.to` names.

Each logger is a function(run: LoggedRun) -> Logger, in this module or in your own, and imports its library only if a
config names it. A run that continues at an earlier step, after a kill or a rollback, opens its loggers again.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError, summarize_error
from jaxrl_llm.loggers.sample import Sample
from jaxrl_llm.machine import extras

__all__ = ["mlflow", "tensorboard", "trackio", "wandb"]

TRACKERS = ("mlflow", "trackio", "wandb")  # loggers that need a package of the same name, and config.log.project
CLOSE_SECONDS = 60.0  # time in which a logger must send its waiting calls at the end of the run
RETRY_PAUSES = (1.0, 60.0)  # seconds of the first and of the longest pause before a failed call is repeated
MAX_TRIES = 8  # tries of one call, in about two minutes, before the logger gets other calls between its tries
SILENT_SECONDS = 60.0  # duration of a call after which a warning says that the logger does not answer
MAX_WAITING_CALLS = 10_000  # calls that wait for a logger, such as records of some hundred numbers
T = TypeVar("T")
Call: TypeAlias = tuple[Any, ...]  # name of the method, step, further arguments


class Logger(Protocol):
    """Receives the numbers of a run. If a method raises, the run continues and repeats the call later."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def write_text(self, step: int, name: str, text: str) -> None: ...

    def write_samples(self, step: int, samples: list[Sample]) -> None: ...

    def close(self) -> None: ...


class LoggedRun(NamedTuple):
    """The facts about a run that a logger receives."""

    workdir: Path
    step: int  # step after which the run continues; later steps that an earlier attempt has sent are sent again
    project: str  # config.log.project
    config: dict[str, Any]
    name: str = ""  # config.log.name
    tags: tuple[str, ...] = ()  # config.log.tags

    def title(self) -> str:
        """Returns the name of the run: config.log.name, or the name of its work directory."""
        return self.name or self.workdir.resolve().name

    def id(self) -> str:
        """Returns the random id of the run, which is stored in its work directory, so a resumed or moved run has it."""
        file = self.workdir / "run_id"
        if not file.is_file():
            file.write_text(uuid.uuid4().hex[:16])
        return file.read_text()


class BackgroundLogger:
    """Runs a logger in a separate thread, so that a slow logger delays no step.

    A call that fails is repeated after growing pauses, because a server may be down for a while. After MAX_TRIES tries
    the logger gets other calls; if it takes another call, the failing call is dropped. At most MAX_WAITING_CALLS calls
    wait, of which the oldest are dropped first. Lines on the console report the first error, the recovery, each dropped
    call, and the calls that are lost at the end.
    """

    def __init__(
        self, name: str, make_logger: Callable[[LoggedRun], Logger], run: LoggedRun, print_line: Callable[[str], None]
    ):
        """name: name of the logger in config.log.to. print_line(line): prints a line on the console."""
        self._logger_name, self._name = name, f"config.log.to: {name}"
        self._make_logger, self._run, self._print_line = make_logger, run, print_line
        # A call is removed only after the logger has taken it, so the calls that remain at the end are lost.
        self._calls: deque[Call] = deque(maxlen=MAX_WAITING_CALLS)
        self._changed = Condition()
        self._failing_method = ""  # method of the logger that has failed since its last success; "" = none
        self._call_start = math.inf  # time.monotonic() when the current call began
        self._hang_reported = False
        self._deadline = math.inf  # time.monotonic() until which calls are retried
        self._dropped_calls = 0
        # The thread is a daemon, because a logger that hangs must not keep the process alive.
        self._thread = Thread(target=self._send_calls, daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Queues the numbers of a step, without waiting."""
        self._add_call("write", step, numbers)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Queues a text, without waiting."""
        self._add_call("write_text", step, name, text)

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Queues completions, without waiting."""
        self._add_call("write_samples", step, samples)

    def close(self) -> None:
        """Waits at most CLOSE_SECONDS until the logger has taken all calls, and reports the calls that are lost."""
        with self._changed:
            self._deadline = time.monotonic() + CLOSE_SECONDS
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        late_text = f"did not end within {CLOSE_SECONDS:g} s" if self._thread.is_alive() else ""
        lost_calls = len(self._calls) + self._dropped_calls
        lost_text = f"has not got {lost_calls} of its records" if lost_calls else ""
        if late_text or lost_text:
            remedy = f": jaxrl log WORKDIR --send {self._logger_name} sends them" if lost_text else ""
            problems = " and ".join(text for text in (late_text, lost_text) if text)
            self._print_line(f"warning: {self._name} {problems}{remedy}")

    def _add_call(self, *call: Any) -> None:
        """Puts a call of the logger, its method and arguments, in the queue of the sending thread."""
        # A call may last long without an error, because a library may retry a server by itself for minutes.
        if time.monotonic() - self._call_start > SILENT_SECONDS and not self._hang_reported:
            self._hang_reported = True
            self._print_line(
                f"warning: {self._name} has not answered for {SILENT_SECONDS:g} s: the run continues, and its records "
                "wait"
            )
        with self._changed:
            # The count comes before the append, because a full deque silently drops its oldest call.
            self._dropped_calls += len(self._calls) == MAX_WAITING_CALLS
            self._calls.append(call)
            self._changed.notify()

    def _send_calls(self) -> None:
        """Sends the waiting calls one after the other, in the logger's own thread, until the run ends."""
        logger = self._retry("make", lambda: self._make_logger(self._run))
        while logger:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._deadline < math.inf)
                if not self._calls:
                    break
                # The call stays in the queue and is sent without the lock, because a send may last minutes, for which
                # a step that writes must not wait.
                call = self._calls[0]
            is_refused = partial(self._try_another_call, logger, call)
            sent = not _accepts(logger, call) or self._retry(call[0], partial(_send, logger, call), is_refused)
            with self._changed:
                # `_add_call` may have dropped this call meanwhile, and has counted it then.
                if self._calls and self._calls[0] is call:
                    self._calls.popleft()
                    self._dropped_calls += not sent
            # `close` reports the lost calls at the deadline, so no call may be sent after it.
            if time.monotonic() > self._deadline:
                return
        if logger:
            self._retry("close", lambda: (logger.close(),))

    def _try_another_call(self, logger: Logger, call: Call, tries: int) -> bool:
        """Sends another waiting call. If the logger takes it, the server works, and True means: `call` is refused.

        tries: failed tries of `call`, at least MAX_TRIES.
        """
        with self._changed:
            # A call of another method shows nothing: it may do nothing in this logger.
            other_calls = [other for other in self._calls if other is not call and other[0] == call[0]]
        if not other_calls:
            return False
        # Each time another call is tried, because a second refused call must not make a working server look dead.
        other_call = other_calls[(tries - MAX_TRIES) % len(other_calls)]
        try:
            _send(logger, other_call)
        except Exception:
            return False
        # `remove` raises a ValueError if `_add_call` has dropped the call meanwhile.
        with self._changed, suppress(ValueError):
            self._calls.remove(other_call)
        self._print_line(f"warning: {self._name} refuses the numbers of step {call[1]} and continues without them")
        return True

    def _retry(
        self, method: str, action: Callable[[], T], is_refused: Callable[[int], bool] = lambda tries: False
    ) -> T | None:
        """Calls action() until it succeeds, and returns its result; None if it is refused or the run ends before.

        method: name of what the action does. A logger works again if the method that failed succeeds.
        is_refused(tries): called after MAX_TRIES tries; True to give up.
        """
        pause, tries = RETRY_PAUSES[0], 0
        while True:
            self._call_start = time.monotonic()
            try:
                result = action()
            # All errors are caught, because the run must continue whatever a library or a server does.
            except Exception as error:
                tries += 1
                # Only the first error of an outage is reported.
                if not self._failing_method and time.monotonic() < self._deadline:
                    message = " ".join(summarize_error(error).split())[:300]
                    self._print_line(f"warning: {self._name} failed and is tried again: {message}")
                self._failing_method = self._failing_method or method
            else:
                # The outage ends when the method that failed succeeds, or when a call that hung returns.
                if self._failing_method == method or (self._hang_reported and not self._failing_method):
                    self._print_line(f"{self._name} works again")
                    self._failing_method = ""
                self._hang_reported = False
                return result
            finally:
                self._call_start = math.inf
            if tries >= MAX_TRIES and is_refused(tries):
                self._failing_method = ""
                return None
            with self._changed:
                # Each call gets one try at the end, because pauses would use up the time of the other calls.
                if self._deadline < math.inf:
                    return None
                # The pause waits on the condition instead of sleeping, so that `close` can end it.
                self._changed.wait_for(lambda: self._deadline < math.inf, pause)
            pause = min(2 * pause, RETRY_PAUSES[1])


def _accepts(logger: Logger, call: Call) -> bool:
    """Returns whether a logger has the method of a call. A logger of the user need not have write_samples."""
    return call[0] != "write_samples" or hasattr(logger, "write_samples")


def _send(logger: Logger, call: Call) -> bool:
    """Calls the logger's method, and returns True, because `_retry` returns None for a refused call."""
    method, *arguments = call
    getattr(logger, method)(*arguments)
    return True


def check_named(names: tuple[str, ...], project: str) -> None:
    """Checks config.log.to = names and config.log.project = project. Raises: UserError, if they do not fit together."""
    if len(set(names)) < len(names):
        raise UserError(f"config.log.to = {names} has a name twice: remove one")
    for name in (name for name in names if name in TRACKERS):
        extras.require(name, name, "config.log.to")
        if not project:
            raise UserError(f"config.log.project = '': config.log.to has {name!r}, which needs a project: set its name")
        if name == "wandb" and (refused := set(project) & set("/\\#?%:")):
            raise UserError(
                f"config.log.project = {project!r}: W&B allows no {min(refused)!r} in the name of a project: remove it"
            )
    if project and set(names) <= {"tensorboard"}:
        raise UserError(
            f"config.log.project = {project!r} has no effect, because no logger of config.log.to = {names} needs a "
            "project: set it to ''"
        )


def tensorboard(run: LoggedRun) -> Logger:
    """Writes event files into WORKDIR/tensorboard. TensorBoard ignores later steps of an earlier attempt."""
    from jaxrl_llm.loggers.events import TensorBoardWriter

    return TensorBoardWriter(run.workdir / "tensorboard", run.step)


class Wandb:
    """Sends a run to Weights & Biases, whose environment variables apply, such as WANDB_MODE=offline.

    The step is sent as a metric of its own, because W&B's internal step must not decrease, but that of a resumed run
    does.
    """

    def __init__(self, run: LoggedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        options: dict[str, Any] = dict(project=run.project, name=run.title(), tags=run.tags, dir=str(run.workdir))
        # "allow" continues the run with this id if W&B knows it, and else creates it. "must" would fail for a new run.
        self._run: Any = wandb.init(**options, id=run.id(), config=run.config, resume="allow")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers | {"step": step})

    def write_text(self, step: int, name: str, text: str) -> None:
        # The title is cut, because W&B refuses titles of 64 characters or more.
        self._run.alert(title=name[:63], text=f"step {step}: {text}")

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["step", *Sample._fields], data=[[step, *sample] for sample in samples])
        self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Sends a run to trackio: on this disk, or in a Space if TRACKIO_SPACE_ID names one.

    The run's id is part of its name, by which trackio finds a resumed run.
    """

    def __init__(self, run: LoggedRun):
        import trackio  # pyright: ignore[reportMissingImports]

        name = f"{run.title()}-{run.id()}"
        # The tags go into the config, because trackio has no tags. embed=False prevents a dashboard in a notebook.
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
    """Sends a run to the MLflow server of MLFLOW_TRACKING_URI, as a run of the experiment config.log.project.

    Only MlflowClient is used, because the run of `mlflow.start_run` belongs to one thread. The run's id is a tag.
    """

    TAG = "jaxrl_llm.run_id"
    PARAMS = 100  # maximum number of parameters in one request

    def __init__(self, run: LoggedRun):
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client, self._metric = MlflowClient(), Metric
        known_experiment = self._client.get_experiment_by_name(run.project)
        experiment = known_experiment.experiment_id if known_experiment else self._client.create_experiment(run.project)
        same_runs = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.id()}'")
        if same_runs:
            self._id = same_runs[0].info.run_id
            # The parameters of the first attempt stay, because MLflow refuses to change a parameter and the config of a
            # resumed run may differ.
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.TAG: run.id()} | dict.fromkeys(run.tags, "")
        new_run = self._client.create_run(experiment, run_name=run.title(), tags=tags)
        self._id = new_run.info.run_id
        params = [Param(self._allowed_name(name), str(value)) for name, value in flatten(run.config).items()]
        # MLflow refuses a request with more than PARAMS parameters.
        for start in range(0, len(params), self.PARAMS):
            self._client.log_batch(self._id, params=params[start : start + self.PARAMS])

    def write(self, step: int, numbers: dict[str, float]) -> None:
        # MLflow expects the time in whole milliseconds.
        milliseconds = int(time.time() * 1000)
        renamed_numbers = {self._allowed_name(name): value for name, value in numbers.items()}
        self._client.log_batch(
            self._id, metrics=[self._metric(name, x, milliseconds, step) for name, x in renamed_numbers.items()]
        )

    @staticmethod
    def _allowed_name(name: str) -> str:
        # All other characters are replaced, because MLflow refuses them in names.
        return re.sub(r"[^\w./ -]", "_", name)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._id, name, f"step {step}: {text}")

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        columns = {"step": [step] * len(samples)}
        columns |= {name: [getattr(sample, name) for sample in samples] for name in Sample._fields}
        # Each step gets a table of its own, because MLflow would download a table to append to it.
        self._client.log_table(self._id, columns, f"completions/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


wandb, trackio, mlflow = Wandb, Trackio, Mlflow  # names in config.log.to
