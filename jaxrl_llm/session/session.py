"""A session holds the lasting state of a run, and defines how the run resumes, saves and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.errors import StoppedByHealth
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import distributed, progress
from jaxrl_llm.machine.compilation import Compilations
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.session import json_lines
from jaxrl_llm.session.checkpoint import MODELS, Checkpoints
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.profile import Profile, steps_of
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.settings import Plan
from jaxrl_llm.session.signals import SECONDS, Stop
from jaxrl_llm.structs import PartState, PyTree, StatefulPart


class ModelStates(Protocol):
    """The states of the models of a run: how they begin, and what a checkpoint holds of them."""

    def shapes(self) -> States:
        """Returns the states that a checkpoint holds, as shapes with shardings."""
        ...

    def initial_states(self) -> States:
        """Returns the states at step 0."""
        ...

    def complete_restored(self, states: States, attempt: int) -> States:
        """Returns the states of a checkpoint with what it leaves out.

        attempt: how often the run has gone back, if it has just done so; else 0.
        """
        ...


class Trainer(Protocol):
    """What a session asks of `train` or `sft`, whose steps it runs."""

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart]:
        """What a checkpoint keeps beside the states of the models."""
        ...

    def start(self, states: States, step: int, attempt: int) -> Any:
        """Begins after `step`. Returns what its step gets: the states, or what lends them."""
        ...

    def wait_until_idle(self) -> None:
        """Waits until nothing beside the main thread uses the states. Raises: UserError, if such work has failed."""
        ...

    def evaluate(self, states: States, /) -> dict[str, float]:
        """Returns the metrics of an evaluation. The best checkpoint is the one with the largest eval/accuracy."""
        ...

    def export(self, states: States, /) -> None:
        """Writes the policy as a folder of Hugging Face."""
        ...


@dataclass
class RunState:
    """Mutable progress of a run: its current step, states and last checkpoint."""

    step: int = 0  # last step whose update `states` contains
    saved_step: int = 0  # step of the newest checkpoint
    states: States = field(default_factory=dict)
    unwritten_record: Record | None = None  # record of `step` until the log has written it
    attempt: int = 0  # number of rollbacks so far


@dataclass
class Session:
    """What lasts of a run: its workdir with log and checkpoints, the rules that act, signals, and where it stands."""

    workdir: Path
    check_lock: Callable[[], None]  # raises: UserError, if another process has taken the lock of the workdir
    keep: Callable[[], None]  # copies what is in the local workdir to where the run is kept
    plan: Plan
    log: Log
    health: Health
    rollbacks: Rollbacks
    checkpoints: Checkpoints
    stop: Stop
    compilations: Compilations
    models: ModelStates
    trainer: Trainer
    run_state: RunState = field(default_factory=RunState)

    def profile(self) -> Profile:
        """Returns the tracer of the steps that config.log.profile names."""
        return Profile(steps_of(self.plan.log.profile, self.plan.steps), self.workdir / "profile", self.log.say)

    def start(self, test: Callable[[], None] | None = None) -> Any:
        """Restores, tests a new run, and evaluates if the log lacks it. Returns what the next step gets."""
        carried = self.restore()
        if test and not self.run_state.step and not self.run_state.attempt:
            test()
        step = self.run_state.step
        # The log lacks an evaluation before the first step, or after a signal interrupted the last evaluation.
        if self.log.lacks_evaluation(step) and (measured := self.evaluate(step)):
            with self.stop.deferred():
                self.log.add_evaluation(step, measured)
        return carried

    def restore(self) -> Any:
        """Moves all parts to the newest checkpoint, or to the beginning. Returns what the next step gets.

        If the run has decided to go back, deletes the checkpoints after that step.
        """
        decisions = self.rollbacks.read()
        attempt, undone = len(decisions), decisions[self.checkpoints.attempt() :]
        for decision in undone:
            self.checkpoints.go_back(decision.to)
        with progress.task("reading the checkpoint"):
            step, parts = self.checkpoints.resume(self.models.shapes())
        for name, part in self.trainer.stateful_parts.items():
            part.load(parts.get(name))
        # Nothing else may hold these arrays: `complete_restored` moves some of them to the host, before the push needs
        # memory.
        states = parts.pop(MODELS).arrays if parts else self.models.initial_states()
        states = self.models.complete_restored(states, attempt if undone else 0)
        parts.clear()
        self.log.start(step)
        seen = self.log.seen_by_health()
        # The record of `step` is judged one step later, as in a run that was not interrupted.
        self.health.start(seen[:-1] if seen and seen[-1]["step"] == step else seen)
        self.run_state = RunState(step, step, states, None, attempt)
        self.checkpoints.accuracies = self.log.accuracies()
        self.checkpoints.tidy_bucket()
        carried = self.trainer.start(states, step, attempt)
        self.stop.finish = self.finish_early  # last: from here on a signal has a complete state to save
        return carried

    def commit(self, states: States, record: Record) -> None:
        """Makes a step the current state. Before this call a signal loses the step; after it a signal saves it."""
        self.run_state.states, self.run_state.step, self.run_state.unwritten_record = states, record.step, record
        WATCHDOG.stepped()

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the metrics of an evaluation after `step` if it is due, without sets without a verdict; else {}."""
        every = self.plan.evaluate_every
        if not every or (step % every and step != self.plan.steps):
            return {}
        measured = self.log.with_verdicts(step, self.trainer.evaluate(self.run_state.states))
        self.checkpoints.accuracies |= json_lines.accuracies([{"step": step} | measured])
        return measured

    def stagnates(self) -> bool:
        """Returns whether the last `eval.patience` evaluations were no better than the best one before them."""
        patience, accuracies = self.plan.patience, [*self.checkpoints.accuracies.values()]
        before, last = accuracies[:-patience], accuracies[-patience:]
        return patience > 0 and bool(before) and max(last) <= max(before)

    def judge(self, records: list[dict[str, Any]]) -> bool:
        """Applies the health rules to the last record, if there is one. Returns whether the run must go back.

        `start` then goes back. Raises: StoppedByHealth, if a rule stops the run.
        """
        action, step, finding = self.health.judge(records or self.log.last())
        if finding and action == "stop":
            latest = self.checkpoints.latest()
            raise StoppedByHealth(f"step {step}: {finding.evidence}, because {finding.cause}; {latest}: {finding.fix}")
        if finding and action == "roll back":
            self.trainer.wait_until_idle()  # then nothing uses these states
            most, saved = self.plan.most_rollbacks, self.checkpoints.steps()
            with self.stop.deferred():  # from the decision on, a signal must not save these states
                decision = self.rollbacks.decide(step, finding.record(), saved, most)
                self.run_state.states, self.run_state.saved_step, self.run_state.unwritten_record = (
                    {},
                    self.run_state.step,
                    None,
                )
            self.log.say(f"    health {finding.line()}")
            self.log.say(f"    rollback {self.run_state.attempt + 1} of at most {most}: back to step {decision.to}")
        return action == "roll back"

    def write(self, record: Record) -> bool:
        """Writes the record of a step, and a checkpoint if it is due. Returns whether `judge` sends the run back.

        Raises: UserError, if another process has taken the lock of the workdir.
        """
        self.check_lock()
        with self.stop.deferred():
            self.log.write(record)
            self.run_state.unwritten_record = None
        self.checkpoints.check()
        best = self.checkpoints.is_best(record.evaluation.get("eval/accuracy"))
        last = record.step == self.plan.steps or self.stagnates()
        due = record.step % self.plan.checkpoint.every == 0 or best or last
        back = due and self.judge(self.log.finish())  # before saving: a bad state must not replace a good checkpoint
        if due and not back:
            with self.stop.deferred():
                self.save()
        return back

    def save(self, *, seconds: float | None = None) -> None:
        """Saves all parts. seconds: how long it may wait for the batches that are sampled ahead.

        Raises: UserError, if the workdir has vanished, or its bucket cannot be written.
        """
        self.log.sync()  # a resumed run expects the record of the checkpoint's step in the log
        self.keep()
        models: PyTree = {name: self.run_state.states[name] for name in self.models.shapes()}
        parts = {MODELS: PartState({}, models)}
        parts |= {name: part.state(seconds) for name, part in self.trainer.stateful_parts.items()}
        self.checkpoints.save(self.run_state.step, parts, attempt=self.run_state.attempt)
        self.run_state.saved_step = self.run_state.step
        WATCHDOG.moved()

    def finish(self) -> None:
        """Ends the run after the last step."""
        if self.run_state.step < self.plan.steps:
            best = f"{max(self.checkpoints.accuracies.values()):.1%}"
            self.log.say(f"early stop: {self.plan.patience} evaluations were not better than {best}")
        self.trainer.wait_until_idle()
        with self.stop.deferred():
            with progress.task("writing the last checkpoint"):
                self.checkpoints.tidy()
            self.trainer.export(self.run_state.states)
            self.log.end(self.run_state.step, self.compilations)

    def finish_early(self) -> None:
        """Ends the run after a signal: writes the last record if its evaluation was interrupted, and a checkpoint."""
        if self.run_state.unwritten_record:
            self.log.write(self.run_state.unwritten_record)
        if self.run_state.saved_step < self.run_state.step:
            self.save(seconds=max(SECONDS / 2 - self.stop.seconds, 0))
        self.log.finish()
        self.checkpoints.wait()
        # The folder is smaller than a checkpoint, and never half-written. There are no states while `restore` runs.
        seconds = max(distributed.exchange(self.stop.seconds))  # the same decision in all processes
        if self.run_state.states and self.run_state.step and seconds < SECONDS / 2:
            self.trainer.export(self.run_state.states)
        self.log.end(self.run_state.step, self.compilations, self.stop.used())
