"""Partial rollouts: a step takes the groups that are complete first, and the others go on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import test_episodes
import tiny
from test_steps import SHORT, numbers, written
from test_steps import tiny as small_config

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.jax import compiled, layout, programs, sizes, stream
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.structs import Batch, Prompts
from jaxrl_llm.tasks.protocol import Reply
from jaxrl_llm.train import steps

LENGTH, WANTED = 24, 3


@pytest.fixture
def short_rounds(monkeypatch):
    """Pages of 4 tokens, and rounds of 8."""
    monkeypatch.setattr(sizes, "PAGE_TOKENS", 4)
    for module in (programs, stream, compiled, sizes, layout):
        monkeypatch.setattr(module, "ROUND_TOKENS", 8)


def calls(config, mesh=(1, 1, 1), count: int = 4) -> tuple[list[tuple[InFlightGroups, list[int]]], InFlightGroups]:
    """Calls until 3 of 6 groups are complete, `count` times, with fresh prompts in place of those that are complete."""
    model, params = tiny.model_and_params(config, scale=3.0)
    mesh = tiny.mesh_of(mesh)
    sampler = Sampler(model, mesh, max_completion_tokens=LENGTH, stop_ids=(3, 4), pad_id=0)
    tokens, mask = tiny.prompts()
    fresh = lambda at: InFlightGroups.empty(  # noqa: E731
        Prompts(tokens[at], mask[at], [{}] * len(at), np.array(at, np.int32)), tiny.G, LENGTH, 0
    )
    in_flight, taken = fresh([0, 1, 2]), []
    for version in range(count):
        sampler.update_weights(jax.device_put(params, sharding.shardings(params, mesh)), version)
        in_flight = in_flight.concatenate(fresh([(3 * version + b) % tiny.B for b in (3, 4, 5)]))
        key = jax.random.key(version)
        in_flight, complete, idle = sampler.sample_first(in_flight, key, sampling=Sampling(1.3), wanted_groups=WANTED)
        assert 0 < idle < 1
        taken.append((in_flight, complete))
        _, in_flight = in_flight.split(complete)
    return taken, in_flight


@pytest.mark.parametrize("config", [tiny.CONFIG, pytest.param(tiny.GEMMA, marks=pytest.mark.slow)], ids=tiny.CONFIGS)
def test_completions_that_go_on_have_the_log_probabilities_of_the_whole(config, short_rounds):
    """The weights stay the same, so the trainer's are those of all tokens, whichever call sampled them."""
    taken, _ = calls(config)
    model, params = tiny.model_and_params(config, scale=3.0)
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling(1.3)))
    carried = 0
    for in_flight, complete in taken:
        assert len(complete) == WANTED and in_flight.has_ended[complete].all() and not in_flight.has_ended.all()
        r = in_flight.rollouts
        batch = Batch(in_flight.prompts.tokens, in_flight.prompts.mask, r.completions, r.completion_mask, r.loss_mask)
        scored, _ = score(params, batch)
        np.testing.assert_allclose(r.logprobs, np.where(r.loss_mask, scored, 0), atol=2e-5)
        # The tokens of a completion are of weights that grow no older.
        ages = np.where(r.completion_mask, r.versions, 99)
        assert (np.diff(ages, axis=-1) >= 0).all()
        carried += int(((r.versions[complete] < in_flight.rollouts.versions.max()) & r.loss_mask[complete]).sum())
    assert carried > 20


@pytest.mark.slow
def test_devices_change_only_which_completions_are_first(short_rounds):
    taken, rest = calls(tiny.CONFIG, (2, 2, 2))
    assert all(in_flight.has_ended[complete].all() for in_flight, complete in taken)
    assert len(rest.has_ended) == 3


class Rare(test_episodes.Echo):
    """Says nothing to some turns, and measures something in the episodes of the first row alone."""

    def step(self, text: str) -> Reply:
        reply = super().step(text)
        rare = {"rare": 1.0} if self.row == test_episodes.prompts(32).rows[0] else {}
        return replace(reply, metrics=reply.metrics | rare)


def batches_of_episodes(delay: float, *, resumed: bool, count: int = 4) -> list[dict]:
    """The batches of calls until 4 of 8 groups are complete. resumed: each call has the flight of a checkpoint."""
    tokenizer = test_episodes.parts()[2]
    engine = test_episodes.sampler()
    pool = EnvironmentPool(tokenizer, partial(Rare, length=0, delay=delay), **test_episodes.LIMITS)
    rows, pad = test_episodes.prompts(32), tokenizer.pad_token_id
    taken = []
    with closing(pool):
        task = CompletionTask(tokenizer, None, pool)
        collate = lambda numbers: rows.take(list(numbers))  # noqa: E731
        in_flight = task.open_environments(InFlightGroups.empty(rows.take([0, 1, 2, 3]), 4, 40, pad))
        for call in range(1, count + 1):
            later = InFlightGroups.empty(rows.take(list(range(4 * call, 4 * call + 4))), 4, 40, pad)
            if resumed:
                arrays = in_flight.to_checkpoint()
                in_flight = InFlightGroups.from_checkpoint(arrays | {"rollouts": vars(arrays["rollouts"])}, collate)
            in_flight = task.open_environments(in_flight).concatenate(task.open_environments(later))
            key = jax.random.key(call)
            in_flight, complete, _ = task.sample_first(engine, in_flight, key, Sampling(1.5), 4, "test")
            batch, in_flight = in_flight.split(complete)
            arrays = batch.to_checkpoint()
            arrays["rollouts"].episodes.pop("seconds")
            taken.append(arrays)
    return taken


def test_episodes_go_on_alike_whatever_tools_take_and_after_a_resume(short_rounds):
    """`Echo` counts the turns that it has heard: in a resumed run it must hear them again.

    A checkpoint has a metric for all episodes, or for none.
    """
    whole = batches_of_episodes(0.0, resumed=False)
    jax.tree.map(np.testing.assert_array_equal, whole, batches_of_episodes(0.003, resumed=True))
    carried = [batch["rollouts"].episodes["turns"][batch["numbers"] < 4 * i].sum() for i, batch in enumerate(whole, 1)]
    assert sum(carried[1:]) > 20


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_with_the_groups_that_were_on_their_way(short_rounds, tmp_path):
    """Completions often need more than a round, and weights are older by a lag."""
    changes = {"rollout.partial": True, "rollout.max_completion_tokens": 12, "num_steps": 5, "rollout.max_lag": 1}
    config = small_config(**SHORT | changes)
    whole = list(steps(config, tmp_path / "whole"))
    assert sum(record["rollout/carried"] > 0 for record in whole) > 2
    assert max(record["rollout/lag_p95"] for record in whole) > 1
    with closing(steps(config, tmp_path / "run")) as run:
        next(record for record in run if record["step"] == 2)
    list(steps(config, tmp_path / "run"))
    assert numbers(written(tmp_path / "run")) == numbers(whole)
