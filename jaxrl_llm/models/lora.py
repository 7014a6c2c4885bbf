"""LoRA (arXiv 2106.09685): a small matrix product beside each frozen kernel W [D, E].

y = x W + s (x A) B, with A [D, r], B [r, E] and s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732). B is 0 at
first, so a model with new adapters equals its base.
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
from jaxrl_llm.models.adapters import AdaptedKernel, AdapterKind, ArrayInit, BaseKernel, PeftForm, as_array
from jaxrl_llm.structs import AnyArray, Array


@partial(jax.tree_util.register_dataclass, data_fields=("frozen", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class LoraKernel(AdaptedKernel):
    """A frozen kernel W with the matrices A and B of its LoRA adapter."""

    a: AnyArray  # A [L, D, r]
    b: AnyArray  # B [L, r, E]
    scale: float  # factor s of (x A) B

    def applied(self, x: Array, y: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Returns y + s (x A) B, which needs less memory than x (W + s A B)."""
        low_rank, b = jnp.matmul(x, self.a.astype(x.dtype), precision=precision), self.b.astype(x.dtype)
        # The batch axis of size 1 keeps remat "dots" from saving this product, because saving `low_rank` is enough.
        batch_dimensions = (((2,), (1,)), ((0,), (0,)))
        adapter_output = jax.lax.dot_general(
            low_rank[None], b[None], batch_dimensions, precision, preferred_element_type=jnp.float32
        )
        return y + self.scale * adapter_output[0]

    def merged(self) -> jax.Array:
        """Returns W + s A B, in float32."""
        # HIGHEST precision, because an exported model must agree with the trained one to float32.
        product = jnp.matmul(self.a, self.b, precision=jax.lax.Precision.HIGHEST)
        return as_array(self.frozen).astype(jnp.float32) + self.scale * product


@dataclass(frozen=True, kw_only=True)
class Lora(AdapterKind):
    """The kind of adapters `lora` with its settings.

    rank: r. alpha: numerator of the scale s. rs: whether s is alpha / sqrt(r) (rank-stabilized scaling) and not
    alpha / r. path: PEFT folder with the initial adapters, "" = new adapters.
    """

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

    def leaves(self, layers: int, d: int, e: int) -> dict[str, ArrayInit]:
        """Returns the initializers: A is uniform in -1 / sqrt(D) ... 1 / sqrt(D), as in PEFT, and B is 0."""
        # PEFT uses kaiming_uniform with a = sqrt(5), whose bound depends on D, not on the rank.
        bound = 1 / math.sqrt(d)
        init_a = partial(jax.random.uniform, shape=(layers, d, self.rank), minval=-bound, maxval=bound)
        return {"lora_a": init_a, "lora_b": lambda key: jnp.zeros((layers, self.rank, e))}

    def adapted(self, frozen: BaseKernel, leaves: Mapping[str, AnyArray]) -> LoraKernel:
        return LoraKernel(frozen, leaves["lora_a"], leaves["lora_b"], self.scale)
