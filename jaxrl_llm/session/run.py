"""A run: its parts, its current states, and how it resumes, saves and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import kl
from jaxrl_llm.algorithms.credit import CreditFn
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Reference
from jaxrl_llm.learner.packing import index_shape
from jaxrl_llm.learner.scorers import Scorer, States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import distributed, progress, sharding
from jaxrl_llm.machine.compilation import Compilations, Program
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.shapes import TRAINING, Book, Shape, abstract
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import Tested
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.lock import Lock
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.signals import SECONDS, Stop
from jaxrl_llm.structs import AnyArray, Array, Batch, Config, Pending, PyTree


class Source(Protocol):
    """The source of a run's batches: an `Actor`, or the `Examples` of `sft`."""

    def reset(self, step: int, params: PyTree, pending: Pending | None = None, attempt: int = 0) -> None:
        """Continues after `step` with these weights and `pending`; without it, at the start of the data.

        attempt: how often the run has gone back.
        """
        ...

    def next(self) -> Any: ...

    def finish_push(self, params: PyTree) -> dict[str, Any]: ...

    def push(self, params: PyTree, step: int) -> None: ...

    def advance(self, step: int) -> None: ...

    def pending(self, seconds: float | None = None) -> Pending: ...


@dataclass
class Run:
    """The parts of a run, in the order in which a step uses them, and its current state."""

    config: Config
    workdir: Path
    lock: Lock | None  # of the workdir, in the first process
    mesh: Mesh
    actor: Source
    scorers: dict[str, Scorer]
    assign_credit: CreditFn
    learners: dict[str, Learner]
    shapes: States  # shapes and shardings of the states that a checkpoint holds
    log: Log
    health: Health
    rollbacks: Rollbacks
    checkpoints: Checkpoints
    stop: Stop
    reference: Reference | None
    minibatches: Callable[[int], Sequence[AnyArray]]  # step -> rows of each of its updates
    accuracy: Callable[[States], float]  # on the held-out problems
    problems: int  # their number
    export: Callable[[States], None]  # writes the policy as a Hugging Face folder
    compilations: Compilations
    programs: Callable[[], Iterator[Program]]  # the larger programs of the run, in all their shapes
    book: Book
    # Lengths [B, G] and P -> packed_index [B, E, N, T]; None: each completion is a row.
    packing: Callable[[np.ndarray, int], np.ndarray] | None = None
    tested: Tested | None = None  # what its self-test needs; None: it has none
    # The current state. After a signal, another thread saves it.
    step: int = 0  # last step that `states` contain
    states: States = field(default_factory=dict)
    saved: int = 0  # last step in a checkpoint
    unwritten: Record | None = None  # record of `step` until it is written
    ladders: dict[str, Any] = field(default_factory=dict)  # of learning, after `step` (`shapes.Book`)
    attempt: int = 0  # how often the run has gone back
    accuracies: list[float] = field(default_factory=list)  # of all evaluations up to `step`

    def begin(self) -> tuple[States, int]:
        """Restores, tests a new run, and evaluates if the log lacks it. Returns the states and their step."""
        states, step = self.restore()
        self.self_test(step)
        self.evaluate_first(step)
        return states, step

    def restore(self) -> tuple[States, int]:
        """Returns the states of the newest checkpoint and its step, or the first states and 0.

        Moves all other parts to that step. If the run has decided to go back, deletes the checkpoints after that step.
        """
        decisions = self.rollbacks.read()
        back = decisions[-1] if len(decisions) > self.checkpoints.rollbacks() else None
        with progress.task("reading the checkpoint"):
            step, states, pending, ladders = self.checkpoints.resume(self.shapes, back.to + 1 if back else None)
        self.book.load(TRAINING, ladders)
        self.ladders = ladders
        if states is None:
            states = {name: learner.init() for name, learner in self.learners.items()}
            if self.reference:
                states["reference"] = self.reference.copy(states["policy"].params)
        elif self.reference and "reference" not in states:  # it never moves, so checkpoints leave it out
            states["reference"] = self.reference.load()
        self.attempt = len(decisions)
        if back:
            states |= {"policy": self.learners["policy"].after_rollback(states["policy"], self.attempt)}
        states = self.put_away(states)
        self.log.begin(step)
        self.health.begin(self.log.seen_by_health())
        self.accuracies = self.log.accuracies()
        self.step = self.saved = step
        self.states, self.unwritten = states, None
        self.actor.reset(step, self.policy(states), pending, self.attempt)
        self.stop.finish = self.finish_early  # last: from here on a signal has a complete state to save
        return states, step

    def policy(self, states: States) -> PyTree:
        """Returns all parameters of the policy, as its model takes them."""
        return self.learners["policy"].all_parameters(states["policy"])

    def score(self, states: States, batch: Batch) -> dict[str, Array]:
        """Returns the columns [B, G, C] of all scorers."""
        return {name: x for scorer in self.scorers.values() for name, x in scorer.score(states, batch).items()}

    def compile(self, states: States, plain: Batch, batch: Batch, rows: AnyArray) -> None:
        """Compiles scoring and learning for the shape of this batch, and for ordered shapes in the background.

        plain: the batch that is scored. batch: the batch of an update on `rows`.
        Raises: UserError, if a program does not fit the memory.
        """
        states, plain, batch, rows = abstract((states, plain, batch, rows))
        index, (_, group, limit) = batch.packed_index, batch.completions.shape

        def compile(shape: Shape) -> None:
            size = index_shape(group, limit, shape)
            packed = jax.ShapeDtypeStruct((len(index), *size), index.dtype, sharding=index.sharding)
            for scorer in self.scorers.values():
                scorer.compile(states, replace(plain, packed_index=packed))
            for name, learner in self.learners.items():
                learner.compile(states[name], replace(batch, packed_index=packed), rows)

        self.book.ready(TRAINING, index.shape[2:], compile)
        self.book.compile_ahead(TRAINING, compile)

    def coefficients(self, states: States) -> dict[str, Array]:
        """Returns the policy's coefficients for the next update."""
        return self.learners["policy"].coefficients(states["policy"])

    def learning(self, step: int) -> dict[str, Learner]:
        """Returns the learners that learn in a step."""
        return {name: learner for name, learner in self.learners.items() if step > learner.frozen_steps}

    def settled(self, states: States, step: int) -> States:
        """Returns the states after the updates of `step`. Moves the reference towards the policy if that is due."""
        every = self.config.kl.refresh_every if "reference" in self.shapes else 0
        if every and step % every == 0:
            reference = sharding.move(states["reference"], sharding.DEVICE)
            states = states | {"reference": kl.mix_params(reference, states["policy"].params, self.config.kl.mix)}
        return self.put_away(states)

    def put_away(self, states: States) -> States:
        """Moves to the host's memory what `config.host_memory` names. Scorers and learners bring it back to use it."""
        if "host_memory" not in self.config:  # `sft`
            return states
        if self.config.host_memory.reference and "reference" in states:
            states = states | {"reference": sharding.move(states["reference"], sharding.HOST)}
        if self.config.host_memory.optimizer:
            away = {name: sharding.move(states[name].opt_state, sharding.HOST) for name in self.learners}
            states = states | {name: replace(states[name], opt_state=opt_state) for name, opt_state in away.items()}
        return states

    def commit(self, states: States, record: Record) -> None:
        """Makes a step the current state. Before this call a signal loses the step; after it a signal saves it."""
        self.states, self.step, self.unwritten = states, record.step, record
        WATCHDOG.stepped()
        self.ladders = self.book.state(TRAINING)  # a copy: a signal may come when the next step has counted already

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the accuracy after `step` if an evaluation is due, else {}."""
        every = self.config.eval.every
        if not every or (step % every and step != self.config.num_steps):
            return {}
        self.accuracies.append(self.accuracy(self.states))
        return {"eval/accuracy": self.accuracies[-1], "eval/problems": self.problems}

    def stagnates(self) -> bool:
        """Returns whether the last `eval.patience` evaluations were no better than the best one before them."""
        patience = self.config.eval.patience
        before, last = self.accuracies[:-patience], self.accuracies[-patience:]
        return patience > 0 and bool(before) and max(last) <= max(before)

    def self_test(self, step: int) -> None:
        """Runs the self-test at the start of a new run."""
        if self.tested and not step and not self.attempt and self.config.health.self_test:
            self_test.at_start(self, self.tested)

    def evaluate_first(self, step: int) -> None:
        """Evaluates before the first step, or again if a signal interrupted the last evaluation."""
        if self.log.lacks_evaluation(step) and (found := self.evaluate(step)):
            with self.stop.deferred():
                self.log.add_evaluation(step, found)

    def judge(self, record: dict[str, Any] | None) -> bool:
        """Applies the health rules. Returns whether the run must go back: `begin` does it.

        Raises: UserError, if a rule stops the run.
        """
        action, step, found = self.health.judge(record)
        if found and action == "stop":
            latest = self.checkpoints.latest()
            last = f"the last checkpoint is {latest}" if latest else "there is no checkpoint"
            raise UserError(f"step {step}: {found.evidence}, because {found.cause}; {last}: {found.fix}")
        if found and action == "roll back":
            self.actor.finish_push(self.policy(self.states))  # then nothing uses these states
            most, saved = self.config.health.rollback.most, self.checkpoints.steps()
            with self.stop.deferred():  # from the decision on, a signal must not save these states
                decision = self.rollbacks.decide(step, found.record(), saved, most)
                self.states, self.saved, self.unwritten = {}, self.step, None
            self.log.say(f"    health {found.line()}")
            self.log.say(f"    rollback {self.attempt + 1} of at most {most}: back to step {decision.to}")
        return action == "roll back"

    def write(self, record: Record) -> bool:
        """Writes the record of a step, and a checkpoint if it is due and `judge` does not send the run back.

        Raises: UserError, if another process has taken the lock of the workdir.
        """
        if self.lock:
            self.lock.check()
        with self.stop.deferred():
            self.log.write(record)
            self.unwritten = None
        self.checkpoints.check()
        accuracy = record.evaluation.get("eval/accuracy")
        last = record.step == self.config.num_steps or self.stagnates()
        if record.step % self.config.checkpoint.every == 0 or self.checkpoints.is_best(accuracy) or last:
            if self.judge(self.log.finish()):  # before saving: a bad state must not replace a good checkpoint
                return True
            with self.stop.deferred():
                self.save(accuracy)
        return False

    def save(self, accuracy: float | None = None, *, seconds: float | None = None) -> None:
        """Saves the states and the batches sampled ahead. seconds: how long it may wait for these batches.

        Raises: UserError, if the workdir has vanished. Orbax would make it again, without config and log.
        """
        if not (self.workdir / "config.json").is_file():
            raise UserError(f"{self.workdir} has vanished: put it back; the same command goes on")
        self.log.sync()  # a resumed run expects the record of the checkpoint's step in the log
        states = {name: self.states[name] for name in self.shapes}
        host = dict(ladders=self.ladders, rollbacks=self.attempt)
        self.checkpoints.save(self.step, states, self.actor.pending(seconds), accuracy, **host)
        self.saved = self.step
        WATCHDOG.moved()

    def finish(self) -> None:
        """Ends the run after the last step."""
        if self.step < self.config.num_steps:
            best = f"{max(self.accuracies):.1%}"
            self.log.say(f"early stop: {self.config.eval.patience} evaluations were not better than {best}")
        self.actor.finish_push(self.policy(self.states))
        with self.stop.deferred():
            with progress.task("writing the last checkpoint"):
                self.checkpoints.wait()
            self.export(self.states)
            self.log.end(self.step, self.compilations)

    def finish_early(self) -> None:
        """Ends the run after a signal: writes the last record if its evaluation was interrupted, and a checkpoint."""
        if self.unwritten:
            self.log.write(self.unwritten)
        if self.saved < self.step:
            self.save(seconds=max(SECONDS / 2 - self.stop.seconds, 0))
        self.log.finish()
        self.checkpoints.wait()
        # The folder is smaller than a checkpoint, and never half-written. There are no states while `restore` runs.
        seconds = max(distributed.exchange(self.stop.seconds))  # the same decision in all processes
        if self.states and self.step and seconds < SECONDS / 2:
            self.export(self.states)
        self.log.end(self.step, self.compilations, self.stop.used())
