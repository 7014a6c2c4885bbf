"""Grouped matrix products: each group of rows is multiplied by its own kernel, as the experts of a layer need.

On TPUs this is `jax.lax.ragged_dot`. On other platforms `ragged_dot` multiplies every row by every kernel, so this file
loops over blocks of rows that share a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array

# Bounds for the rows of a block. Small blocks make the loop long. Large blocks have more padding.
MIN_ROWS, MAX_ROWS = 8, 256

# The product of rows [M, D] and output gradients [M, F] is, group by group, the gradient of the kernels [E, D, F].
_KERNEL_GRADIENT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(rows: Array, kernels: Array, sizes: Array, precision: jax.lax.Precision | None = None) -> jax.Array:
    """Multiplies each row by the kernel of its group, as a mixture of experts needs. Returns the products [M, F].

    rows [M, D]: sorted by group. kernels [E, D, F]: one for each of E groups. sizes [E]: number of rows of each group.
    The products of rows after the last group are 0.
    """
    ragged_dot = partial(jax.lax.ragged_dot, precision=precision)
    product = jax.lax.platform_dependent(
        rows, kernels, sizes, tpu=ragged_dot, default=partial(_by_blocks, precision=precision)
    )
    # Set the rows after the last group to 0, because the two implementations leave different numbers there.
    return jnp.where(jnp.arange(len(product))[:, None] < jnp.sum(sizes), product, 0)


def _forward(rows: Array, kernels: Array, sizes: Array, precision: Any) -> tuple[jax.Array, tuple[Array, ...]]:
    """Returns the products, and the arrays that `_backward` needs."""
    return grouped_matmul(rows, kernels, sizes, precision), (rows, kernels, sizes)


def _backward(precision: Any, saved: tuple[Array, ...], gradients: Array) -> tuple[Any, Any, None]:
    """Returns the gradients of rows and kernels. gradients: gradients [M, F] of the products."""
    rows, kernels, sizes = saved
    row_gradients = grouped_matmul(gradients, jnp.swapaxes(kernels, 1, 2), sizes, precision)
    ragged_dot = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_KERNEL_GRADIENT, precision=precision)
    kernel_gradients = jax.lax.platform_dependent(
        rows, gradients, sizes, tpu=ragged_dot, default=partial(_kernel_gradients_by_blocks, precision=precision)
    )
    return row_gradients, kernel_gradients, None


grouped_matmul.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """A division of sorted rows into blocks, each for one group. A group's last block may reach into later groups."""

    size: int  # rows of a block
    starts: Array  # [E] first row of each group
    ends: Array  # [E] row after the last one of each group
    blocks_before: Array  # [E] number of blocks before each group
    total: Array  # number of blocks of all groups

    def locate(self, block: Array) -> tuple[jax.Array, jax.Array]:
        """Returns the group and the first row of a block."""
        # If several groups start at this block, it belongs to the last group, because the groups before it are empty.
        group = jnp.sum(self.blocks_before <= block) - 1
        return group, self.starts[group] + (block - self.blocks_before[group]) * self.size


def _make_blocks(rows: int, sizes: Array) -> _Blocks:
    """Divides `rows` rows into blocks. sizes: number of rows of each group [E].

    The rows of a block are a power of two above the mean size of a group, between MIN_ROWS and MAX_ROWS.
    """
    block_rows = min(max(1 << (rows // len(sizes)).bit_length(), MIN_ROWS), MAX_ROWS)
    ends = jnp.cumsum(sizes)
    block_counts = -(-sizes // block_rows)  # rounded up
    blocks_before = jnp.cumsum(block_counts) - block_counts
    return _Blocks(block_rows, ends - sizes, ends, blocks_before, jnp.sum(block_counts))


def _pad_rows(rows: Array, blocks: _Blocks) -> jax.Array:
    """Adds rows of zeros, because the last block may reach beyond the last row."""
    return jnp.pad(rows, ((0, blocks.size), (0, 0)))


def _by_blocks(rows: Array, kernels: Array, sizes: Array, *, precision: Any) -> jax.Array:
    """Computes the products of `grouped_matmul` in a loop over blocks of rows, each with the kernel of its group."""
    blocks = _make_blocks(len(rows), sizes)
    padded = _pad_rows(rows, blocks)

    def multiply_block(block: Array, products: Array) -> jax.Array:
        group, first_row = blocks.locate(block)
        block_rows = jax.lax.dynamic_slice_in_dim(padded, first_row, blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        product = jnp.matmul(block_rows, kernel, precision=precision)
        # Blocks run in order, because a group's last block also writes into rows that the next group then overwrites.
        return jax.lax.dynamic_update_slice_in_dim(products, product, first_row, 0)

    products = jnp.zeros((len(padded), kernels.shape[2]), rows.dtype)
    # The number of blocks is known only at run time. JAX cannot differentiate such a loop, so `grouped_matmul` defines
    # its own gradient.
    return jax.lax.fori_loop(0, blocks.total, multiply_block, products)[: len(rows)]


def _kernel_gradients_by_blocks(rows: Array, gradients: Array, sizes: Array, *, precision: Any) -> jax.Array:
    """Returns the gradients of the kernels [E, D, F], in a loop over blocks of rows.

    rows: [M, D]. gradients: gradients of the products [M, F]. sizes: number of rows of each group [E].
    """
    blocks = _make_blocks(len(rows), sizes)
    rows, gradients = _pad_rows(rows, blocks), _pad_rows(gradients, blocks)

    def add_block(block: Array, totals: Array) -> jax.Array:
        group, first_row = blocks.locate(block)
        block_rows = jax.lax.dynamic_slice_in_dim(rows, first_row, blocks.size)
        gradient = jax.lax.dynamic_slice_in_dim(gradients, first_row, blocks.size)
        in_group = (first_row + jnp.arange(blocks.size) < blocks.ends[group])[:, None]
        # Leave out the rows of the next groups in this block, because they belong to other kernels.
        gradient = jnp.where(in_group, gradient, 0)
        block_gradient = jnp.matmul(block_rows.T, gradient, precision=precision, preferred_element_type=jnp.float32)
        total = jax.lax.dynamic_index_in_dim(totals, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(totals, total + block_gradient, group, 0)

    # The sum over many blocks needs float32.
    totals = jnp.zeros((len(sizes), rows.shape[1], gradients.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.total, add_block, totals).astype(rows.dtype)
