"""The sizes and the arithmetic of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxrl_llm.models.rope import Rope


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer. The width of each is `DecoderConfig.mlp_width`."""

    experts: int
    chosen: int  # experts that a token chooses
    normalized: bool  # the weights of the chosen experts add up to 1
    fused: bool = False  # gate and up are one kernel


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the tower of a vision-language model (`vision.Tower`)."""

    depth: int
    width: int
    heads: int
    mlp_width: int
    patch: int  # pixels of a side
    merge: int  # patches of a side of a merged token, which is a token of a prompt
    frames: int  # of a patch: an image is a film of equal frames; 0: kernels of patches have no axis for frames
    activation: str  # of the MLP
    gated: bool  # the MLP has a gate
    centered: bool  # norms subtract the mean, and have a bias
    window: int = 0  # merged tokens of a side of a window; 0: each patch sees its whole image in all layers
    full: tuple[int, ...] = ()  # layers in which a patch sees its whole image
    table: int = 0  # rows, and columns, of learned positions, between which an image's are interpolated; 0: none
    patch_bias: bool = False
    # SigLIP in Gemma 3: query, key and value apart, nothing rotates, a merged token is the mean of its patches.
    siglip: bool = False
    # Most tokens of an image in the decoder, each of which sees all of them; 0: it sees those before it.
    two_way: int = 0
    deep: tuple[int, ...] = ()  # layers whose output is also added behind the first layers of the decoder (DeepStack)
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    never: tuple[int, ...] = ()  # tokens that stand for images: none is sampled
    # Mean and deviation of each channel of pixels between 0 and 1, from preprocessor_config.json.
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def window_patches(self) -> int:
        return (self.window * self.merge) ** 2


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and arithmetic of a decoder.

    Layers of the kind `local` have sliding-window attention. The two kinds of layers may have two rotary embeddings.
    """

    family: str  # the module of this package, or the dotted name of a function: it has the tensors' names in a file
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # of each expert, if there are experts
    max_positions: int
    rope: Rope
    norm_eps: float
    tied_head: bool
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    output_bias: bool = False  # of the projection after attention
    mlp_bias: bool = False
    activation: str = "silu"  # of the MLP's gate: one of ACTIVATIONS
    window: int = 0  # tokens that a token sees in a local layer, itself included
    local: tuple[bool, ...] = ()  # which layers are local; (): none
    local_rope: Rope | None = None  # of local layers; None: as in the others
    score_size: float | None = None  # scores are divided by its square root; None: head_dim
    soft_cap: float = 0.0  # bound of attention scores: cap * tanh(score / cap); 0: none
    final_soft_cap: float = 0.0  # bound of logits, likewise
    gemma: bool = False  # the embedding is multiplied by the square root of the width, a norm has the factor 1 + scale
    post_norms: bool = False  # attention and MLP also have a norm behind them
    mixture: Mixture | None = None  # experts instead of an MLP
    vision: VisionConfig | None = None  # None: a text model
    # Arithmetic, not architecture: the same parameters serve all values of these fields.
    dtype: str = "float32"  # of activations and matrix products; parameters stay float32
    remat: str = "none"  # rematerialization in the backward pass: none | dots | full
    transposed: bool = False  # kernels of layers are [E, D], not [D, E]: on a CPU, products with few rows are faster
    row_parts: int = 1  # parts in which a group's packed rows are scored and learned from, one after the other

    @property
    def kinds(self) -> tuple[bool, ...]:
        """For each layer, whether it is local."""
        return self.local or (False,) * self.layers

    @property
    def never(self) -> tuple[int, ...]:
        """Tokens that have the probability 0, in sampling and in scoring."""
        return self.vision.never if self.vision else ()

    @property
    def precision(self) -> jax.lax.Precision | None:
        """HIGHEST for float32, because accelerators multiply float32 in bf16 or TF32 by default."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else None
