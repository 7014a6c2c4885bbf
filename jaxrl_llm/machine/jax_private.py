"""The private names of JAX that this package uses, because no public function does the same.

JAX's public functions for the number of processes initialize the devices, and none reaches the key-value store of the
coordination service or says whether the devices are initialized. tests/machine/test_jax_private.py checks the names.
"""

from __future__ import annotations

from jax._src.distributed import global_state
from jax._src.xla_bridge import backends_are_initialized

__all__ = ["backends_are_initialized", "global_state"]
