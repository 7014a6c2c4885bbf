"""The vision tower of a vision-language model: turns image patches into vectors that replace token embeddings.

A merged token is one image token of the decoder; it stands for a square of patches. Shapes: B prompts, N patches and M
merged tokens of a prompt, E width of the tower, D width of the decoder, h head size of the tower. The patches of a
window are neighbours in N, and all windows have the same number of patches. K layers of the tower also return vectors
that the decoder's first K layers add (DeepStack, arXiv 2406.04334).
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

# {name of an activation in vision_config of a config.json: function}.
TOWER_ACTIVATIONS: dict[str, Callable[[Array], jax.Array]] = ACTIVATIONS | {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
CHANNELS = 3  # red, green and blue
# Number of patches whose queries attend at a time, because the scores of all queries would take memory of N^2.
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

        def layer_parameters(layer_key: Array) -> PyTree:
            return parameter_tree(TowerBlock(self.cfg, self.vision, nnx.Rngs(layer_key)))

        # vmap traces one layer and stacks the results, so the program does not grow with the number of layers.
        stacked_layers = jax.vmap(layer_parameters)(jax.random.split(block_key, self.vision.depth))
        outer_parts = parameter_tree(TowerOuterParts(self.cfg, self.vision, nnx.Rngs(outer_key)))
        params = {"layers": stacked_layers, **outer_parts}
        if not self.vision.deepstack_layers:
            return params

        def deepstack_merger(merger_key: Array) -> PyTree:
            return parameter_tree(Merger(self.cfg, self.vision, nnx.Rngs(merger_key), norm_after_merge=True))

        merger_keys = jax.random.split(jax.random.fold_in(key, 2), len(self.vision.deepstack_layers))
        return params | {"deep": jax.vmap(deepstack_merger)(merger_keys)}

    def __call__(self, params: PyTree, images: Images) -> jax.Array:
        """Runs the tower on the patches of B prompts. Returns vectors [1 + K, B, M, D] of M merged tokens per prompt.

        Vectors 0 replace the embeddings of image tokens; vectors 1 to K are added by the first K decoder layers.
        """
        outer_parts = self._outer_parts({name: leaf for name, leaf in params.items() if name not in ("layers", "deep")})
        angles = None if self.vision.siglip else self._angles(images.places)
        image_numbers = images.segments[:, None]  # [B, 1, N] number of each patch's image, 0 for padding

        def layer(states: Array, layer_inputs: tuple[Array, PyTree]) -> tuple[jax.Array, None]:
            """Runs one layer on patches [B, 1, N, E]."""
            layer_sees_image, layer_params = layer_inputs
            # A Python bool, where all layers are of one kind, spares the choice at run time.
            sees_image = all(self._sees_image) if len(set(self._sees_image)) == 1 else layer_sees_image
            block = self._block(layer_params)
            attended = self._attend(sees_image, *block.project(states, angles), image_numbers)
            return block.finish(states, attended), None

        # Patches become vectors [B, N, E], to which learned positions are added if the tower has a table of positions.
        states = outer_parts.patches(images.patches)
        if self.vision.position_grid:
            states = outer_parts.table(states, images)
        states = self._shard_by_prompt(states[:, None])
        # The layers are scanned in ranges that end at the DeepStack layers, because one scan would keep the outputs of
        # all layers.
        all_layers = jnp.asarray(self._sees_image), params["layers"]
        deepstack_vectors, first_layer = list[Array](), 0
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
        token_vectors = self._shard_by_prompt(outer_parts.merger(states[:, 0]))
        return jnp.stack([token_vectors, *deepstack_vectors])

    @property
    def _sees_image(self) -> tuple[bool, ...]:
        """For each layer, whether a patch sees its whole image, and not only its window."""
        has_windows, depth = bool(self.vision.window), self.vision.depth
        return tuple(not has_windows or layer in self.vision.full_layers for layer in range(depth))

    def _angles(self, places: Array) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine [B, 1, N, h / 2] of the rotary angles of N patches, for heads of size h.

        places [B, N, 2]: row and column of each patch in its image. The first half of the angles grows with the row,
        the second half with the column.
        """
        rope = default_rope(self.vision.rope_theta, self.vision.head_dim // 2)
        frequencies = jnp.asarray(rope.frequencies, jnp.float32)
        angles = places.astype(jnp.float32)[:, None, :, :, None] * frequencies[None, None, None, None]
        angles = angles.reshape(*angles.shape[:3], -1)
        return jnp.cos(angles), jnp.sin(angles)

    def _attend(
        self, sees_image: Array | bool, query: Array, key: Array, value: Array, image_numbers: Array
    ) -> jax.Array:
        """Returns softmax attention [B, 1, N, heads, h] of patches to the patches of their image or window.

        sees_image: whether a patch attends to its whole image, and not only to its window. image_numbers [B, 1, N]:
        number of each patch's image.
        """
        attend_in_images = partial(_attend_in_images, precision=self.cfg.precision)
        attend_in_windows = partial(_attend_in_windows, size=self.vision.window_patches, precision=self.cfg.precision)
        if isinstance(sees_image, bool):
            return (attend_in_images if sees_image else attend_in_windows)(query, key, value, image_numbers)
        return jax.lax.cond(sees_image, attend_in_images, attend_in_windows, query, key, value, image_numbers)

    def _shard_by_prompt(self, x: Array) -> jax.Array:
        """Splits an array with a leading axis of prompts over the devices by prompt."""
        # Without this constraint, XLA may shard like the kernels, over fsdp, and hold all prompts on each device.
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))


def _attend_in_windows(
    query: Array, key: Array, value: Array, image_numbers: Array, *, size: int, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns attention [B, 1, N, heads, h] of patches to the patches of their window of `size` patches.

    image_numbers [B, 1, N]: number of each patch's image, 0 for padding. The padding of a window sees only padding.
    """

    def split_windows(x: Array) -> jax.Array:
        """Splits the axis of N patches into windows: [B, 1, N, ...] -> [B, windows, size, ...]."""
        return x.reshape(len(x), -1, size, *x.shape[3:])

    # `attend` treats each window as a row of tokens.
    window_query, keys_values = head_major(split_windows(query), split_windows(key), split_windows(value))
    window_image_numbers = split_windows(image_numbers)
    visible = Visible(_same_image_mask(window_image_numbers, window_image_numbers))
    attended = attend(window_query, keys_values, visible, precision=precision)
    return token_major(attended).reshape(query.shape)


def _attend_in_images(
    query: Array, key: Array, value: Array, image_numbers: Array, *, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns attention [B, 1, N, heads, h] of patches to the patches of their image.

    image_numbers [B, 1, N]: number of each patch's image. To save memory, a part of the queries attends at a time, and
    the backward pass computes the scores again.
    """
    all_queries, keys_values = head_major(query, key, value)  # all_queries: [B, heads, 1, 1, N, h]
    length = query.shape[2]
    part_count = -(-length // QUERIES_AT_A_TIME)  # rounded up

    def attend_part(part: tuple[Array, Array]) -> jax.Array:
        queries, query_image_numbers = part
        visible = Visible(_same_image_mask(query_image_numbers, image_numbers))
        return attend(queries, keys_values, visible, precision=precision)

    if part_count == 1:
        return token_major(attend_part((all_queries, image_numbers)))
    part_size = -(-length // part_count)
    padding = part_count * part_size - length

    def split(x: Array, patch_axis: int) -> jax.Array:
        """Splits the axis of patches into equal parts, padded at the end, and moves the axis of parts to the front."""
        padded = jnp.pad(x, [(0, padding if axis == patch_axis else 0) for axis in range(x.ndim)])
        by_part = padded.reshape(*x.shape[:patch_axis], part_count, part_size, *x.shape[patch_axis + 1 :])
        return jnp.moveaxis(by_part, patch_axis, 0)

    attended = jax.lax.map(jax.checkpoint(attend_part), (split(all_queries, 4), split(image_numbers, 2)))
    # Join the parts: [parts, B, heads, 1, 1, part_size, h] -> [B, heads, 1, 1, N, h].
    joined_shape = (*all_queries.shape[:4], part_count * part_size, all_queries.shape[-1])
    attended = jnp.moveaxis(attended, 0, 4).reshape(joined_shape)
    return token_major(attended[:, :, :, :, :length])


def _same_image_mask(query_image_numbers: Array, key_image_numbers: Array) -> jax.Array:
    """Returns the attention mask [..., T, S]: True where a query [..., T] and a key [..., S] are of one image."""
    return query_image_numbers[..., :, None] == key_image_numbers[..., None, :]


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
        angles: cosine and sine of the patches' rotary angles; None for a tower without a rotary embedding.
        """
        heads_shape, normed = (self.vision.heads, self.vision.head_dim), self.attention_norm(x)
        query_scale = self.vision.head_dim**-0.5
        if angles is None:
            query, key, value = (
                linear_layer(normed).reshape(*x.shape[:3], *heads_shape)
                for linear_layer in (self.query, self.key, self.value)
            )
            return (query.astype(jnp.float32) * query_scale).astype(value.dtype), key, value
        fused_projection = self.qkv(normed).reshape(*x.shape[:3], 3, *heads_shape)
        query, key, value = (fused_projection[..., i, :, :] for i in range(3))
        # Rotate and scale in float32 and round once, as the decoder does.
        query = rotate(query, angles) * query_scale
        return query.astype(value.dtype), rotate(key, angles).astype(value.dtype), value

    def finish(self, x: Array, attended: Array) -> jax.Array:
        """Returns the output [B, 1, N, E] of the layer. x: its input [B, 1, N, E]. attended: [B, 1, N, heads, h]."""
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
        # The axes are [columns, rows, frames, channels, E]: the axes of the checkpoint in reversed order, as for all
        # kernels. `still` is the kernel of a tower without an axis of frames.
        shape = (vision.patch_size, vision.patch_size, vision.patch_frames, CHANNELS, vision.width)
        if vision.patch_frames:
            self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        else:
            self.still = Kernel(*shape[:2], *shape[3:], rngs=rngs)
        if vision.patch_bias:
            self.bias = nnx.Param(jnp.zeros(vision.width))

    def __call__(self, patches: Array) -> jax.Array:
        """Returns vectors [B, N, E] of N patches per prompt. patches [B, N, F]: the F uint8 numbers of their pixels."""
        vision = self.vision
        # Normalize the pixels of each channel.
        mean = jnp.asarray(vision.pixel_mean, jnp.float32)[None, :, None]
        std = jnp.asarray(vision.pixel_std, jnp.float32)[None, :, None]
        pixels = patches.reshape(-1, CHANNELS, vision.patch_size**2).astype(jnp.float32) / 255
        pixels = ((pixels - mean) / std).reshape(len(pixels), -1).astype(self.dtype)
        # A tower for videos has a kernel for each of some frames. An image counts as a video of equal frames, so its
        # kernel is the sum over the frames. The kernels are rounded as in the engines, and added in float32.
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
    """Learned vectors of positions, in a square table that is stretched over each image.

    The corners of the table lie on the corners of the image; for patches in between, the vectors are interpolated.
    """

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.dtype, self.side = jnp.dtype(cfg.dtype), vision.position_grid
        shape = (vision.position_grid**2, vision.width)
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, x: Array, images: Images) -> jax.Array:
        """Adds the interpolated vectors of positions to patches x [B, N, E]."""
        # segment_max finds the last row and column of each image. N + 1 segments are enough, because an image has
        # several patches.
        find_last_places = partial(jax.ops.segment_max, num_segments=x.shape[1] + 1)
        last_place_of_image = jax.vmap(find_last_places)(images.places, images.segments)
        select_by_patch = jax.vmap(lambda places_by_image, image_numbers: places_by_image[image_numbers])
        last_place = jnp.maximum(select_by_patch(last_place_of_image, images.segments), 1)
        # Place of each patch in the table, [B, N, 2], as fractions of rows and columns.
        table_place = images.places.astype(jnp.float32) * (self.side - 1) / last_place.astype(jnp.float32)
        # Bilinear interpolation: the four entries around a place are weighted by their nearness.
        first_entry = jnp.floor(table_place)
        position_vectors = jnp.zeros(x.shape, jnp.float32)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            offset = jnp.array([row, column])[None, None]
            entry = jnp.minimum(first_entry.astype(jnp.int32) + offset, self.side - 1)
            weight = jnp.prod(1 - jnp.abs(table_place - first_entry - offset), axis=-1, keepdims=True)
            entry_vectors = self.embedding[...][entry[..., 0] * self.side + entry[..., 1]]
            position_vectors += weight * entry_vectors.astype(self.dtype).astype(jnp.float32)
        return x + position_vectors.astype(x.dtype)


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
        merged_shape = (len(patches), -1, self.up.in_features)  # the patches of a merged token become one vector
        if self.norm_after_merge:
            merged = self.norm(patches.reshape(merged_shape))
        else:
            merged = self.norm(patches).reshape(merged_shape)
        return self.down(TOWER_ACTIVATIONS["gelu"](self.up(merged)))


class MeanMerger(nnx.Module):
    """Gemma 3's merger: the mean of the normalized patches of a merged token, a norm, and a projection."""

    def __init__(self, cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs):
        self.patches_of_token = vision.merge_size**2
        self.norm = _norm(cfg, vision, rngs, vision.width)
        self.mean_norm = UnitOffsetRMSNorm(replace(cfg, norm_eps=vision.norm_eps), vision.width)
        self.projection = linear(cfg, vision.width, cfg.width, rngs=rngs)

    def __call__(self, patches: Array) -> jax.Array:
        """Returns vectors [B, M, D] of the M merged tokens of each prompt, from its N patches [B, N, E]."""
        by_merged_token = self.norm(patches).reshape(len(patches), -1, self.patches_of_token, patches.shape[-1])
        return self.projection(self.mean_norm(jnp.mean(by_merged_token, axis=2)))


def _norm(cfg: DecoderConfig, vision: VisionConfig, rngs: nnx.Rngs, size: int) -> nnx.RMSNorm | nnx.LayerNorm:
    """Returns a norm over vectors of `size` numbers: a LayerNorm or an RMSNorm, as the model's config.json says."""
    options: dict[str, Any] = dict(epsilon=vision.norm_eps, dtype=jnp.dtype(cfg.dtype), rngs=rngs)
    if not vision.layer_norm:
        return nnx.RMSNorm(size, **options)
    # The fast variance is the difference of two means, which loses digits.
    return nnx.LayerNorm(size, use_fast_variance=False, **options)
