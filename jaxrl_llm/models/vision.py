"""The tower of a vision-language model: it turns the patches of images into vectors that replace embeddings.

Shapes: B prompts, N patches and M merged tokens of a prompt, E width of the tower, D width of the decoder. Windows are
one after the other in N, and all have the same number of patches. K layers also give vectors to the decoder's first
K layers (DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.machine.sharding import BATCH
from jaxrl_llm.models.attention import Visible, attend, head_major, token_major
from jaxrl_llm.models.blocks import ACTIVATIONS, CenteredNorm, linear
from jaxrl_llm.models.config import DecoderConfig, VisionConfig
from jaxrl_llm.models.experts import Kernel
from jaxrl_llm.models.rope import plain, rotate
from jaxrl_llm.models.skeleton import Skeleton, parameters, recomputed
from jaxrl_llm.structs import Array, Images, PyTree

TOWER_ACTIVATIONS: dict[str, Callable[[Array], jax.Array]] = ACTIVATIONS | {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
CHANNELS = 3
# Queries of an attention over whole images at a time: all at once would take memory that grows with N^2.
QUERIES = 256


class Tower:
    """Pure functions over a parameter tree {"patches", "table", "layers", "merger", "deep"}; some lack table or deep.

    The layers are stacked and scanned.
    """

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, mesh: Mesh | None = None):
        # The sampler's kernels of text layers are transposed, those of the tower are not.
        self.cfg, self.vision, self.mesh = replace(cfg, transposed=False), vision, mesh
        self._block = Skeleton(lambda: TowerBlock(self.cfg, vision, nnx.Rngs(0)))
        self._ends = Skeleton(lambda: TowerEnds(self.cfg, vision, nnx.Rngs(0)))
        self._deep = Skeleton(lambda: Merger(self.cfg, vision, nnx.Rngs(0), after=True))

    def init(self, key: Array) -> PyTree:
        """Initializes float32 parameters; kernels are normal(0, 0.02)."""
        block_key, ends_key = jax.random.split(key)

        def block(key: Array) -> PyTree:
            return parameters(TowerBlock(self.cfg, self.vision, nnx.Rngs(key)))

        layers = jax.vmap(block)(jax.random.split(block_key, self.vision.depth))
        params = {"layers": layers, **parameters(TowerEnds(self.cfg, self.vision, nnx.Rngs(ends_key)))}
        if not self.vision.deep:
            return params

        def deep(key: Array) -> PyTree:
            return parameters(Merger(self.cfg, self.vision, nnx.Rngs(key), after=True))

        return params | {"deep": jax.vmap(deep)(jax.random.split(jax.random.fold_in(key, 2), len(self.vision.deep)))}

    def __call__(self, params: PyTree, images: Images) -> jax.Array:
        """Returns the vectors [1 + K, B, M, D] of the merged tokens: in the place of embeddings, and for K layers."""
        ends = self._ends({name: leaf for name, leaf in params.items() if name not in ("layers", "deep")})
        angles = None if self.vision.siglip else self._angles(images.places)
        segments = images.segments[:, None]

        def layer(x: Array, scanned: tuple[Array, PyTree]) -> tuple[jax.Array, None]:
            whole = all(self._whole) if len(set(self._whole)) == 1 else scanned[0]
            block = self._block(scanned[1])
            attended = self._attend(whole, *block.project(x, angles), segments)
            return block.finish(x, attended), None

        x, deep, begin = ends.patches(images.patches), list[Array](), 0
        x = self._split_by_prompt((ends.table(x, images) if self.vision.table else x)[:, None])
        scanned = jnp.asarray(self._whole), params["layers"]
        # A scan that collects the outputs of a few layers would hold those of all.
        for end in (*(layer + 1 for layer in self.vision.deep), self.vision.depth):
            part = scanned if end - begin == self.vision.depth else jax.tree.map(lambda x: x[begin:end], scanned)  # noqa: B023
            x, _ = jax.lax.scan(recomputed(layer, self.cfg.remat), x, part)
            if len(deep) < len(self.vision.deep):
                merger = self._deep(jax.tree.map(lambda x: x[len(deep)], params["deep"]))
                deep.append(self._split_by_prompt(merger(x[:, 0])))
            begin = end
        return jnp.stack([self._split_by_prompt(ends.merger(x[:, 0])), *deep])

    @property
    def _whole(self) -> tuple[bool, ...]:
        """For each layer, whether a patch sees its whole image, and not only its window."""
        return tuple(not self.vision.window or i in self.vision.full for i in range(self.vision.depth))

    def _angles(self, places: Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine [B, 1, N, h / 2]: the first half of the frequencies turns with the row, the other with the
        column of a patch.
        """
        frequencies = jnp.asarray(plain(self.vision.rope_theta, self.vision.head_dim // 2).frequencies, jnp.float32)
        angles = places.astype(jnp.float32)[:, None, :, :, None] * frequencies[None, None, None, None]
        angles = angles.reshape(*angles.shape[:3], -1)
        return jnp.cos(angles), jnp.sin(angles)

    def _attend(self, whole: Array | bool, query: Array, key: Array, value: Array, segments: Array) -> jax.Array:
        """Softmax attention of patches [B, 1, N, heads, h] to those of equal segments [B, 1, N] -> the same shape."""
        in_images = partial(_in_images, precision=self.cfg.precision)
        in_windows = partial(_in_windows, size=self.vision.window_patches, precision=self.cfg.precision)
        if isinstance(whole, bool):
            return (in_images if whole else in_windows)(query, key, value, segments)
        return jax.lax.cond(whole, in_images, in_windows, query, key, value, segments)

    def _split_by_prompt(self, x: Array) -> jax.Array:
        # XLA may otherwise follow the kernels, which are split over fsdp, and hold all prompts on a device.
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))


def _in_windows(
    query: Array, key: Array, value: Array, segments: Array, *, size: int, precision: jax.lax.Precision | None
) -> jax.Array:
    """Attention within windows of `size` patches. The padding of a window sees itself only."""

    def windows(x: Array) -> jax.Array:
        return x.reshape(len(x), -1, size, *x.shape[3:])

    grouped, row = head_major(windows(query), windows(key), windows(value))
    visible = Visible(_equal(windows(segments), windows(segments)))
    return token_major(attend(grouped, row, visible, precision=precision)).reshape(query.shape)


def _in_images(
    query: Array, key: Array, value: Array, segments: Array, *, precision: jax.lax.Precision | None
) -> jax.Array:
    """Attention within images, of some queries at a time. The backward pass computes the scores again."""
    grouped, row = head_major(query, key, value)
    length = query.shape[2]
    parts = -(-length // QUERIES)

    def part(query_segments: tuple[Array, Array]) -> jax.Array:
        return attend(query_segments[0], row, Visible(_equal(query_segments[1], segments)), precision=precision)

    if parts == 1:
        return token_major(part((grouped, segments)))
    size = -(-length // parts)

    def split(x: Array, axis: int) -> jax.Array:
        """Splits an axis of patches into parts, padded at the end, and moves them to the front."""
        widths = [(0, parts * size - length if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :]), axis, 0)

    attended = jax.lax.map(jax.checkpoint(part), (split(grouped, 4), split(segments, 2)))
    # [parts, B, heads, 1, 1, size, h] -> [B, heads, 1, 1, N, h]
    attended = jnp.moveaxis(attended, 0, 4).reshape(*grouped.shape[:4], parts * size, grouped.shape[-1])
    return token_major(attended[:, :, :, :, :length])


def _equal(queries: Array, keys: Array) -> jax.Array:
    """Which keys a query sees: [..., T] and [..., S] -> [..., T, S]."""
    return queries[..., :, None] == keys[..., None, :]


class TowerBlock(nnx.Module):
    """One layer: norm, attention, norm, MLP, with residuals."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.vision = vision
        biased = partial(linear, cfg, rngs=rngs, use_bias=True)
        self.attention_norm = _norm(cfg, vision, rngs, vision.width)
        if vision.siglip:
            self.query, self.key, self.value = (biased(vision.width, vision.width) for _ in range(3))
        else:
            self.qkv = biased(vision.width, 3 * vision.width)
        self.output = biased(vision.width, vision.width)
        self.mlp_norm = _norm(cfg, vision, rngs, vision.width)
        self.mlp = TowerMLP(cfg, vision, rngs)

    def project(self, x: Array, angles: tuple[Array, Array] | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, 1, N, E] -> query, divided by the square root of h, key and value [B, 1, N, heads, h]."""
        heads, normed = (self.vision.heads, self.vision.head_dim), self.attention_norm(x)
        if angles is None:
            parts = (part(normed).reshape(*x.shape[:3], *heads) for part in (self.query, self.key, self.value))
            query, key, value = parts
            return (query.astype(jnp.float32) * self.vision.head_dim**-0.5).astype(value.dtype), key, value
        fused = self.qkv(normed).reshape(*x.shape[:3], 3, *heads)
        query, key, value = (fused[..., i, :, :] for i in range(3))
        # Rotated and scaled in float32, rounded once, as in the decoder.
        query = rotate(query, angles) * self.vision.head_dim**-0.5
        return query.astype(value.dtype), rotate(key, angles).astype(value.dtype), value

    def finish(self, x: Array, attended: Array) -> jax.Array:
        x = x + self.output(attended.reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))


class TowerMLP(nnx.Module):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))), with biases."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        biased = partial(linear, cfg, rngs=rngs, use_bias=True)
        self.vision = vision
        if vision.gated:
            self.gate = biased(vision.width, vision.mlp_width)
        self.up = biased(vision.width, vision.mlp_width)
        self.down = biased(vision.mlp_width, vision.width)

    def __call__(self, x: Array) -> jax.Array:
        act = TOWER_ACTIVATIONS[self.vision.activation]
        return self.down(act(self.gate(x)) * self.up(x) if self.vision.gated else act(self.up(x)))


class TowerEnds(nnx.Module):
    """The parts outside the layers."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.patches = Patches(cfg, vision, rngs)
        if vision.table:
            self.table = PositionTable(cfg, vision, rngs)
        self.merger = (MeanMerger if vision.siglip else Merger)(cfg, vision, rngs)


class Patches(nnx.Module):
    """The product of patches with a kernel: a convolution whose stride is the size of its kernel."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.dtype, self.precision, self.vision = jnp.dtype(cfg.dtype), cfg.precision, vision
        # [columns, rows, frames, channels, E]: as all kernels, the one of a checkpoint with its axes reversed.
        shape = (vision.patch, vision.patch, vision.frames, CHANNELS, vision.width)
        if vision.frames:
            self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        else:
            self.still = Kernel(*shape[:2], *shape[3:], rngs=rngs)
        if vision.patch_bias:
            self.bias = nnx.Param(jnp.zeros(vision.width))

    def __call__(self, patches: Array) -> jax.Array:
        """Numbers of patches [B, N, F] uint8 -> [B, N, E]."""
        vision = self.vision
        mean, std = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (vision.mean, vision.std))
        x = patches.reshape(-1, CHANNELS, vision.patch**2).astype(jnp.float32) / 255
        x = ((x - mean) / std).reshape(len(x), -1).astype(self.dtype)
        # An image is a film of equal frames, so their kernels add up: rounded as in the engines, added in float32.
        if vision.frames:
            kernel = jnp.sum(self.kernel[...].astype(self.dtype).astype(jnp.float32), axis=2)
        else:
            kernel = self.still.kernel[...]
        kernel = kernel.transpose(2, 1, 0, 3).reshape(x.shape[1], -1).astype(self.dtype)
        y = jnp.matmul(x, kernel, precision=self.precision)
        if vision.patch_bias:
            y = (y.astype(jnp.float32) + self.bias[...].astype(self.dtype)[None]).astype(self.dtype)
        return y.reshape(*patches.shape[:2], -1)


class PositionTable(nnx.Module):
    """Learned positions: the corners of an image have those of the table's corners, the rest is interpolated."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.dtype, self.side = jnp.dtype(cfg.dtype), vision.table
        shape = (vision.table**2, vision.width)
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, x: Array, images: Images) -> jax.Array:
        """Adds positions to patches x [B, N, E]."""
        # The last row and column of each image. It has several patches, so there are fewer images than patches.
        largest = jax.vmap(partial(jax.ops.segment_max, num_segments=x.shape[1] + 1))(images.places, images.segments)
        last = jnp.maximum(jax.vmap(lambda of, at: of[at])(largest, images.segments), 1)
        at = images.places.astype(jnp.float32) * (self.side - 1) / last.astype(jnp.float32)
        below = jnp.floor(at)
        total = jnp.zeros(x.shape, jnp.float32)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corner = jnp.array([row, column])[None, None]
            near = jnp.minimum(below.astype(jnp.int32) + corner, self.side - 1)
            weight = jnp.prod(1 - jnp.abs(at - below - corner), axis=-1, keepdims=True)
            vectors = self.embedding[...][near[..., 0] * self.side + near[..., 1]]
            total += weight * vectors.astype(self.dtype).astype(jnp.float32)
        return x + total.astype(x.dtype)


class Merger(nnx.Module):
    """A norm, and an MLP over the patches of a merged token together; after: the norm is over them too."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs, *, after: bool = False):
        biased = partial(linear, cfg, rngs=rngs, use_bias=True)
        inner = vision.width * vision.merge**2
        self.after = after
        self.norm = _norm(cfg, vision, rngs, inner if after else vision.width)
        self.up = biased(inner, inner)
        self.down = biased(inner, cfg.width)

    def __call__(self, x: Array) -> jax.Array:
        """[B, N, E] -> [B, M, D]."""
        shape = (len(x), -1, self.up.in_features)
        merged = self.norm(x.reshape(shape)) if self.after else self.norm(x).reshape(shape)
        return self.down(TOWER_ACTIVATIONS["gelu"](self.up(merged)))


class MeanMerger(nnx.Module):
    """The mean of the normed patches of a merged token, a norm with the factor 1 + scale, and a projection."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.patches = vision.merge**2
        self.norm = _norm(cfg, vision, rngs, vision.width)
        self.mean_norm = CenteredNorm(replace(cfg, norm_eps=vision.norm_eps), vision.width)
        self.projection = linear(cfg, vision.width, cfg.width, rngs=rngs)

    def __call__(self, x: Array) -> jax.Array:
        """[B, N, E] -> [B, M, D]."""
        patches = self.norm(x).reshape(len(x), -1, self.patches, x.shape[-1])
        return self.projection(self.mean_norm(jnp.mean(patches, axis=2)))


def _norm(cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs, size: int) -> nnx.RMSNorm | nnx.LayerNorm:
    options: dict[str, Any] = dict(epsilon=vision.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
    if not vision.centered:
        return nnx.RMSNorm(size, **options)
    # The fast variance is a difference of two means, which loses digits.
    return nnx.LayerNorm(size, use_fast_variance=False, **options)
