"""The actor: pushes weights to the engine and samples the batches of the next steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, from_text, to_text
from jaxrl_llm.machine import distributed, keys, transfers
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.prefetch import Prefetcher
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import Samples, SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.structs import PartState, PyTree, Rollouts


class WeightLease(NamedTuple):
    """States of a run whose parameters the engine may still read. An update donates them, so it reclaims them first."""

    states: PyTree  # states of the models, to read only
    params: PyTree  # parameters that were pushed to the engine
    pushed: Future[Rollouts | None]  # ends when the engine no longer reads `params`; answers for the weight check
    weight_check: WeightCheck | None  # None if the engine needs no check

    def reclaim(self) -> tuple[PyTree, dict[str, Any]]:
        """Waits until the engine no longer reads the parameters. Returns the states, and the weight check's metrics.

        Raises: UserError, if the engine does not have the pushed weights.
        """
        answers = self.pushed.result()
        metrics = self.weight_check.check(answers, self.params) if self.weight_check and answers else {}
        return self.states, metrics


class Actor:
    """Samples a batch for each step. The batch of step s comes from the weights after step s - 1 - lag.

    Call `load` and `start` first, and then `next` and `push` once per step, in this order. With a lag, one thread
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
        """seed: seed of the run. last: last step of the run. curriculum: order of `source`'s prompts, None if the data
        decides the order.

        device: device that only the engine uses, None if the engine shares the trainer's devices or has none on this
        host.
        """
        self._device = device
        self.engine, self._source = engine, source
        self._seed, self._attempt = seed, 0
        self._lag, self._last, self._check = lag, last, weight_check
        self._curriculum = curriculum
        # Marks [rows] of the curriculum after the last step: True for a row whose last group had no signal. With a lag,
        # sampling uses the marks of an earlier step.
        self._no_signal_rows = curriculum.no_signal if curriculum else None
        # Position in the data after the last batch that was learned from.
        self._start_position = self._position = self._data_position()
        self._in_flight: InFlightGroups | None = None  # groups that were incomplete after that batch
        self._prefetcher: Prefetcher[Samples] = Prefetcher(self._sample, lag=lag, last=last)
        self._restored: list[Samples] = []  # batches of a checkpoint, until `start` hands them to the prefetcher
        self._learned_step = 0  # last step that was pushed but not yet followed by `next`; 0: no such step
        self._current: Samples | None = None  # batch that `next` has returned, until its `push`
        self._unpushed: tuple[PyTree, PyTree, int] | None = None  # states, parameters and number of the last step
        self.lease: WeightLease  # result of the last `start` or `push`

    def load(self, state: PartState | None) -> None:
        """Restores the position in the data and the sampled batches. state: None for the start of the data."""
        # Wait for the prefetcher, because a batch in sampling still moves the data iterator.
        self._prefetcher.close(wait=True)
        self._prefetcher = Prefetcher(self._sample, lag=self._lag, last=self._last)
        notes = state.notes if state else {"attempt": 0, "positions": [self._start_position]}
        metrics, arrays = (notes["metrics"], state.arrays) if state and state.arrays else ([], [])
        # The first position follows the batches that were learned from. Each sampled batch adds the position after it.
        self._position, *positions = notes["positions"][: 1 + len(metrics)]
        self._attempt, self._current, self._learned_step, self._in_flight = notes["attempt"], None, 0, None
        # Set the position of the prompts before a push is submitted, because with a lag the thread samples right after
        # the push.
        newest_position = positions[-1] if positions else self._position
        self._source.prompts.set_state(newest_position["data"])
        if self._no_signal_rows is not None:
            size = len(self._no_signal_rows)
            self._no_signal_rows = from_text(notes["visits"], size) if "visits" in notes else np.zeros(size, bool)
        batches = zip(arrays[: len(metrics)], metrics, notes["replaced"] if metrics else [], strict=True)
        sampled = [self._source.from_checkpoint(*batch) for batch in batches]
        # The arrays of the groups in flight, if any, follow the arrays of the batches.
        for in_flight_arrays in arrays[len(metrics) :]:
            in_flight_arrays = transfers.to_host(in_flight_arrays)
            self._in_flight = InFlightGroups.from_checkpoint(in_flight_arrays, self._source.collate)
        self._source.in_flight = self._in_flight
        self._restored = [
            replace(samples, position=position, in_flight=self._in_flight)
            for samples, position in zip(sampled, positions, strict=True)
        ]

    def start(self, states: PyTree, params: PyTree, step: int, attempt: int = 0) -> WeightLease:
        """Starts after `step`, once `load` has restored the position. Leases `params` to the engine.

        states: train states, which the lease holds until it is reclaimed, because they may share arrays with `params`.
        params: parameters to push. attempt: number of rollbacks of the run so far. Each attempt samples anew: it drops
        the batches and the groups in flight of an earlier attempt, and uses the prompts of these batches again.
        """
        if attempt != self._attempt and (self._restored or self._in_flight):
            self._restored, self._in_flight, self._source.in_flight = [], None, None
            self._source.prompts.set_state(self._position["data"])
        self._attempt = attempt
        self.lease, self._unpushed = self._submit_push(states, params, step), None
        # Start the prefetcher after the push, so that its batches are sampled from these weights.
        self._prefetcher.start(step, self._restored)
        self._restored = []
        return self.lease

    def next(self) -> Samples:
        """Waits for the batch of the next step and returns it. Returns the same batch until `push`.

        It also orders a later batch from the prefetcher. `push` cannot order that batch, because after `push` the last
        step may still use the engine and the devices, for example for an evaluation.
        """
        if self._learned_step:
            self._prefetcher.order_after(self._learned_step)
            self._learned_step = 0
        if self._current is None:
            # The main thread replaces groups, because all processes must run their programs in the same order.
            self._current = self._source.apply_replacements(self._prefetcher.next())
        return self._current

    def push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        """Pushes the parameters after `step` to the engine and drops the batch of `step`. Returns the new lease."""
        assert self._current, "`next` comes before `push`"
        samples, self._current = self._current, None
        # A run that resumes from a later checkpoint continues after this batch.
        self._position, self._in_flight = samples.position, samples.in_flight
        self._prefetcher.drop_current()
        self._learned_step = step
        if self._curriculum and self._no_signal_rows is not None:
            # `no_signal` waits for the reward functions.
            visits = samples.prompts.numbers, samples.no_signal, samples.replaced_rows
            self._no_signal_rows = self._curriculum.visited(self._no_signal_rows, *visits)
        if step < self._last:
            self.lease = self._submit_push(states, params, step)
            return self.lease
        # No step samples from the last weights. `wait_for_weights` pushes them if an evaluation needs them.
        self._unpushed = states, params, step
        self.lease = WeightLease(states, params, self._prefetcher.submit(lambda: None), None)
        return self.lease

    def wait_for_weights(self) -> None:
        """Waits until the engine has the newest weights and the thread is idle. Samples nothing itself."""
        if self._unpushed:
            self.lease, self._unpushed = self._submit_push(*self._unpushed), None
        self.lease.pushed.result()
        # When a run starts, the thread samples batches after the push.
        self.wait_for_batches()

    def wait_for_batches(self, seconds: float | None = None) -> list[Samples]:
        """Waits at most `seconds` for the ordered batches that no step has used, and returns the finished ones.

        With several processes it waits for all batches, because every process must save the same batches.
        """
        return self._prefetcher.finished_batches(seconds if distributed.count() == 1 else None)

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the position in the data, the sampled batches that no update has used, and the groups in flight.

        seconds: longest wait for batches in sampling, None = no limit.
        """
        batches = self.wait_for_batches(seconds)
        in_flight = batches[-1].in_flight if batches else self._in_flight
        positions = [self._position, *(samples.position for samples in batches)]
        complete_batches = list(map(self._source.apply_replacements, batches))
        metrics = [{name: float(x) for name, x in samples.metrics.items()} for samples in complete_batches]
        notes = {"attempt": self._attempt, "positions": positions, "metrics": metrics}
        notes |= {"replaced": [samples.replaced_rows for samples in complete_batches]}
        notes |= {"visits": to_text(self._no_signal_rows)} if self._no_signal_rows is not None else {}
        arrays = [self._source.to_checkpoint(samples) for samples in complete_batches]
        if in_flight:
            arrays.append(transfers.shard_batch(in_flight.to_checkpoint(), self._source.mesh))
        return PartState(notes, arrays)

    def unlearned_text(self) -> str:
        """Describes the groups in flight, from which no step learns if the run ends now; "" without such groups.

        All processes must call it.
        """
        if not self._in_flight:
            return ""
        tokens = distributed.gather(self._in_flight.rollouts.loss_mask.sum(axis=(1, 2)))
        groups = np.count_nonzero(tokens)
        return f"never learned from: {groups:,} groups in flight, with {tokens.sum():,} tokens" if groups else ""

    def close(self) -> None:
        """Starts no further push and no further batch."""
        self._prefetcher.close()

    def _submit_push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        """Starts a push of the parameters in the sampling thread, and returns the lease of the states."""
        pushed = self._prefetcher.submit(self._push, params, step, self._no_signal_rows)
        if distributed.count() > 1 or self._device:
            # The push gathers weights on the trainer's devices, so it must end before any process runs another program.
            pushed.result()
        return WeightLease(states, params, pushed, self._check)

    def _push(self, params: PyTree, step: int, no_signal_rows: np.ndarray | None) -> Rollouts | None:
        """Pushes the parameters to the engine. Returns completions for the weight check, None without a check."""
        if self._curriculum and no_signal_rows is not None:
            # The curriculum gets new marks with a push, so that the step and not the time decides what sampling uses.
            self._curriculum.no_signal = no_signal_rows
        self.engine.update_weights(params, step)
        return self._check.ask() if self._check else None

    def _sample(self, step: int) -> Samples:
        """Samples the completions of a step, and stores the position in the data after them."""
        # Small arrays go to the engine's device, because on the trainer's devices they would wait for its programs.
        with jax.default_device(self._device):
            # An attempt's number counts down from 2**32. Steps are below 2**31, so the two never meet in a key.
            attempt = [2**32 - self._attempt] if self._attempt else []
            samples = self._source.sample(keys.derived(self._seed, *attempt, step))
        if not self._lag:
            # If the run has a lag, the engine keeps its weights, because one push may serve several batches.
            self.engine.release()
        curriculum_metrics = self._curriculum.metrics() if self._curriculum else {}
        return replace(samples, position=self._data_position(), metrics=samples.metrics | curriculum_metrics)

    def _data_position(self) -> dict[str, Any]:
        """Returns the position in the data, for a checkpoint."""
        return {"data": self._source.prompts.get_state()}
