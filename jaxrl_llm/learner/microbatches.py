"""Micro-batches: the parts of a batch that are in memory one after the other.

A micro-batch has some prompts, and N packed rows of each prompt. A prompt with more than N rows is in several
micro-batches. Their number depends on the lengths of the completions, so a compiled loop ends when no row is left.
Rows without tokens cost no time, and need no program of another shape.
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
from jaxrl_llm.structs import Array, Batch, PyTree


class Microbatch(NamedTuple):
    """Some prompts of a batch with some of their completions."""

    batch: Batch  # these prompts; masks are False on completions outside of the micro-batch
    take: Callable[[PyTree], PyTree]  # arrays [B, ...] of all prompts -> arrays of these prompts
    spread: Callable[[PyTree], PyTree]  # arrays of these prompts -> arrays [B, ...], 0 for other prompts


def map_reduce(
    batch: Batch,
    visit: Callable[[Microbatch], PyTree],
    join: Callable[[PyTree, PyTree], PyTree] = optax.tree.add,
    empty: Callable[[PyTree], PyTree] = optax.tree.zeros_like,
    *,
    microbatch: int,
    mesh: Mesh,
) -> PyTree:
    """Runs `visit` on each micro-batch and joins the results with `join`, which adds them by default.

    visit is traced twice, so it should call a jitted function. empty(shapes): returns the result of no micro-batch,
    from which the loop starts. microbatch: prompts of a micro-batch, 0 = all prompts.
    """
    count, get_part = split(batch, microbatch, mesh)
    if isinstance(count, int) and count == 1:
        return visit_smallest_size(get_part(0), visit)

    def visit_next(number: Array, joined: PyTree) -> PyTree:
        return join(joined, visit_smallest_size(get_part(number), visit))

    start = empty(jax.eval_shape(lambda: visit(get_part(0))))
    return jax.lax.fori_loop(0, count, visit_next, start)


def visit_smallest_size(part: Microbatch, visit: Callable[[Microbatch], PyTree]) -> PyTree:
    """Returns visit(part) with the prompts cut to the smallest of the batch's sizes that holds them.

    Only prompts with completions in the micro-batch count.
    """
    prompt, smaller = part.batch.prompt, part.batch.smaller
    if not smaller:
        return visit(part)

    def narrowed(width: int, patches: int) -> PyTree:
        tokens, mask, images = prompt.narrowed(width, patches)
        narrow = replace(part.batch, prompts=tokens, prompt_mask=mask, images=images, smaller=())
        return visit(part._replace(batch=narrow))

    full_size = prompt.tokens.shape[1], prompt.images.sizes.patches if prompt.images is not None else 0
    branches = [partial(narrowed, *size) for size in (full_size, *smaller)]
    has_tokens = jnp.any(part.batch.completion_mask, axis=(1, 2))
    # The minimum is over all devices, because they must run the same branch.
    return jax.lax.switch(jnp.min(prompt.count_sizes(smaller), where=has_tokens, initial=len(smaller)), branches)


def split(batch: Batch, microbatch: int, mesh: Mesh) -> tuple[int | Array, Callable[[Array | int], Microbatch]]:
    """Returns the number of micro-batches of `microbatch` prompts (0 = all prompts), and a function that makes one.

    The function gets the number of a micro-batch. Each completion is in one micro-batch. Each device runs its own
    prompts, so no prompt moves between devices.
    """
    devices = sharding.prompt_shards(mesh)
    prompts = len(batch.prompts) // devices  # prompts of each device
    device_prompts_at_once = microbatch // devices or prompts
    packed: Array = batch.packed_index
    parts = 1 if packed is None else packed.shape[1]
    if parts == 1 and device_prompts_at_once == prompts:
        return 1, lambda i: Microbatch(batch, lambda tree: tree, lambda tree: tree)

    def by_device(array: Array) -> Array:
        """Splits the axis of prompts: [B, ...] -> [devices, prompts of a device, ...]."""
        return array.reshape(devices, prompts, *array.shape[1:])

    count: int | Array = -(-prompts // device_prompts_at_once)
    has_rows = jnp.ones((devices, prompts), bool)
    if parts > 1:
        has_rows = by_device(jnp.any(packed >= 0, axis=(2, 3))).reshape(devices, -1)
        count = -(-jnp.max(jnp.sum(has_rows, axis=1)) // device_prompts_at_once)
    sort_key: Array = ~has_rows
    if batch.smaller:
        # Prompts of one size run together, so that their micro-batches can be cut to that size.
        size = jnp.repeat(by_device(batch.prompt.count_sizes(batch.smaller)), parts, axis=1)
        sort_key = jnp.where(has_rows, size, 1 + len(batch.smaller))
    # The parts with tokens come first, in order, on each device.
    order = jnp.argsort(sort_key, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % device_prompts_at_once)))

    def get_part(number: Array | int) -> Microbatch:
        """Returns the micro-batch with this number, from 0."""
        start = number * device_prompts_at_once
        part_numbers = jax.lax.dynamic_slice_in_dim(order, start, device_prompts_at_once, axis=1)
        # A device with fewer parts than another device runs empty ones, because all devices run the same loop.
        used_parts = jnp.sum(has_rows, axis=1, keepdims=True)
        has_tokens = start + jnp.arange(device_prompts_at_once)[None] < used_parts
        prompt, rows = part_numbers // parts, part_numbers % parts

        def take(tree: PyTree) -> PyTree:
            """Selects the prompts of this micro-batch from arrays [B, ...] of all prompts."""

            def select(array: Array) -> jax.Array:
                selected = jax.vmap(lambda of_device, index: of_device[index])(by_device(array), prompt)
                return selected.reshape(-1, *array.shape[1:])

            return jax.tree.map(select, tree)

        def spread(tree: PyTree) -> PyTree:
            """Undoes `take`: returns arrays [B, ...] that are 0 for the other prompts."""

            def add_at(values: Array, index: Array) -> Array:
                # The values are added, because a micro-batch may hold a prompt twice.
                return jnp.zeros((prompts, *values.shape[1:]), values.dtype).at[index].add(values)

            def spread_array(array: Array) -> jax.Array:
                of_devices = array.reshape(devices, device_prompts_at_once, *array.shape[1:])
                return jax.vmap(add_at)(of_devices, prompt).reshape(-1, *array.shape[1:])

            return jax.tree.map(spread_array, tree)

        selected, index, is_here = take(replace(batch, packed_index=None)), None, has_tokens.reshape(-1, 1, 1)
        if packed is not None:
            index = jax.vmap(lambda of_device, prompt, rows: of_device[prompt, rows])(by_device(packed), prompt, rows)
            index = jnp.where(has_tokens[..., None, None], index, -1).reshape(-1, 1, *index.shape[2:])
            is_here = _completions_of(index, *batch.completions.shape[1:])
        masks = {name: getattr(selected, name) & is_here for name in ("completion_mask", "loss_mask")}
        return Microbatch(replace(selected, packed_index=index, **masks), take, spread)

    return count, get_part


def _completions_of(index: Array, group_size: int, limit: int) -> jax.Array:
    """Returns [B, G, 1]: True for the completions of a group that packed rows hold.

    index [B, E, N, T]: packed index. limit: token limit of completions (C).
    """
    number = jnp.where(index < 0, group_size, index // limit).reshape(len(index), 1, -1)
    return jnp.any(number == jnp.arange(group_size)[None, :, None], axis=-1, keepdims=True)
