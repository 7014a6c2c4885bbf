"""Partial rollouts: a step takes the groups that are complete first, and the next step continues the others."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import test_episodes
import tiny
from model_parts import parts, prompts
from test_steps import SHORT
from test_steps import tiny as small_config

from benchmarks.speed.partial import DrawnEngine, make_source, prompts_of, sampled_steps
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.recipe import fit
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.in_flight import FirstCompleteGroups, InFlightGroups
from jaxrl_llm.rollout.jax import compiled, layout, programs, sizes, stream
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.samples import CompletionTask, partial_metrics
from jaxrl_llm.structs import Batch, Prompts
from jaxrl_llm.tasks.protocol import Reply

LENGTH, WANTED = 24, 3


@pytest.fixture
def short_rounds(monkeypatch):
    """Pages of 4 tokens, and rounds of 8."""
    monkeypatch.setattr(sizes, "PAGE_TOKENS", 4)
    for module in (programs, stream, compiled, sizes, layout):
        monkeypatch.setattr(module, "ROUND_TOKENS", 8)


def calls(config, mesh=(1, 1, 1), count: int = 4) -> tuple[list[tuple[InFlightGroups, list[int]]], InFlightGroups]:
    """Calls until 3 of 6 groups are complete, `count` times, with fresh prompts in place of those that are complete.

    Each call requires the last group of those that an earlier call has begun.
    """
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
        wanted = dict(wanted_groups=WANTED, required_groups=[2])
        first = sampler.sample_first(in_flight, key, sampling=Sampling(1.3), **wanted)
        assert 0 < first.computed_tokens < first.slot_steps
        in_flight, complete = first.in_flight, first.complete_groups
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
        assert (
            len({*complete}) == WANTED
            and complete[0] == 2
            and in_flight.has_ended[complete].all()
            and not in_flight.has_ended.all()
        )
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
    """Says nothing to some turns, rewards turns, and measures something in the episodes of the first row alone."""

    def step(self, text: str) -> Reply:
        reply = super().step(text)
        rare = {"rare": 1.0} if self.row == prompts(32).rows[0] else {}
        reward = len(text) / 8 if len(text) % 3 else None
        return replace(reply, metrics=reply.metrics | rare, reward=reward, score=float(len(self.said)))


def batches_of_episodes(delay: float, *, resumed: bool, count: int = 4) -> list[dict]:
    """The batches of calls until 4 of 8 groups are complete. resumed: each call has the flight of a checkpoint."""
    tokenizer = parts()[2]
    engine = test_episodes.sampler()
    pool = EnvironmentPool(tokenizer, partial(Rare, length=0, delay=delay), **test_episodes.LIMITS)
    rows, pad = prompts(32), tokenizer.pad_token_id
    taken = []
    with closing(pool):
        task = CompletionTask(tokenizer, None, pool, keeps_turns=True)
        collate = lambda numbers: rows.take(list(numbers))  # noqa: E731
        in_flight = task.open_environments(InFlightGroups.empty(rows.take([0, 1, 2, 3]), 4, 40, pad))
        for call in range(1, count + 1):
            later = InFlightGroups.empty(rows.take(list(range(4 * call, 4 * call + 4))), 4, 40, pad)
            if resumed:
                arrays = in_flight.to_checkpoint()
                in_flight = InFlightGroups.from_checkpoint(arrays | {"rollouts": vars(arrays["rollouts"])}, collate)
            in_flight = task.open_environments(in_flight).concatenate(task.open_environments(later))
            key = jax.random.key(call)
            due = in_flight.due_groups(2)
            first = task.sample_first(engine, in_flight, key, Sampling(1.5), 4, due, "test")
            assert {*due} <= {*first.complete_groups}
            batch, in_flight = first.in_flight.split(first.complete_groups)
            in_flight = in_flight.one_step_later()
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
    for batch in whole:
        rollouts = batch["rollouts"]
        ends = ~np.isnan(rollouts.turn_rewards)
        assert rollouts.loss_mask[ends].all()
        np.testing.assert_array_equal(ends.sum(axis=-1), rollouts.episodes["turns"])
        np.testing.assert_array_equal(
            np.nansum(rollouts.turn_rewards, axis=-1), rollouts.episodes["reward"] + rollouts.episodes["final_score"]
        )


GROUP_SIZE, LIMIT, BATCH = 2, 200, 6


def drawn_source(seed: int, *, partial: int, max_age: int):
    """Returns a source of samples that runs no model, and the length [N, G] of each completion."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(3, 1.5, (97, GROUP_SIZE))).clip(1, LIMIT).round().astype(np.int32)
    # With so few sequences at a time, some open groups have no token when a call ends.
    engine = DrawnEngine(lengths, LIMIT, devices=1 + seed % 2, max_sequences=2 * (seed % 2))
    return make_source(engine, BATCH, GROUP_SIZE, LIMIT, partial=partial, max_age=max_age), lengths


SETTINGS = [(open_groups, max_age) for open_groups in (1, 3, 6) for max_age in (0, 1, 2)]


def test_age_and_number_of_open_groups_stay_bounded_also_after_a_resume():
    """A source that each step takes from a checkpoint has the batches of one that is not stopped."""
    oldest = dict.fromkeys((0, 1, 2), 0)
    for seed, (open_groups, max_age) in enumerate(SETTINGS):
        source, lengths = drawn_source(seed, partial=open_groups, max_age=max_age)
        resumed, _ = drawn_source(seed, partial=open_groups, max_age=max_age)
        begun_steps, trained = dict[int, int](), list[int]()
        pairs = zip(sampled_steps(source, 12), sampled_steps(resumed, 12), strict=True)
        for step, (samples, again) in enumerate(pairs, 1):
            jax.tree.map(np.testing.assert_array_equal, samples.rollouts, again.rollouts)
            assert samples.metrics == again.metrics
            arrays = resumed.in_flight.to_checkpoint()
            arrays |= {"rollouts": vars(arrays["rollouts"])}
            resumed.in_flight = InFlightGroups.from_checkpoint(arrays, prompts_of)
            in_flight, rollouts, numbers = source.in_flight, samples.rollouts, samples.prompts.numbers
            open_numbers = in_flight.prompts.numbers[in_flight.has_begun]
            for number in [*numbers, *open_numbers]:
                begun_steps.setdefault(int(number), step)
            trained += numbers.tolist()
            np.testing.assert_array_equal(rollouts.completion_mask.sum(axis=-1), lengths[numbers % 97])
            ages = step - np.array([begun_steps[number] for number in numbers.tolist()])
            # The oldest token is as old as its group.
            np.testing.assert_array_equal(step - 1 - rollouts.versions[:, :, 0].min(axis=1), ages)
            metrics = {"age": ages.mean(), "age_max": ages.max(), "carried": (ages > 0).mean()}
            metrics = {f"rollout/{name}": value for name, value in metrics.items()}
            assert samples.metrics | metrics | {"rollout/in_flight": len(open_numbers)} == samples.metrics
            assert len(numbers) == BATCH and len(open_numbers) <= open_groups
            assert not max_age or ages.max() <= max_age
            oldest[max_age] = max(oldest[max_age], int(ages.max()))
        # Each prompt is trained on once, and no prompt is skipped.
        every = sorted(trained + source.in_flight.prompts.numbers.tolist())
        assert every == list(range(len(every)))
    assert oldest[0] > 2 and (oldest[1], oldest[2]) == (1, 2)


def test_without_a_bound_the_first_complete_of_two_batches_are_the_batch():
    """This holds with as many open groups beyond a batch as a batch has."""
    source, _ = drawn_source(1, partial=BATCH, max_age=0)
    engine, prompts = source.engine, make_source(source.engine, BATCH, GROUP_SIZE, LIMIT, partial=0, max_age=0).prompts
    fresh = lambda: InFlightGroups.empty(next(prompts), GROUP_SIZE, LIMIT, 0)  # noqa: E731
    in_flight = fresh()
    for samples in sampled_steps(source, 8):
        in_flight = in_flight.concatenate(fresh())
        key, wanted = jax.random.key(0), dict(wanted_groups=BATCH, required_groups=[])
        first = engine.sample_first(in_flight, key, sampling=Sampling(), **wanted)
        batch, in_flight = first.in_flight.split(first.complete_groups)
        assert batch.prompts.numbers.tolist() == samples.prompts.numbers.tolist()
        jax.tree.map(np.testing.assert_array_equal, batch.rollouts, samples.rollouts)


def test_a_call_that_decodes_nothing_has_no_idle_slots():
    decoded, nothing = (FirstCompleteGroups(None, [], *tokens) for tokens in ((3, 4), (0, 0)))
    ages, has_begun = np.array([0, 2]), np.array([True])
    assert partial_metrics(ages, has_begun, decoded)["rollout/idle_slots"] == 0.25
    assert "rollout/idle_slots" not in partial_metrics(ages, has_begun, nothing)


def test_processes_that_cannot_share_the_open_groups_are_refused(monkeypatch, refused):
    monkeypatch.setattr(fit.distributed, "count", lambda: 2)
    check = lambda count: fit.check_partial(SimpleNamespace(rollout=SimpleNamespace(partial=count)))  # noqa: E731
    check(4)
    with refused("config.rollout.partial = 3"):
        check(3)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_with_the_groups_that_were_on_their_way(short_rounds, tmp_path, capsys):
    """Completions often need more than a round, and weights are older by a lag."""
    changes = {"rollout.partial": 6, "rollout.max_completion_tokens": 12, "num_steps": 5, "rollout.max_lag": 1}
    config = small_config(**SHORT | changes | {"rollout.max_age": 1})
    whole = test_episodes.run_records(config, tmp_path / "whole")
    assert sum(record["rollout/carried"] > 0 for record in whole) > 2
    assert max(record["rollout/lag_p95"] for record in whole) > 1
    assert {record["rollout/age_max"] for record in whole} == {0, 1}
    lost = int(whole[-1]["rollout/in_flight"])
    assert 0 < lost <= 6 and f" {lost} groups in flight" in capsys.readouterr().out
    assert test_episodes.run_records(config, tmp_path / "run", stop=2) == whole
