"""The actor: pushes weights to the engine and samples the batches of the next steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, from_text, to_text
from jaxrl_llm.machine import distributed, keys, sharding
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.prefetch import Prefetcher
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import Samples, SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.structs import PartState, PyTree, Rollouts


class WeightLease(NamedTuple):
    """States of a run whose parameters the engine may still read. An update, which donates them, takes them back."""

    states: PyTree  # to read
    params: PyTree  # those that were pushed
    pushed: Future[Rollouts | None]
    weight_check: WeightCheck | None

    def reclaim(self) -> tuple[PyTree, dict[str, Any]]:
        """Waits until the engine no longer reads the parameters. Returns the states, and the weight check's metrics.

        Raises: UserError, if the engine does not have the pushed weights.
        """
        answer = self.pushed.result()
        measured = self.weight_check.check(answer, self.params) if self.weight_check and answer else {}
        return self.states, measured


class Actor:
    """Samples a batch for each step. The batch of step s comes from the weights after step s - 1 - lag.

    Call `load` and `begin` first, and then `next` and `push` once per step, in this order. With a lag, one thread
    pushes and samples while the caller's thread learns. The step count decides the order of its work, not the time.
    """

    def __init__(
        self,
        engine: Engine,
        source: SampleSource,
        seed: int,
        *,
        lag: int,
        last: int,
        weight_check: WeightCheck | None = None,
        curriculum: Curriculum | None = None,
        device: Any = None,
    ):
        """seed: seed of the run; last: last step of the run; curriculum: order of `source`'s prompts, or None.

        device: a device that only the engine uses, None if it shares the trainer's devices or has none on this host.
        """
        self._device = device
        self.engine, self._source = engine, source
        self._seed, self._attempt = seed, 0
        self._lag, self._last, self._check = lag, last, weight_check
        self._curriculum = curriculum
        # Marks of the last step. With a lag, a draw knows the marks of an earlier step.
        self._visits = curriculum.no_signal if curriculum else None
        self._beginning = self._position = self._now()  # after the last batch learned from
        self._in_flight: InFlightGroups | None = None  # groups that go on after the last step
        self._prefetcher: Prefetcher[Samples] = Prefetcher(self._sample, lag=lag, last=last)
        self._sampled: list[Samples] = []  # by an earlier process, for the steps after `begin`
        self._learned = 0  # last step whose `push` no `next` has followed; 0: none
        self._current: Samples | None = None  # the batch of `next`, until its `push`
        self._unpushed: tuple[PyTree, PyTree, int] | None = None  # states, parameters and number of the last step
        self.lease: WeightLease  # by the last `begin` or `push`

    def load(self, state: PartState | None) -> None:
        """Goes on at the position in the data of a state, with its batches; None: at the start of the data."""
        # Waits: a batch in sampling still moves the iterator.
        self._prefetcher.close(wait=True)
        self._prefetcher = Prefetcher(self._sample, lag=self._lag, last=self._last)
        notes = state.notes if state else {"attempt": 0, "positions": [self._beginning]}
        metrics, arrays = (notes["metrics"], state.arrays) if state and state.arrays else ([], [])
        # One for each batch that waits, after the one for the batches that were learned from.
        self._position, *positions = notes["positions"][: 1 + len(metrics)]
        self._attempt, self._current, self._learned, self._in_flight = notes["attempt"], None, 0, None
        # The state of the prompts is set before the push is ordered, because with a lag the thread samples right after
        # it.
        self._source.prompts.set_state([self._position, *positions][-1]["data"])
        if self._visits is not None:
            size = len(self._visits)
            self._visits = from_text(notes["visits"], size) if "visits" in notes else np.zeros(size, bool)
        batches = zip(arrays[: len(metrics)], metrics, notes["replaced"] if metrics else [], strict=True)
        ordered = [self._source.from_checkpoint(*batch) for batch in batches]
        for in_flight in arrays[len(metrics) :]:
            self._in_flight = InFlightGroups.from_checkpoint(sharding.to_host(in_flight), self._source.collate)
        self._source.in_flight = self._in_flight
        self._sampled = [
            replace(samples, position=position, in_flight=self._in_flight)
            for samples, position in zip(ordered, positions, strict=True)
        ]

    def begin(self, states: PyTree, params: PyTree, step: int, attempt: int = 0) -> WeightLease:
        """Begins after `step`, once `load` has set the position, and lends the engine the parameters of `states`.

        attempt: how often the run has gone back. Each attempt has other samples: it drops the batches and the groups
        that an earlier attempt has sampled, and draws the prompts of the batches again.
        """
        if attempt != self._attempt and (self._sampled or self._in_flight):
            self._sampled, self._in_flight, self._source.in_flight = [], None, None
            self._source.prompts.set_state(self._position["data"])
        self._attempt = attempt
        self.lease, self._unpushed = self._ordered_push(states, params, step), None
        # Batches are ordered after the push, so that they are sampled from these weights.
        self._prefetcher.begin(step, self._sampled)
        self._sampled = []
        return self.lease

    def next(self) -> Samples:
        """Waits for the batch of the next step and returns it. Returns the same batch until `push`.

        Here, not at the end of a step: only now does the last step need neither the engine nor the devices.
        """
        if self._learned:
            self._prefetcher.learned(self._learned)
            self._learned = 0
        if self._current is None:
            # The main thread does this, because all processes must call programs in the same order.
            self._current = self._source.apply_replacements(self._prefetcher.next())
        return self._current

    def push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        """Drops the batch that `step` has learned from, and lends the engine the parameters of the states after it."""
        assert self._current, "`next` comes before `push`"
        samples, self._current = self._current, None
        self._position, self._in_flight = samples.position, samples.in_flight
        # The position behind this batch: a checkpoint from now on begins there.
        self._prefetcher.used()
        self._learned = step
        if self._curriculum and self._visits is not None:
            # `no_signal` waits for the reward functions.
            visits = samples.prompts.numbers, samples.no_signal, samples.replaced_rows
            self._visits = self._curriculum.visited(self._visits, *visits)
        if step < self._last:
            self.lease = self._ordered_push(states, params, step)
            return self.lease
        # No step samples from these weights. If an evaluation does, `wait` pushes them.
        self._unpushed = states, params, step
        self.lease = WeightLease(states, params, self._prefetcher.do(lambda: None), None)
        return self.lease

    def wait(self) -> None:
        """Waits until the engine has the newest weights, and samples nothing."""
        if self._unpushed:
            self.lease, self._unpushed = self._ordered_push(*self._unpushed), None
        self.lease.pushed.result()
        # When a run starts, batches are ordered only after the push.
        self.waiting()

    def waiting(self, seconds: float | None = None) -> list[Samples]:
        """Waits for the ordered batches that no step has used, at most `seconds`, and returns the finished ones.

        With several processes it waits for all: each must save the same batches.
        """
        return self._prefetcher.waiting(seconds if distributed.count() == 1 else None)

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the position in the data, the batches that wait for their update, and the groups that go on.

        Waits for these batches.
        """
        batches = self.waiting(seconds)
        in_flight = batches[-1].in_flight if batches else self._in_flight
        positions = [self._position, *(samples.position for samples in batches)]
        settled = list(map(self._source.apply_replacements, batches))
        metrics = [{name: float(x) for name, x in samples.metrics.items()} for samples in settled]
        notes = {"attempt": self._attempt, "positions": positions, "metrics": metrics}
        notes |= {"replaced": [samples.replaced_rows for samples in settled]}
        notes |= {"visits": to_text(self._visits)} if self._visits is not None else {}
        arrays = [self._source.to_checkpoint(samples) for samples in settled]
        if in_flight:
            arrays.append(sharding.shard_batch(in_flight.to_checkpoint(), self._source.mesh))
        return PartState(notes, arrays)

    def close(self) -> None:
        """Starts nothing more."""
        self._prefetcher.close()

    def _ordered_push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        pushed = self._prefetcher.do(self._push, params, step, self._visits)
        if distributed.count() > 1 or self._device:
            # It gathers the weights on the trainer's devices: no other program may come between, in any process.
            pushed.result()
        return WeightLease(states, params, pushed, self._check)

    def _push(self, params: PyTree, step: int, visits: np.ndarray | None) -> Rollouts | None:
        if self._curriculum and visits is not None:
            # The marks change with a push, so that the step decides what a draw knows, and not the time.
            self._curriculum.no_signal = visits
        self.engine.update_weights(params, step)
        return self._check.ask() if self._check else None

    def _sample(self, step: int) -> Samples:
        # What has no place of its own must not wait for the programs of the trainer.
        with jax.default_device(self._device):
            # Steps are below 2**31, so no step has the number of an attempt.
            attempt = [2**32 - self._attempt] if self._attempt else []
            samples = self._source.sample(keys.derived(self._seed, *attempt, step))
        if not self._lag:
            # The engine keeps its weights if there is a lag, because one push may serve several batches.
            self.engine.release()
        more = self._curriculum.metrics() if self._curriculum else {}
        return replace(samples, position=self._now(), metrics=samples.metrics | more)

    def _now(self) -> dict[str, Any]:
        """Returns the position of the data, and the shapes in use: both decide the next batch."""
        return {"data": self._source.prompts.get_state()}
