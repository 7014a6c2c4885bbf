"""The Flax NNX modules of a decoder: attention, MLP, norms, embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from qwix import QArray

from jaxrl_llm.models.adapters import AdaptedKernel, BaseKernel, as_array
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.experts import Experts, Routing
from jaxrl_llm.models.rope import rotate
from jaxrl_llm.structs import Array

ACTIVATIONS: dict[str, Callable[[Array], jax.Array]] = {  # {name in config.json: function}
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

# `Linear` multiplies tokens x with a kernel that is stored as W [E, D] in one of two orders. W x^T is faster than x W^T
# for fewer tokens than this number. Both take as long for more tokens, and x W^T needs no transpose.
MATERIALIZED_ROWS = 128


class Attention(nnx.Module):
    """The linear layers of grouped-query attention: query, key and value before it, and the output after it.

    The softmax attention between them is `attention.attend`. Letters of shapes: B prompts, N rows per prompt, T tokens
    per row, D model width, K key heads, h head size.
    """

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        project = partial(linear, cfg, rngs=rngs)
        self.query = project(cfg.width, cfg.heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.key = project(cfg.width, cfg.kv_heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.value = project(cfg.width, cfg.kv_heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.output = project(cfg.heads * cfg.head_dim, cfg.width, use_bias=cfg.output_bias)
        if cfg.qk_norm:
            self.query_norm = _norm(cfg, cfg.head_dim, rngs=rngs)
            self.key_norm = _norm(cfg, cfg.head_dim, rngs=rngs)

    def project(self, states: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Projects hidden states [B, N, T, D] to query [B, N, T, heads, h], and key and value [B, N, T, K, h].

        angles: cosine and sine of the rotary embedding, for the position of each token. The query is divided by the
        square root of `cfg.score_size` in float32, so its products with keys are the scores.
        """
        cfg, batch_shape = self.cfg, states.shape[:3]
        query = self.query(states).reshape(*batch_shape, cfg.heads, cfg.head_dim)
        key = self.key(states).reshape(*batch_shape, cfg.kv_heads, cfg.head_dim)
        value = self.value(states).reshape(*batch_shape, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        # Rotate and scale in float32 and round once, because a rounding in between would change every score.
        query_scale = (cfg.score_size or cfg.head_dim) ** -0.5
        query = rotate(query, angles) * query_scale
        return query.astype(value.dtype), rotate(key, angles).astype(value.dtype), value

    def __call__(self, attended: Array) -> jax.Array:
        """Applies the output projection: [B, N, T, heads, h] -> [B, N, T, D]."""
        return self.output(attended.reshape(*attended.shape[:3], -1))


class MLP(nnx.Module):
    """The gated feed-forward part of a layer, SwiGLU or GeGLU: down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        project = partial(linear, cfg, rngs=rngs, use_bias=cfg.mlp_bias)
        self.activation = cfg.activation
        self.gate = project(cfg.width, cfg.mlp_width)
        self.up = project(cfg.width, cfg.mlp_width)
        self.down = project(cfg.mlp_width, cfg.width)

    def __call__(self, x: Array) -> jax.Array:
        gate_values = ACTIVATIONS[self.activation](self.gate(x))
        return self.down(gate_values * self.up(x))


class Block(nnx.Module):
    """One layer: norm, attention, norm, MLP or experts, with residuals.

    With cfg.post_norms, the outputs of attention and MLP are also normalized, before they are added to the residual.
    """

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs, mesh: Mesh | None = None):
        self.attention_norm = _norm(cfg, cfg.width, rngs=rngs)
        self.attention = Attention(cfg, rngs)
        self.mlp_norm = _norm(cfg, cfg.width, rngs=rngs)
        self.mixture = cfg.mixture
        if cfg.mixture:
            self.experts = Experts(cfg, cfg.mixture, ACTIVATIONS[cfg.activation], mesh, rngs=rngs)
        else:
            self.mlp = MLP(cfg, rngs)
        self.post_norms = cfg.post_norms
        if cfg.post_norms:
            self.attention_post_norm = _norm(cfg, cfg.width, rngs=rngs)
            self.mlp_post_norm = _norm(cfg, cfg.width, rngs=rngs)

    def project(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns query, key and value of the layer's attention. x: input of the layer. angles: rotary angles."""
        return self.attention.project(self.attention_norm(x), angles)

    def finish(self, x: Array, attended: Array) -> tuple[jax.Array, Routing | None]:
        """Returns the output of the layer, and the router's decisions (None if the layer has no experts).

        x: input of the layer [B, N, T, D]. attended: attention output [B, N, T, heads, h].
        """
        attention_output = self.attention(attended)
        if self.post_norms:
            attention_output = self.attention_post_norm(attention_output)
        x = x + attention_output
        normed = self.mlp_norm(x)
        mlp_output, routing = self.experts(normed) if self.mixture else (self.mlp(normed), None)
        if self.post_norms:
            mlp_output = self.mlp_post_norm(mlp_output)
        return x + mlp_output, routing


class UnitOffsetRMSNorm(nnx.Module):
    """RMS norm of Gemma, whose factor is 1 + scale: x / sqrt(mean(x^2) + eps) * (1 + scale), in float32."""

    def __init__(self, cfg: DecoderConfig, size: int):
        self.epsilon, self.dtype = cfg.norm_eps, jnp.dtype(cfg.dtype)
        self.scale = nnx.Param(jnp.zeros(size))

    def __call__(self, x: Array) -> jax.Array:
        # The mean of squares is float32, because the 8 bits of bfloat16 are too few for a sum over the width.
        x_float32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_float32), axis=-1, keepdims=True)
        normalized = x_float32 * jax.lax.rsqrt(mean_square + self.epsilon)
        # The product with the factor is rounded, as in Gemma. Llama rounds before it multiplies.
        factor = (1 + self.scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        return (normalized * factor).astype(self.dtype)


class EmbedAndHead(nnx.Module):
    """The modules outside the layers: embedding, final norm and head."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        embedding_init = nnx.initializers.normal(0.02)
        # No dtype is set, so that `Decoder._embed` can cast after the lookup.
        self.embed = nnx.Embed(cfg.vocab_size, cfg.width, embedding_init=embedding_init, rngs=rngs)
        self.norm = _norm(cfg, cfg.width, rngs=rngs)
        if not cfg.tied_head:
            self.head = linear(cfg, cfg.width, cfg.vocab_size, rngs=rngs)


class Linear(nnx.Linear):
    """A linear layer x [..., D] -> [..., E], whose kernel W [D, E] may be int8 or have an adapter (`AdaptedKernel`)."""

    def __init__(self, cfg: DecoderConfig, din: int, dout: int, **options: Any):
        super().__init__(din, dout, dtype=jnp.dtype(cfg.dtype), **options)
        self.cfg = cfg

    def __call__(self, x: Array) -> jax.Array:
        # Merge all axes before the last one, because XLA would otherwise copy and transpose both factors of the
        # kernel's gradient.
        token_rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        stored_kernel = self.kernel.get_value()
        adapter = stored_kernel if isinstance(stored_kernel, AdaptedKernel) else None
        kernel = adapter.frozen if adapter else stored_kernel
        # The backward pass needs an int8 kernel as floats. With `jax.checkpoint`, it dequantizes the kernel again.
        # Without, the float kernels of all layers would stay in memory from the forward to the backward pass.
        dequantize_again = isinstance(kernel, QArray) and self.cfg.remat == "none"
        product = jax.checkpoint(self._product) if dequantize_again else self._product
        outputs = product(token_rows, kernel)
        if adapter:
            # The adapter's part is added to the finished product x W, so that a new adapter changes no bit of it.
            outputs = adapter.applied(token_rows, outputs.astype(jnp.float32), self.cfg.precision).astype(self.dtype)
        if self.bias is not None:
            # The bias is rounded as in the engines, but added in float32, because its gradient sums over all tokens.
            bias = self.bias[...].astype(self.dtype)[None]
            outputs = (outputs.astype(jnp.float32) + bias).astype(self.dtype)
        return outputs.reshape(*x.shape[:-1], -1)

    def _product(self, x: Array, kernel: BaseKernel) -> jax.Array:
        """Returns the matrix product x W, [tokens, D] -> [tokens, E]. With cfg.transposed, W is stored as [E, D]."""
        weights, precision = as_array(kernel).astype(self.dtype), self.cfg.precision
        if not self.cfg.transposed:
            return jnp.matmul(x, weights, precision=precision)
        contract_last_axes = (((1,), (1,)), ((), ()))  # `dot_general` sums over the last axis of both factors
        if len(x) >= MATERIALIZED_ROWS:
            return jax.lax.dot_general(x, weights, contract_last_axes, precision=precision)
        product = jax.lax.dot_general(weights, x, contract_last_axes, precision=precision)
        # The compiler would turn the transposed product back into x W^T if the barrier were missing.
        return jax.lax.optimization_barrier(product).T


def linear(cfg: DecoderConfig, din: int, dout: int, *, rngs: nnx.Rngs, use_bias: bool = False) -> Linear:
    """Returns a linear layer of `din` inputs and `dout` outputs, with a new random kernel."""
    return Linear(cfg, din, dout, use_bias=use_bias, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)


def _norm(cfg: DecoderConfig, size: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm | UnitOffsetRMSNorm:
    """Returns the RMS norm of the model's family over vectors of `size` numbers."""
    if cfg.unit_offset_norm:
        return UnitOffsetRMSNorm(cfg, size)
    return nnx.RMSNorm(size, epsilon=cfg.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
