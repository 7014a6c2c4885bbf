"""Completions that are trees: the numbers of their branches, with each token computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.learner.programs import example_shapes
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import attention_tpu
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.samples import to_batch
from jaxrl_llm.structs import Batch, Prompts, PromptSizes, Rollouts, Sizes, Tree
from jaxrl_llm.tools.replay import from_file
from jaxrl_llm.tools.replay.observer import StepObserver

B, G, C = tiny.B, 3, 16
COLUMNS = ("advantages", "sampler_logprobs", "old_logprobs", "ref_logprobs")


def random_tree(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns previous, ends and depths [C] of a completion whose tokens follow the last token, or one before it."""
    tree = Tree.chains(np.arange(C) < length)
    previous, ends, depths = tree.previous.copy(), tree.ends.copy(), tree.depths.copy()
    path: list[int] = []
    for t in range(length):
        if path and rng.random() < 0.3:
            path = path[: rng.integers(len(path))]
        previous[t], depths[t] = path[-1] if path else -1, len(path)
        path = [*path, t]
        leaves = [j for j in range(t) if j not in path and ends[j] == length]
        ends[leaves] = t
    return previous, ends, depths


@cache
def tree_batch(seed: int = 5) -> Batch:
    """A batch of random trees, some of whose tokens are trained. The last prompt has no token."""
    rng = np.random.default_rng(seed)
    tokens, mask = tiny.prompts()
    mask[-1] = False
    completions = rng.integers(0, tiny.CONFIG.vocab_size, (B, G, C)).astype(np.int32)
    lengths = rng.integers(1, C + 1, (B, G))
    lengths[0] = 1, C, C
    completion_mask = np.arange(C) < lengths[..., None]
    arrays = [[random_tree(rng, length) for length in group] for group in lengths]
    tree = Tree(*(np.array([[one[i] for one in group] for group in arrays]) for i in range(3)))
    # Nothing predicts the first token of a text without a prompt.
    trained = completion_mask & (rng.random((B, G, C)) < 0.7) & (mask.any(axis=-1)[:, None, None] | (tree.depths > 0))
    noise = {name: np.where(trained, rng.normal(-2, 0.3, (B, G, C)), 0).astype(np.float32) for name in COLUMNS}
    return Batch(tokens, mask, completions, completion_mask, trained, tree=tree, **noise)


def branch_index(batch: Batch) -> np.ndarray:
    """Returns the branches of each group, [B, G', C']: index g * C + t of each token in its group, -1 for padding."""
    branches = list[list[list[int]]]()
    for previous, mask in zip(batch.tree.previous, batch.completion_mask, strict=True):
        group = list[list[int]]()
        for g in range(G):
            length = mask[g].sum()
            for leaf in set(range(length)) - set(previous[g, :length].tolist()):
                path, t = list[int](), leaf
                while t >= 0:
                    path, t = [g * C + t, *path], int(previous[g, t])
                group.append(path)
        branches.append(group)
    index = np.full((B, max(map(len, branches)), max(len(x) for group in branches for x in group)), -1)
    for b, group in enumerate(branches):
        for k, path in enumerate(group):
            index[b, k, : len(path)] = path
    return index


def in_branches(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Moves values [B, G, C] to branches [B, G', C']; 0 on padding."""
    return np.where(index < 0, 0, np.take_along_axis(values.reshape(B, 1, -1), np.maximum(index, 0), axis=2))


def in_one_branch(mask: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Moves a mask [B, G, C] to the first branch of each token."""
    found = in_branches(mask, index).astype(bool)
    for b, k, d in np.argwhere(found):
        found[b, k, d] = not np.any(index[b, :k] == index[b, k, d])
    return found


@cache
def branch_batch() -> Batch:
    """The branches of `tree_batch` as completions of their own, with each trained token in one of them."""
    batch, index = tree_batch(), branch_index(tree_batch())
    trained = in_one_branch(batch.loss_mask, index)
    columns = {name: np.where(trained, in_branches(getattr(batch, name), index), 0) for name in COLUMNS}
    return Batch(
        batch.prompts, batch.prompt_mask, in_branches(batch.completions, index), index >= 0, trained, **columns
    )


def scores_and_gradient(model: Decoder, params, batch: Batch) -> tuple:
    """Log-probabilities and entropies of trained tokens, and the gradient of sums that the advantages weight."""

    def total(params):
        scores = forward.completion_logprobs(model, params, batch, Sampling(temperature=0.7))
        scores = [jnp.where(batch.loss_mask, x, 0.0) for x in scores]
        return sum(jnp.sum(x * batch.advantages * (1 + i)) for i, x in enumerate(scores)), scores

    gradient, scores = jax.jit(jax.grad(total, has_aux=True))(params)
    return transfers.to_host((scores, gradient))


@cache
def of_branches(family: str) -> tuple:
    model, params = tiny.model_and_params(tiny.CONFIGS[family], scale=2.0)
    return scores_and_gradient(model, params, branch_batch())


def close(tolerance: float) -> Callable:
    return partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "shape", "parts", "rows"),
    [("qwen2", (1, 1, 1), 1, None), ("qwen2", (1, 1, 1), 2, (3, 24)), ("gemma", (2, 2, 2), 1, (2, 32))],
    ids=str,
)
def test_scores_and_gradient_of_trees_equal_those_of_their_branches(family, shape, parts, rows):
    """In packed rows, in parts, on a mesh, and with windows that are shorter than a branch."""
    _, params = tiny.model_and_params(tiny.CONFIGS[family], scale=2.0)
    batch, mesh = tree_batch(), tiny.mesh_of(shape)
    if rows:
        batch = dataclasses.replace(batch, packed_index=pack(batch.completion_mask.sum(axis=-1), C, rows))
    model = Decoder(dataclasses.replace(tiny.CONFIGS[family], row_parts=parts), mesh)
    params = jax.device_put(params, sharding.shardings(params, mesh))
    scores, gradient = scores_and_gradient(model, params, transfers.shard_batch(batch, mesh))
    expected_scores, expected_gradient = of_branches(family)
    index = branch_index(batch)
    trained = in_one_branch(batch.loss_mask, index)
    assert trained.sum() == batch.loss_mask.sum()
    for found, expected in zip(scores, expected_scores, strict=True):
        close(2e-5)(in_branches(found, index)[trained], expected[trained])
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_gradient))
    jax.tree.map(lambda x, y: close(1e-5)(x / largest, y / largest), gradient, expected_gradient)


@pytest.mark.slow
def test_an_update_on_trees_is_that_on_their_branches_on_every_mesh():
    """With the prompts in micro-batches of packed rows, and the group of a prompt in several of them."""
    batch = tree_batch()
    packed = dataclasses.replace(batch, packed_index=pack(batch.completion_mask.sum(axis=-1), C, (1, 24)))
    expected = tiny.updated(branch_batch())
    assert expected[1]["grad_norm"] > 0.1
    for found in (tiny.updated(batch, (1, 4, 2), 4), tiny.updated(packed, (2, 1, 1), 4)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), found, expected)


def test_the_tpu_kernel_which_has_no_masks_of_trees_is_not_used(monkeypatch):
    class KernelUsed(Exception):
        pass

    def attend_tpu(*_, **__):
        raise KernelUsed

    monkeypatch.setattr(attention_tpu, "fits", lambda *_: True)
    monkeypatch.setattr(Decoder, "_attend_tpu", attend_tpu)
    model, batch = Decoder(tiny.CONFIG, tiny.mesh_of((1, 1, 1))), tree_batch()
    prefix = KeyValue(*(jax.ShapeDtypeStruct((2, B, tiny.CONFIG.kv_heads, tiny.P, 8), jnp.float32),) * 2)
    rows = forward._packed_rows(batch, np.broadcast_to(np.arange(G * C).reshape(1, G, C), (B, G, C)))
    run = partial(jax.eval_shape, model.extend, model.shapes, prefix, batch.prompt)
    run(rows)
    with pytest.raises(KernelUsed):
        run(rows._replace(previous=None, ends=None))


def test_checkpoints_batches_and_replays_keep_the_tree_of_a_completion():
    batch = tree_batch()
    arrays = (batch.completions, batch.completion_mask, batch.loss_mask, batch.sampler_logprobs)
    rollouts = Rollouts(*arrays, truncated=np.zeros((B, G), bool), versions=batch.completions, tree=batch.tree)
    restored = Rollouts.from_checkpoint(dataclasses.asdict(rollouts))
    prompts = Prompts(batch.prompts, batch.prompt_mask, [{}] * B, np.arange(B))
    made = to_batch(prompts, restored, batch.loss_mask, lambda lengths, _: pack(lengths, C, (1, 24)))
    fields = {name: getattr(batch, name) for name in from_file.IN_RECORD}
    inputs = StepObserver.inputs(SimpleNamespace(batch=batch))
    replayed = from_file.batch_of(SimpleNamespace(**fields, inputs=inputs, columns={}))
    for other in (restored, made, replayed):
        jax.tree.map(np.testing.assert_array_equal, other.tree, batch.tree)
    chains = Rollouts.from_checkpoint(dataclasses.asdict(dataclasses.replace(rollouts, tree=None)))
    assert to_batch(prompts, chains, batch.loss_mask, lambda *_: made.packed_index).tree is None


def test_programs_that_are_compiled_ahead_are_those_of_batches_with_trees():
    sizes = Sizes(
        prompts_per_step=B, max_completion_tokens=C, prompts_per_update=B, microbatch=0, steps=1, scheduled_steps=1,
        group_size=G, trees=True,
    )  # fmt: skip
    mesh = tiny.mesh_of((1, 1, 1))
    example, _ = example_shapes(sizes, PromptSizes(tiny.P), mesh)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(example.tree) == shapes(jax.tree.map(jnp.asarray, tree_batch().tree))
    assert example_shapes(dataclasses.replace(sizes, trees=False), PromptSizes(tiny.P), mesh)[0].tree is None
