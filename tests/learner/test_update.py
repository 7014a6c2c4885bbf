"""Scoring and updating: the group-native forward, memory, and what must not change a gradient."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward, head, optim, update
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import rope
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Batch, Prompt, PyTree

score = jax.jit(forward.completion_logprobs, static_argnums=(0, 3))


def assert_close(ours: PyTree, theirs: PyTree, tolerance: float = 1e-5) -> None:
    """Compares two trees within the rounding of float32: a share of the largest number."""
    largest = max(1.0, *(np.abs(x).max() for x in jax.tree.leaves(theirs)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=tolerance * largest), ours, theirs)


def packed(batch: Batch, shape: tuple[int, int]) -> Batch:
    return dataclasses.replace(batch, packed_index=pack(batch.completion_mask.sum(axis=-1), tiny.C, shape))


def flat_scores(model, params, batch, sampling):
    """Log-probabilities and entropies, every completion with a prompt of its own and all logits at once."""
    b, g, c = batch.completions.shape
    repeat = partial(np.repeat, repeats=g, axis=0)
    tokens = np.concatenate([repeat(batch.prompts), batch.completions.reshape(b * g, c)], axis=1)
    mask = np.concatenate([repeat(batch.prompt_mask), batch.completion_mask.reshape(b * g, c)], axis=1)
    logits = model.logits(params, model.prefill(params, Prompt(tokens, mask))[0]) / sampling.temperature
    before = batch.prompts.shape[1] - 1
    logprobs = jax.nn.log_softmax(logits[:, before : before + c])
    chosen = jnp.take_along_axis(logprobs, batch.completions.reshape(b * g, c, 1), axis=-1)
    scores = chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return tuple(jnp.where(batch.completion_mask, x.reshape(b, g, c), 0.0) for x in scores)


def with_gradients(scores, params):
    """Scores, and the gradient of a random weighting of them."""
    weights = np.random.default_rng(3).normal(size=(2, tiny.B, tiny.G, tiny.C)).astype(np.float32)

    def total(params):
        scored = scores(params)
        return sum(jnp.sum(x * w) for x, w in zip(scored, weights, strict=True)), scored

    gradient, scored = jax.jit(jax.grad(total, has_aux=True))(params)
    return transfers.to_host((scored, gradient))


CONFIGS = tiny.CONFIGS | {
    "untied": dataclasses.replace(tiny.CONFIG, tied_head=False, final_soft_cap=3.0),
    # No number of devices divides its width.
    "narrow": dataclasses.replace(
        tiny.CONFIG, width=20, heads=2, kv_heads=2, head_dim=10, rope=rope.default_rope(1e4, 10)
    ),
}


@cache
def flat(family: str):
    model, params = tiny.model_and_params(CONFIGS[family], scale=2.0)
    return with_gradients(lambda p: flat_scores(model, p, tiny.batch(), Sampling(temperature=0.7)), params)


@pytest.mark.parametrize(
    ("family", "shape", "parts", "rows"),
    [
        ("narrow", (1, 8, 1), 3, None),  # four rows in three parts
        ("gemma", (2, 2, 2), 9, (1, 10)),  # more parts than rows
        ("untied", (2, 2, 2), 1, None),
    ],
    ids=str,
)
def test_grouped_scores_and_gradients_equal_flat_ones(family, shape, parts, rows, monkeypatch):
    """On any mesh, with groups packed or in parts, and the logits of seven tokens at once."""
    monkeypatch.setattr(head, "tokens_at_once", lambda *_: 7)
    _, params = tiny.model_and_params(CONFIGS[family], scale=2.0)
    batch, mesh = packed(tiny.batch(), rows) if rows else tiny.batch(), tiny.mesh_of(shape)
    model = Decoder(dataclasses.replace(CONFIGS[family], row_parts=parts, remat="full"), mesh)
    params = jax.device_put(params, sharding.shardings(params, mesh))
    batch = transfers.shard_batch(batch, mesh)
    scores = lambda p: forward.completion_logprobs(model, p, batch, Sampling(temperature=0.7))  # noqa: E731
    for ours, theirs in zip(with_gradients(scores, params), flat(family), strict=True):
        assert_close(ours, theirs)


def test_padding_changes_no_score_wherever_and_whatever_it_is():
    model, params = tiny.model_and_params()
    left, right = tiny.batch("left"), tiny.batch("right")
    prompts, completions = np.full_like(left.prompts, 7), np.where(left.completion_mask, left.completions, 9)
    prompts[right.prompt_mask] = left.prompts[left.prompt_mask]
    right = dataclasses.replace(right, prompts=prompts, completions=completions)
    assert_close(*(score(model, params, x, Sampling()) for x in (right, left)))


def test_no_array_of_all_logits_is_held_at_a_vocabulary_of_152k():
    b, g, c, v = 2, 8, 128, 151_936
    model = Decoder(dataclasses.replace(tiny.CONFIG, vocab_size=v, max_positions=256))
    of = jax.ShapeDtypeStruct
    completions, mask = of((b, g, c), jnp.int32), of((b, g, c), bool)
    batch = Batch(of((b, 16), jnp.int32), of((b, 16), bool), completions, mask, mask)
    loss = lambda p, b: jnp.sum(forward.completion_logprobs(model, p, b, Sampling())[0])  # noqa: E731
    memory = jax.jit(jax.grad(loss)).lower(model.shapes, batch).compile().memory_analysis()
    all_logits = b * g * c * v * 4
    assert memory.temp_size_in_bytes < 0.75 * all_logits, (memory.temp_size_in_bytes, all_logits)


def test_fsdp_gathers_weights_and_leaves_every_device_its_own_prompts():
    """Were the batch copied to all devices, memory would be several times that of plain data parallelizm."""
    config, sizes = dataclasses.replace(tiny.CONFIG, width=128, mlp_width=512, layers=4), {}
    for shape in ((8, 1, 1), (1, 8, 1)):
        mesh = tiny.mesh_of(shape)
        model = Decoder(config, mesh)
        of = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
        params = jax.tree.map(of, model.shapes, sharding.shardings(model.shapes, mesh))
        completions = np.zeros((16, 4, 32), np.int32)
        mask = completions == 0
        batch = transfers.shard_batch(Batch(completions[:, 0, :8], mask[:, 0, :8], completions, mask, mask), mesh)
        loss = lambda p, b, model=model: jnp.sum(forward.completion_logprobs(model, p, b, Sampling())[0])  # noqa: E731
        sizes[shape] = jax.jit(loss).lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    assert sizes[1, 8, 1] < 1.3 * sizes[8, 1, 1], sizes


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "microbatch", "rows"), [((1, 1, 8), 3, (3, 5)), ((8, 1, 1), 0, ())], ids=str)
def test_an_update_is_the_same_on_meshes_of_one_axis(shape, microbatch, rows):
    assert_same_update(tiny.one_update(shape, microbatch, packed=rows), tiny.one_update())


def assert_same_update(ours: tuple, theirs: tuple) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), ours, theirs)


REWARDS = np.full((tiny.B, tiny.G), -0.5, np.float32)


@pytest.fixture(scope="module")
def updates() -> list[tuple]:
    """States and metrics after updates on a usual batch, on NaN, on no trained token, and on the usual batch again.

    The mesh has two axes, and the prompts run in micro-batches of packed rows: a group is in several of them. Half of
    the micro-batches are cut to a smaller size.
    """
    mesh = tiny.mesh_of((1, 4, 2))
    _, params = tiny.model_and_params()
    params = jax.device_put(params, sharding.shardings(params, mesh))
    objective = update.policy_objective(Decoder(tiny.CONFIG, mesh), losses.ppo_clip, Sampling(), kl=k3)
    coefficient = optim.adaptive_kl(0.1, 32, target=1.0, horizon=100)
    adamw = tiny.optimizer(weight_decay=0.1, coefficients={"kl/coef": coefficient})
    state, step = tiny.updater(objective, adamw, params, mesh, microbatch=4)
    usual = dataclasses.replace(packed(tiny.batch(), (1, 10)), rewards=REWARDS, smaller=((5, 0),))
    third = np.arange(tiny.B)[:, None, None] == 3
    not_finite = dataclasses.replace(usual, advantages=np.where(third, np.nan, usual.advantages))
    empty = dataclasses.replace(usual, loss_mask=usual.loss_mask & False, rewards=REWARDS * np.nan)
    made = [(jax.tree.map(lambda x: x.sharding, state), None)]
    for batch in (usual, not_finite, empty, usual):
        state, metrics = step(state, transfers.shard_batch(batch, mesh), jnp.arange(tiny.B))
        made.append(transfers.to_host((state, metrics)))
    return [*made, (state, None)]


def test_mesh_micro_batches_of_packed_rows_and_sizes_change_no_update(updates):
    params, metrics = tiny.one_update()
    _, (state, found), *_ = updates
    assert_same_update((state.params, {name: found[name] for name in metrics}), (params, metrics))


def test_a_state_is_initialized_sharded_and_stays_so(updates):
    (before, _), *_, (after, _) = updates
    spec = jax.P(None, "fsdp", "tensor")
    moments = [leaf.sharding.spec for leaf in jax.tree.leaves(after.opt_state) if leaf.shape == (2, 32, 64)]
    assert after.params["layers"]["mlp"]["up"]["kernel"].sharding.spec == spec
    assert moments.count(spec) >= 2
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.is_equivalent_to(b.sharding, b.ndim), before, after)))


def test_an_update_on_nan_or_on_no_trained_token_changes_nothing_but_a_count(updates):
    """Neither momentum and weight decay move a parameter, nor does a schedule or a coefficient go on."""
    _, (first, metrics), *skipped, (last, _), _ = updates
    for count, (state, metrics) in enumerate(skipped, 1):
        kept = lambda x: (x.params, x.opt_state.inner_state, x.coef_state)  # noqa: E731
        jax.tree.map(np.testing.assert_array_equal, kept(state), kept(first))
        assert int(state.opt_state.total_notfinite) == count
        assert np.isfinite(metrics["kl/to_reward"]) or count == 1  # also without any verdict
    assert skipped[1][1]["update_norm"] == 0
    assert int(last.opt_state.total_notfinite) == 2
    assert last.coef_state["learning_rate"] == first.coef_state["learning_rate"] + 1
    assert last.coef_state["kl/coef"] != first.coef_state["kl/coef"]
    assert not np.array_equal(last.params["embed"]["embedding"], first.params["embed"]["embedding"])


@pytest.mark.parametrize(("trained", "refused"), [(True, 1.0), (False, 0.0)])
def test_an_update_without_a_trained_token_shows_no_mismatch(trained, refused):
    mesh, adamw = tiny.mesh_of((1, 1, 1)), tiny.optimizer(skips=("sampler_mismatch",))
    weights = dict.fromkeys(("importance/raw_mean", "importance/raw_square"), jnp.float32(0))
    learner = update.make_learner(
        lambda *_: None, adamw, {"w": jnp.ones(1)}, lambda: {"w": jnp.ones(1)}, mesh, microbatch=0, aggregate=abs
    )
    placed = jax.tree.map(lambda x: x.sharding, learner.shapes)
    step = update.make_update_step(lambda params, *_: (params, dict(weights)), adamw, mesh, placed)
    batch = Batch(None, None, None, None, np.full((1, 1, 2), trained))
    assert step(learner.init(), batch, jnp.arange(1))[1]["skip/sampler_mismatch"] == refused


def test_the_kl_to_reward_ratio_is_the_penalty_of_a_completion_over_the_reward(updates):
    batch, (model, params) = tiny.batch(), tiny.model_and_params()
    gap = batch.ref_logprobs - np.asarray(score(model, params, batch, Sampling())[0])
    penalty = 0.1 * np.where(batch.loss_mask, np.exp(gap) - gap - 1, 0).sum(axis=-1).mean()
    assert updates[1][1]["kl/to_reward"] == pytest.approx(penalty / 0.5, rel=1e-4)
