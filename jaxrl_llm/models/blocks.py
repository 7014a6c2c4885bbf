"""The Flax NNX modules of a decoder: all parts with parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from qwix import QArray

from jaxrl_llm.models.adapters import AdaptedKernel, Stored, as_array
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.experts import Experts, Routing
from jaxrl_llm.models.rope import rotate
from jaxrl_llm.structs import Array

ACTIVATIONS: dict[str, Callable[[Array], jax.Array]] = {  # as config.json names them
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

MANY_ROWS = 128  # of a product with a transposed kernel, from which on its result is computed as it is used


class Attention(nnx.Module):
    """Grouped-query attention: the projections before and after `attend`."""

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

    def project(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """x [B, N, T, D] -> query [B, N, T, heads, h], key and value [B, N, T, K, h].

        The query is divided by the square root of `score_size`, in float32: its products with keys are the scores.
        """
        cfg, lead = self.cfg, x.shape[:3]
        query = self.query(x).reshape(*lead, cfg.heads, cfg.head_dim)
        key = self.key(x).reshape(*lead, cfg.kv_heads, cfg.head_dim)
        value = self.value(x).reshape(*lead, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        # Rotated and scaled in float32, rounded once: rounding between the two would move every score.
        query = rotate(query, angles) * (cfg.score_size or cfg.head_dim) ** -0.5
        return query.astype(value.dtype), rotate(key, angles).astype(value.dtype), value

    def __call__(self, attended: Array) -> jax.Array:
        """Applies the output projection: [B, N, T, heads, h] -> [B, N, T, D]."""
        return self.output(attended.reshape(*attended.shape[:3], -1))


class MLP(nnx.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202)."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        project = partial(linear, cfg, rngs=rngs, use_bias=cfg.mlp_bias)
        self.activation = cfg.activation
        self.gate = project(cfg.width, cfg.mlp_width)
        self.up = project(cfg.width, cfg.mlp_width)
        self.down = project(cfg.mlp_width, cfg.width)

    def __call__(self, x: Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: norm, attention, norm, MLP or experts, with residuals; with post_norms, also norms before these."""

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
        return self.attention.project(self.attention_norm(x), angles)

    def finish(self, x: Array, attended: Array) -> tuple[jax.Array, Routing | None]:
        """Returns the output of the layer, and the router's decisions, if the layer has experts."""
        update = self.attention(attended)
        x = x + (self.attention_post_norm(update) if self.post_norms else update)
        normed = self.mlp_norm(x)
        update, routing = self.experts(normed) if self.mixture else (self.mlp(normed), None)
        return x + (self.mlp_post_norm(update) if self.post_norms else update), routing


class CenteredNorm(nnx.Module):
    """RMS norm with the factor 1 + scale: x / sqrt(mean(x^2) + eps) * (1 + scale), in float32."""

    def __init__(self, cfg: DecoderConfig, size: int):
        self.epsilon, self.dtype = cfg.norm_eps, jnp.dtype(cfg.dtype)
        self.scale = nnx.Param(jnp.zeros(size))

    def __call__(self, x: Array) -> jax.Array:
        # The mean of squares is in float32: bfloat16 has 8 bits, too few for a sum over the width.
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        # Rounded after the factor, as Gemma does it; Llama rounds before.
        factor = (1 + self.scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * factor).astype(self.dtype)


class EmbedAndHead(nnx.Module):
    """The parts outside the layers: embedding, final norm, head."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        # No dtype is set, so that `Decoder._embed` can cast after the lookup.
        self.embed = nnx.Embed(cfg.vocab_size, cfg.width, embedding_init=init, rngs=rngs)
        self.norm = _norm(cfg, cfg.width, rngs=rngs)
        if not cfg.tied_head:
            self.head = linear(cfg, cfg.width, cfg.vocab_size, rngs=rngs)


class Linear(nnx.Linear):
    """x [..., D] -> [..., E]. The kernel [D, E] may be in int8, and have an adapter (`AdaptedKernel`)."""

    def __init__(self, cfg: DecoderConfig, din: int, dout: int, **options: Any):
        super().__init__(din, dout, dtype=jnp.dtype(cfg.dtype), **options)
        self.cfg = cfg

    def __call__(self, x: Array) -> jax.Array:
        # One token axis: with several, XLA copies and transposes both factors of the kernel's gradient.
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        stored = self.kernel.get_value()
        adapter = stored if isinstance(stored, AdaptedKernel) else None
        kernel = adapter.frozen if adapter else stored
        # The backward pass needs W. Without a checkpoint here or around the layer, it would keep all kernels as floats.
        recompute = isinstance(kernel, QArray) and self.cfg.remat == "none"
        y = (jax.checkpoint(self._product) if recompute else self._product)(flat, kernel)
        if adapter:
            # The product with W is computed as in the base, so that with a new adapter base and adapted model give the
            # same bits.
            y = adapter.applied(flat, y.astype(jnp.float32), self.cfg.precision).astype(self.dtype)
        if self.bias is not None:
            # The bias is rounded as in the engines, but added in float32: its gradient is a sum over all tokens.
            y = (y.astype(jnp.float32) + self.bias[...].astype(self.dtype)[None]).astype(self.dtype)
        return y.reshape(*x.shape[:-1], -1)

    def _product(self, x: Array, kernel: Stored) -> jax.Array:
        """Returns x W: [T, D] -> [T, E]."""
        w, precision = as_array(kernel).astype(self.dtype), self.cfg.precision
        if not self.cfg.transposed:
            return jnp.matmul(x, w, precision=precision)
        if len(x) >= MANY_ROWS:
            return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision)
        product = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), precision=precision)
        # The barrier keeps the compiler from turning the product around.
        return jax.lax.optimization_barrier(product).T


def linear(cfg: DecoderConfig, din: int, dout: int, *, rngs: nnx.Rngs, use_bias: bool = False) -> Linear:
    return Linear(cfg, din, dout, use_bias=use_bias, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)


def _norm(cfg: DecoderConfig, size: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm | CenteredNorm:
    if cfg.gemma:
        return CenteredNorm(cfg, size)
    return nnx.RMSNorm(size, epsilon=cfg.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
