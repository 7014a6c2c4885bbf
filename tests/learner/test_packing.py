"""Lanes: every token once, few shapes, and the same scores and gradients as without them."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward, microbatches, packing, update
from jaxrl_llm.learner.packing import Packing, packed_shapes
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.machine.shapes import ShapePolicy
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.rope import default_rope

LIMIT = 32


def pack(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Packs into the narrowest rows that hold everything, two rows in a part."""
    shapes = [(n, t) for n, t in packed_shapes(lengths.shape[1], limit) if n <= 2 and limit <= t]
    return packing.pack(lengths, limit, min(shapes, key=lambda shape: (shape[1], -shape[0])))


def ragged(seed: int, b: int = 8, g: int = 8, median: float = 6.0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 0.8, (b, g)).astype(int)
    return np.clip(lengths, 1, LIMIT)


@pytest.mark.parametrize("seed", range(2))
def test_every_token_has_one_slot_and_a_completion_lies_in_one_lane_in_order(seed):
    """And in less than half of the slots that rows of the longest length have."""
    lengths = ragged(seed)
    assert np.any(pack(lengths, LIMIT) >= 0, axis=(2, 3)).sum() * 2 * LIMIT <= lengths.size * LIMIT / 2
    for row, packed_index in zip(lengths, pack(lengths, LIMIT), strict=True):
        packed_index = packed_index.reshape(-1, packed_index.shape[-1])
        taken = packed_index[packed_index >= 0]
        wanted = np.concatenate([g * LIMIT + np.arange(n) for g, n in enumerate(row)])
        np.testing.assert_array_equal(np.sort(taken), wanted)
        for g, n in enumerate(row):
            row, at = np.nonzero(packed_index // LIMIT == g)
            assert len(set(row)) == 1
            np.testing.assert_array_equal(at, at[0] + np.arange(n))
            np.testing.assert_array_equal(packed_index[row[0], at] % LIMIT, np.arange(n))


@pytest.mark.parametrize("limit", [5, 12, 32, 100, 512, 2048])
@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_a_run_has_few_shapes_and_each_that_is_wide_enough_holds_all(group, limit):
    shapes = packed_shapes(group, limit)
    assert len(shapes) <= 28
    sizes = [n * t for n, t in shapes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= group * max(1.5 * limit, 2 * packing.KERNEL)
    for shape in shapes:
        longest = min(shape[1], limit)
        index = packing.pack(np.full((2, group), longest), limit, shape)
        assert index.shape[1:] == packing.index_shape(group, limit, shape)
        assert (index >= 0).sum() == 2 * group * longest


def test_a_step_takes_the_cheapest_shape_and_orders_a_smaller_one_once_it_pays():
    shapes = [shape for shape in packed_shapes(8, LIMIT) if shape[1] == LIMIT]
    work = lambda shape, _, parts: parts.sum() * (50 + shape[0] * shape[1]) / 100  # noqa: E731
    shape_policy = ShapePolicy(tuple(shapes), compile_seconds=50.0, limit=3)
    pack_next, seen = Packing(shape_policy, work, LIMIT), []
    for seed in range(20):
        lengths = ragged(seed) if seed else np.full((8, 8), LIMIT)  # the first batch is longer
        index = pack_next(lengths, 8)
        assert (index >= 0).sum() == lengths.sum()
        seen.append(index.shape[2:])
    assert seen[0] == shapes[0]
    assert 2 <= len(set(seen)) <= 3
    assert seen[-1][0] < seen[0][0]
    changes = [i for i in range(1, 20) if seen[i] not in seen[:i]]
    assert changes[0] > 2  # the first order: padding has cost as much as compiling


def test_a_generous_limit_makes_not_even_the_first_step_slow():
    limit, shapes = 4096, packed_shapes(8, 4096)
    work = lambda shape, _, parts: parts.sum() * shape[0] * shape[1] ** 2  # noqa: E731
    shape_policy = ShapePolicy(tuple(shapes), compile_seconds=1e15, limit=3)
    pack_next, short = Packing(shape_policy, work, limit), np.full((2, 8), 16)
    seen = [pack_next(np.where(step == 1, 1000, short), 8).shape[2:] for step in range(3)]
    assert seen[0] == seen[2] == (1, 128)
    assert seen[1][1] >= limit and set(shape_policy.first_calls) == {seen[0], seen[1]}


def test_no_later_shape_is_larger_than_the_first():
    shapes = packed_shapes(8, LIMIT)
    work = lambda shape, _, parts: parts.sum() * (1000 + shape[0] * shape[1]) / 100  # noqa: E731
    pack_next = Packing(ShapePolicy(tuple(shapes), compile_seconds=1.0, limit=3), work, LIMIT)
    first = pack_next(ragged(0), 8).shape[2:]
    assert first[0] < 8
    for seed in range(10):
        assert pack_next(np.full((8, 8), LIMIT), 8).shape[2:] == first, seed


@pytest.mark.parametrize(("mesh", "microbatch"), [((1, 1, 1), 2), ((1, 1, 1), 0), ((2, 2, 2), 4)])
def test_there_are_as_many_micro_batches_as_the_device_with_most_rows_needs(mesh, microbatch):
    batch, devices = tiny.batch(), mesh[0] * mesh[1]
    index = packing.pack(batch.completion_mask.sum(axis=-1), tiny.C, (1, tiny.C))

    @jax.jit
    def count_and_tokens(batch):
        count, part = microbatches.split(batch, microbatch, tiny.mesh_of(mesh))
        return count, jax.vmap(lambda i: part(i).batch.completion_mask.sum())(jnp.arange(tiny.B * tiny.G))

    count, tokens = count_and_tokens(dataclasses.replace(batch, packed_index=index))
    rows = np.any(index >= 0, axis=(2, 3)).reshape(devices, -1).sum(axis=1)
    assert int(count) == -(-rows.max() // ((microbatch or tiny.B) // devices))
    assert tokens[:count].sum() == batch.completion_mask.sum()


def test_a_group_in_parts_needs_less_memory():
    config = dataclasses.replace(tiny.CONFIG, width=64, mlp_width=256, max_positions=4096, remat="full")
    of = jax.ShapeDtypeStruct

    def compiled(parts: int):
        model = Decoder(dataclasses.replace(config, row_parts=parts))
        tokens, mask = of((1, 8, 256), jnp.int32), of((1, 8, 256), bool)
        batch = update.Batch(of((1, 64), jnp.int32), of((1, 64), bool), tokens, mask, mask)
        total = lambda params, batch: forward.completion_logprobs(model, params, batch, Sampling())[0].sum()  # noqa: E731
        return jax.jit(jax.grad(total)).lower(model.shapes, batch).compile()

    whole, in_parts = (compiled(parts).memory_analysis().temp_size_in_bytes for parts in (1, 8))
    assert in_parts < 0.4 * whole, (in_parts, whole)


def test_scores_do_not_depend_on_packing_mesh_micro_batch_or_sizes_of_prompts():
    (model, params), batch, mesh = tiny.model_and_params(), tiny.batch(), tiny.mesh_of((2, 2, 2))
    whole, _ = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))(params, batch)
    score = forward.make_logprob_fn(Decoder(tiny.CONFIG, mesh), Sampling(), mesh, 4)
    params = jax.device_put(params, sharding.shardings(params, mesh))
    index, sizes = pack(batch.completion_mask.sum(axis=-1), tiny.C), ((5, 0), (3, 0))
    packed = dataclasses.replace(batch, packed_index=index, smaller=sizes)
    assert packed.packed_index.shape[2] < tiny.G
    found = score(params, transfers.shard_batch(packed, mesh))
    np.testing.assert_allclose(found, whole, atol=1e-5 * np.abs(whole).max())


@cache
def flops(b, g, p, c) -> float:
    """XLA's count for scoring with a one-layer model (a loop's body is counted once), all logits at once."""
    config = dataclasses.replace(
        tiny.CONFIG, layers=1, width=512, heads=8, head_dim=64, rope=default_rope(1e4, 64), mlp_width=1408,
        max_positions=4096, vocab_size=64,
    )  # fmt: skip
    model, of = Decoder(config), jax.ShapeDtypeStruct
    tokens, mask = of((b, g, c), jnp.int32), of((b, g, c), bool)
    batch = update.Batch(of((b, p), jnp.int32), of((b, p), bool), tokens, mask, mask)
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
    return score.lower(model.shapes, batch).cost_analysis()["flops"]


def test_doubling_the_prompt_costs_less_than_15_percent_of_a_flat_layout():
    ours = flops(2, 16, 128, 32) - flops(2, 16, 64, 32)
    flat = flops(2 * 16, 1, 128, 32) - flops(2 * 16, 1, 64, 32)
    assert ours < 0.15 * flat, ours / flat
