"""The decoder of all model families: pure functions over a parameter tree.

A prompt [B, P] is computed once per group. A row [B, N, T] holds one completion, or several packed ones. All rows of
a group attend to one copy of the keys and values of their prompt.

Letters of shapes: B prompts, P tokens of a prompt, N rows of a prompt's completions, T tokens of a row, D model width,
L layers, K key heads, h head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machine.sharding import BATCH, path_name
from jaxrl_llm.models import attention_gpu, attention_tpu, names
from jaxrl_llm.models.adapters import AdapterKind, Adapters, make_adapters
from jaxrl_llm.models.attention import (
    KeyValue,
    Visible,
    attend,
    causal_mask,
    head_major,
    hide_tokens,
    prompt_positions,
    prompt_visibility,
    soft_capped,
    token_major,
    tree_mask,
)
from jaxrl_llm.models.blocks import Block, EmbedAndHead, Linear
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.models.rope import rotary_angles
from jaxrl_llm.models.skeleton import Skeleton, parameter_tree, rematerialized
from jaxrl_llm.models.vision import Tower
from jaxrl_llm.structs import Array, Images, Prompt, PyTree

# A function of the caller: it reduces the router's decisions in one layer, for the tokens of completion rows
# [B, N, T, ...], to the arrays that the caller wants, such as the load of each expert.
RoutingCollector: TypeAlias = Callable[[Routing], PyTree]
TOWER = "visual"  # key of the vision tower in the parameter tree


def last_state(hidden: Array, mask: Array) -> jax.Array:
    """Returns the hidden state [B, D] of the last real token of each of B prompts.

    hidden: hidden states [B, P, D] of P tokens. mask: True on real tokens [B, P], padded on the left or on the right.
    """
    # argmax returns the first True of the reversed mask, which is the last real token.
    last_index = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, last_index[:, None, None], axis=1)[:, 0]


class PackedRows(NamedTuple):
    """The completions that a model reads: B prompts with N rows of T tokens each. All arrays are [B, N, T].

    A row holds one completion or several; the tokens of a completion stand together. A completion is a sequence of
    tokens, or a tree: its branches share their first tokens. `previous` and `ends` describe trees by indices of the
    row, and are None for sequences.
    """

    tokens: Array  # int32
    positions: Array  # number of completion tokens before each token
    segment_ids: Array  # number of the completion that each token belongs to, 0 for padding
    previous: Array | None = None  # index of each token's parent in the tree, for tokens with a position above 0
    ends: Array | None = None  # index after the last token that sees each token


class PerLayerKind(NamedTuple):
    """A pair of values, such as masks: one for layers with full attention, one for local (sliding-window) layers."""

    full: Any
    local: Any

    @classmethod
    def for_window(cls, make: Callable[[int], Any], window: int) -> PerLayerKind:
        """Returns make(0) for the layers with full attention, and make(window) for the local ones; window 0 = none."""
        full_value = make(0)
        return cls(full_value, make(window) if window else full_value)

    def select(self, is_local: Array | bool) -> Any:
        """Returns the value for one layer. In a scan, `is_local` is an array that is known only at run time."""
        if self.full is self.local or isinstance(is_local, bool):
            return self.local if is_local is True else self.full
        return jax.tree.map(lambda full, in_local: jnp.where(is_local, in_local, full), self.full, self.local)


@lru_cache(maxsize=16)
def decoder_of(cfg: DecoderConfig, mesh: Mesh | None) -> Decoder:
    """Returns the decoder of a config on a mesh: always the same object, so that runs in one process share programs."""
    return Decoder(cfg, mesh)


class Decoder:
    """A language model as pure functions over a parameter tree {"layers", "embed", "norm", "head", "visual"}.

    A model with a tied head has no "head", and a text model has no "visual". For training, "layers" is stacked
    [L, ...] and scanned, so that XLA compiles one layer. For sampling, "layers" is the list from `unstack`, because a
    scan would copy each layer's slice of the stack for every token. Full and local layers run the same program: they
    differ only in masks and rotary angles, which the scan selects for each layer.
    """

    def __init__(self, cfg: DecoderConfig, mesh: Mesh | None = None):
        self.cfg = cfg
        self.mesh = mesh
        self._block = Skeleton(lambda: Block(cfg, nnx.Rngs(0), mesh))
        self._outer_parts = Skeleton(lambda: EmbedAndHead(cfg, nnx.Rngs(0)))
        self._tower = Tower(cfg, cfg.vision, mesh) if cfg.vision else None

    def init(self, key: Array) -> PyTree:
        """Returns new random parameters, in float32; kernels and embedding are drawn from normal(0, 0.02)."""
        block_key, outer_key = jax.random.split(key)

        def layer_parameters(layer_key: Array) -> PyTree:
            return parameter_tree(Block(self.cfg, nnx.Rngs(layer_key)))

        # vmap traces one layer and stacks the results, so the program does not grow with the number of layers.
        stacked_layers = jax.vmap(layer_parameters)(jax.random.split(block_key, self.cfg.layers))
        params = {"layers": stacked_layers, **parameter_tree(EmbedAndHead(self.cfg, nnx.Rngs(outer_key)))}
        return params | {TOWER: self._tower.init(jax.random.fold_in(key, 2))} if self._tower else params

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the parameter tree."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def size(self, *, active: bool = False) -> int:
        """Returns the number of parameters.

        active: whether to count only the parameters that one token uses, so among the experts those that it is sent to.
        """
        sizes = {path_name(path): x.size for path, x in jax.tree_util.tree_leaves_with_path(self.shapes)}
        if active and (mixture := self.cfg.mixture):
            expert_kernels = [name for name in sizes if "experts/" in name and "router" not in name]
            sizes |= {name: sizes[name] * mixture.chosen // mixture.experts for name in expert_kernels}
        return sum(sizes.values())

    def adapters(self, kind: AdapterKind) -> Adapters:
        """Returns adapters (LoRA) of this kind for the layers. Raises: UserError, if kind.targets matches no kernel."""
        # Kernels of linear layers may get an adapter: {path of the kernel: its shape, stacked over the layers}.
        kernel_shapes = {
            f"layers/{'/'.join(map(str, path))}/kernel": (self.cfg.layers, *module.kernel.get_value().shape)
            for path, module in nnx.iter_graph(self._block.empty)
            if isinstance(module, Linear)
        }
        return make_adapters(kind, kernel_shapes, names.module_table(self.cfg.family))

    def cast_for_compute(self, params: PyTree) -> PyTree:
        """Casts parameters to the dtype in which they are used: mostly cfg.dtype, float32 for norms and routers.

        A frozen model may be stored in this form, because the forward pass would cast its parameters anyway.
        """
        dtypes = self.compute_dtypes(params)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)

    def compute_dtypes(self, params: PyTree) -> PyTree:
        """Returns the dtype of each parameter after `cast_for_compute`; `params` may be shapes."""

        # An int8 kernel consists of integers ("qvalue") and float32 scales, and both keep their dtype.
        def keeps_dtype(path: Any) -> bool:
            return path_name(path).endswith(("scale", "norm/bias", "qvalue", "router/kernel"))

        def compute_dtype(path: Any, x: Any) -> jnp.dtype:
            return jnp.dtype(x.dtype if keeps_dtype(path) else self.cfg.dtype)

        return jax.tree_util.tree_map_with_path(compute_dtype, params)

    def prefill(self, params: PyTree, prompt: Prompt) -> tuple[jax.Array, Any]:
        """Runs prompts [B, P] and returns hidden states [B, P, D], and keys and values [B, K, P, h] of each layer."""
        # A prompt is one row of tokens in the layers: its arrays have the axes [B, 1, P, ...].
        angles = self._angles(_prompt_rotary_positions(prompt))
        segment_ids = prompt.mask[:, None].astype(jnp.int32)  # 1 for real tokens, 0 for padding
        attend_row = self._attend_packed(segment_ids, last_visible=self._last_visible(prompt))

        def layer(states: Array, is_local: Array | bool, layer_params: PyTree) -> tuple[Array, KeyValue]:
            block = self._block(layer_params)
            query, keys_values = head_major(*block.project(states, angles.select(is_local)))
            attended = attend_row(is_local, query, keys_values)
            states, _ = block.finish(states, token_major(attended))
            return states, _without_row_axis(keys_values)

        embeddings = self._embed(params, prompt.tokens[:, None])
        states, deepstack = self._insert_images(params, embeddings, prompt.images)
        states, prompt_cache = self._run_layers(layer, states, params["layers"], deepstack=deepstack)
        return self._embed_and_head(params).norm(states)[:, 0], prompt_cache

    def forward(
        self, params: PyTree, prompt: Prompt, rows: PackedRows, collect: RoutingCollector | None = None
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Runs prompts [B, P] and their completion rows [B, N, T] in one pass: N rows of T tokens for each prompt.

        Each matrix product covers the tokens of prompts and rows together. Returns hidden states of prompts [B, P, D]
        and of rows [B, N, T, D], and the results of `collect` for the routing of the rows, with a leading axis of
        layers; None without experts.
        """
        prompt_length = prompt.tokens.shape[1]

        def join(of_prompts: Array, of_rows: Array) -> jax.Array:
            """Joins the token axes of prompts and rows: [B, 1, P, ...], [B, N, T, ...] -> [B, 1, P + N * T, ...]."""
            of_rows = of_rows.reshape(len(of_rows), 1, -1, *of_rows.shape[3:])
            return jnp.concatenate([of_prompts, of_rows], axis=2)

        def split(joined: Array) -> tuple[jax.Array, jax.Array]:
            """Undoes `join`."""
            of_rows = joined[:, :, prompt_length:].reshape(*rows.tokens.shape, *joined.shape[3:])
            return joined[:, :, :prompt_length], of_rows

        # A completion continues at the number of real tokens of its prompt, because padding has no position.
        text_positions = _count_tokens(prompt) + rows.positions  # [B, N, T] of row tokens
        angles = self._angles(join(*_rotary_positions(prompt, rows.positions, text_positions)))
        prompt_segment_ids = prompt.mask[:, None].astype(jnp.int32)  # 1 for real tokens, 0 for padding
        attend_prompts = self._attend_packed(prompt_segment_ids, last_visible=self._last_visible(prompt))
        attend_rows = self._attend_packed(rows.segment_ids, prompt.mask, text_positions, ends=rows.ends)

        def layer(states: Array, is_local: Array | bool, layer_params: PyTree) -> tuple[Array, PyTree]:
            block = self._block(layer_params)
            projections = block.project(states, angles.select(is_local))  # query, key and value of all tokens
            of_prompts, of_rows = zip(*(split(projection) for projection in projections), strict=True)
            # The rows of a group attend to the keys and values of the prompt, and gradients flow back through them.
            prompt_query, prompt_cache = head_major(*of_prompts)
            row_query, row_cache = head_major(*of_rows)
            attended_by_prompts = attend_prompts(is_local, prompt_query, prompt_cache)
            attended_by_rows = attend_rows(is_local, row_query, row_cache, _without_row_axis(prompt_cache))
            attended = join(token_major(attended_by_prompts), token_major(attended_by_rows))
            states, routing = block.finish(states, attended)
            routing_of_rows = jax.tree.map(lambda array: split(array)[1], routing)
            return states, _collected(collect, routing_of_rows)

        embeddings = self._embed(params, join(prompt.tokens[:, None], rows.tokens), by_width=True)
        states, deepstack = self._insert_images(params, embeddings, prompt.images)
        states, collected = self._run_layers(layer, states, params["layers"], deepstack=deepstack)
        prompt_states, row_states = split(self._embed_and_head(params).norm(states))
        return prompt_states[:, 0], row_states, collected

    def extend(
        self,
        params: PyTree,
        prompt_cache: Any,
        prompt: Prompt,
        rows: PackedRows,
        collect: RoutingCollector | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Runs completion rows [B, N, T] after prompts whose keys and values `prefill` has computed.

        prompt_cache: keys and values of the prompts, from `prefill`. collect: function of the routing of each layer,
        whose results are returned; None = no results. Returns hidden states [B, N, T, D], and the results of `collect`.
        """
        text_positions = _count_tokens(prompt) + rows.positions  # [B, N, T], counted from the first prompt token
        rotary_positions = text_positions
        if prompt.images is not None:
            # An image has fewer rotary positions than tokens, so `images.end` says where completions continue.
            rotary_positions = prompt.images.end[:, None, None] + rows.positions
        angles = self._angles(rotary_positions)
        attend_rows = self._attend_packed(rows.segment_ids, prompt.mask, text_positions, ends=rows.ends)

        def layer(
            states: Array, is_local: Array | bool, layer_params: PyTree, layer_cache: KeyValue
        ) -> tuple[Array, PyTree]:
            block = self._block(layer_params)
            query, keys_values = head_major(*block.project(states, angles.select(is_local)))
            attended = attend_rows(is_local, query, keys_values, layer_cache)
            states, routing = block.finish(states, token_major(attended))
            return states, _collected(collect, routing)

        embeddings = self._embed(params, rows.tokens, by_width=True)
        states, collected = self._run_layers(layer, embeddings, params["layers"], prompt_cache)
        return self._embed_and_head(params).norm(states), collected

    def step(
        self,
        params: PyTree,
        tokens: Array,
        positions: Array,
        cache: list[Any],
        attend: Callable[..., tuple[Array, Any]],
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        """Runs the next tokens [B, N, T] of rows, whose earlier keys and values are in the cache: a step of decoding.

        params: parameter tree from `unstack`. positions [B, N, T]: position of each token in its text; after a prompt
        with images, positions continue at `Images.end`. attend(is_local, query, keys and values of the new tokens,
        cache of a layer): returns the attention output, and the cache with the new tokens. Returns hidden states
        [B, N, T, D], the cache of each layer, and the chosen experts [B, N, T, chosen] of each layer (None without
        experts).
        """
        angles = self._angles(positions)

        def layer(states: Array, is_local: Array | bool, layer_params: PyTree, layer_cache: Any) -> tuple[Array, Any]:
            block = self._block(layer_params)
            query, keys_values = head_major(*block.project(states, angles.select(is_local)))
            attended, layer_cache = attend(is_local, query, keys_values, layer_cache)
            states, routing = block.finish(states, token_major(attended))
            return states, (layer_cache, routing and routing.chosen)

        states, outputs = self._run_layers(layer, self._embed(params, tokens), params["layers"], cache)
        cache, chosen_experts = map(list, zip(*outputs, strict=True))
        return self._embed_and_head(params).norm(states), cache, chosen_experts

    def logits(self, params: PyTree, hidden: Array) -> jax.Array:
        """Returns float32 logits [..., V] over the vocabulary for hidden states [..., D]."""
        # Products have the model's dtype, but sums are float32, because log-probabilities are differences of logits.
        flat_states = hidden.reshape(-1, hidden.shape[-1]).astype(self.cfg.dtype)
        kernel = self.head_kernel(params).astype(self.cfg.dtype)
        logits = jnp.matmul(flat_states, kernel, precision=self.cfg.precision, preferred_element_type=jnp.float32)
        logits = hide_tokens(soft_capped(logits, self.cfg.final_soft_cap), self.cfg.hidden_tokens)
        return logits.reshape(*hidden.shape[:-1], -1)

    def head_kernel(self, params: PyTree) -> jax.Array:
        """Returns the head's kernel [D, V], in float32; a tied head is the transposed embedding."""
        return params["embed"]["embedding"].T if self.cfg.tied_head else params["head"]["kernel"]

    def unstack(self, params: PyTree) -> PyTree:
        """Returns the parameter tree with the stacked layers as a list."""
        # Slicing copies, so the layers are in memory twice while both trees exist.
        layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(self.cfg.layers)]
        return params | {"layers": layers}

    def _angles(self, positions: Array) -> PerLayerKind:
        """Returns the angles of the rotary embedding for tokens at these positions, for full and for local layers."""
        full_angles = rotary_angles(positions, self.cfg.rope)
        local_angles = rotary_angles(positions, self.cfg.local_rope) if self.cfg.local_rope else full_angles
        return PerLayerKind(full_angles, local_angles)

    def _window(self, length: int) -> int:
        """Returns the window of local layers, or 0 if texts of this length fit into the window."""
        return self.cfg.window if self.cfg.window < length else 0

    def _last_visible(self, prompt: Prompt) -> jax.Array | None:
        """Returns the index [B, 1, P] of the last token that each prompt token sees; None if each sees up to itself.

        In some models, such as Gemma 3, a token of an image sees all tokens of its image, also later tokens.
        """
        images = prompt.images
        if images is None or not self.cfg.vision or not self.cfg.vision.bidirectional_tokens:
            return None
        prompt_count, image_tokens = images.columns.shape
        token_index = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)
        # Number of the image of each image token: that of the token's first patch.
        image_numbers = images.segments.reshape(prompt_count, image_tokens, -1)[..., 0]
        find_last_token = partial(jax.ops.segment_max, num_segments=image_tokens + 1)
        last_token_of_image = jax.vmap(find_last_token)(images.columns, image_numbers)

        def last_visible_of_prompt(columns: Array, last_token_of_image: Array, image_numbers: Array) -> jax.Array:
            # A text token sees up to itself, and an image token up to the last token of its image.
            return token_index.at[columns].set(last_token_of_image[image_numbers], mode="drop")

        return jax.vmap(last_visible_of_prompt)(images.columns, last_token_of_image, image_numbers)[:, None]

    def _attend_packed(
        self,
        segment_ids: Array,
        prompt_mask: Array | None = None,
        positions: Array | None = None,
        last_visible: Array | None = None,
        ends: Array | None = None,
    ) -> Callable[..., jax.Array]:
        """Returns `attend(is_local, query, row, prompt)`: attention that is causal within each completion of a row.

        The TPU or GPU kernel is used where it supports this model. segment_ids [B, N, T]: number of each token's
        completion. positions [B, N, T]: index of each token, counted from the first token of its prompt.
        last_visible [B, N, T]: index of the last token that a token sees, None = itself; only for rows without prompt.
        ends [B, N, T]: index after the last token that sees each token, for completions that are trees; else None.
        """
        cfg, length = self.cfg, segment_ids.shape[-1]
        window = self._window(length + (0 if prompt_mask is None else prompt_mask.shape[-1]))

        def make_masks(window: int) -> Visible:
            to_prompt = None if prompt_mask is None else prompt_visibility(prompt_mask, positions, window)
            if ends is not None and positions is not None:
                return Visible(tree_mask(segment_ids, ends, positions, window), to_prompt)
            return Visible(causal_mask(segment_ids, window, last_visible), to_prompt)

        masks, soft_cap = PerLayerKind.for_window(make_masks, window), cfg.soft_cap
        if self.mesh is not None:
            device = self.mesh.devices.flat[0]
            # The TPU kernel cannot mask trees, because it knows only the first key that each token sees.
            if ends is None and attention_tpu.fits(device, cfg.head_dim, cfg.dtype, length):
                # The TPU kernel makes its own masks. jit drops `masks`, which the TPU kernel does not use.
                return self._attend_tpu(segment_ids, prompt_mask, window, last_visible)
            if attention_gpu.fits(device, cfg.head_dim, cfg.dtype, soft_cap):
                return lambda is_local, query, row, prompt=None: attention_gpu.attend_gpu(
                    query, row, segment_ids, masks.select(is_local), prompt, mesh=self.mesh
                )
        return lambda is_local, query, row, prompt=None: attend(
            query, row, masks.select(is_local), prompt, soft_cap=soft_cap, precision=cfg.precision
        )

    def _attend_tpu(
        self, segment_ids: Array, prompt_mask: Array | None, window: int, last_visible: Array | None
    ) -> Callable[..., jax.Array]:
        """Returns `attend(is_local, query, row, prompt)`, the attention of rows to themselves and to their prompt.

        It runs the TPU kernel. The masks of a kernel are static, so full and local layers need two kernels. window:
        window of local layers, 0 = none. last_visible [B, N, T]: index of the last token that a token sees, or None.
        """

        def make_kernel(window: int) -> Callable[..., jax.Array]:
            # `ahead` bounds how many later tokens an image token sees.
            ahead = self.cfg.vision.bidirectional_tokens if self.cfg.vision and last_visible is not None else 0
            limits = attention_tpu.AttentionLimits(window, self.cfg.soft_cap, last_visible, ahead)
            return lambda query, row, prompt: attention_tpu.attend_tpu(
                query, row, segment_ids, prompt, prompt_mask, limits=limits, mesh=self.mesh
            )

        def attend(is_local: Array | bool, query: Array, row: KeyValue, prompt: KeyValue | None = None) -> jax.Array:
            # Where the layer's kind is known at trace time, avoid `cond`, because it would compile both kernels.
            if not window or isinstance(is_local, bool):
                return make_kernel(window if is_local is True else 0)(query, row, prompt)
            return jax.lax.cond(is_local, make_kernel(window), make_kernel(0), query, row, prompt)

        return attend

    def _run_layers(
        self, layer: Callable, x: Array, layers: PyTree, *per_layer: Any, deepstack: DeepStackVectors | None = None
    ) -> tuple[Array, Any]:
        """Runs hidden states x through all layers, and returns the new states and the outputs of the layers.

        layer(x, is_local, parameters of the layer, ...): returns the new x and an output. is_local: True for a layer
        with a sliding window. layers: parameters, stacked [L, ...] or as a list. per_layer: further arguments of
        `layer`, each with one entry per layer. deepstack: vectors that the first layers add to image tokens, or None.
        """
        layer_is_local = self.cfg.kinds
        if deepstack is not None:
            layer_numbers = range(self.cfg.layers) if isinstance(layers, list) else jnp.arange(self.cfg.layers)
            layer, per_layer = deepstack.wrap_layer(layer), (*per_layer, layer_numbers)
        if not isinstance(layers, list):
            # Training scans the stacked layers. If all layers are of one kind, `is_local` is a Python bool, so that
            # masks are not selected at run time.
            one_kind = len(set(layer_is_local)) == 1

            def scanned_layer(x: Array, layer_inputs: tuple[Any, ...]) -> tuple[Array, Any]:
                is_local, *arguments = layer_inputs
                return layer(x, layer_is_local[0] if one_kind else is_local, *arguments)

            stacked_inputs = (jnp.asarray(layer_is_local), layers, *per_layer)
            return jax.lax.scan(rematerialized(scanned_layer, self.cfg.remat), x, stacked_inputs)
        # Sampling runs a list of layers one after the other.
        outputs = []
        for is_local, *arguments in zip(layer_is_local, layers, *per_layer, strict=True):
            x, output = layer(x, is_local, *arguments)
            outputs.append(output)
        return x, outputs

    def _embed(self, params: PyTree, tokens: Array, *, by_width: bool = False) -> jax.Array:
        """Returns the embeddings [B, N, T, D] of tokens [B, N, T].

        by_width: whether each device looks up only its part of the width, because the table is split over fsdp.
        """
        # Cast after the lookup, because a frequent token's gradient sums thousands of rows and needs float32.
        embeddings = self._embed_and_head(params).embed(tokens).astype(self.cfg.dtype)
        if self.cfg.scaled_embedding:
            # The factor is rounded to the model's dtype, as in transformers.
            embeddings = embeddings * jnp.asarray(self.cfg.width**0.5, self.cfg.dtype)
        if self.mesh is None:
            return embeddings
        if by_width and self.cfg.width % self.mesh.shape["fsdp"] == 0:
            # Without this constraint, and with a vocabulary split over `tensor`, a device would hold the embeddings of
            # the completion rows of all devices.
            split_width = NamedSharding(self.mesh, P("data", None, None, "fsdp"))
            embeddings = jax.lax.with_sharding_constraint(embeddings, split_width)
        # Shard the axis B here, because XLA would shard the width, like the embedding table, and keep all prompts on
        # each device.
        return jax.lax.with_sharding_constraint(embeddings, NamedSharding(self.mesh, BATCH))

    def _insert_images(
        self, params: PyTree, embeddings: Array, images: Images | None
    ) -> tuple[jax.Array, DeepStackVectors | None]:
        """Replaces the embeddings of image tokens by the vectors of the vision tower.

        embeddings: embeddings [B, 1, T, D] of T tokens, first the tokens of the prompt. images: images of the prompts,
        or None. Returns the new embeddings, and the vectors that the first layers add (None without DeepStack).
        """
        if images is None:
            return embeddings, None
        assert self.cfg.vision and self._tower
        tower, dtype = self._tower, embeddings.dtype
        vectors_shape = (1 + len(tower.vision.deepstack_layers), *images.columns.shape, self.cfg.width)
        # A batch without images skips the tower. The condition is evaluated once per batch, so one prompt with an image
        # costs as much as an image in each.
        vectors = jax.lax.cond(
            jnp.any(images.segments > 0),
            lambda: tower(params[TOWER], images).astype(dtype),
            lambda: jnp.zeros(vectors_shape, dtype),
        )
        # `columns` are the token indices of image tokens. Padding columns are set out of range, so that their vectors
        # are dropped and not written into the completions.
        prompt_length, length = images.positions.shape[-1], embeddings.shape[2]
        columns = jnp.where(images.columns < prompt_length, images.columns, length)
        insert_vectors = jax.vmap(lambda row, columns, vectors: row.at[columns].set(vectors, mode="drop"))
        embeddings = insert_vectors(embeddings[:, 0], columns, vectors[0])[:, None]
        return embeddings, DeepStackVectors(columns, vectors[1:]) if tower.vision.deepstack_layers else None

    def _embed_and_head(self, params: PyTree) -> EmbedAndHead:
        """Returns the embedding, the final norm and the head of the model, with these parameters."""
        return self._outer_parts({name: leaf for name, leaf in params.items() if name not in ("layers", TOWER)})


class DeepStackVectors(NamedTuple):
    """Vectors of a vision tower that the first layers of a decoder add to the hidden states of image tokens.

    So DeepStack (arXiv 2406.04334) feeds features of the tower's inner layers to the decoder.
    """

    columns: Array  # [B, M] index of each of M image tokens among the tokens; an index out of range adds nothing
    vectors: Array  # [first layers, B, M, D] vectors that each of the first layers adds

    def wrap_layer(self, layer: Callable) -> Callable:
        """Returns a function that runs `layer`, and adds the vectors of this layer to its new hidden states.

        The function has the number of the layer as an additional last argument.
        """
        layers_with_vectors = len(self.vectors)
        add_at_columns = jax.vmap(lambda row, columns, vectors: row.at[columns].add(vectors, mode="drop"))

        def with_vectors(states: Array, *arguments: Any) -> tuple[jax.Array, Any]:
            *layer_arguments, layer_number = arguments
            states, output = layer(states, *layer_arguments)
            if isinstance(layer_number, int) and layer_number >= layers_with_vectors:
                return states, output

            def add_vectors(states: Array) -> jax.Array:
                # Both branches of `cond` are traced, so the index must be valid for later layers too.
                layer_vectors = self.vectors[jnp.minimum(layer_number, layers_with_vectors - 1)]
                return add_at_columns(states[:, 0], self.columns, layer_vectors)[:, None]

            has_vectors = layer_number < layers_with_vectors
            return jax.lax.cond(has_vectors, add_vectors, lambda states: states, states), output

        return with_vectors


def _collected(collect: RoutingCollector | None, routing: Routing | None) -> PyTree:
    """Returns collect(routing) of a layer; None without experts or without a collector."""
    return collect(routing) if collect and routing else None


def _count_tokens(prompt: Prompt) -> jax.Array:
    """Returns the number of real tokens of each prompt, [B, 1, 1]."""
    return jnp.sum(prompt.mask, axis=-1)[:, None, None]


def _without_row_axis(prompt: KeyValue) -> KeyValue:
    """Removes the row axis of a prompt's keys and values: [B, K, 1, P, h] -> [B, K, P, h]."""
    return KeyValue(prompt.keys[:, :, 0], prompt.values[:, :, 0])


def _prompt_rotary_positions(prompt: Prompt) -> jax.Array:
    """Returns rotary positions of prompt tokens: [B, 1, P], or with images [B, 1, P, 3] for time, row and column."""
    if prompt.images is None:
        return prompt_positions(prompt.mask)
    return jnp.moveaxis(prompt.images.positions, 1, 2)[:, None]


def _rotary_positions(prompt: Prompt, positions: Array, text_positions: Array) -> tuple[jax.Array, jax.Array]:
    """Returns rotary positions of prompt tokens, and of their rows: [B, N, T], or with images [B, N, T, 3].

    positions [B, N, T]: index of each row token in its completion. text_positions [B, N, T]: index of each row token,
    counted from the first prompt token; used without images, because an image has fewer positions than tokens.
    """
    if prompt.images is None:
        return _prompt_rotary_positions(prompt), text_positions
    row_positions = (prompt.images.end[:, None, None] + positions)[..., None]
    return _prompt_rotary_positions(prompt), jnp.broadcast_to(row_positions, (*positions.shape, 3))
