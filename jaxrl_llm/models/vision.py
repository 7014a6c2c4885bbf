"""The vision tower of a vision-language model: turns image patches into vectors that replace token embeddings.

Shapes: B prompts, N patches and M merged tokens of a prompt, E width of the tower, D width of the decoder. The patches
of a window are neighbours in N, and all windows have the same number of patches. K layers of the tower also return
vectors that the decoder's first K layers add (DeepStack, arXiv 2406.04334).
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
from jaxrl_llm.models.blocks import ACTIVATIONS, UnitOffsetRMSNorm, linear
from jaxrl_llm.models.config import DecoderConfig, VisionConfig
from jaxrl_llm.models.experts import Kernel
from jaxrl_llm.models.rope import default_rope, rotate
from jaxrl_llm.models.skeleton import Skeleton, parameter_tree, rematerialized
from jaxrl_llm.structs import Array, Images, PyTree

TOWER_ACTIVATIONS: dict[str, Callable[[Array], jax.Array]] = ACTIVATIONS | {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
CHANNELS = 3
# Number of queries that attend at a time: all at once would take memory that grows with N^2.
QUERIES_AT_A_TIME = 256


class Tower:
    """A vision tower as pure functions over a parameter tree {"patches", "table", "layers", "merger", "deep"}.

    A tower without learned positions has no "table", and one without DeepStack has no "deep". The layers are stacked
    and scanned.
    """

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, mesh: Mesh | None = None):
        # The sampler transposes the kernels of the text layers, but not the kernels of the tower.
        self.cfg, self.vision, self.mesh = replace(cfg, transposed=False), vision, mesh
        self._block = Skeleton(lambda: TowerBlock(self.cfg, vision, nnx.Rngs(0)))
        self._outer_parts = Skeleton(lambda: TowerOuterParts(self.cfg, vision, nnx.Rngs(0)))
        self._deepstack_merger = Skeleton(lambda: Merger(self.cfg, vision, nnx.Rngs(0), norm_after_merge=True))

    def init(self, key: Array) -> PyTree:
        """Returns new float32 parameters; kernels are drawn from normal(0, 0.02)."""
        block_key, outer_key = jax.random.split(key)

        def tower_block(key: Array) -> PyTree:
            return parameter_tree(TowerBlock(self.cfg, self.vision, nnx.Rngs(key)))

        layers = jax.vmap(tower_block)(jax.random.split(block_key, self.vision.depth))
        params = {"layers": layers, **parameter_tree(TowerOuterParts(self.cfg, self.vision, nnx.Rngs(outer_key)))}
        if not self.vision.deepstack_layers:
            return params

        def deepstack_merger(key: Array) -> PyTree:
            return parameter_tree(Merger(self.cfg, self.vision, nnx.Rngs(key), norm_after_merge=True))

        return params | {
            "deep": jax.vmap(deepstack_merger)(
                jax.random.split(jax.random.fold_in(key, 2), len(self.vision.deepstack_layers))
            )
        }

    def __call__(self, params: PyTree, images: Images) -> jax.Array:
        """Runs the tower on the patches of B prompts. Returns vectors [1 + K, B, M, D] of M merged tokens per prompt.

        The first vectors replace the token embeddings, and the K others are added by the first K decoder layers.
        """
        outer_parts = self._outer_parts({name: leaf for name, leaf in params.items() if name not in ("layers", "deep")})
        angles = None if self.vision.siglip else self._angles(images.places)
        segments = images.segments[:, None]

        def layer(states: Array, scanned: tuple[Array, PyTree]) -> tuple[jax.Array, None]:
            layer_sees_image, layer_params = scanned
            sees_image = all(self._sees_image) if len(set(self._sees_image)) == 1 else layer_sees_image
            block = self._block(layer_params)
            attended = self._attend(sees_image, *block.project(states, angles), segments)
            return block.finish(states, attended), None

        states, deepstack_vectors, first_layer = outer_parts.patches(images.patches), list[Array](), 0
        if self.vision.position_grid:
            states = outer_parts.table(states, images)
        states = self._shard_by_prompt(states[:, None])
        all_layers = jnp.asarray(self._sees_image), params["layers"]
        # The layers are scanned in ranges that end at the DeepStack layers, because one scan would keep the outputs of
        # all layers.
        for end_layer in (*(layer + 1 for layer in self.vision.deepstack_layers), self.vision.depth):
            layer_range = all_layers
            if end_layer - first_layer < self.vision.depth:
                layer_range = jax.tree.map(lambda array, first=first_layer, end=end_layer: array[first:end], all_layers)
            states, _ = jax.lax.scan(rematerialized(layer, self.cfg.remat), states, layer_range)
            deepstack_index = len(deepstack_vectors)
            if deepstack_index < len(self.vision.deepstack_layers):
                merger_params = jax.tree.map(lambda array, index=deepstack_index: array[index], params["deep"])
                merger = self._deepstack_merger(merger_params)
                deepstack_vectors.append(self._shard_by_prompt(merger(states[:, 0])))
            first_layer = end_layer
        return jnp.stack([self._shard_by_prompt(outer_parts.merger(states[:, 0])), *deepstack_vectors])

    @property
    def _sees_image(self) -> tuple[bool, ...]:
        """For each layer, whether a patch sees its whole image, and not only its window."""
        has_windows, depth = bool(self.vision.window), self.vision.depth
        return tuple(not has_windows or layer in self.vision.full_layers for layer in range(depth))

    def _angles(self, places: Array) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine [B, 1, N, h / 2] of the rotary angles of N patches, for heads of size h.

        places: row and column of each patch [B, N, 2]. The first half of the angles grows with the row, the second
        half with the column.
        """
        rope = default_rope(self.vision.rope_theta, self.vision.head_dim // 2)
        frequencies = jnp.asarray(rope.frequencies, jnp.float32)
        angles = places.astype(jnp.float32)[:, None, :, :, None] * frequencies[None, None, None, None]
        angles = angles.reshape(*angles.shape[:3], -1)
        return jnp.cos(angles), jnp.sin(angles)

    def _attend(self, sees_image: Array | bool, query: Array, key: Array, value: Array, segments: Array) -> jax.Array:
        """Returns softmax attention [B, 1, N, heads, h] of patches to the patches of their image or window.

        segments [B, 1, N]: number of each patch's image.
        """
        attend_in_images = partial(_attend_in_images, precision=self.cfg.precision)
        attend_in_windows = partial(_attend_in_windows, size=self.vision.window_patches, precision=self.cfg.precision)
        if isinstance(sees_image, bool):
            return (attend_in_images if sees_image else attend_in_windows)(query, key, value, segments)
        return jax.lax.cond(sees_image, attend_in_images, attend_in_windows, query, key, value, segments)

    def _shard_by_prompt(self, x: Array) -> jax.Array:
        """Splits an array with a leading axis of prompts over the devices by prompt."""
        # Without this constraint, XLA may shard like the kernels, over fsdp, and hold all prompts on each device.
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))


def _attend_in_windows(
    query: Array, key: Array, value: Array, segments: Array, *, size: int, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns attention [B, 1, N, heads, h] of patches to the patches of their window of `size` patches.

    The padding of a window sees only padding.
    """

    def split_windows(x: Array) -> jax.Array:
        """Splits the axis of N patches into windows: [B, 1, N, ...] -> [B, windows, size, ...]."""
        return x.reshape(len(x), -1, size, *x.shape[3:])

    # `attend` sees each window as a row of tokens.
    grouped_query, keys_values = head_major(split_windows(query), split_windows(key), split_windows(value))
    window_segments = split_windows(segments)
    visible = Visible(_equal_segments(window_segments, window_segments))
    return token_major(attend(grouped_query, keys_values, visible, precision=precision)).reshape(query.shape)


def _attend_in_images(
    query: Array, key: Array, value: Array, segments: Array, *, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns attention [B, 1, N, heads, h] of patches to the patches of their image.

    To save memory, a part of the queries attends at a time, and the backward pass computes the scores again.
    """
    all_queries, keys_values = head_major(query, key, value)
    length = query.shape[2]
    part_count = -(-length // QUERIES_AT_A_TIME)  # rounded up

    def attend_part(part: tuple[Array, Array]) -> jax.Array:
        queries, query_segments = part
        visible = Visible(_equal_segments(query_segments, segments))
        return attend(queries, keys_values, visible, precision=precision)

    if part_count == 1:
        return token_major(attend_part((all_queries, segments)))
    part_size = -(-length // part_count)
    padding = part_count * part_size - length

    def split(x: Array, patch_axis: int) -> jax.Array:
        """Splits the axis of patches into equal parts, padded at the end, and moves the axis of parts to the front."""
        padded = jnp.pad(x, [(0, padding if axis == patch_axis else 0) for axis in range(x.ndim)])
        by_part = padded.reshape(*x.shape[:patch_axis], part_count, part_size, *x.shape[patch_axis + 1 :])
        return jnp.moveaxis(by_part, patch_axis, 0)

    attended = jax.lax.map(jax.checkpoint(attend_part), (split(all_queries, 4), split(segments, 2)))
    # The parts are joined again: [parts, B, heads, 1, 1, size, h] -> [B, heads, 1, 1, N, h].
    joined_shape = (*all_queries.shape[:4], part_count * part_size, all_queries.shape[-1])
    attended = jnp.moveaxis(attended, 0, 4).reshape(joined_shape)
    return token_major(attended[:, :, :, :, :length])


def _equal_segments(queries: Array, keys: Array) -> jax.Array:
    """Returns a mask [..., T, S]: True where a query [..., T] and a key [..., S] have the same segment number."""
    return queries[..., :, None] == keys[..., None, :]


class TowerBlock(nnx.Module):
    """One layer of the tower: norm, attention, norm, MLP, with residuals."""

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
        """Projects N patches x [B, 1, N, E] to query, key and value [B, 1, N, heads, h].

        The query is divided by the square root of h, so its products with keys are the scores of attention.
        angles: cosine and sine of the patches; None for a tower without a rotary embedding.
        """
        heads, normed = (self.vision.heads, self.vision.head_dim), self.attention_norm(x)
        if angles is None:
            projections = (
                linear_map(normed).reshape(*x.shape[:3], *heads) for linear_map in (self.query, self.key, self.value)
            )
            query, key, value = projections
            return (query.astype(jnp.float32) * self.vision.head_dim**-0.5).astype(value.dtype), key, value
        fused = self.qkv(normed).reshape(*x.shape[:3], 3, *heads)
        query, key, value = (fused[..., i, :, :] for i in range(3))
        # Rotate and scale in float32 and round once, as the decoder does.
        query = rotate(query, angles) * self.vision.head_dim**-0.5
        return query.astype(value.dtype), rotate(key, angles).astype(value.dtype), value

    def finish(self, x: Array, attended: Array) -> jax.Array:
        """Returns the output of the layer, from its input x [B, 1, N, E] and its attention [B, 1, N, heads, h]."""
        x = x + self.output(attended.reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))


class TowerMLP(nnx.Module):
    """An MLP with biases: down(act(gate(x)) * up(x)), or without a gate down(act(up(x)))."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        biased = partial(linear, cfg, rngs=rngs, use_bias=True)
        self.vision = vision
        if vision.gated_mlp:
            self.gate = biased(vision.width, vision.mlp_width)
        self.up = biased(vision.width, vision.mlp_width)
        self.down = biased(vision.mlp_width, vision.width)

    def __call__(self, x: Array) -> jax.Array:
        activation = TOWER_ACTIVATIONS[self.vision.activation]
        return self.down(activation(self.gate(x)) * self.up(x) if self.vision.gated_mlp else activation(self.up(x)))


class TowerOuterParts(nnx.Module):
    """The modules of the tower outside its layers: patch embedding, table of positions, merger."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.patches = PatchEmbedding(cfg, vision, rngs)
        if vision.position_grid:
            self.table = PositionTable(cfg, vision, rngs)
        self.merger = (MeanMerger if vision.siglip else Merger)(cfg, vision, rngs)


class PatchEmbedding(nnx.Module):
    """The product of patches with a kernel; a convolution whose stride equals its kernel size does the same."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.dtype, self.precision, self.vision = jnp.dtype(cfg.dtype), cfg.precision, vision
        # As for all kernels, the axes [columns, rows, frames, channels, E] are those of the checkpoint, reversed.
        shape = (vision.patch_size, vision.patch_size, vision.patch_frames, CHANNELS, vision.width)
        if vision.patch_frames:
            self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        else:
            self.still = Kernel(*shape[:2], *shape[3:], rngs=rngs)
        if vision.patch_bias:
            self.bias = nnx.Param(jnp.zeros(vision.width))

    def __call__(self, patches: Array) -> jax.Array:
        """Returns vectors [B, N, E] of N patches [B, N, F], the F uint8 numbers of their pixels."""
        vision = self.vision
        mean = jnp.asarray(vision.pixel_mean, jnp.float32)[None, :, None]
        std = jnp.asarray(vision.pixel_std, jnp.float32)[None, :, None]
        pixels = patches.reshape(-1, CHANNELS, vision.patch_size**2).astype(jnp.float32) / 255
        pixels = ((pixels - mean) / std).reshape(len(pixels), -1).astype(self.dtype)
        # An image repeats one frame, so the kernels of the frames add up. They are rounded as in the engines, and added
        # in float32.
        if vision.patch_frames:
            kernel = jnp.sum(self.kernel[...].astype(self.dtype).astype(jnp.float32), axis=2)
        else:
            kernel = self.still.kernel[...]
        kernel = kernel.transpose(2, 1, 0, 3).reshape(pixels.shape[1], -1).astype(self.dtype)
        vectors = jnp.matmul(pixels, kernel, precision=self.precision)
        if vision.patch_bias:
            bias = self.bias[...].astype(self.dtype)[None]
            vectors = (vectors.astype(jnp.float32) + bias).astype(self.dtype)
        return vectors.reshape(*patches.shape[:2], -1)


class PositionTable(nnx.Module):
    """Learned positions: the corners of the square table are those of an image, and patches are interpolated."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.dtype, self.side = jnp.dtype(cfg.dtype), vision.position_grid
        shape = (vision.position_grid**2, vision.width)
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, x: Array, images: Images) -> jax.Array:
        """Adds the interpolated positions to patches x [B, N, E]."""
        # segment_max finds the last row and column of each image. N + 1 segments are enough, because an image has
        # several patches.
        last_by_segment = jax.vmap(partial(jax.ops.segment_max, num_segments=x.shape[1] + 1))(
            images.places, images.segments
        )
        last_place = jnp.maximum(
            jax.vmap(lambda last_of_image, at: last_of_image[at])(last_by_segment, images.segments), 1
        )
        grid_place = images.places.astype(jnp.float32) * (self.side - 1) / last_place.astype(jnp.float32)
        lower_corner = jnp.floor(grid_place)
        total = jnp.zeros(x.shape, jnp.float32)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corner = jnp.array([row, column])[None, None]
            grid_corner = jnp.minimum(lower_corner.astype(jnp.int32) + corner, self.side - 1)
            weight = jnp.prod(1 - jnp.abs(grid_place - lower_corner - corner), axis=-1, keepdims=True)
            vectors = self.embedding[...][grid_corner[..., 0] * self.side + grid_corner[..., 1]]
            total += weight * vectors.astype(self.dtype).astype(jnp.float32)
        return x + total.astype(x.dtype)


class Merger(nnx.Module):
    """The last part of a tower: a norm, and an MLP that turns the patches of a merged token into one vector.

    A merged token is a square of merge_size x merge_size patches. norm_after_merge: whether the norm covers the patches
    of a merged token together; False = each patch alone.
    """

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs, *, norm_after_merge: bool = False):
        biased = partial(linear, cfg, rngs=rngs, use_bias=True)
        merged_width = vision.width * vision.merge_size**2
        self.norm_after_merge = norm_after_merge
        self.norm = _norm(cfg, vision, rngs, merged_width if norm_after_merge else vision.width)
        self.up = biased(merged_width, merged_width)
        self.down = biased(merged_width, cfg.width)

    def __call__(self, patches: Array) -> jax.Array:
        """Returns vectors [B, M, D] of the M merged tokens of each prompt, from its N patches [B, N, E]."""
        shape = (len(patches), -1, self.up.in_features)
        merged = self.norm(patches.reshape(shape)) if self.norm_after_merge else self.norm(patches).reshape(shape)
        return self.down(TOWER_ACTIVATIONS["gelu"](self.up(merged)))


class MeanMerger(nnx.Module):
    """Gemma 3's merger: the mean of the normalized patches of a merged token, a norm, and a projection."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.patches = vision.merge_size**2
        self.norm = _norm(cfg, vision, rngs, vision.width)
        self.mean_norm = UnitOffsetRMSNorm(replace(cfg, norm_eps=vision.norm_eps), vision.width)
        self.projection = linear(cfg, vision.width, cfg.width, rngs=rngs)

    def __call__(self, patches: Array) -> jax.Array:
        """Returns vectors [B, M, D] of the M merged tokens of each prompt, from its N patches [B, N, E]."""
        by_merged_token = self.norm(patches).reshape(len(patches), -1, self.patches, patches.shape[-1])
        return self.projection(self.mean_norm(jnp.mean(by_merged_token, axis=2)))


def _norm(cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs, size: int) -> nnx.RMSNorm | nnx.LayerNorm:
    """Returns the tower's kind of norm, over vectors of `size` numbers."""
    options: dict[str, Any] = dict(epsilon=vision.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
    if not vision.layer_norm:
        return nnx.RMSNorm(size, **options)
    # The fast variance is the difference of two means, which loses digits.
    return nnx.LayerNorm(size, use_fast_variance=False, **options)
