"""The in-JAX sampler: its distribution, its randomness, its stops, and that the trainer agrees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import count
from threading import Event, Timer
from typing import Any

import jax
import jax.numpy as jnp
import model_parts
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms.sampling import (
    MAX_BLOCK,
    Sampling,
    draw_tokens,
    log_distribution,
    mask_logits,
    token_logprobs_and_residuals,
    token_logprobs_gradient,
)
from jaxrl_llm.learner import forward
from jaxrl_llm.machine.compilation import Compilations
from jaxrl_llm.models import adapters
from jaxrl_llm.rollout import weights
from jaxrl_llm.rollout.jax import compiled, layout, programs, sizes, stream
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.structs import Batch, Prompt, Prompts, PyTree, Rollouts

KINDS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7), Sampling(1.3, 8, 0.9)]
WARM = Sampling(1.3)
LIMITS = np.where(np.arange(tiny.B)[:, None] == 1, 8, np.full((tiny.B, tiny.G), 24))
FEW_PAGES, ALL_DEVICES = dict(most=8, pages=16), dict(mesh=(2, 2, 2), most=16, pages=7)
supported, distribution = (jax.jit(function, static_argnums=1) for function in (mask_logits, log_distribution))


def sample(
    sampling=KINDS[0], *, length=12, stops=(3, 4), mesh=(1, 1, 1), most=0, pages=0, config=tiny.CONFIG,
    environments=None, in_int8=False, cache_dtype="", limits=None, prompts=None,
):  # fmt: skip
    """Completions of a new sampler."""
    bounds = dict(max_completion_tokens=length, max_sequences=most, pages=pages, stop_ids=stops)
    bounds |= dict(in_int8=in_int8, cache_dtype=cache_dtype, observation_tokens=length if environments else 0)
    sampler = model_parts.random_sampler(config, mesh, **bounds)
    prompts = prompts or Prompts(*tiny.prompts(), [], np.arange(tiny.B))
    options = dict(group_size=tiny.G, sampling=sampling, environments=environments, max_tokens=limits)
    return sampler.sample(prompts, jax.random.key(0), **options)


def steady(**changes) -> Rollouts:
    """Completions of up to 24 tokens, and of up to 8 for the second prompt."""
    return sample(WARM, length=24, limits=LIMITS, **changes)


@cache
def whole(config=tiny.CONFIG) -> Rollouts:
    """The completions of `steady`, each of whose tokens is computed once and in one round."""
    return steady(config=config)


def test_weights_that_give_no_finite_log_probability_are_told(monkeypatch, capsys):
    model, params = tiny.model_and_params(tiny.CONFIG)
    huge = jax.tree.map(lambda x: x * 1e10, params)  # finite, but their activations overflow
    monkeypatch.setattr(model_parts, "random_model", lambda config: (model, huge))
    sample()
    assert capsys.readouterr().out.startswith("note: 384 of 384 ")


@contextmanager
def small_pages() -> Iterator[list[int]]:
    """Makes pages and rounds 4 tokens long. Yields the numbers of completions that have given their pages back."""
    numbers, preempt = [], Scheduler._preempt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "PAGE_TOKENS", 4)
        for module in (programs, stream, compiled, sizes, layout):
            patch.setattr(module, "ROUND_TOKENS", 4)
        patch.setattr(Scheduler, "_preempt", lambda self, one: (numbers.append(one.number), preempt(self, one)))
        yield numbers


def score(rollouts: Rollouts, sampling: Sampling, config=tiny.CONFIG, *changed: PyTree) -> list[np.ndarray]:
    """Log-probabilities of the trainer with the parameters of `sample`, and with changed ones."""
    model, params = model_parts.random_model(config)
    batch = Batch(*tiny.prompts(), rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    program = jax.jit(partial(forward.completion_logprobs, model, sampling=sampling))
    return [np.where(batch.loss_mask, program(p, batch)[0], 0) for p in (params, *changed)]


def check_draws(rollouts: Rollouts, sampling: Sampling, config=tiny.CONFIG) -> None:
    """Compares to draws from the logits of one pass over the texts: by the numbers of a larger batch, with key 0."""
    (model, params), size = model_parts.random_model(config), tiny.B * tiny.G
    given = [np.repeat(x, tiny.G, axis=0) for x in tiny.prompts()]
    flat = (rollouts.completions, rollouts.completion_mask, rollouts.loss_mask, rollouts.logprobs)
    sampled, mask, own, logprobs = (x.reshape(size, -1) for x in flat)
    text = Prompt(*(np.concatenate(x, axis=1) for x in zip(given, (sampled, mask), strict=True)))

    @jax.jit
    def drawn(params):
        logits = model.logits(params, model.prefill(params, text)[0][:, tiny.P - 1 : -1])
        uniform = lambda t: jax.random.uniform(jax.random.fold_in(jax.random.key(0), t), (2 * size, 2))  # noqa: E731
        return draw_tokens(
            mask_logits(logits, sampling), jax.vmap(uniform, out_axes=1)(jnp.arange(own.shape[1]))[:size]
        )

    expected = drawn(params)
    np.testing.assert_array_equal(sampled[own], expected[0][own])
    np.testing.assert_allclose(logprobs[own], expected[1][own], atol=2e-5)


def same(one: Rollouts, other: Rollouts) -> None:
    for name in ("completions", "completion_mask", "loss_mask", "truncated"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_tokens_are_drawn_from_the_trainers_softmax_by_their_own_numbers():
    check_draws(whole(), WARM)
    np.testing.assert_allclose(whole().logprobs, score(whole(), WARM)[0], atol=1e-5)


def test_a_second_sampler_of_a_model_compiles_no_program_of_it_again():
    first = sample(WARM, length=8)
    with closing(Compilations()) as made:
        second = sample(WARM, length=8)
    assert not made.programs.keys() & {"jit(prefill_first)", "jit(decode)"}, made.programs
    np.testing.assert_array_equal(first.completions, second.completions)


def test_a_copy_in_int8_samples_from_the_rounded_weights():
    rollouts = sample(mesh=(2, 2, 2), in_int8=True)
    _, params = model_parts.random_model(tiny.CONFIG)
    rounded = partial(weights._map_kernels, change=lambda kernel: adapters.as_array(adapters.quantize_int8(kernel)))
    layers = jax.jit(rounded)(params["layers"])
    exact, rounded = score(rollouts, Sampling(), tiny.CONFIG, params | {"layers": layers})
    np.testing.assert_allclose(rollouts.logprobs, rounded, atol=2e-5)
    assert 1e-3 < np.abs(rollouts.logprobs - exact).max() < 1


def test_a_cache_in_int8_changes_little_and_its_bounds_change_no_token(monkeypatch):
    exact, in_int8 = whole(), steady(cache_dtype="int8")
    # As long as the texts are the same: the first token does not read the cache.
    alike = np.cumprod(in_int8.completions == exact.completions, axis=-1).astype(bool) & exact.completion_mask
    gap = np.abs(in_int8.logprobs - exact.logprobs)
    assert alike.sum() > 0.5 * exact.completion_mask.sum()
    assert (gap[:, :, 0] < 1e-5).all() and 1e-4 < gap[alike].max() < 0.1
    monkeypatch.setattr(sizes, "PAGE_TOKENS", 8)
    bounded = steady(cache_dtype="int8", most=8, pages=12)
    np.testing.assert_array_equal(in_int8.completions, bounded.completions)
    # Another program rounds float32 differently, which moves some numbers of the cache by one step of int8. Rounding to
    # int8 moves all numbers by up to half a step, so those few steps stay below the gap to the exact cache.
    moved = np.abs(in_int8.logprobs - bounded.logprobs)
    assert moved.max() < 0.5 * gap[alike].max() and moved[alike].mean() < 0.2 * gap[alike].mean()


def test_a_completion_ends_with_its_stop_token_which_is_trained_on():
    rollouts = whole()
    np.testing.assert_array_equal(rollouts.completion_mask, rollouts.loss_mask)
    assert np.all(rollouts.logprobs[~rollouts.completion_mask] == 0)
    for tokens, mask, limit, cut in zip(
        *(x.reshape(-1, 24) for x in (rollouts.completions, rollouts.completion_mask)), LIMITS.ravel(),
        rollouts.truncated.ravel(), strict=True,
    ):  # fmt: skip
        length = mask.sum()
        assert mask[:length].all() and (tokens[length:] == 0).all()
        assert not np.isin(tokens[: length - 1], (3, 4)).any()
        assert np.isin(tokens[length - 1], (3, 4)) != cut
        assert length == limit or (length < limit and not cut)
    assert 0 < rollouts.truncated.sum() < tiny.B * tiny.G  # both kinds were seen


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_draws_follow_the_distribution_by_which_the_trainer_scores_them(sampling):
    logits, number = np.random.default_rng(0).normal(0, 2, 16).astype(np.float32), 50_000

    @jax.jit
    def sampled(uniform):
        each = jnp.broadcast_to(logits, (number, 16))
        tokens, logprobs = programs.choose(each, uniform, sampling)
        return tokens, logprobs, token_logprobs_and_residuals(each, tokens, sampling)[0][0]

    tokens, logprobs, scored = map(np.asarray, sampled(jax.random.uniform(jax.random.key(0), (number, 2))))
    expected = np.asarray(distribution(logits, sampling))
    observed, p = np.bincount(tokens, minlength=16) / number, np.exp(expected)
    assert np.all(observed[p == 0] == 0)
    chi2 = number * np.sum((observed - p)[p > 0] ** 2 / p[p > 0])
    assert chi2 < 3 * np.sum(p > 0) + 15  # far above its mean (the support's size) only if the draw is wrong
    np.testing.assert_allclose([logprobs, scored], [expected[tokens]] * 2, atol=1e-5)


def test_greedy_takes_the_first_of_the_best_tokens():
    logits = np.array([[0.0, 2.0, 1.0, 2.0], [5.0, 1.0, 2.0, 3.0]], np.float32)
    tokens, logprobs = jax.jit(partial(programs.choose, sampling=Sampling(temperature=0)))(logits, jnp.zeros((2, 2)))
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, [2, 5] - np.log(np.exp(logits).sum(axis=1)), rtol=1e-5)


def test_draw_never_takes_a_token_of_probability_zero_even_at_the_ends():
    logprobs = np.array([[-np.inf, -1, -np.inf, -1, -np.inf]] * 5, np.float32)
    last = 0.99999994
    ends = np.array([[0, 0], [0, last], [0.4999999, last], [0.5, 0], [last, last]], np.float32)
    np.testing.assert_array_equal(jax.jit(draw_tokens)(logprobs, ends)[0], [1, 1, 1, 3, 3])


def test_a_vocabulary_of_152k_is_drawn_from_without_loss_of_its_tail():
    logits = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    logprobs = np.asarray(distribution(logits, Sampling()), np.float64)
    step = jax.jit(lambda u: draw_tokens(jnp.broadcast_to(logits, (len(u), len(logits))), u)[0])
    uniform = np.random.default_rng(1).random((24, 20, 2), np.float32)
    drawn = logprobs[np.concatenate([step(u) for u in uniform])]
    # Mean and share below a small probability, against the distribution's own.
    p = np.exp(logprobs)
    mean = np.sum(p * logprobs)
    assert abs(drawn.mean() - mean) < 5 * np.sqrt(np.sum(p * (logprobs - mean) ** 2) / len(drawn))
    # Even a rare token is reached, exactly, from the middle of its own part of the two unit intervals.
    blocks = np.add.reduceat(p, np.arange(0, 151_936, MAX_BLOCK))
    share = p / blocks[np.arange(151_936) // MAX_BLOCK].clip(1e-30)
    resolved = np.flatnonzero(share > 1e-5)  # float32 tells these apart within their block
    rare = resolved[np.argsort(p[resolved])[:20]]
    within = np.array([p[token // MAX_BLOCK * MAX_BLOCK : token].sum() for token in rare]) + p[rare] / 2
    middle = (np.cumsum(blocks) - blocks / 2)[rare // MAX_BLOCK] / p.sum()
    found = step(np.stack([middle, within / blocks[rare // MAX_BLOCK]], axis=-1).astype(np.float32))
    np.testing.assert_array_equal(found, rare)


def test_top_p_counts_in_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    both = distribution(logits, Sampling(top_k=3, top_p=0.5))  # of what top-k left: 4/9, then 7/9 >= 0.5
    np.testing.assert_allclose(np.exp(both), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [7, 5_000, 33_001])
def test_top_k_and_top_p_keep_what_a_sort_keeps(vocabulary):
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (24, vocabulary)).astype(np.float32)
    logits[7] = 0
    logits[8:16] = np.round(logits[8:16])  # ties, and zeros of both signs
    logits[16:, random.integers(0, vocabulary, vocabulary // 3)] = -np.inf
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, axis=-1)
    weights = np.exp(ranked.astype(np.float64) - ranked[:, :1])
    above = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True) - weights / weights.sum(-1, keepdims=True)
    for k in (1, 5):
        kept = np.isfinite(supported(logits, Sampling(top_k=k)))
        np.testing.assert_array_equal(kept, (logits >= ranked[:, min(k, vocabulary) - 1, None]) & np.isfinite(logits))
    for p in (0.1, 0.5, 0.99):
        kept = np.isfinite(supported(logits, Sampling(top_p=p)))
        # float32 and float64 may take another last token where a sum is as near to p as this.
        least, most = (
            np.where(above < near, ranked, np.inf).min(axis=-1, keepdims=True) for near in (p - 1e-5, p + 1e-5)
        )
        assert (kept[logits >= np.broadcast_to(least, logits.shape)]).all()
        assert not kept[logits < np.broadcast_to(most, logits.shape)].any()
        alone = [np.isfinite(supported(logits[row : row + 1], Sampling(top_p=p)))[0] for row in (0, 7, 8, 23)]
        np.testing.assert_array_equal(alone, kept[[0, 7, 8, 23]])
    if vocabulary > 7:
        both = np.isfinite(supported(logits, Sampling(top_k=20, top_p=0.5)))
        top_k = np.where(logits >= ranked[:, 19, None], logits, -np.inf)
        np.testing.assert_array_equal(both, np.isfinite(supported(top_k, Sampling(top_p=0.5))))


def test_a_token_that_left_the_support_keeps_a_finite_log_probability():
    logits, kind = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), Sampling(top_k=1)

    @jax.jit
    def scored():
        numbers, residuals = token_logprobs_and_residuals(jnp.asarray(logits), jnp.array(3), kind)
        return numbers, token_logprobs_gradient(kind, residuals, (jnp.ones(()), jnp.zeros(())))[0]

    (logprob, entropy), gradient = scored()
    np.testing.assert_allclose(logprob, np.log(0.1 / 0.5), rtol=1e-5)
    np.testing.assert_allclose(entropy, -(0.8 * np.log(0.8) + 0.2 * np.log(0.2)), rtol=1e-5)
    np.testing.assert_allclose(gradient, [-0.8, 0, 0, 0.8], atol=1e-6)


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        (tiny.CONFIG, FEW_PAGES),
        *(pytest.param(config, ALL_DEVICES, marks=pytest.mark.slow) for config in (tiny.CONFIG, tiny.GEMMA)),
    ],
    ids=["one device", "8 devices", "gemma on 8 devices"],
)
def test_pages_bounds_and_preemptions_change_no_token(config, bounds):
    with small_pages() as preempted:
        found = steady(config=config, **bounds)
    assert preempted
    same(whole(config), found)


def test_a_cache_that_grows_changes_no_token(monkeypatch):
    grown, grow = [], compiled.CallPrograms.grow
    monkeypatch.setattr(compiled.CallPrograms, "grow", lambda *call: grown.append(call[2]) or grow(*call))
    with small_pages():
        rollouts = steady(stops=())  # all completions reach their limits
    assert grown == [6 * tiny.B * tiny.G]  # from 4 pages of each completion to all
    same(steady(stops=()), rollouts)


@pytest.mark.parametrize("widths", [(20, tiny.P, 4), (20,)], ids=["the width of the prompts", "too wide"])
def test_prompts_are_cut_to_the_smallest_size_that_holds_them(widths, monkeypatch):
    computed, prefill = [], compiled.CallPrograms.prefill
    see = lambda call, cache, new: computed.append(new.tokens.shape[-1]) or prefill(call, cache, new)  # noqa: E731
    monkeypatch.setattr(compiled.CallPrograms, "prefill", see)
    tokens, mask = (np.pad(x, ((0, 0), (30, 0))) for x in tiny.prompts())
    wide = Prompts(tokens, mask, [], np.arange(tiny.B), smaller=tuple((width, 0) for width in widths))
    rollouts = steady(prompts=wide)
    smallest = min(width for width in widths if width >= tiny.P)
    assert set(computed) == {smallest}
    if smallest == tiny.P:
        np.testing.assert_array_equal(rollouts.logprobs, whole().logprobs)
    same(whole(), rollouts)


def test_a_call_waits_for_a_program_in_work_and_compiles_one_that_waits_itself():
    started, goes_on, compiled_in = Event(), Event(), []

    def compile(name: str) -> None:
        started.set()
        assert goes_on.wait(60)
        compiled_in.append(name)

    ahead = compiled.CompiledAhead()
    ahead.wait("known")  # a call has compiled it
    ahead.start([(name, partial(compile, name)) for name in ("known", "in work", "waiting", "later")])
    assert started.wait(60)
    ahead.wait("waiting")
    Timer(0.2, goes_on.set).start()
    ahead.wait("in work")
    assert "in work" in compiled_in
    ahead.start([("later", partial(compile, "later"))])  # is there already
    ahead.wait("later")
    ahead.close()
    assert set(compiled_in) <= {"in work", "later"} and len(compiled_in) == len(set(compiled_in))


def test_a_program_that_does_not_fit_is_told_by_the_next_call():
    ahead = compiled.CompiledAhead()
    ahead.start([("too large", partial(int, "no number"))])
    ahead._thread.submit(int).result()
    with pytest.raises(ValueError, match="no number"):
        ahead.wait("another")
    ahead.close()


def test_a_device_holds_its_share_of_the_keys_and_values_and_no_more(monkeypatch):
    shares, decode = set(), compiled.CallPrograms.decode

    def measured(self, *args):
        cache, sampled = decode(self, *args)
        shares.update(x.addressable_shards[0].data.nbytes / x.nbytes for x in jax.tree.leaves(cache))
        return cache, sampled

    monkeypatch.setattr(compiled.CallPrograms, "decode", measured)
    with small_pages():
        steady(**ALL_DEVICES)
    assert shares == {1 / 8}


def test_a_preempted_completion_goes_on_with_the_tokens_that_it_had(monkeypatch):
    """Each round has another key: what is computed again would be other tokens, if they were drawn again."""
    decode, rounds = compiled.CallPrograms.decode, count()

    def rekeyed(self, *args):
        self.key = jax.random.fold_in(self.key, next(rounds))
        return decode(self, *args)

    monkeypatch.setattr(compiled.CallPrograms, "decode", rekeyed)
    with small_pages() as preempted:
        rollouts = steady(**FEW_PAGES)
    assert preempted and (rollouts.completions != whole().completions).any()
    np.testing.assert_allclose(rollouts.logprobs, score(rollouts, WARM)[0], atol=1e-5)


class Tool:
    """Answers each turn with tokens that follow from it; a turn ends with token 5. The protocol of environments."""

    turn_tokens = 6

    def __init__(self, turns: int = 3):
        self.turns, self.counts, self.pool = turns, {}, ThreadPoolExecutor(4)

    def possible_turn_ends(self, vocabulary_size: int) -> np.ndarray:
        return np.arange(vocabulary_size) == 5

    def find_turn_ends(self, episodes: list[int], turns: list[list[int]]) -> list[int]:
        return [turn.index(5) + 1 if 5 in turn else 0 for turn in turns]

    def answer(self, episode: int, turn: list[int]) -> Any:
        self.counts[episode] = self.counts.get(episode, 0) + 1
        more = self.counts[episode] < self.turns
        time.sleep(0.002 * (episode % 3))
        return self.pool.submit(lambda: [6 + (sum(turn) + k) % 20 for k in range(sum(turn) % 9)] if more else None)


@pytest.mark.parametrize(
    "bounds", [dict(most=12, pages=12), ALL_DEVICES | dict(pages=10)], ids=["gemma", "gemma on 8 devices"]
)
@pytest.mark.slow
def test_the_trainer_agrees_on_episodes_whatever_their_pages(bounds, monkeypatch):
    for module in (stream, layout, sizes):
        monkeypatch.setattr(module, "CHUNK_TOKENS", (2, 4))
    with small_pages() as preempted:
        episodes = sample(KINDS[-1], config=tiny.GEMMA, length=40, stops=(3,), environments=Tool(), **bounds)
    assert (episodes.completion_mask & ~episodes.loss_mask).sum() > 40  # a tool has spoken
    # With slow tools, few of the sequences of a device hold pages at once.
    assert preempted or "mesh" in bounds
    np.testing.assert_allclose(episodes.logprobs, score(episodes, KINDS[-1], tiny.GEMMA)[0], atol=2e-5)
    check_draws(episodes, KINDS[-1], tiny.GEMMA)
