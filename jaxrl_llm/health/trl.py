"""A callback that applies the health rules to a running TRL trainer. It needs transformers, which TRL depends on."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import printable
from . import logs
from .finding import LogRecord
from .judge import Judge
from .logs.files import numbers
from .logs.names import RolloutLog, renamed


class DoctorCallback(TrainerCallback):
    """Prints findings while TRL trains: `GRPOTrainer(..., callbacks=[DoctorCallback()])`.

    TRL logs each update, and the updates on one rollout form one record. So a record is judged when the next rollout
    begins.
    """

    def __init__(self):
        self._rollouts, self._judge = RolloutLog(), Judge(logs.OTHER_TRAINER_BOUNDS)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for row in state.log_history:  # A resumed run has a history.
            self._add(int(row["step"]), row)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if state.is_world_process_zero:
            self._add(state.global_step, given["logs"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._print_findings(self._rollouts.last())

    def _add(self, step: int, row: dict[str, Any]) -> None:
        self._print_findings(self._rollouts.add({"at": step} | renamed(dict(numbers(row)))))

    def _print_findings(self, record: LogRecord | None) -> None:
        if record is None:
            return
        for finding in self._judge.add(record):
            print(printable(f"jaxrl-doctor, step {record['at']:,}: {finding.line()}"), flush=True)
