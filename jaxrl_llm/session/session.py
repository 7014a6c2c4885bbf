"""The session of a run: its log, checkpoints, health rules and signals, and how the run resumes, saves and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.errors import StoppedByHealth
from jaxrl_llm.health import json_lines
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import distributed, progress
from jaxrl_llm.machine.compilation import Compilations
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.session.checkpoint import MODELS, Checkpoints
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.profile import Profile, steps_of
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.settings import Plan
from jaxrl_llm.session.signals import PREEMPTION_SECONDS, Stop
from jaxrl_llm.structs import PartState, PyTree, StatefulPart


class ModelStates(Protocol):
    """The initial states of a run's models, and the states that its checkpoints hold."""

    def shapes(self) -> States:
        """Returns the states that a checkpoint holds, as shapes with shardings."""
        ...

    def initial_states(self) -> States:
        """Returns the states at step 0."""
        ...

    def complete_restored(self, states: States, attempt: int) -> States:
        """Adds the states that checkpoints omit, such as a frozen reference model.

        attempt: number of rollbacks so far if the run resumes because of a rollback, else 0.
        """
        ...


class Trainer(Protocol):
    """The methods that a session calls on the parts of `train` or `sft`."""

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart]:
        """Parts that a checkpoint holds besides the states of the models, by their names in the checkpoint."""
        ...

    def start(self, states: States, step: int, attempt: int) -> Any:
        """Starts after `step`, and returns the argument of the next step: the states, or a lease of them."""
        ...

    def wait_until_idle(self) -> None:
        """Waits until only the main thread uses the states. Raises: UserError, if work of another thread has failed."""
        ...

    def unlearned_text(self) -> str:
        """Describes what has been sampled, and is never learned from if the run ends now; "" if there is nothing.

        All processes must call it.
        """
        ...

    def evaluate(self, states: States, /) -> dict[str, float]:
        """Returns the metrics of an evaluation. The best checkpoint is the one with the largest eval/accuracy."""
        ...

    def export(self, states: States, /) -> None:
        """Writes the policy as a Hugging Face folder."""
        ...


@dataclass
class RunState:
    """Mutable progress of a run: its current step, states and last checkpoint."""

    step: int = 0  # last step whose update `states` contains
    saved_step: int = 0  # step of the newest checkpoint
    states: States = field(default_factory=dict)
    unwritten_record: Record | None = None  # record of `step` until the log has written it
    attempt: int = 0  # number of rollbacks so far


@dataclass(kw_only=True)
class Session:
    """Everything of a run that outlives a step: work directory, log, checkpoints, health rules, signals and run state.

    `loop.run` and the steps of `train` and `sft` use it.
    """

    workdir: Path
    check_lock: Callable[[], None]  # raises a UserError if another process has taken the lock of the work directory
    sync_workdir: Callable[[], None]  # copies the local files of the run into its bucket, if it has one
    plan: Plan
    log: Log
    health: Health
    rollbacks: Rollbacks
    checkpoints: Checkpoints
    stop: Stop
    compilations: Compilations
    models: ModelStates  # makes the initial states of the models, and knows the shapes that checkpoints hold
    trainer: Trainer = field(init=False)  # the parts of `train` or `sft`, set last because they need the open session
    run_state: RunState = field(default_factory=RunState)

    def profile(self) -> Profile:
        """Returns the tracer of the steps that config.log.profile names."""
        return Profile(steps_of(self.plan.log.profile, self.plan.steps), self.workdir / "profile", self.log.print_line)

    def start(self, test: Callable[[], None] | None = None) -> Any:
        """Restores the newest checkpoint or starts a new run, and evaluates if the log lacks the evaluation.

        test: self-test, which runs at step 0 unless the run has rolled back. Returns the argument of the next step.
        """
        step_argument = self.restore()
        if test and not self.run_state.step and not self.run_state.attempt:
            test()
        step = self.run_state.step
        # The log lacks the evaluation before the first step, or after a signal has interrupted the last evaluation.
        if self.log.lacks_evaluation(step) and (measured := self.evaluate(step)):
            with self.stop.deferred():
                self.log.add_evaluation(step, measured)
        return step_argument

    def restore(self) -> Any:
        """Restores all parts from the newest checkpoint, or initializes them. Returns the argument of the next step.

        If a rollback has been decided but not carried out, deletes the later checkpoints first.
        """
        decisions = self.rollbacks.read()
        attempt = len(decisions)
        # The newest checkpoint knows how many decisions had been carried out when it was saved.
        pending_decisions = decisions[self.checkpoints.attempt() :]
        for decision in pending_decisions:
            self.checkpoints.go_back(decision.to)
        with progress.task("reading the checkpoint"):
            step, parts = self.checkpoints.resume(self.models.shapes())
        for name, part in self.trainer.stateful_parts.items():
            part.load(parts.get(name))
        # No other variable may refer to these arrays, because `complete_restored` moves some of them to the host to
        # free memory for the push of the weights.
        states = parts.pop(MODELS).arrays if parts else self.models.initial_states()
        states = self.models.complete_restored(states, attempt if pending_decisions else 0)
        parts.clear()
        self.log.start(step)
        records = self.log.health_records()
        # The record of `step` is judged one step later, as in a run that was not interrupted.
        self.health.start(records[:-1] if records and records[-1]["step"] == step else records)
        self.run_state = RunState(step, step, states, None, attempt)
        self.checkpoints.accuracies = self.log.accuracies()
        self.checkpoints.tidy_bucket()
        step_argument = self.trainer.start(states, step, attempt)
        self.stop.finish = self.finish_early  # set last, because only now a signal finds a complete state to save
        return step_argument

    def commit(self, states: States, record: Record) -> None:
        """Makes a step the current state. A signal before this call discards the step; a later one saves it."""
        self.run_state.states, self.run_state.step, self.run_state.unwritten_record = states, record.step, record
        WATCHDOG.report_step()

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the metrics of an evaluation after `step`, or {} if none is due.

        Omits an evaluation set if its reward function had no verdict on any completion.
        """
        interval = self.plan.evaluate_every
        if not interval or (step % interval and step != self.plan.steps):
            return {}
        measured = self.log.with_verdicts(step, self.trainer.evaluate(self.run_state.states))
        self.checkpoints.accuracies |= json_lines.accuracies([{"step": step} | measured])
        return measured

    def stagnates(self) -> bool:
        """Returns whether the last `eval.patience` evaluations were no better than the best one before them."""
        patience, accuracies = self.plan.patience, [*self.checkpoints.accuracies.values()]
        earlier_accuracies, latest_accuracies = accuracies[:-patience], accuracies[-patience:]
        return patience > 0 and bool(earlier_accuracies) and max(latest_accuracies) <= max(earlier_accuracies)

    def judge(self, records: list[dict[str, Any]]) -> bool:
        """Applies the health rules to the last record, if there is one. Returns whether the run must roll back.

        The caller rolls back with `start`. Raises: StoppedByHealth, if a rule stops the run.
        """
        # The verdict is to continue, to stop, or to roll back because of a finding.
        action, step, finding = self.health.judge(records or self.log.last_records())
        if finding and action == "stop":
            newest_checkpoint = self.checkpoints.latest()
            raise StoppedByHealth(
                f"step {step}: {finding.evidence}, because {finding.cause}; {newest_checkpoint}: {finding.fix}"
            )
        if finding and action == "roll back":
            self.trainer.wait_until_idle()  # because the states are dropped below
            limit, saved_steps = self.plan.most_rollbacks, self.checkpoints.steps()
            with self.stop.deferred():  # a signal after the decision must not save these states
                decision = self.rollbacks.decide(step, finding.record(), saved_steps, limit)
                # The bad state is dropped and counts as saved, so that an early end of the run saves nothing.
                self.run_state.states, self.run_state.saved_step = {}, self.run_state.step
                self.run_state.unwritten_record = None
            self.log.print_line(f"    health {finding.line()}")
            self.log.print_line(
                f"    rollback {self.run_state.attempt + 1} of at most {limit}: back to step {decision.to}"
            )
        return action == "roll back"

    def write(self, record: Record) -> bool:
        """Writes the record of a step, and a checkpoint if one is due. Returns whether the run must roll back.

        Raises: UserError, if another process has taken the lock of the workdir.
        """
        self.check_lock()
        with self.stop.deferred():
            self.log.write(record)
            self.run_state.unwritten_record = None
        self.checkpoints.check()
        is_best = self.checkpoints.is_best(record.evaluation.get("eval/accuracy"))
        is_last_step = record.step == self.plan.steps or self.stagnates()
        is_save_due = record.step % self.plan.checkpoint.every == 0 or is_best or is_last_step
        # The health rules judge the step before it is saved, because a bad state must not replace a good checkpoint.
        must_roll_back = is_save_due and self.judge(self.log.finish())
        if is_save_due and not must_roll_back:
            with self.stop.deferred():
                self.save()
        return must_roll_back

    def save(self, *, seconds: float | None = None) -> None:
        """Saves all parts. seconds: time limit for the batches that are being sampled ahead; None = unlimited.

        Raises: UserError, if the workdir has vanished, or its bucket cannot be written.
        """
        self.log.sync()  # a resumed run expects the record of the checkpoint's step in the log
        self.sync_workdir()
        models: PyTree = {name: self.run_state.states[name] for name in self.models.shapes()}
        parts = {MODELS: PartState({}, models)}
        parts |= {name: part.state(seconds) for name, part in self.trainer.stateful_parts.items()}
        self.checkpoints.save(self.run_state.step, parts, attempt=self.run_state.attempt)
        self.run_state.saved_step = self.run_state.step
        WATCHDOG.report_progress()

    def finish(self) -> None:
        """Ends the run after the last step."""
        if self.run_state.step < self.plan.steps:
            best = f"{max(self.checkpoints.accuracies.values()):.1%}"
            self.log.print_line(f"early stop: {self.plan.patience} evaluations were not better than {best}")
        self.trainer.wait_until_idle()
        if unlearned_text := self.trainer.unlearned_text():
            self.log.print_line(unlearned_text)
        with self.stop.deferred():
            with progress.task("writing the last checkpoint"):
                self.checkpoints.tidy()
            self.trainer.export(self.run_state.states)
            self.log.end(self.run_state.step, self.compilations)

    def finish_early(self) -> None:
        """Ends the run after a signal: writes a checkpoint, and the last record if its evaluation was interrupted."""
        if self.run_state.unwritten_record:
            self.log.write(self.run_state.unwritten_record)
        if self.run_state.saved_step < self.run_state.step:
            self.save(seconds=max(PREEMPTION_SECONDS / 2 - self.stop.seconds, 0))
        self.log.finish()
        self.checkpoints.wait()
        # The export is smaller than a checkpoint and replaces the old folder only when it is complete. It is skipped
        # while `restore` runs, because the states are empty then.
        seconds = max(distributed.exchange(self.stop.seconds))  # the same decision in all processes
        if self.run_state.states and self.run_state.step and seconds < PREEMPTION_SECONDS / 2:
            self.trainer.export(self.run_state.states)
        self.log.end(self.run_state.step, self.compilations, self.stop.ending_text())
