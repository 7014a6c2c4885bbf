"""The sizes, the architecture and the arithmetic of a decoder and of its vision tower."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxrl_llm.models.rope import Rope


@dataclass(frozen=True)
class Mixture:
    """The mixture of experts of each layer. The width of an expert is `DecoderConfig.mlp_width`."""

    experts: int  # number of experts in a layer
    chosen: int  # number of experts that each token is sent to
    normalized: bool  # whether the router weights of the chosen experts are normalized to the sum 1
    fused: bool = False  # whether the gate and up projections are one kernel


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and architecture of the vision tower of a vision-language model (`vision.Tower`)."""

    depth: int  # number of layers
    width: int
    heads: int
    mlp_width: int
    patch_size: int  # pixels along a side of a patch
    merge_size: int  # patches along a side of a merged token; a merged token is one token of the prompt
    patch_frames: int  # frames of a patch; an image repeats one frame. 0 = patch kernels have no axis of frames
    activation: str  # activation of the MLP
    gated_mlp: bool  # whether the MLP has a gate
    layer_norm: bool  # whether norms are LayerNorms, which subtract the mean and have a bias; False = RMS norms
    window: int = 0  # merged tokens along a side of an attention window; 0 = each patch sees its whole image
    full_layers: tuple[int, ...] = ()  # numbers of the layers in which a patch sees its whole image despite `window`
    position_grid: int = 0  # side of the square table of learned positions, interpolated to an image; 0 = no table
    patch_bias: bool = False
    # Whether the tower is Gemma 3's SigLIP: separate query, key and value kernels, no rotary embedding, and a merged
    # token that is the mean of its patches.
    siglip: bool = False
    # Largest number of tokens of an image whose tokens see each other in the decoder; 0 = a token sees earlier ones.
    bidirectional_tokens: int = 0
    # Numbers of the tower layers whose outputs are also added after the decoder's first layers (DeepStack).
    deepstack_layers: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    hidden_tokens: tuple[int, ...] = ()  # ids of the placeholder tokens of images, which are never sampled
    # Mean and standard deviation of each channel of pixels between 0 and 1, from preprocessor_config.json.
    pixel_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    pixel_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def window_patches(self) -> int:
        return (self.window * self.merge_size) ** 2


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes, architecture and arithmetic of a decoder, as a family's function reads them from config.json.

    A local layer has sliding-window attention; the other layers have full attention.
    """

    family: str  # module of jaxrl_llm.models that names the tensors of a checkpoint, or a user's dotted function
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # width of the MLP, or of each expert
    max_positions: int
    rope: Rope
    norm_eps: float
    tied_head: bool
    qkv_bias: bool  # whether query, key and value have biases, as in Qwen2
    qk_norm: bool  # whether query and key are normalized, as in Qwen3
    output_bias: bool = False  # whether the projection after attention has a bias
    mlp_bias: bool = False
    activation: str = "silu"  # activation of the MLP's gate, a key of `blocks.ACTIVATIONS`
    window: int = 0  # number of tokens that a token sees in a local layer, itself included
    local: tuple[bool, ...] = ()  # for each layer, whether it is local; () = no layer is
    local_rope: Rope | None = None  # rotary embedding of local layers; None = that of the other layers
    score_size: float | None = None  # attention scores are divided by its square root; None = head_dim
    soft_cap: float = 0.0  # bound of attention scores: cap * tanh(score / cap); 0 = unbounded
    final_soft_cap: float = 0.0  # bound of logits: cap * tanh(logit / cap); 0 = unbounded
    scaled_embedding: bool = False  # whether embeddings are multiplied by the square root of the width, as in Gemma
    unit_offset_norm: bool = False  # whether an RMS norm multiplies by 1 + scale, as in Gemma, and not by scale
    post_norms: bool = False  # whether the outputs of attention and MLP are normalized too
    mixture: Mixture | None = None  # experts instead of an MLP; None = an MLP
    vision: VisionConfig | None = None  # vision tower; None for a text model
    # The fields below set the arithmetic, not the architecture: checkpoints fit all their values.
    dtype: str = "float32"  # dtype of activations and matrix products; parameters stay float32
    remat: str = "none"  # what the backward pass recomputes: none | dots (all but kernel products) | full
    transposed: bool = False  # whether layer kernels are [E, D], not [D, E]: faster on a CPU for products of few rows
    row_parts: int = 1  # number of parts in which the packed rows of a group are computed, one after the other

    @property
    def kinds(self) -> tuple[bool, ...]:
        """For each layer, whether it is local (has sliding-window attention)."""
        return self.local or (False,) * self.layers

    @property
    def hidden_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that have the probability 0, in sampling and in scoring."""
        return self.vision.hidden_tokens if self.vision else ()

    @property
    def precision(self) -> jax.lax.Precision | None:
        """HIGHEST for float32, because accelerators multiply float32 in bf16 or TF32 by default."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else None
