"""Keys of random numbers. They follow from the run's seed and from numbers, so that any step can be sampled alone."""

from __future__ import annotations

import jax
import numpy as np


def derived(seed: int, *numbers: int) -> jax.Array:
    """Returns jax.random.key(seed), with each number folded in."""
    # Of NumPy's type: JAX would convert a Python number by another program.
    return _derived(np.uint32(seed), *map(np.uint32, numbers))


@jax.jit
def _derived(seed: jax.Array, *numbers: jax.Array) -> jax.Array:
    # One program, where key and fold_in alone are three.
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
