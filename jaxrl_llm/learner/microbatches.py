"""Micro-batches: the part of a batch that is in memory at a time.

A micro-batch has some prompts, and of each prompt N of its packed rows. A prompt with more rows is in several
micro-batches, and runs in each of them. How many there are depends on the lengths of the completions, so the compiled
loop ends when no row is left: rows without tokens cost nothing, and need no program of another shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import Array, Batch, Prompt, PyTree


class Microbatch(NamedTuple):
    """Some prompts of a batch, with some of their completions."""

    batch: Batch  # its masks are False on all other completions
    take: Callable[[PyTree], PyTree]  # arrays [B, ...] of all prompts -> the rows of these prompts
    spread: Callable[[PyTree], PyTree]  # rows of these prompts -> arrays [B, ...], 0 for all others


def map_reduce(
    batch: Batch,
    visit: Callable[[Microbatch], PyTree],
    join: Callable[[PyTree, PyTree], PyTree] = optax.tree.add,
    nothing: Callable[[PyTree], PyTree] = optax.tree.zeros_like,
    *,
    microbatch: int,
    mesh: Mesh,
) -> PyTree:
    """Joins what `visit` returns for each micro-batch of `microbatch` prompts (0: of all). By default it adds that up.

    nothing: shapes of that -> what to begin with. visit is traced twice: give it a jitted function.
    """
    count, part = split(batch, microbatch, mesh)
    if isinstance(count, int) and count == 1:
        return visit_smallest_size(part(0), visit)
    start = nothing(jax.eval_shape(lambda: visit(part(0))))
    return jax.lax.fori_loop(0, count, lambda i, joined: join(joined, visit_smallest_size(part(i), visit)), start)


def visit_smallest_size(part: Microbatch, visit: Callable[[Microbatch], PyTree]) -> PyTree:
    """Returns visit(part), with prompts of the smallest of the batch's sizes that holds those with completions."""
    prompt = part.batch.prompt
    if prompt.images is None or not prompt.images.smaller:
        return visit(part)

    def narrowed(width: int, patches: int) -> PyTree:
        tokens, mask, images = prompt.narrowed(width, patches)
        return visit(part._replace(batch=replace(part.batch, prompts=tokens, prompt_mask=mask, images=images)))

    whole = prompt.tokens.shape[1], prompt.images.sizes.patches
    branches = [partial(narrowed, *size) for size in (whole, *prompt.images.smaller)]
    has_tokens = jnp.any(part.batch.completion_mask, axis=(1, 2))
    # The least of all devices: they run the same branch.
    return jax.lax.switch(jnp.min(smaller_sizes_of(prompt), where=has_tokens, initial=len(branches) - 1), branches)


def smaller_sizes_of(prompt: Prompt) -> jax.Array:
    """Returns how many of the smaller sizes hold each prompt [B]."""
    assert prompt.images is not None
    first = jnp.argmax(prompt.mask, axis=1)
    last = jnp.max(jnp.where(prompt.images.segments > 0, 1 + jnp.arange(prompt.images.sizes.patches), 0), axis=1)
    holds = [(first >= prompt.tokens.shape[1] - width) & (last <= patches) for width, patches in prompt.images.smaller]
    return sum(holds, jnp.zeros(len(prompt.mask), jnp.int32))


def split(batch: Batch, microbatch: int, mesh: Mesh) -> tuple[int | Array, Callable[[Array | int], Microbatch]]:
    """Returns the number of micro-batches of `microbatch` prompts (0: of all), and `part(i)`, the micro-batch i.

    Each completion is in one of them. Each device goes through its own prompts, so none needs another's.
    """
    devices = sharding.prompt_shards(mesh)
    prompts = len(batch.prompts) // devices  # of a device
    at_once = microbatch // devices or prompts
    packed: Array = batch.packed_index
    parts = 1 if packed is None else packed.shape[1]
    if parts == 1 and at_once == prompts:
        return 1, lambda i: Microbatch(batch, lambda tree: tree, lambda tree: tree)

    def by_device(x: Array) -> Array:
        return x.reshape(devices, prompts, *x.shape[1:])

    count: int | Array = -(-prompts // at_once)
    used = jnp.ones((devices, prompts), bool)
    if parts > 1:
        used = by_device(jnp.any(packed >= 0, axis=(2, 3))).reshape(devices, -1)
        count = -(-jnp.max(jnp.sum(used, axis=1)) // at_once)
    last: Array = ~used
    if batch.images is not None and batch.images.smaller:
        # Prompts of a size run together.
        size = jnp.repeat(by_device(smaller_sizes_of(batch.prompt)), parts, axis=1)
        last = jnp.where(used, size, 1 + len(batch.images.smaller))
    # The parts of each device that have tokens, in order, and then the others.
    order = jnp.argsort(last, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % at_once)))

    def part(i: Array | int) -> Microbatch:
        at = jax.lax.dynamic_slice_in_dim(order, i * at_once, at_once, axis=1)
        # A device with fewer parts than another goes through empty ones: all devices run the same loop.
        has_tokens = i * at_once + jnp.arange(at_once)[None] < jnp.sum(used, axis=1, keepdims=True)
        prompt, rows = at // parts, at % parts

        def take(tree: PyTree) -> PyTree:
            def select(x: Array) -> jax.Array:
                return jax.vmap(lambda x, at: x[at])(by_device(x), prompt).reshape(-1, *x.shape[1:])

            return jax.tree.map(select, tree)

        def spread(tree: PyTree) -> PyTree:
            def add_at(x: Array, at: Array) -> Array:
                # A prompt may be here twice.
                return jnp.zeros((prompts, *x.shape[1:]), x.dtype).at[at].add(x)

            def spread_array(x: Array) -> jax.Array:
                spread_rows = jax.vmap(add_at)(x.reshape(devices, at_once, *x.shape[1:]), prompt)
                return spread_rows.reshape(-1, *x.shape[1:])

            return jax.tree.map(spread_array, tree)

        selected, index, is_here = take(replace(batch, packed_index=None)), None, has_tokens.reshape(-1, 1, 1)
        if packed is not None:
            index = jax.vmap(lambda x, b, n: x[b, n])(by_device(packed), prompt, rows)
            index = jnp.where(has_tokens[..., None, None], index, -1).reshape(-1, 1, *index.shape[2:])
            is_here = _completions_of(index, *batch.completions.shape[1:])
        masks = {name: getattr(selected, name) & is_here for name in ("completion_mask", "loss_mask")}
        return Microbatch(replace(selected, packed_index=index, **masks), take, spread)

    return count, part


def _completions_of(index: Array, group: int, limit: int) -> jax.Array:
    """Whether packed rows index [B, E, N, T] have completion g: [B, G, 1]."""
    number = jnp.where(index < 0, group, index // limit).reshape(len(index), 1, -1)
    return jnp.any(number == jnp.arange(group)[None, :, None], axis=-1, keepdims=True)
