"""The decoder shared by all families: Flax NNX blocks inside, pure functions outside.

Prompts are [B, P] and run once; completions are [B, G, T] and attend to the keys and
values of their prompt, of which one copy serves the whole group. Layers are stacked
on a leading axis and scanned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.sharding import BATCH
from jaxrl_llm.structs import Array, PyTree


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides a decoder's shapes and arithmetic."""

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
    remat: str = "none"  # what the backward pass computes again: none | dots | full

    @property
    def precision(self) -> jax.lax.Precision | None:
        """float32 means float32: accelerators would multiply it in bf16 or TF32 unasked."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else None


class KeyValue(NamedTuple):
    """Keys and values: of prompts [L, B, P, K, h], of completions [L, B, G, C, K, h]."""

    keys: Array
    values: Array


def rotate(x: Array, positions: Array, theta: float) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), halves layout: x [B, G, T, heads, h]."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / (theta ** (jnp.arange(half, dtype=jnp.float32) / half))
    angles = jnp.expand_dims(positions.astype(jnp.float32), (-2, -1)) * frequencies[None, None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def attend(query: Array, parts: list[tuple[Array, Array, Array]], precision: jax.lax.Precision | None) -> jax.Array:
    """Softmax attention over several stretches of keys at once.

    query [B, G, T, K, R, h] (R query heads to a key head). A part is (keys, values, mask):
    keys shared by the group [B, S, K, h] or of each member [B, G, S, K, h]; mask, True
    where visible, broadcasts to [B, G, T, S]. Returns [B, G, T, K, R, h].
    """
    scale = query.shape[-1] ** -0.5
    scores = []
    for keys, _, mask in parts:
        form = "bgtkrh,bskh->bgkrts" if keys.ndim == 4 else "bgtkrh,bgskh->bgkrts"
        score = jnp.einsum(form, query, keys, precision=precision, preferred_element_type=jnp.float32) * scale
        scores.append(jnp.where(mask[:, :, None, None], score, jnp.finfo(jnp.float32).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(query.dtype)
    out, start = jnp.zeros_like(query), 0
    for keys, values, _ in parts:
        stop = start + keys.shape[-3]
        form = "bgkrts,bskh->bgtkrh" if keys.ndim == 4 else "bgkrts,bgskh->bgtkrh"
        out = out + jnp.einsum(form, weights[..., start:stop], values, precision=precision)
        start = stop
    return out


def last_state(hidden: Array, mask: Array) -> jax.Array:
    """Hidden state [B, D] of the last real token, hidden [B, P, D], mask [B, P] padded on either side."""
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


class Attention(nnx.Module):
    """Grouped-query attention: the projections on both sides of `attend`."""

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

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x [B, G, T, D] -> query [B, G, T, K, R, h], key and value [B, G, T, K, h]."""
        cfg = self.cfg
        query = self.query(x).reshape(*x.shape[:3], cfg.heads, cfg.head_dim)
        key = self.key(x).reshape(*x.shape[:3], cfg.kv_heads, cfg.head_dim)
        value = self.value(x).reshape(*x.shape[:3], cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, positions, cfg.rope_theta), rotate(key, positions, cfg.rope_theta)
        return query.reshape(*x.shape[:3], cfg.kv_heads, -1, cfg.head_dim), key, value

    def __call__(self, attended: Array) -> jax.Array:
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

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        return self.attention.project(self.attention_norm(x), positions)

    def finish(self, x: Array, attended: Array) -> jax.Array:
        x = x + self.attention(attended)
        return x + self.mlp(self.mlp_norm(x))


class Ends(nnx.Module):
    """What is below and above the layers: embedding, last norm, head."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(cfg.vocab_size, cfg.width, embedding_init=init, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
        self.norm = _norm(cfg, cfg.width, rngs=rngs)
        if not cfg.tied_head:
            self.head = _linear(cfg, cfg.width, cfg.vocab_size, rngs=rngs)


def _linear(cfg: DecoderConfig, din: int, dout: int, *, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.Linear:
    init = nnx.initializers.normal(0.02)
    dtype, precision = jnp.dtype(cfg.dtype), cfg.precision
    return nnx.Linear(din, dout, use_bias=use_bias, kernel_init=init, dtype=dtype, precision=precision, rngs=rngs)


def _norm(cfg: DecoderConfig, size: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(size, epsilon=cfg.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)


class Decoder:
    """Pure functions over a parameter tree {"layers": stacked [L, ...], "embed", "norm", "head"}."""

    def __init__(self, cfg: DecoderConfig, mesh: Mesh | None = None):
        self.cfg = cfg
        self.mesh = mesh
        self._block_def, self._block_state = nnx.split(nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0))))
        self._ends_def, self._ends_state = nnx.split(nnx.eval_shape(lambda: Ends(cfg, nnx.Rngs(0))))

    def init(self, key: Array) -> PyTree:
        """Fresh float32 parameters, normal(0, 0.02)."""
        block_key, ends_key = jax.random.split(key)
        blocks = jax.vmap(lambda k: _pure(Block(self.cfg, nnx.Rngs(k))))(jax.random.split(block_key, self.cfg.layers))
        return {"layers": blocks, **_pure(Ends(self.cfg, nnx.Rngs(ends_key)))}

    def shapes(self) -> PyTree:
        """The parameter tree's shapes and dtypes."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def prefill(self, params: PyTree, tokens: Array, mask: Array) -> tuple[jax.Array, KeyValue]:
        """Prompts [B, P] -> hidden [B, P, D] and their keys and values [L, B, P, K, h]."""
        positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, None]
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        visible = causal[None, None] & mask[:, None, None, :]

        def layer(x: Array, params_l: PyTree) -> tuple[Array, KeyValue]:
            block = self._block(params_l)
            query, key, value = block.project(x, positions)
            x = block.finish(x, attend(query, [(key, value, visible)], self.cfg.precision))
            return x, KeyValue(key[:, 0], value[:, 0])

        x = self._embed(params, tokens)[:, None]
        x, cache = jax.lax.scan(self._remat(layer), x, params["layers"])
        return self._ends(params).norm(x)[:, 0], cache

    def extend(self, params: PyTree, tokens: Array, mask: Array, prefix: KeyValue, prefix_mask: Array) -> jax.Array:
        """Completions [B, G, T] after their prompts -> hidden [B, G, T, D].

        mask [B, G, T] has its padding at the end; prefix and prefix_mask are those of `prefill`.
        """
        length = jnp.sum(prefix_mask, axis=-1)[:, None, None]
        positions = length + jnp.arange(tokens.shape[2])[None, None]
        causal = jnp.tril(jnp.ones((tokens.shape[2],) * 2, bool))
        visible = causal[None, None] & mask[:, :, None, :]
        prefix_visible = prefix_mask[:, None, None, :]

        def layer(x: Array, scanned: tuple[PyTree, KeyValue]) -> tuple[Array, None]:
            params_l, prompt = scanned
            block = self._block(params_l)
            query, key, value = block.project(x, positions)
            parts = [(prompt.keys, prompt.values, prefix_visible), (key, value, visible)]
            return block.finish(x, attend(query, parts, self.cfg.precision)), None

        x = self._embed(params, tokens)
        x, _ = jax.lax.scan(self._remat(layer), x, (params["layers"], prefix))
        return self._ends(params).norm(x)

    def decode(
        self, params: PyTree, tokens: Array, t: Array, cache: KeyValue, prefix: KeyValue, prefix_mask: Array
    ) -> tuple[jax.Array, KeyValue]:
        """Completion token t of every member, tokens [B, G] -> hidden [B, G, D] and the cache with it.

        cache [L, B, G, C, K, h] holds tokens 0 .. t-1.
        """
        positions = (jnp.sum(prefix_mask, axis=-1) + t)[:, None, None]
        visible = (jnp.arange(cache.keys.shape[3]) <= t)[None, None, None]
        prefix_visible = prefix_mask[:, None, None, :]

        def layer(carry: tuple[Array, KeyValue], scanned: Any) -> tuple[tuple[Array, KeyValue], None]:
            (x, cache), (params_l, prompt, i) = carry, scanned
            block = self._block(params_l)
            query, *now = block.project(x, positions)
            # The whole cache is carried and one token written into it: no copy of a layer's cache.
            cache = KeyValue(*(jax.lax.dynamic_update_slice(c, n[None], (i, 0, 0, t, 0, 0))
                               for c, n in zip(cache, now, strict=True)))  # fmt: skip
            own = [jax.lax.dynamic_index_in_dim(c, i, keepdims=False) for c in cache]
            parts = [(prompt.keys, prompt.values, prefix_visible), (own[0], own[1], visible)]
            return (block.finish(x, attend(query, parts, self.cfg.precision)), cache), None

        x = self._embed(params, tokens)[:, :, None]
        scanned = (params["layers"], prefix, jnp.arange(self.cfg.layers))
        (x, cache), _ = jax.lax.scan(layer, (x, cache), scanned)
        return self._ends(params).norm(x)[:, :, 0], cache

    def logits(self, params: PyTree, hidden: Array) -> jax.Array:
        """hidden [..., D] -> float32 logits [..., V]."""
        kernel = params["embed"]["embedding"].T if self.cfg.tied_head else params["head"]["kernel"]
        hidden, kernel = (x.astype(self.cfg.dtype) for x in (hidden, kernel))
        return jnp.matmul(hidden, kernel, precision=self.cfg.precision, preferred_element_type=jnp.float32)

    def empty_cache(self, batch: int, group: int, length: int) -> KeyValue:
        """A completion cache of zeros [L, B, G, C, K, h]."""
        cfg = self.cfg
        shape = (cfg.layers, batch, group, length, cfg.kv_heads, cfg.head_dim)
        return KeyValue(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))

    def _embed(self, params: PyTree, tokens: Array) -> jax.Array:
        x = self._ends(params).embed(tokens)
        if self.mesh is None:
            return x
        # Left to itself the compiler would split the width as the embedding is, and give every device all prompts.
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))

    def _block(self, params: PyTree) -> Block:
        return _merge(self._block_def, self._block_state, params)

    def _ends(self, params: PyTree) -> Ends:
        return _merge(self._ends_def, self._ends_state, {k: v for k, v in params.items() if k != "layers"})

    def _remat(self, layer: Any) -> Any:
        if self.cfg.remat == "none":
            return layer
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, policy=dots if self.cfg.remat == "dots" else None)


def _pure(module: nnx.Module) -> PyTree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _merge(graphdef: Any, state: Any, params: PyTree) -> Any:
    state = jax.tree.map(lambda x: x, state)  # a copy: `replace_by_pure_dict` writes in place
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)
