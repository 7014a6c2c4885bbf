"""Scoring and updating: the group-native forward, memory, and what must not change a gradient."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.flatten_util import ravel_pytree

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling, log_distribution
from jaxrl_llm.learner import forward, head, update
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import rope
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Batch, Prompt, PyTree

ONE = (1, 1, 1)
score = jax.jit(forward.completion_logprobs, static_argnums=(0, 3))


def flat_logprobs(model, params, batch, sampling):
    """The same log-probabilities, every completion with a prompt of its own and all logits at once."""
    b, g, c = batch.completions.shape
    repeat = partial(jnp.repeat, repeats=g, axis=0)
    tokens = jnp.concatenate([repeat(jnp.asarray(batch.prompts)), batch.completions.reshape(b * g, c)], axis=1)
    mask = jnp.concatenate([repeat(jnp.asarray(batch.prompt_mask)), batch.completion_mask.reshape(b * g, c)], axis=1)
    logits = model.logits(params, model.prefill(params, Prompt(tokens, mask))[0]) / sampling.temperature
    before = batch.prompts.shape[1] - 1
    logprobs = jax.nn.log_softmax(logits[:, before : before + c])
    chosen = jnp.take_along_axis(logprobs, batch.completions.reshape(b * g, c, 1), axis=-1)
    return jnp.where(batch.completion_mask, chosen.reshape(b, g, c), 0.0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma"])
def test_the_group_native_forward_equals_the_flat_one_in_value_and_gradient(family):
    config = dataclasses.replace(tiny.CONFIG, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    config = tiny.CONFIGS.get(family, config)
    model, params = tiny.model_and_params(config, scale=2.0)
    batch, sampling = tiny.batch(), Sampling(temperature=0.7)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=batch.completions.shape), jnp.float32)

    def total(score, params):
        return jnp.sum(score(params) * weights)

    grouped = lambda p: forward.completion_logprobs(model, p, batch, sampling)[0]  # noqa: E731
    flat = lambda p: flat_logprobs(model, p, batch, sampling)  # noqa: E731
    np.testing.assert_allclose(jax.jit(grouped)(params), jax.jit(flat)(params), atol=1e-5)
    ours, theirs = (jax.jit(jax.grad(partial(total, f)))(params) for f in (grouped, flat))
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(scale, 1))


def test_a_prompt_padded_on_the_right_scores_as_one_padded_on_the_left():
    model, params = tiny.model_and_params()
    left, right = tiny.batch("left"), tiny.batch("right")
    moved = np.zeros_like(left.prompts)
    for b in range(tiny.B):
        moved[b, right.prompt_mask[b]] = left.prompts[b, left.prompt_mask[b]]
    right = dataclasses.replace(right, prompts=moved)
    scores = [score(model, params, x, Sampling())[0] for x in (left, right)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_what_stands_in_the_padding_changes_nothing():
    model, params = tiny.model_and_params()
    batch = tiny.batch()
    other = dataclasses.replace(
        batch,
        prompts=np.where(batch.prompt_mask, batch.prompts, 7),
        completions=np.where(batch.completion_mask, batch.completions, 9),
    )
    scores = [score(model, params, x, Sampling())[0] for x in (batch, other)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100, 10_000])
def test_scores_do_not_depend_on_how_many_logits_are_held_at_once(chunk, monkeypatch):
    model, params = tiny.model_and_params()
    batch = tiny.batch()
    whole = score(model, params, batch, Sampling())
    monkeypatch.setattr(head, "tokens_at_once", lambda *_: chunk)
    chunked = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
    for a, b in zip(whole, chunked(params, batch), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())


@pytest.mark.parametrize(("tied", "cap"), [(True, 0.0), (False, 3.0)], ids=["tied", "untied and bounded"])
@pytest.mark.parametrize(("shape", "width"), [((1, 1, 1), 32), ((2, 2, 2), 32), ((1, 8, 1), 20)], ids=str)
def test_the_head_in_chunks_has_the_gradients_of_the_plain_head_on_every_mesh(shape, width, tied, cap, monkeypatch):
    monkeypatch.setattr(head, "tokens_at_once", lambda *_: 7)
    config = dataclasses.replace(
        tiny.CONFIG,
        width=width,
        heads=2,
        kv_heads=2,
        head_dim=10,
        rope=rope.plain(1e4, 10),
        tied_head=tied,
        final_soft_cap=cap,
    )
    mesh, rng = tiny.mesh_of(shape), np.random.default_rng(4)
    model, params = Decoder(config, mesh), jax.tree.map(lambda x: x * 9, Decoder(config).init(jax.random.key(0)))
    states = rng.normal(size=(tiny.B, 2, 10, width)).astype(np.float32)
    tokens = rng.integers(0, config.vocab_size, states.shape[:3])
    weights = rng.normal(size=(2, *tokens.shape)).astype(np.float32)
    sampling = Sampling(temperature=0.7)

    def plain(params, states):
        distribution = log_distribution(model.logits(params, states), sampling)
        chosen = jnp.take_along_axis(distribution, tokens[..., None], axis=-1)[..., 0]
        return chosen, -jnp.sum(jnp.exp(distribution) * distribution, axis=-1)

    def chunked(params, states):
        return head.logprobs(model, sampling, model.head_kernel(params), states, tokens)

    def values_and_gradients(scored, *given):
        total = lambda *given: sum(jnp.sum(x * w) for x, w in zip(scored(*given), weights, strict=True))  # noqa: E731
        return jax.jit(lambda *x: (scored(*x), jax.grad(total, argnums=(0, 1))(*x)))(*given)

    placed = jax.device_put(params, sharding.shardings(params, mesh)), sharding.shard_batch(states, mesh)
    ours, theirs = values_and_gradients(chunked, *placed), values_and_gradients(plain, params, states)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_no_array_of_all_logits_is_held_at_a_vocabulary_of_152k():
    b, g, c, v = 2, 8, 128, 151_936
    config = dataclasses.replace(tiny.CONFIG, vocab_size=v, max_positions=256)
    model = Decoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    of = jax.ShapeDtypeStruct
    batch = Batch(
        of((b, 16), jnp.int32), of((b, 16), bool),
        of((b, g, c), jnp.int32), of((b, g, c), bool), of((b, g, c), bool),
    )  # fmt: skip

    def loss(params, batch):
        return jnp.sum(forward.completion_logprobs(model, params, batch, Sampling())[0])

    memory = jax.jit(jax.grad(loss)).lower(params, batch).compile().memory_analysis()
    all_logits = b * g * c * v * 4
    assert memory.temp_size_in_bytes < 0.75 * all_logits, (memory.temp_size_in_bytes, all_logits)


def test_entropy_is_that_of_the_softmax():
    model, params = tiny.model_and_params()
    batch = tiny.batch()
    _, entropy = score(model, params, batch, Sampling())
    hidden = jax.jit(model.prefill)(params, batch.prompt)[0][:, -1]
    p = np.asarray(jax.nn.softmax(model.logits(params, hidden)))
    np.testing.assert_allclose(entropy[:, 0, 0], -(p * np.log(p)).sum(-1), atol=1e-5)


def assert_same_update(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("mode", "microbatch"),
    [
        ("token_mean", 1),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sequence_mean", 2), ("constant", 4), ("token_mean", 2))),
    ],
)
def test_microbatch_changes_memory_and_nothing_else(mode, microbatch):
    assert_same_update(tiny.one_update(mode=mode), tiny.one_update(mode=mode, microbatch=microbatch))


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((8, 1, 1), (2, 4, 1), (1, 1, 8)))]
)
def test_the_mesh_changes_placement_and_nothing_else(shape):
    assert_same_update(tiny.one_update(), tiny.one_update(shape))


@pytest.mark.parametrize("config", tiny.CONFIGS.values(), ids=tiny.CONFIGS)
def test_mesh_and_microbatch_together_give_the_same_update(config):
    packed = () if config is tiny.CONFIG else (1, 10)
    together = tiny.one_update((2, 2, 2), microbatch=4, packed=packed, config=config)
    assert_same_update(tiny.one_update(config=config), together)


@pytest.mark.parametrize(
    ("packed", "shape", "microbatch"),
    [
        pytest.param((1, 5), (1, 1, 1), 0, marks=pytest.mark.slow),
        pytest.param((3, 5), (1, 1, 1), 3, marks=pytest.mark.slow),
        ((1, 10), (2, 2, 2), 4),
    ],
    ids=str,
)
def test_a_group_may_be_in_several_micro_batches(packed, shape, microbatch):
    assert_same_update(tiny.one_update(), tiny.one_update(shape, microbatch, packed=packed))


def test_fsdp_gathers_weights_and_leaves_every_device_its_own_prompts():
    """Were the batch copied to all devices, memory would be several times that of plain data parallelizm."""
    config = dataclasses.replace(tiny.CONFIG, width=128, mlp_width=512, layers=4)
    sizes = {}
    for shape in ((8, 1, 1), (1, 8, 1)):
        mesh = tiny.mesh_of(shape)
        model = Decoder(config, mesh)
        params = jax.device_put(model.init(jax.random.key(0)), sharding.shardings(model.shapes, mesh))
        rng = np.random.default_rng(0)
        completions = rng.integers(0, 32, (16, 4, 32)).astype(np.int32)
        mask = np.ones(completions.shape, bool)
        batch = Batch(completions[:, 0, :8], mask[:, 0, :8], completions, mask, mask)
        loss = lambda p, b, model=model: jnp.sum(forward.completion_logprobs(model, p, b, Sampling())[0])  # noqa: E731
        lowered = jax.jit(jax.grad(loss)).lower(params, sharding.shard_batch(batch, mesh))
        sizes[shape] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert sizes[1, 8, 1] < 1.3 * sizes[8, 1, 1], sizes


def test_state_is_initialized_sharded_and_stays_so():
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    model, params = tiny.model_and_params()
    params = jax.device_put(params, sharding.shardings(params, mesh))
    optimizer = tiny.optimizer()
    state, step = tiny.updater(update.policy_objective(model, losses.ppo_clip, Sampling()), optimizer, params, mesh)
    before = jax.tree.map(lambda x: x.sharding, state)
    after, _ = step(state, sharding.shard_batch(tiny.batch(), mesh), jnp.arange(tiny.B))
    kernel = lambda tree: tree["layers"]["mlp"]["up"]["kernel"].sharding.spec  # noqa: E731
    moments = [leaf.sharding.spec for leaf in jax.tree.leaves(after.opt_state) if leaf.shape == (2, 32, 64)]
    assert kernel(after.params) == jax.P(None, "fsdp", "tensor")
    assert moments.count(jax.P(None, "fsdp", "tensor")) >= 2
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.is_equivalent_to(b.sharding, b.ndim), before, after)))


def test_a_non_finite_gradient_changes_no_parameter_and_is_counted():
    mesh, (model, params) = tiny.mesh_of(ONE), tiny.model_and_params()
    optimizer = tiny.optimizer()
    kept = jax.tree.map(np.array, params)
    state, step = tiny.updater(update.policy_objective(model, losses.ppo_clip, Sampling()), optimizer, params, mesh)
    good = tiny.batch()
    bad = dataclasses.replace(good, advantages=np.where(np.arange(tiny.B)[:, None, None] == 3, np.nan, good.advantages))
    state, _ = step(state, sharding.shard_batch(bad, mesh), jnp.arange(tiny.B))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(state.opt_state.total_notfinite) == 1
    state, _ = step(state, sharding.shard_batch(good, mesh), jnp.arange(tiny.B))
    assert int(state.opt_state.total_notfinite) == 1
    assert not np.array_equal(kept["embed"]["embedding"], state.params["embed"]["embedding"])


def test_an_update_without_a_trained_token_is_skipped_though_the_optimizer_has_momentum():
    mesh, (model, params) = tiny.mesh_of(ONE), tiny.model_and_params()
    optimizer = tiny.optimizer(weight_decay=0.1)
    state, step = tiny.updater(update.policy_objective(model, losses.ppo_clip, Sampling()), optimizer, params, mesh)
    good, rows = tiny.batch(), jnp.arange(tiny.B)
    state, _ = step(state, sharding.shard_batch(good, mesh), rows)
    before, moments = jax.tree.map(np.array, (state.params, state.opt_state.inner_state))
    nothing = dataclasses.replace(good, loss_mask=np.zeros_like(good.loss_mask))
    state, metrics = step(state, sharding.shard_batch(nothing, mesh), rows)
    jax.tree.map(np.testing.assert_array_equal, (before, moments), (state.params, state.opt_state.inner_state))
    assert int(state.opt_state.total_notfinite) == 1
    assert metrics["update_norm"] == 0


def test_the_first_on_policy_update_has_ratio_one_and_the_reinforce_gradient():
    model, params = tiny.model_and_params()
    batch = dataclasses.replace(tiny.batch(), old_logprobs=None, ref_logprobs=None)
    objective = update.policy_objective(model, losses.ppo_clip, Sampling())

    def surrogate(params):
        loss, metrics = objective(params, batch, {})
        return jnp.sum(loss * batch.loss_mask), metrics

    def reinforce(params):
        logprobs, _ = forward.completion_logprobs(model, params, batch, Sampling())
        return -jnp.sum(logprobs * batch.advantages * batch.loss_mask)

    ours, metrics = jax.jit(jax.grad(surrogate, has_aux=True))(params)
    theirs = jax.jit(jax.grad(reinforce))(params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics["ratio/mean"], 1.0)
    np.testing.assert_array_equal(metrics["clip/fraction"], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["momentum_dtype", "gradient_dtype"])
def test_moments_or_sums_of_micro_batches_in_bfloat16_move_the_parameters_almost_alike(field):
    def moved(**changes) -> tuple[np.ndarray, PyTree]:
        mesh, (model, params) = tiny.mesh_of(ONE), tiny.model_and_params()
        optimizer = tiny.optimizer(**changes)
        state, step = tiny.updater(
            update.policy_objective(model, losses.ppo_clip, Sampling()), optimizer, params, mesh, microbatch=1
        )
        before, batch = np.array(ravel_pytree(params)[0]), sharding.shard_batch(tiny.batch(), mesh)
        for _ in range(3):
            state, _ = step(state, batch, jnp.arange(tiny.B))
        return np.array(ravel_pytree(state.params)[0]) - before, state.opt_state

    exact, _ = moved()
    rounded, opt_state = moved(**{field: "bfloat16"})
    share = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-5 < share < 0.01
    dtypes = {x.dtype.name for x in jax.tree.leaves(opt_state) if x.ndim}
    assert dtypes == ({"float32", "bfloat16"} if field == "momentum_dtype" else {"float32"})
