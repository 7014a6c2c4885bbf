"""The Flax NNX modules of a decoder: all parts with parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.attention import rotate
from jaxrl_llm.structs import Array


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and arithmetic of a decoder."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_head: bool
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    dtype: str = "float32"  # of activations and matrix products; parameters stay float32
    remat: str = "none"  # rematerialization in the backward pass: none | dots | full
    transposed: bool = False  # kernels of layers are [E, D], not [D, E]: on a CPU, products with few rows are faster
    row_parts: int = 1  # parts in which a group's packed rows are scored and learned from, one after the other

    @property
    def precision(self) -> jax.lax.Precision | None:
        """HIGHEST for float32, because accelerators multiply float32 in bf16 or TF32 by default."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else None


class Attention(nnx.Module):
    """Grouped-query attention: the projections before and after `attend`."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        linear = partial(_linear, cfg, rngs=rngs)
        self.query = linear(cfg.width, cfg.heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.key = linear(cfg.width, cfg.kv_heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.value = linear(cfg.width, cfg.kv_heads * cfg.head_dim, use_bias=cfg.qkv_bias)
        self.output = linear(cfg.heads * cfg.head_dim, cfg.width)
        if cfg.qk_norm:
            self.query_norm = _norm(cfg, cfg.head_dim, rngs=rngs)
            self.key_norm = _norm(cfg, cfg.head_dim, rngs=rngs)

    def project(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """x [B, N, T, D] -> query [B, N, T, heads, h], key and value [B, N, T, K, h]."""
        cfg, lead = self.cfg, x.shape[:3]
        query = self.query(x).reshape(*lead, cfg.heads, cfg.head_dim)
        key = self.key(x).reshape(*lead, cfg.kv_heads, cfg.head_dim)
        value = self.value(x).reshape(*lead, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, angles), rotate(key, angles), value

    def __call__(self, attended: Array) -> jax.Array:
        """Applies the output projection: [B, N, T, heads, h] -> [B, N, T, D]."""
        return self.output(attended.reshape(*attended.shape[:3], -1))


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        linear = partial(_linear, cfg, rngs=rngs)
        self.gate = linear(cfg.width, cfg.mlp_width)
        self.up = linear(cfg.width, cfg.mlp_width)
        self.down = linear(cfg.mlp_width, cfg.width)

    def __call__(self, x: Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: norm, attention, norm, MLP, with residuals."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = _norm(cfg, cfg.width, rngs=rngs)
        self.attention = Attention(cfg, rngs)
        self.mlp_norm = _norm(cfg, cfg.width, rngs=rngs)
        self.mlp = MLP(cfg, rngs)

    def project(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return self.attention.project(self.attention_norm(x), angles)

    def finish(self, x: Array, attended: Array) -> jax.Array:
        x = x + self.attention(attended)
        return x + self.mlp(self.mlp_norm(x))


class EmbedAndHead(nnx.Module):
    """The parts outside the layers: embedding, final norm, head."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(cfg.vocab_size, cfg.width, embedding_init=init, rngs=rngs)  # returns the table's dtype
        self.norm = _norm(cfg, cfg.width, rngs=rngs)
        if not cfg.tied_head:
            self.head = _linear(cfg, cfg.width, cfg.vocab_size, rngs=rngs)


class Linear(nnx.Linear):
    """x [..., D] -> [..., E]."""

    def __init__(self, cfg: DecoderConfig, din: int, dout: int, **options: Any):
        super().__init__(din, dout, dtype=jnp.dtype(cfg.dtype), **options)
        self.cfg = cfg

    def __call__(self, x: Array) -> jax.Array:
        # One token axis: with several, XLA copies and transposes both factors of the kernel's gradient.
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        kernel, precision = self.kernel[...].astype(self.dtype), self.cfg.precision
        if self.cfg.transposed:  # the barrier keeps the compiler from turning the product around
            product = jax.lax.dot_general(kernel, flat, (((1,), (1,)), ((), ())), precision=precision)
            y = jax.lax.optimization_barrier(product).T
        else:
            y = jnp.matmul(flat, kernel, precision=precision)
        if self.bias is not None:
            # The bias is rounded as in the engines, but added in float32: its gradient is a sum over all tokens.
            y = (y.astype(jnp.float32) + self.bias[...].astype(self.dtype)[None]).astype(self.dtype)
        return y.reshape(*x.shape[:-1], -1)


def _linear(cfg: DecoderConfig, din: int, dout: int, *, rngs: nnx.Rngs, use_bias: bool = False) -> Linear:
    return Linear(cfg, din, dout, use_bias=use_bias, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)


def _norm(cfg: DecoderConfig, size: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(size, epsilon=cfg.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
