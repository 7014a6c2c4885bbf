"""Keys of random numbers, derived from the run's seed and numbers such as the step, so any step can be replayed."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

# The implementation is fixed, because the sampler computes Threefry itself and JAX's default may be set to another.
key = partial(jax.random.key, impl="threefry2x32")


def derived(seed: int, *numbers: int) -> jax.Array:
    """Returns key(seed) with each number folded in."""
    # The numbers are NumPy scalars, because JAX would compile another program to convert a Python number.
    return _fold_in_all(np.uint32(seed), *map(np.uint32, numbers))


@jax.jit
def _fold_in_all(seed: jax.Array, *numbers: jax.Array) -> jax.Array:
    # The jit compiles one program; separate calls of key and fold_in would compile three.
    folded = key(seed)
    for number in numbers:
        folded = jax.random.fold_in(folded, number)
    return folded
