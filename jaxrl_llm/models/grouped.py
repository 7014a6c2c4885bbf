"""Products of groups of rows, each with its own kernel.

A TPU has an instruction for it. On other platforms `jax.lax.ragged_dot` multiplies every row with every kernel, so here
a loop goes over blocks of rows that share a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array

# Rows of a block. Few make the loop long; with many, more rows of later groups are computed in vain.
MIN_ROWS, MAX_ROWS = 8, 256

# dW of a group: rows [M, D] and gradients [M, F] -> [E, D, F].
_KERNEL_GRADIENT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(rows: Array, kernels: Array, sizes: Array, precision: jax.lax.Precision | None = None) -> jax.Array:
    """rows [M, D], sorted by group, times the kernel of their group: kernels [E, D, F], sizes [E] -> [M, F].

    Rows after the last group give 0.
    """
    on_tpu = partial(jax.lax.ragged_dot, precision=precision)
    product = jax.lax.platform_dependent(
        rows, kernels, sizes, tpu=on_tpu, default=partial(_by_blocks, precision=precision)
    )
    # The two implementations leave different numbers in the rows after the last group.
    return jnp.where(jnp.arange(len(product))[:, None] < jnp.sum(sizes), product, 0)


def _forward(rows: Array, kernels: Array, sizes: Array, precision: Any) -> tuple[jax.Array, tuple[Array, ...]]:
    return grouped_matmul(rows, kernels, sizes, precision), (rows, kernels, sizes)


def _backward(precision: Any, saved: tuple[Array, ...], gradients: Array) -> tuple[Any, Any, None]:
    rows, kernels, sizes = saved
    row_gradients = grouped_matmul(gradients, jnp.swapaxes(kernels, 1, 2), sizes, precision)
    on_tpu = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_KERNEL_GRADIENT, precision=precision)
    kernel_gradients = jax.lax.platform_dependent(
        rows, gradients, sizes, tpu=on_tpu, default=partial(_kernel_gradients_by_blocks, precision=precision)
    )
    return row_gradients, kernel_gradients, None


grouped_matmul.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """Blocks of rows of one group each. The last block of a group also holds rows of later groups."""

    size: int
    starts: Array  # [E] first row of each group
    ends: Array  # [E] row after the last one of each group
    before: Array  # [E] number of blocks before each group
    total: Array

    def at(self, i: Array) -> tuple[jax.Array, jax.Array]:
        """Returns group and first row of block i."""
        # The last one that begins here: those before it are empty.
        group = jnp.sum(self.before <= i) - 1
        return group, self.starts[group] + (i - self.before[group]) * self.size


def _blocks(rows: int, sizes: Array) -> _Blocks:
    """Makes blocks of about as many rows as a group has."""
    size = min(max(1 << (rows // len(sizes)).bit_length(), MIN_ROWS), MAX_ROWS)
    ends, counts = jnp.cumsum(sizes), -(-sizes // size)
    return _Blocks(size, ends - sizes, ends, jnp.cumsum(counts) - counts, jnp.sum(counts))


def _padded(rows: Array, blocks: _Blocks) -> jax.Array:
    """Adds rows, because the last block may reach beyond the end."""
    return jnp.pad(rows, ((0, blocks.size), (0, 0)))


def _by_blocks(rows: Array, kernels: Array, sizes: Array, *, precision: Any) -> jax.Array:
    blocks = _blocks(len(rows), sizes)
    padded = _padded(rows, blocks)

    def step(i: Array, products: Array) -> jax.Array:
        group, first = blocks.at(i)
        block = jax.lax.dynamic_slice_in_dim(padded, first, blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        # The order matters, because the next group writes over what this group leaves in its rows.
        return jax.lax.dynamic_update_slice_in_dim(products, jnp.matmul(block, kernel, precision=precision), first, 0)

    products = jnp.zeros((len(padded), kernels.shape[2]), rows.dtype)
    # The loop covers only the blocks in use, at most rows / size + groups. JAX cannot differentiate a loop of unknown
    # length, so `grouped_matmul` has a gradient of its own.
    return jax.lax.fori_loop(0, blocks.total, step, products)[: len(rows)]


def _kernel_gradients_by_blocks(rows: Array, gradients: Array, sizes: Array, *, precision: Any) -> jax.Array:
    blocks = _blocks(len(rows), sizes)
    rows, gradients = _padded(rows, blocks), _padded(gradients, blocks)

    def step(i: Array, totals: Array) -> jax.Array:
        group, first = blocks.at(i)
        x, gradient = (jax.lax.dynamic_slice_in_dim(y, first, blocks.size) for y in (rows, gradients))
        in_group = (first + jnp.arange(blocks.size) < blocks.ends[group])[:, None]
        # Rows of the next groups are in this block too, and belong to their kernels.
        gradient = jnp.where(in_group, gradient, 0)
        more = jnp.matmul(x.T, gradient, precision=precision, preferred_element_type=jnp.float32)
        total = jax.lax.dynamic_index_in_dim(totals, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(totals, total + more, group, 0)

    # It sums over many blocks.
    totals = jnp.zeros((len(sizes), rows.shape[1], gradients.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.total, step, totals).astype(rows.dtype)
