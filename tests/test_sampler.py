"""The in-JAX sampler: its distribution, its randomness, its stops, and that the trainer agrees."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms.sampling import (
    BLOCK,
    Sampling,
    draw,
    log_distribution,
    support,
    token_logprobs_and_residuals,
    token_logprobs_gradient,
)
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import adapters
from jaxrl_llm.rollout import weights
from jaxrl_llm.rollout.jax import compiled, layout, programs, sizes, stream
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.programs import Cache
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.structs import Batch, Prompt, Prompts

KINDS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7), Sampling(1.3, 8, 0.9)]


def sample(
    sampling=KINDS[0], *, group=tiny.G, length=12, stops=(3, 4), key=0, mesh=(1, 1, 1), prompts=None, most=0, pages=0,
    config=tiny.CONFIG, limits=None, environments=None, in_int8=False, cache_dtype="",
):  # fmt: skip
    model, params = tiny.model_and_params(config, scale=3.0)
    mesh = tiny.mesh_of(mesh)
    bounds = dict(max_completion_tokens=length, max_sequences=most, pages=pages)
    bounds |= dict(in_int8=in_int8, cache_dtype=cache_dtype, observation_tokens=length if environments else 0)
    sampler = Sampler(model, mesh, stop_ids=stops, pad_id=0, **bounds)
    sampler.update_weights(jax.device_put(params, sharding.shardings(params, mesh)))
    tokens, mask = prompts or tiny.prompts()
    return sampler.sample(
        Prompts(tokens, mask, [], np.arange(tiny.B)), jax.random.key(key), group_size=group, sampling=sampling,
        environments=environments, max_tokens=limits,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "config"), [*((kind, tiny.CONFIG) for kind in KINDS), (KINDS[1], tiny.GEMMA)],
    ids=[*map(str, KINDS), "gemma"],
)  # fmt: skip
def test_sampler_and_trainer_agree_on_the_log_probability_of_every_token(sampling, config):
    rollouts = sample(sampling, config=config)
    model, params = tiny.model_and_params(config, scale=3.0)
    batch = Batch(*tiny.prompts(), rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    scored, _ = jax.jit(partial(forward.completion_logprobs, model, sampling=sampling))(params, batch)
    np.testing.assert_allclose(rollouts.logprobs, scored, atol=1e-5)
    assert np.all(np.asarray(rollouts.logprobs)[~np.asarray(rollouts.completion_mask)] == 0)


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_a_copy_in_int8_samples_from_the_rounded_weights(mesh):
    rollouts = sample(mesh=mesh, in_int8=True)
    model, params = tiny.model_and_params(scale=3.0)
    batch = Batch(*tiny.prompts(), rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
    rounded = weights._on_kernels(params["layers"], lambda kernel: adapters.as_array(adapters.int8(kernel)))
    scored, exact = (np.where(batch.loss_mask, score(p, batch)[0], 0) for p in (params | {"layers": rounded}, params))
    np.testing.assert_allclose(rollouts.logprobs, scored, atol=2e-5)
    assert 1e-3 < np.abs(rollouts.logprobs - exact).max() < 1


def test_a_cache_in_int8_changes_log_probabilities_a_little_and_its_bounds_change_no_token(monkeypatch):
    monkeypatch.setattr(sizes, "PAGE", 8)
    whole, exact = sample(length=30, cache_dtype="int8"), sample(length=30)
    # As long as the texts are the same: the first token does not read the cache.
    same = np.cumprod(whole.completions == exact.completions, axis=-1).astype(bool)
    gap = np.abs(whole.logprobs - exact.logprobs)
    assert same.mean() > 0.5 and (gap[:, :, 0] == 0).all() and 1e-4 < gap[same].max() < 0.1
    bounded = sample(length=30, cache_dtype="int8", most=8, pages=12)
    np.testing.assert_array_equal(whole.completions, bounded.completions)
    # Another program rounds float32 differently, which moves some numbers of the cache by one step of int8. Rounding to
    # int8 moves all numbers by up to half a step, so those few steps stay below the gap to the exact cache.
    moved = np.abs(whole.logprobs - bounded.logprobs)
    assert moved.max() < 0.5 * gap[same].max() and moved.mean() < 0.2 * gap[same].mean()


def test_a_completion_ends_with_its_stop_token_which_is_trained_on():
    rollouts = sharding.to_host(sample())
    stopped = 0
    for tokens, mask, loss_mask, cut in zip(
        *(x.reshape(-1, *x.shape[2:]) for x in (rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)),
        rollouts.truncated.reshape(-1), strict=True,
    ):  # fmt: skip
        length = mask.sum()
        assert mask[:length].all()
        np.testing.assert_array_equal(mask, loss_mask)
        assert not np.isin(tokens[: length - 1], (3, 4)).any()
        assert np.isin(tokens[length - 1], (3, 4)) != cut
        assert length == 12 or not cut
        assert (tokens[length:] == 0).all()
        stopped += not cut
    assert 0 < stopped < tiny.B * tiny.G  # both kinds were seen


def test_greedy_takes_the_best_token_every_time():
    rollouts = sharding.to_host(sample(Sampling(temperature=0), group=2))
    np.testing.assert_array_equal(rollouts.completions[:, 0], rollouts.completions[:, 1])
    model, params = tiny.model_and_params(scale=3.0)
    tokens, mask = tiny.prompts()
    for t in range(3):
        hidden, _ = jax.jit(model.prefill)(params, Prompt(tokens, mask))
        best = np.argmax(model.logits(params, hidden[:, -1]), axis=-1)
        alive = rollouts.completion_mask[:, 0, t]
        np.testing.assert_array_equal(best[alive], rollouts.completions[:, 0, t][alive])
        tokens = np.concatenate([tokens, best[:, None]], axis=1)
        mask = np.concatenate([mask, np.ones((tiny.B, 1), bool)], axis=1)


def test_the_same_key_repeats_and_every_step_prompt_and_member_differs():
    tokens, mask = (np.repeat(x[:1], tiny.B, axis=0) for x in tiny.prompts())  # one prompt, eight times
    of = lambda key: np.asarray(sample(key=key, length=6, stops=(), prompts=(tokens, mask)).completions)  # noqa: E731
    first, again, other = of(0), of(0), of(1)
    np.testing.assert_array_equal(first, again)
    distinct = {tuple(row) for row in np.concatenate([first, other]).reshape(-1, 6)}
    assert len(distinct) > 0.9 * 2 * tiny.B * tiny.G


@pytest.mark.parametrize("config", [tiny.CONFIG, pytest.param(tiny.GEMMA, marks=pytest.mark.slow)], ids=tiny.CONFIGS)
def test_the_mesh_does_not_change_what_is_sampled(config):
    single = sharding.to_host(sample(config=config))
    spread = sharding.to_host(sample(mesh=(2, 2, 2), config=config))
    np.testing.assert_array_equal(single.completions, spread.completions)
    np.testing.assert_allclose(single.logprobs, spread.logprobs, atol=1e-5)


@pytest.mark.parametrize(("mesh", "most"), [((1, 1, 1), 9), ((2, 2, 2), 16)])
def test_completions_that_wait_for_their_turn_have_the_same_tokens(mesh, most):
    whole, in_turns = sharding.to_host(sample()), sample(mesh=mesh, most=most)
    np.testing.assert_array_equal(whole.completions, in_turns.completions)
    np.testing.assert_array_equal(whole.completion_mask, in_turns.completion_mask)
    np.testing.assert_allclose(whole.logprobs, in_turns.logprobs, atol=1e-5)


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_frequencies_of_drawn_tokens_match_the_distribution(sampling):
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, 16), jnp.float32)
    logprobs = log_distribution(logits, sampling)
    count = 200_000
    drawn, _ = draw(jnp.broadcast_to(logprobs, (count, 16)), jax.random.uniform(jax.random.key(0), (count, 2)))
    observed, p = np.bincount(drawn, minlength=16) / count, np.exp(logprobs)
    assert np.all(observed[p == 0] == 0)
    chi2 = count * np.sum((observed - p)[p > 0] ** 2 / p[p > 0])
    assert chi2 < 3 * np.sum(p > 0) + 15  # far above its mean (the support's size) only if the draw is wrong


def test_the_first_token_of_a_real_rollout_follows_the_softmax():
    tokens, mask = (np.repeat(x[:1], tiny.B, axis=0) for x in tiny.prompts())
    rollouts = sample(group=512, length=1, stops=(), prompts=(tokens, mask))
    model, params = tiny.model_and_params(scale=3.0)
    p = np.asarray(jax.nn.softmax(model.logits(params, model.prefill(params, Prompt(tokens, mask))[0][0, -1])))
    count = tiny.B * 512
    observed = np.bincount(np.asarray(rollouts.completions).ravel(), minlength=32) / count
    common = p > 5 / count
    chi2 = count * np.sum((observed - p)[common] ** 2 / p[common])
    assert chi2 < common.sum() + 5 * (2 * common.sum()) ** 0.5, chi2


def test_draw_never_takes_a_token_of_probability_zero_even_at_the_ends():
    logprobs = jnp.log(jnp.array([0.0, 0.5, 0.0, 0.5, 0.0]))
    last = 0.99999994
    ends = jnp.array([[0.0, 0.0], [0.0, last], [0.4999999, last], [0.5, 0.0], [last, last]])
    np.testing.assert_array_equal(draw(jnp.broadcast_to(logprobs, (5, 5)), ends)[0], [1, 1, 1, 3, 3])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), *(pytest.param(x, marks=pytest.mark.slow) for x in (Sampling(top_p=0.95), Sampling(top_k=50)))],
    ids=str,
)
def test_a_vocabulary_of_152k_is_drawn_from_without_loss_of_its_tail(sampling):
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, 151_936), jnp.float32)
    logprobs = log_distribution(logits, sampling)
    step = jax.jit(lambda u: draw(jnp.broadcast_to(logprobs, (len(u), len(logprobs))), u)[0])
    tokens = np.concatenate([step(jax.random.uniform(jax.random.key(i), (64, 2))) for i in range(100)])
    drawn = np.asarray(logprobs)[tokens]
    assert np.isfinite(drawn).all()
    # Mean and share below a small probability, against the distribution's own.
    p = np.exp(np.asarray(logprobs, np.float64))
    finite = p > 0
    mean = np.sum(p[finite] * np.asarray(logprobs, np.float64)[finite])
    spread = np.sqrt(np.sum(p[finite] * (np.asarray(logprobs)[finite] - mean) ** 2) / len(drawn))
    assert abs(drawn.mean() - mean) < 5 * spread
    # Even a rare token is reached, exactly, from the middle of its own part of the two unit intervals.
    size = BLOCK
    blocks = np.add.reduceat(p, np.arange(0, 151_936, size))
    share = p / blocks[np.arange(151_936) // size].clip(1e-30)
    resolved = np.flatnonzero(share > 1e-5)  # float32 tells these apart within their block
    rare = resolved[np.argsort(p[resolved])[:20]]
    within = np.array([p[token // size * size : token].sum() for token in rare]) + p[rare] / 2
    middle = (np.cumsum(blocks) - blocks / 2)[rare // size] / p.sum()
    uniform = jnp.asarray(np.stack([middle, within / blocks[rare // size]], axis=-1), jnp.float32)
    np.testing.assert_array_equal(step(uniform), rare)


def test_top_k_then_top_p_by_hand():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    np.testing.assert_allclose(jnp.exp(log_distribution(logits, Sampling(top_k=2))), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    np.testing.assert_allclose(
        jnp.exp(log_distribution(logits, Sampling(top_p=0.75))), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-6
    )
    both = log_distribution(logits, Sampling(top_k=3, top_p=0.5))  # of what top-k left: 4/9, then 7/9 >= 0.5
    np.testing.assert_allclose(jnp.exp(both), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [7, 1_000, 49_152])
def test_top_k_and_top_p_keep_what_a_sort_keeps(vocabulary):
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (24, vocabulary)).astype(np.float32)
    logits[8:16] = np.round(logits[8:16])  # ties, and zeros of both signs
    logits[16:, random.integers(0, vocabulary, vocabulary // 3)] = -np.inf
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, axis=-1)
    weights = np.exp(ranked.astype(np.float64) - ranked[:, :1])
    above = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True) - weights / weights.sum(-1, keepdims=True)
    for k in (1, 5, 64):
        kept = np.isfinite(np.asarray(support(jnp.asarray(logits), Sampling(top_k=k))))
        np.testing.assert_array_equal(kept, (logits >= ranked[:, min(k, vocabulary) - 1, None]) & np.isfinite(logits))
    for p in (0.1, 0.5, 0.9, 0.99):
        kept = np.isfinite(np.asarray(support(jnp.asarray(logits), Sampling(top_p=p))))
        # float32 and float64 may take another last token where a sum is as near to p as this.
        least, most = (
            np.where(above < near, ranked, np.inf).min(axis=-1, keepdims=True) for near in (p - 1e-5, p + 1e-5)
        )
        assert (kept[logits >= np.broadcast_to(least, logits.shape)]).all()
        assert not kept[logits < np.broadcast_to(most, logits.shape)].any()


def test_a_token_that_left_the_support_keeps_a_finite_log_probability():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    (logprob, entropy), residuals = token_logprobs_and_residuals(logits, jnp.array(3), Sampling(top_k=1))
    np.testing.assert_allclose(logprob, np.log(0.1 / 0.5), rtol=1e-6)
    np.testing.assert_allclose(entropy, -(0.8 * np.log(0.8) + 0.2 * np.log(0.2)), rtol=1e-6)
    gradient, _ = token_logprobs_gradient(Sampling(top_k=1), residuals, (jnp.ones(()), jnp.zeros(())))
    np.testing.assert_allclose(gradient, [-0.8, 0, 0, 0.8], atol=1e-6)


BUDGETS = np.random.default_rng(7).lognormal(2.0, 0.8, (tiny.B, tiny.G)).astype(int).clip(1, 24)
STEADY = dict(length=24, stops=(), limits=BUDGETS)


@pytest.fixture
def small(monkeypatch):
    """Pages of 4 tokens, and rounds of 4."""
    monkeypatch.setattr(sizes, "PAGE", 4)
    for module in (programs, stream, compiled, sizes, layout):
        monkeypatch.setattr(module, "ROUND", 4)


@pytest.fixture
def preempted(monkeypatch):
    """The numbers of completions that gave their pages back."""
    numbers, original = [], Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, one: (numbers.append(one.number), original(self, one)))
    return numbers


def same(one, other) -> None:
    for name in ("completions", "completion_mask", "truncated"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "bounds",
    [dict(), dict(most=5), dict(pages=9), dict(most=12, pages=14), dict(mesh=(2, 2, 2), most=16, pages=7)],
    ids=str,
)
@pytest.mark.parametrize("config", [tiny.CONFIG, pytest.param(tiny.GEMMA, marks=pytest.mark.slow)], ids=tiny.CONFIGS)
def test_pages_bounds_and_preemptions_change_no_token(config, bounds, request, preempted):
    whole = sample(config=config, **STEADY)
    request.getfixturevalue("small")
    same(whole, sample(config=config, **STEADY, **bounds))
    assert bool(preempted) == ("pages" in bounds)
    np.testing.assert_array_equal(whole.completion_mask.sum(axis=-1), BUDGETS)


def test_a_preempted_completion_goes_on_with_the_tokens_that_it_had(small, preempted, monkeypatch):
    """Each round has another key: what is computed again would be other tokens, if they were drawn again."""
    original, rounds = compiled.CallPrograms.decode, count()

    def decode(self, *args):
        self.key = jax.random.fold_in(self.key, next(rounds))
        return original(self, *args)

    monkeypatch.setattr(compiled.CallPrograms, "decode", decode)
    rollouts = sample(pages=9, **STEADY)
    assert preempted
    model, params = tiny.model_and_params(scale=3.0)
    batch = Batch(*tiny.prompts(), rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    scored, _ = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))(params, batch)
    np.testing.assert_allclose(rollouts.logprobs, scored, atol=1e-5)


def test_a_completion_draws_the_numbers_of_its_place_in_a_batch_of_any_size():
    key, number, t = jax.random.key(3), jnp.asarray([0, 1, 7, 40]), jnp.asarray([0, 5, 5, 2000])
    drawn = jax.jit(programs.uniform_numbers)(key, number, t)
    for one, n, place in zip(drawn, number, t, strict=True):
        np.testing.assert_array_equal(one, jax.random.uniform(jax.random.fold_in(key, place), (64, 2))[n])


class Tool:
    """Answers each turn with tokens that follow from it; a turn ends with token 5. The protocol of environments."""

    turn_tokens, stops = 6, ("5",)

    def __init__(self, turns: int = 3):
        self.turns, self.counts, self.pool = turns, {}, ThreadPoolExecutor(4)

    def may_end(self, vocabulary: int) -> np.ndarray:
        return np.arange(vocabulary) == 5

    def ends(self, turns: list[list[int]]) -> list[int]:
        return [turn.index(5) + 1 if 5 in turn else 0 for turn in turns]

    def answer(self, episode: int, turn: list[int]) -> Any:
        self.counts[episode] = self.counts.get(episode, 0) + 1
        more = self.counts[episode] < self.turns
        time.sleep(0.002 * (episode % 3))
        return self.pool.submit(lambda: [6 + (sum(turn) + k) % 20 for k in range(sum(turn) % 9)] if more else None)


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.GEMMA], ids=tiny.CONFIGS)
def test_the_trainer_agrees_on_episodes_whatever_their_pages(config, mesh, small, preempted, monkeypatch):
    for module in (stream, layout, sizes):
        monkeypatch.setattr(module, "CHUNKS", (2, 4))
    whole = sample(config=config, length=40, stops=(3,), environments=Tool())
    model, params = tiny.model_and_params(config, scale=3.0)
    batch = Batch(*tiny.prompts(), whole.completions, whole.completion_mask, whole.loss_mask)
    scored, _ = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))(params, batch)
    trained = whole.loss_mask
    assert (whole.completion_mask & ~trained).sum() > 40  # a tool has spoken
    np.testing.assert_allclose(np.asarray(scored)[trained], whole.logprobs[trained], atol=2e-5)
    assert not preempted
    bounds = dict(most=12, pages=12) if mesh == (1, 1, 1) else dict(most=16, pages=10)
    again = sample(config=config, length=40, stops=(3,), environments=Tool(), mesh=mesh, **bounds)
    # With slow tools, few of the sequences of a device hold pages at once.
    assert preempted or mesh != (1, 1, 1)
    same(whole, again)
    np.testing.assert_array_equal(whole.loss_mask, again.loss_mask)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2)])
def test_a_device_holds_its_share_of_the_keys_and_values_and_no_more(shape, monkeypatch):
    """After each program: the whole / (data x fsdp x tensor)."""
    seen = []
    for name in ("prefill", "decode"):
        original = getattr(compiled.CallPrograms, name)

        def call(self, *args, original=original):
            output = original(self, *args)
            seen.append(output if isinstance(output, Cache) else output[0])
            for x in jax.tree.leaves(seen[-1]):
                assert x.addressable_shards[0].data.nbytes * np.prod(shape) == x.nbytes
            return output

        monkeypatch.setattr(compiled.CallPrograms, name, call)
    sample(mesh=shape)
    assert len(seen) >= 2
