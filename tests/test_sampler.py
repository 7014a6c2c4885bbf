"""The in-JAX sampler: its distribution, its randomness, its stops, and that the trainer agrees."""

from __future__ import annotations

from functools import partial

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
    token_logprobs_and_residuals,
    token_logprobs_gradient,
)
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.shapes import Book, Rates
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.rollout import compaction
from jaxrl_llm.rollout import sampler as sampler_module
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.structs import Batch, Prompts

KINDS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7), Sampling(1.3, 8, 0.9)]


def sample(
    sampling=KINDS[0], *, group=tiny.G, length=12, stops=(3, 4), key=0, mesh=(1, 1, 1), prompts=None, most=0,
    config=tiny.CONFIG,
):  # fmt: skip
    model, params = tiny.model_and_params(config, scale=3.0)
    mesh = tiny.mesh_of(mesh)
    sampler = Sampler(model, mesh, max_completion_tokens=length, stop_ids=stops, pad_id=0, max_sequences=most)
    sampler.update_weights(jax.device_put(params, sharding.shardings(params, mesh)))
    tokens, mask = prompts or tiny.prompts()
    return sampler.sample(
        Prompts(tokens, mask, [], np.arange(tiny.B)), jax.random.key(key), group_size=group, sampling=sampling
    )


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


def test_tokens_that_are_decoded_in_pieces_have_the_states_of_a_pass_over_all():
    """Each row is two tokens long at first. Then the rows go on by different numbers of tokens."""
    config = tiny.GEMMA
    model, params = tiny.model_and_params(config, scale=2.0)
    (prompts, mask), tokens = tiny.prompts(), jnp.asarray(tiny.batch().completions)
    places = jnp.broadcast_to(jnp.arange(tiny.C), tokens.shape)
    _, prefix = jax.jit(model.prefill)(params, prompts, mask)
    whole, _ = jax.jit(model.extend)(params, prefix, mask, tokens, places, jnp.ones_like(tokens))
    params = model.unstack(params)
    _, prefix = jax.jit(model.prefill)(params, prompts, mask)
    empty = jnp.zeros((tiny.B, config.kv_heads, tiny.G, tiny.C, config.head_dim))
    cache = [KeyValue(empty, empty) for _ in range(config.layers)]
    for t in range(2):
        hidden, cache = jax.jit(model.decode)(params, tokens[:, :, t], t, cache, prefix, mask)
        np.testing.assert_allclose(hidden, whole[:, :, t], atol=1e-4)
    at = jnp.full((tiny.B, tiny.G), 2)
    first = 1 + jnp.arange(tiny.B * tiny.G).reshape(at.shape) % 2
    for count in (first, 3 - first):
        piece = jnp.minimum(at[..., None] + jnp.arange(2)[None, None], tiny.C - 1)
        of_rows = jnp.take_along_axis(tokens, piece, axis=2)
        hidden, cache = jax.jit(model.decode_at)(params, of_rows, at, count, cache, prefix, mask)
        expected = jnp.take_along_axis(whole, piece[..., None], axis=2)
        real = np.arange(2) < np.asarray(count)[..., None]
        np.testing.assert_allclose(np.asarray(hidden)[real], np.asarray(expected)[real], atol=1e-4)
        at = at + count


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
        hidden, _ = jax.jit(model.prefill)(params, tokens, mask)
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


def test_as_many_prompts_as_allowed_have_a_cache_at_once_and_every_device_equally_many():
    assert compaction.prompts_at_once(64, 8, 1, 0) == 64
    assert compaction.prompts_at_once(64, 8, 1, 511) == 32
    assert compaction.prompts_at_once(60, 8, 4, 200) == 20
    assert compaction.prompts_at_once(8, 4, 8, 1) == 8  # one prompt a device, at least


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
    p = np.asarray(jax.nn.softmax(model.logits(params, model.prefill(params, tokens, mask)[0][0, -1])))
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


def test_a_token_that_left_the_support_keeps_a_finite_log_probability():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    (logprob, entropy), residuals = token_logprobs_and_residuals(logits, jnp.array(3), Sampling(top_k=1))
    np.testing.assert_allclose(logprob, np.log(0.1 / 0.5), rtol=1e-6)
    np.testing.assert_allclose(entropy, -(0.8 * np.log(0.8) + 0.2 * np.log(0.2)), rtol=1e-6)
    gradient, _ = token_logprobs_gradient(Sampling(top_k=1), residuals, (jnp.ones(()), jnp.zeros(())))
    np.testing.assert_allclose(gradient, [-0.8, 0, 0, 0.8], atol=1e-6)


BUDGETS = np.random.default_rng(7).lognormal(1.5, 0.8, (tiny.B, tiny.G)).astype(int).clip(1, 24)


def ragged(monkeypatch, *, mesh=(1, 1, 1), rates=None):
    """Completions cut as BUDGETS says; with rates, in all shapes that these make cheap. And the shapes used."""
    if rates:
        monkeypatch.setattr(compaction, "BLOCK", 2)
        monkeypatch.setattr(sampler_module, "RATES", {"cpu": rates})
    model, params = tiny.model_and_params(scale=3.0)
    mesh, book = tiny.mesh_of(mesh), Book()
    sampler = Sampler(model, mesh, max_completion_tokens=24, stop_ids=(3,), pad_id=0, book=book)
    sampler.update_weights(jax.device_put(params, sharding.shardings(params, mesh)))
    shapes, original = [], sampler._run

    def run(fixed, slots, *args):
        state, t = original(fixed, slots, *args)
        shapes.append(slots)
        for x in jax.tree.leaves((state.prefix, state.cache)):
            assert x.addressable_shards[0].data.nbytes * mesh.devices.size == x.nbytes
        return state, t

    run.trace = original.trace
    monkeypatch.setattr(sampler, "_run", run)
    for _ in range(6 if rates else 1):  # until all shapes are in use
        rollouts = sampler.sample(
            Prompts(*tiny.prompts(), [], np.arange(tiny.B)),
            jax.random.key(5),
            group_size=tiny.G,
            sampling=Sampling(),
            max_tokens=BUDGETS,
        )
    book.close()
    return rollouts, shapes


def test_smaller_batches_and_shorter_caches_change_no_token(monkeypatch):
    with monkeypatch.context() as patch:
        plain, shapes = ragged(patch)
    assert set(shapes) == {(8, 4, 24)}
    lengths = plain.completion_mask.sum(axis=-1)
    assert np.all(lengths <= BUDGETS)
    assert 0 < plain.truncated.sum() < plain.truncated.size  # some stopped by themselves
    np.testing.assert_array_equal(lengths[plain.truncated], BUDGETS[plain.truncated])
    free = Rates(flops=1e9, bandwidth=1e8, cache=1e8, compile=1e-6)  # compiling costs nothing: every shape pays
    with monkeypatch.context() as patch:
        moved, shapes = ragged(patch, rates=free)
    assert len({slots.capacity for slots in shapes}) >= 3
    assert len({(slots.entries, slots.width) for slots in shapes}) >= 3
    np.testing.assert_array_equal(plain.completions, moved.completions)
    np.testing.assert_array_equal(plain.completion_mask, moved.completion_mask)
    np.testing.assert_array_equal(plain.truncated, moved.truncated)
    np.testing.assert_allclose(plain.logprobs, moved.logprobs, atol=1e-5)
    with monkeypatch.context() as patch:
        spread, _ = ragged(patch, rates=free, mesh=(2, 2, 2))
    np.testing.assert_array_equal(plain.completions, spread.completions)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2)])
def test_a_device_holds_its_share_of_the_keys_and_values_and_no_more(shape):
    """After the start; `ragged` asserts it after each loop: the whole / (data x fsdp x tensor)."""
    model, params = tiny.model_and_params(scale=3.0)
    mesh = tiny.mesh_of(shape)
    sampler = Sampler(model, mesh, max_completion_tokens=24, stop_ids=(3,), pad_id=0)
    sampler.update_weights(jax.device_put(params, sharding.shardings(params, mesh)))
    fixed = sampler._decoding(tiny.B, tiny.G, Sampling())
    number = np.arange(tiny.B * tiny.G, dtype=np.int32).reshape(tiny.B, tiny.G)
    batch = sharding.shard_batch((*tiny.prompts(), number, BUDGETS), mesh)
    state = sampler._start(fixed, sampler._params, *batch, jax.random.key(5))
    layers = jax.tree.leaves((state.prefix, state.cache))
    assert len(layers) == 4 * model.cfg.layers
    for x in layers:
        assert x.addressable_shards[0].data.nbytes * np.prod(shape) == x.nbytes


@pytest.mark.parametrize("devices", [1, 4])
def test_every_living_completion_has_one_slot_with_its_own_prompt(devices):
    rng = np.random.default_rng(devices)
    for share in (0.9, 0.5, 0.3, 0.1, 0.02):
        alive = rng.random((8, 8)) < share
        alive[0, 0] = True
        of_device = alive.reshape(devices, -1, 8)
        there = [s for s in compaction.slot_shapes(8 // devices, 8, 64) if s.fits(of_device.sum(axis=2))]
        slots = there[-1]
        prompt, completion, _ = compaction.plan_compaction(alive, slots, (-1, 1), devices)
        assert completion.shape == (devices, *slots[:2])
        for d in range(devices):
            taken = completion[d][completion[d] < 64]
            if slots != there[0]:  # the largest shape keeps all completions in their places, the ended ones too
                np.testing.assert_array_equal(np.sort(taken), np.flatnonzero(of_device[d]))
            for entry, row in zip(prompt[d], completion[d], strict=True):
                assert np.all(row[row < 64] // 8 == entry)
