"""A run: its parts, the states that it has come to, and what survives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms import kl
from jaxrl_llm.algorithms.credit import CreditFn
from jaxrl_llm.checkpoint import Checkpoints, Pending
from jaxrl_llm.compilation import Compilations
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import Health
from jaxrl_llm.health.rules import WINDOW
from jaxrl_llm.host.signals import SECONDS, NoSignals, StopSignals
from jaxrl_llm.learner.scorers import Scorer, States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.log import Log
from jaxrl_llm.record import Record
from jaxrl_llm.structs import Array, Batch, Config, PyTree


class Source(Protocol):
    """Where the batches of a run come from: an `Actor`, or the examples of `sft`."""

    def reset(self, step: int, params: PyTree, pending: Pending | None = None) -> None:
        """Goes on after `step`, with these weights, and as `pending` says; without it, at the start of the data."""
        ...

    def next(self) -> Any: ...

    def finish_push(self, params: PyTree) -> dict[str, Any]: ...

    def push(self, params: PyTree, step: int) -> None: ...

    def advance(self, step: int) -> None: ...

    def pending(self, seconds: float | None = None) -> Pending: ...


@dataclass
class Run:
    """The parts of a run, in the order in which a step uses them, and where it stands."""

    config: Config
    workdir: Path
    mesh: Mesh
    actor: Source
    scorers: dict[str, Scorer]
    assign_credit: CreditFn
    learners: dict[str, Learner]
    shapes: States  # shapes and shardings of the states that a checkpoint holds
    log: Log
    health: Health
    checkpoints: Checkpoints
    stop: StopSignals | NoSignals
    reference: Callable[[], PyTree] | None  # parameters of the KL's anchor at the beginning of the run
    minibatches: Callable[[int], list[Array]]  # step -> the rows of each of its updates
    accuracy: Callable[[States], float]  # on the held-out problems
    export: Callable[[PyTree], None]  # of the policy's parameters, as a Hugging Face folder
    compilations: Compilations
    # Where it stands. What a signal saves, in another thread, is this.
    step: int = 0  # the last one that is in the states
    states: States = field(default_factory=dict)
    saved: int = 0  # the last one that is in a checkpoint
    unwritten: Record | None = None  # of that last step, while it is not written

    def restore(self, before: int | None = None) -> tuple[States, int]:
        """The states after the newest step that has a checkpoint, or as a run begins, and that step.

        All other parts go on from there. before: only a step below that; the checkpoints after it are given up.
        """
        if self.states:  # of a run that goes on: nothing may use them any more, and a signal not save them
            self.actor.finish_push(self.states["policy"].params)
            self.log.finish()
            self.states, self.saved, self.unwritten = {}, self.step, None
        step, states, pending = self.checkpoints.resume(self.shapes, before)
        if states is None:
            states = {name: learner.init() for name, learner in self.learners.items()}
            if self.reference:
                states["reference"] = jax.tree.map(jnp.copy, states["policy"].params)
        elif self.reference and "reference" not in states:  # it stays what it was at the beginning
            states["reference"] = self.reference()
        self.log.begin(step)
        self.health.begin(self.log.last(WINDOW))
        self.step = self.saved = step
        self.states, self.unwritten = states, None
        self.actor.reset(step, states["policy"].params, pending)
        self.stop.finish = self.finish_early
        return states, step

    def score(self, states: States, batch: Batch) -> dict[str, Array]:
        """Columns [B, G, C] of all models that score."""
        return {name: x for scorer in self.scorers.values() for name, x in scorer.score(states, batch).items()}

    def coefficients(self, states: States) -> dict[str, Array]:
        """What the policy's coefficients are in the next update."""
        return self.learners["policy"].coefficients(states["policy"])

    def learning(self, step: int) -> dict[str, Learner]:
        """The learners of a step."""
        return {name: learner for name, learner in self.learners.items() if step > learner.frozen_steps}

    def moved_reference(self, states: States, step: int) -> States:
        """The states after `step`, with the reference moved towards the policy if it is time."""
        every = self.config.kl.refresh_every if "reference" in self.shapes else 0
        if not every or step % every:
            return states
        return states | {"reference": kl.mix_params(states["reference"], states["policy"].params, self.config.kl.mix)}

    def commit(self, states: States, record: Record) -> None:
        """A step is learned. Until here a signal would have lost it, from here on it is saved."""
        self.states, self.step, self.unwritten = states, record.step, record

    def evaluate(self, step: int) -> dict[str, float]:
        """The accuracy after `step` if it is time, else nothing."""
        every = self.config.eval.every
        if not every or (step % every and step != self.config.num_steps):
            return {}
        return {"eval/accuracy": self.accuracy(self.states)}

    def evaluate_first(self, step: int) -> None:
        """Before the first step, or where a signal cut the evaluation of the last one off."""
        if self.log.lacks_evaluation(step) and (found := self.evaluate(step)):
            with self.stop.deferred():
                self.log.add_evaluation(step, found)

    def judge(self, record: dict[str, Any] | None) -> None:
        """Asks the health rules. Raises: UserError, if one of them stops the run."""
        verdict = self.health.judge(record)
        if verdict.action == "stop":
            latest = self.checkpoints.latest()
            last = f"the last checkpoint is {latest}" if latest else "there is no checkpoint"
            raise UserError(f"{verdict.reason}; {last}: {verdict.fix}")

    def write(self, record: Record) -> None:
        """The line of a step, and a checkpoint if it is time."""
        self.log.write(record)
        self.unwritten = None
        self.checkpoints.check()
        last = record.step == self.config.num_steps
        if record.step % self.config.checkpoint.every == 0 or record.evaluation or last:
            self.judge(self.log.finish())  # a state that a rule stops at must not take the place of a good one
            self.save(record.evaluation.get("eval/accuracy"))

    def save(self, accuracy: float | None = None, *, seconds: float | None = None) -> None:
        """A checkpoint of the states, and of what is sampled ahead of them, which may take so many seconds."""
        self.log.finish()  # what the log says of a step is there before its checkpoint
        states = {name: self.states[name] for name in self.shapes}
        self.checkpoints.save(self.step, states, self.actor.pending(seconds), accuracy)
        self.saved = self.step

    def finish(self) -> None:
        """The end after the last step."""
        self.actor.finish_push(self.states["policy"].params)
        with self.stop.deferred():
            self.checkpoints.wait()
            self.export(self.states["policy"].params)
            self.log.end(self.step, self.compilations)

    def finish_early(self) -> None:
        """What a signal leaves to do: the line of the last step if its evaluation was cut off, and its checkpoint."""
        if self.unwritten:
            self.log.write(self.unwritten)
        if self.saved < self.step:
            self.save(seconds=max(SECONDS / 2 - self.stop.seconds, 0))
        self.log.finish()
        self.checkpoints.wait()
        if self.step and self.stop.seconds < SECONDS / 2:  # it is less than a checkpoint, and never half-written
            self.export(self.states["policy"].params)
        self.log.end(self.step, self.compilations, self.stop.used())
