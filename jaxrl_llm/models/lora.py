"""LoRA (arXiv 2106.09685): a small matrix product beside each frozen kernel W [D, E].

y = x W + s (x A) B, with A [D, r], B [r, E] and s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732). B begins
as 0, so the model begins as its base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import AtLeastOne, MayChange, Positive
from jaxrl_llm.models.adapters import AdaptedKernel, AdapterKind, Init, PeftForm, Stored, as_array
from jaxrl_llm.structs import AnyArray, Array


@partial(jax.tree_util.register_dataclass, data_fields=("frozen", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class LoraKernel(AdaptedKernel):
    """A kernel with its matrices A and B."""

    a: AnyArray  # [L, D, r]
    b: AnyArray  # [L, r, E]
    scale: float

    def applied(self, x: Array, y: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Returns y + s (x A) B. W + s A B would take the memory of another kernel."""
        inner, b = jnp.matmul(x, self.a.astype(x.dtype), precision=precision), self.b.astype(x.dtype)
        # Its batch axis of size 1 keeps this product out of what remat "dots" saves, where it would be
        # beside that of the kernel: `inner` is enough.
        batched = (((2,), (1,)), ((0,), (0,)))
        outer = jax.lax.dot_general(inner[None], b[None], batched, precision, preferred_element_type=jnp.float32)
        return y + self.scale * outer[0]

    def merged(self) -> jax.Array:
        """Returns W + s A B, in float32."""
        # HIGHEST: what is exported must be what was trained, to float32.
        product = jnp.matmul(self.a, self.b, precision=jax.lax.Precision.HIGHEST)
        return as_array(self.frozen).astype(jnp.float32) + self.scale * product


@dataclass(frozen=True, kw_only=True)
class Lora(AdapterKind):
    """LoRA of rank r with the scale s. rs: rank-stabilized scaling. path: folder of PEFT adapters to start from."""

    rank: AtLeastOne
    alpha: Positive
    rs: bool = False
    path: MayChange[str] = field(default="")  # pyright: ignore[reportIncompatibleVariableOverride]

    peft: ClassVar[PeftForm | None] = PeftForm(
        "LORA",
        settings={"rank": "r", "alpha": "lora_alpha", "rs": "use_rslora"},
        leaves={"lora_a": "lora_A", "lora_b": "lora_B"},
    )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)

    def leaves(self, layers: int, d: int, e: int) -> dict[str, Init]:
        """Returns how to make A, uniform in -1 / sqrt(D) ... 1 / sqrt(D) as in PEFT, and B, which is 0."""
        # PEFT's kaiming_uniform with a = sqrt(5): the bound depends on D alone, not on the rank.
        bound = 1 / math.sqrt(d)
        a = partial(jax.random.uniform, shape=(layers, d, self.rank), minval=-bound, maxval=bound)
        return {"lora_a": a, "lora_b": lambda key: jnp.zeros((layers, self.rank, e))}

    def adapted(self, frozen: Stored, leaves: Mapping[str, AnyArray]) -> LoraKernel:
        return LoraKernel(frozen, leaves["lora_a"], leaves["lora_b"], self.scale)
