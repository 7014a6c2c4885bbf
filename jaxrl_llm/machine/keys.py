"""Keys of random numbers. They follow from the run's seed and from numbers, so that any step can be sampled alone."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

# The sampler counts with Threefry, so another default of JAX, such as rbg, must not change what a key is.
key = partial(jax.random.key, impl="threefry2x32")


def derived(seed: int, *numbers: int) -> jax.Array:
    """Returns key(seed), with each number folded in."""
    # The numbers are of NumPy, because JAX would compile a program of its own to convert a Python number.
    return _derived(np.uint32(seed), *map(np.uint32, numbers))


@jax.jit
def _derived(seed: jax.Array, *numbers: jax.Array) -> jax.Array:
    # One program, where key and fold_in alone are three.
    folded = key(seed)
    for number in numbers:
        folded = jax.random.fold_in(folded, number)
    return folded
