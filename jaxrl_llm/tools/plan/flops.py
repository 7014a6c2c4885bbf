"""Counts the operations of matrix products in the jaxpr of a program: the compiler itself counts each loop once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax


def flops(traced: jax.stages.Traced, turns: float = 1) -> float:
    """Returns the operations of all devices together. An addition and a multiplication count as two.

    turns: turns of each loop whose end the program itself decides, such as the loop over micro-batches. A condition
    counts as its largest branch, and a kernel as all its blocks, including those that its mask skips.
    """
    return _jaxpr_flops(traced.jaxpr.jaxpr, turns)


def _jaxpr_flops(jaxpr: Any, turns: float) -> float:
    """Returns the floating-point operations of all matrix products of a traced program. turns: trips of its loops."""
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product_flops(equation.params["dimension_numbers"], equation)
        # The number of groups is no factor, because each row is multiplied once, with the kernel of its group.
        elif name == "ragged_dot_general":
            ragged = params["ragged_dot_dimension_numbers"]
            total += _product_flops(ragged.dot_dimension_numbers, equation, ragged.rhs_group_dimensions)
        elif name == "cond":
            branches = params["branches"]
            # A condition over platforms has one branch per platform. Only the first, for TPUs, is compiled.
            if params.get("branches_platforms"):
                branches = branches[:1]
            total += max(_jaxpr_flops(branch.jaxpr, turns) for branch in branches)
        else:
            total += _times(name, params, turns) * sum(_jaxpr_flops(inner, turns) for inner in _inner(params))
    return total


def _product_flops(dimensions: Any, equation: Any, groups: Sequence[int] = ()) -> float:
    """Returns the operations of a matrix product. groups: axes of the second array that count groups of kernels."""
    first, second = (x.aval.shape for x in equation.invars[:2])
    (_, second_contracted), (_, second_batch) = dimensions
    # A product has 2 x (size of the first array) x (axes of the second that are neither contracted nor batch axes).
    free = [n for i, n in enumerate(second) if i not in (*second_contracted, *second_batch, *groups)]
    return 2.0 * math.prod(first) * math.prod(free)


def _times(name: str, params: dict[str, Any], turns: float) -> float:
    """Returns how often an equation, such as a loop, runs the programs in it, on all devices together."""
    if name == "scan":
        return params["length"]
    if name == "while":
        return turns
    # The shapes in a shard_map are those of one device, so its programs count once per device.
    if name == "shard_map":
        # The name of the parameter depends on the version of JAX.
        axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    return 1


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation."""
    for value in params.values():
        for nested in value if isinstance(value, tuple | list) else (value,):
            nested = getattr(nested, "jaxpr", nested)  # a ClosedJaxpr holds a Jaxpr
            if hasattr(nested, "eqns"):
                yield nested
