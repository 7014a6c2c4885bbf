"""The decoder of all model families: pure functions over a parameter tree.

A prompt [B, P] is computed once per group. A row [B, N, T] holds one completion, or several packed ones. All rows of
a group attend to one copy of the keys and values of their prompt.
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

# Reduces a layer's routing of completion rows [B, N, T, ...] to the arrays that the caller wants.
RoutingCollector: TypeAlias = Callable[[Routing], PyTree]
TOWER = "visual"  # key of the vision tower in the parameter tree


def last_state(hidden: Array, mask: Array) -> jax.Array:
    """Returns the hidden state [B, D] of the last real token.

    hidden: hidden states [B, P, D]. mask: True on real tokens [B, P], padded on the left or on the right.
    """
    # argmax returns the first True of the reversed mask, which is the last real token.
    last_index = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, last_index[:, None, None], axis=1)[:, 0]


class PackedRows(NamedTuple):
    """The completions that a model reads, one or several in a row: [B, N, T]. Each lies contiguously in its row.

    If completions are trees, `previous` and `ends` say how their tokens follow each other, in places of the row.
    """

    tokens: Array  # int32
    positions: Array  # number of completion tokens before each token
    segment_ids: Array  # number of the completion that each token belongs to, 0 for padding
    previous: Array | None = None  # place of the token before each token whose position is above 0; None for chains
    ends: Array | None = None  # place after the last token that sees each token; None for chains


class PerLayerKind(NamedTuple):
    """One value for the layers with full attention, and one for the local (sliding-window) layers."""

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
        """Returns new float32 parameters; kernels and embedding are drawn from normal(0, 0.02)."""
        block_key, outer_key = jax.random.split(key)

        # vmap traces one layer and stacks the results, so the program does not grow with the number of layers.
        def block_parameters(key: Array) -> PyTree:
            return parameter_tree(Block(self.cfg, nnx.Rngs(key)))

        blocks = jax.vmap(block_parameters)(jax.random.split(block_key, self.cfg.layers))
        params = {"layers": blocks, **parameter_tree(EmbedAndHead(self.cfg, nnx.Rngs(outer_key)))}
        return params | {TOWER: self._tower.init(jax.random.fold_in(key, 2))} if self._tower else params

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the parameter tree."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def size(self, *, active: bool = False) -> int:
        """Returns the number of parameters.

        active: whether to count, of the experts, only as many as one token is sent to.
        """
        sizes = {path_name(path): x.size for path, x in jax.tree_util.tree_leaves_with_path(self.shapes)}
        if active and (mixture := self.cfg.mixture):
            expert_kernels = [name for name in sizes if "experts/" in name and "router" not in name]
            sizes |= {name: sizes[name] * mixture.chosen // mixture.experts for name in expert_kernels}
        return sum(sizes.values())

    def adapters(self, kind: AdapterKind) -> Adapters:
        """Returns the adapters of this model. Raises: UserError, if kind.targets matches the name of no kernel."""
        nodes = nnx.iter_graph(self._block.empty)
        kernels = {
            f"layers/{'/'.join(map(str, path))}/kernel": (self.cfg.layers, *node.kernel.get_value().shape)
            for path, node in nodes
            if isinstance(node, Linear)
        }
        return make_adapters(kind, kernels, names.module_table(self.cfg.family))

    def cast_for_compute(self, params: PyTree) -> PyTree:
        """Casts parameters to the dtype of their products. Norms and routers compute in float32 and stay float32.

        A frozen model may be stored in these dtypes, because the forward pass would cast its parameters anyway.
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
        angles = self._angles(_prompt_rotary_positions(prompt))
        attend_packed = self._attend_packed(
            prompt.mask[:, None].astype(jnp.int32), last_visible=self._last_visible(prompt)
        )

        def layer(x: Array, is_local: Array | bool, params_l: PyTree) -> tuple[Array, KeyValue]:
            block = self._block(params_l)
            query, keys_values = head_major(*block.project(x, angles.select(is_local)))
            x, _ = block.finish(x, token_major(attend_packed(is_local, query, keys_values)))
            return x, _without_row_axis(keys_values)

        x, deepstack = self._insert_images(params, self._embed(params, prompt.tokens[:, None]), prompt.images)
        x, prompt_cache = self._run_layers(layer, x, params["layers"], deepstack=deepstack)
        return self._embed_and_head(params).norm(x)[:, 0], prompt_cache

    def forward(
        self, params: PyTree, prompt: Prompt, rows: PackedRows, collect: RoutingCollector | None = None
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Runs prompts [B, P] and their completion rows [B, N, T] in one pass.

        Each matrix product covers the tokens of prompts and rows together. Returns hidden states of prompts [B, P, D]
        and of rows [B, N, T, D], and the results of `collect` for the routing of the rows, with a leading axis of
        layers; None without experts.
        """
        prompt_length = prompt.tokens.shape[1]

        def join(x_prompts: Array, x_rows: Array) -> jax.Array:
            """[B, 1, P, ...] and [B, N, T, ...] -> [B, 1, P + N * T, ...]."""
            x_rows = x_rows.reshape(len(x_rows), 1, -1, *x_rows.shape[3:])
            return jnp.concatenate([x_prompts, x_rows], axis=2)

        def split(x: Array) -> tuple[jax.Array, jax.Array]:
            return x[:, :, :prompt_length], x[:, :, prompt_length:].reshape(*rows.tokens.shape, *x.shape[3:])

        # A completion continues at the number of real tokens of its prompt, because padding has no position.
        after_prompt = jnp.sum(prompt.mask, axis=-1)[:, None, None] + rows.positions
        angles = self._angles(join(*_rotary_positions(prompt, rows.positions, after_prompt)))
        attend_prompts = self._attend_packed(
            prompt.mask[:, None].astype(jnp.int32), last_visible=self._last_visible(prompt)
        )
        attend_packed = self._attend_packed(rows.segment_ids, prompt.mask, after_prompt, ends=rows.ends)

        def layer(x: Array, is_local: Array | bool, params_l: PyTree) -> tuple[Array, PyTree]:
            block = self._block(params_l)
            x_prompts, x_rows = zip(*(split(y) for y in block.project(x, angles.select(is_local))), strict=True)
            # The rows of a group attend to the keys and values of the prompt, and gradients flow back through them.
            query, prompt_cache = head_major(*x_prompts)
            from_prompts = attend_prompts(is_local, query, prompt_cache)
            from_rows = attend_packed(is_local, *head_major(*x_rows), _without_row_axis(prompt_cache))
            x, routing = block.finish(x, join(token_major(from_prompts), token_major(from_rows)))
            return x, _collected(collect, jax.tree.map(lambda y: split(y)[1], routing))

        x = self._embed(params, join(prompt.tokens[:, None], rows.tokens), by_width=True)
        x, deepstack = self._insert_images(params, x, prompt.images)
        x, collected = self._run_layers(layer, x, params["layers"], deepstack=deepstack)
        x_prompts, x_rows = split(self._embed_and_head(params).norm(x))
        return x_prompts[:, 0], x_rows, collected

    def extend(
        self,
        params: PyTree,
        prompt_cache: Any,
        prompt: Prompt,
        rows: PackedRows,
        collect: RoutingCollector | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Runs completion rows [B, N, T] after prompts whose keys and values `prefill` has computed.

        prompt_cache: keys and values of the prompts, from `prefill`. The other arguments are as in `forward`. Returns
        hidden states [B, N, T, D], and the results of `collect`.
        """
        after_prompt, images = jnp.sum(prompt.mask, axis=-1)[:, None, None] + rows.positions, prompt.images
        angles = self._angles(after_prompt if images is None else images.end[:, None, None] + rows.positions)
        attend_packed = self._attend_packed(rows.segment_ids, prompt.mask, after_prompt, ends=rows.ends)

        def layer(x: Array, is_local: Array | bool, params_l: PyTree, prompt_cache_l: KeyValue) -> tuple[Array, PyTree]:
            block = self._block(params_l)
            attended = attend_packed(is_local, *head_major(*block.project(x, angles.select(is_local))), prompt_cache_l)
            x, routing = block.finish(x, token_major(attended))
            return x, _collected(collect, routing)

        x, collected = self._run_layers(
            layer, self._embed(params, rows.tokens, by_width=True), params["layers"], prompt_cache
        )
        return self._embed_and_head(params).norm(x), collected

    def step(
        self,
        params: PyTree,
        tokens: Array,
        positions: Array,
        cache: list[Any],
        attend: Callable[..., tuple[Array, Any]],
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        """Runs one decoding round: the next tokens [B, N, T] of rows.

        params: parameter tree from `unstack`. positions [B, N, T]: position of each token in its text; after a prompt
        with images, positions continue at `Images.end`. attend(is_local, query, keys and values of these tokens, cache
        of a layer): returns the attention output, and the cache with these tokens. Returns hidden states [B, N, T, D],
        the cache of each layer, and the chosen experts [B, N, T, chosen] of each layer (None without experts).
        """
        angles = self._angles(positions)

        def layer(x: Array, is_local: Array | bool, params_l: PyTree, cache_l: Any) -> tuple[Array, Any]:
            block = self._block(params_l)
            attended, cache_l = attend(is_local, *head_major(*block.project(x, angles.select(is_local))), cache_l)
            x, routing = block.finish(x, token_major(attended))
            return x, (cache_l, routing and routing.chosen)

        x, outputs = self._run_layers(layer, self._embed(params, tokens), params["layers"], cache)
        cache, chosen_experts = map(list, zip(*outputs, strict=True))
        return self._embed_and_head(params).norm(x), cache, chosen_experts

    def logits(self, params: PyTree, hidden: Array) -> jax.Array:
        """Returns float32 logits [..., V] for hidden states [..., D]."""
        # Products have the model's dtype, but sums are float32, because log-probabilities are differences of logits.
        flat, kernel = (
            x.astype(self.cfg.dtype) for x in (hidden.reshape(-1, hidden.shape[-1]), self.head_kernel(params))
        )
        logits = jnp.matmul(flat, kernel, precision=self.cfg.precision, preferred_element_type=jnp.float32)
        return hide_tokens(soft_capped(logits, self.cfg.final_soft_cap), self.cfg.hidden_tokens).reshape(
            *hidden.shape[:-1], -1
        )

    def head_kernel(self, params: PyTree) -> jax.Array:
        """Returns the head's kernel [D, V], in float32; a tied head is the transposed embedding."""
        return params["embed"]["embedding"].T if self.cfg.tied_head else params["head"]["kernel"]

    def unstack(self, params: PyTree) -> PyTree:
        """Returns the parameter tree with the stacked layers as a list."""
        # Slicing copies, so the layers are in memory twice while both trees exist.
        layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(self.cfg.layers)]
        return params | {"layers": layers}

    def _angles(self, positions: Array) -> PerLayerKind:
        full = rotary_angles(positions, self.cfg.rope)
        return PerLayerKind(full, rotary_angles(positions, self.cfg.local_rope) if self.cfg.local_rope else full)

    def _window(self, length: int) -> int:
        """Returns the window of local layers, or 0 if texts of this length fit into the window."""
        return self.cfg.window if self.cfg.window < length else 0

    def _last_visible(self, prompt: Prompt) -> jax.Array | None:
        """Returns the index [B, 1, P] of the last token that each prompt token sees; None if each sees up to itself.

        In some models, the tokens of an image see all tokens of this image, also the later ones.
        """
        images = prompt.images
        if images is None or not self.cfg.vision or not self.cfg.vision.bidirectional_tokens:
            return None
        (b, m), token_index = images.columns.shape, jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)
        segments = images.segments.reshape(b, m, -1)[..., 0]
        last_of_segment = jax.vmap(partial(jax.ops.segment_max, num_segments=m + 1))(images.columns, segments)

        def last_visible_of_prompt(columns: Array, last_of_segment: Array, segments: Array) -> jax.Array:
            return token_index.at[columns].set(last_of_segment[segments], mode="drop")

        return jax.vmap(last_visible_of_prompt)(images.columns, last_of_segment, segments)[:, None]

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
        ends [B, N, T]: as in `PackedRows`, None if completions are chains.
        """
        cfg, length = self.cfg, segment_ids.shape[-1]
        window = self._window(length + (0 if prompt_mask is None else prompt_mask.shape[-1]))

        def visible(window: int) -> Visible:
            prompt = None if prompt_mask is None else prompt_visibility(prompt_mask, positions, window)
            if ends is not None and positions is not None:
                return Visible(tree_mask(segment_ids, ends, positions, window), prompt)
            return Visible(causal_mask(segment_ids, window, last_visible), prompt)

        masks, soft_cap = PerLayerKind.for_window(visible, window), cfg.soft_cap
        if self.mesh is not None:
            device = self.mesh.devices.flat[0]
            # The TPU kernel has no masks of trees, because it knows only the first key that each token sees.
            if ends is None and attention_tpu.fits(device, cfg.head_dim, cfg.dtype, length):
                # The TPU kernel makes its own masks. jit drops `masks`, which nothing uses on this path.
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
        """Returns the `attend` of `_attend_packed` that uses the TPU kernel.

        The kernel's masks are static, so full and local layers need two kernels.
        """

        def make_kernel(window: int) -> Callable[..., jax.Array]:
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
        """Runs x through all layers, and returns x and the outputs of the layers.

        layer(x, is_local, parameters of the layer, ...): returns the new x and an output. per_layer: further arguments
        of `layer`, each with one entry per layer. deepstack: vectors that the first layers add, None = none.
        """
        layer_is_local = self.cfg.kinds
        if deepstack is not None:
            layer_numbers = range(self.cfg.layers) if isinstance(layers, list) else jnp.arange(self.cfg.layers)
            layer, per_layer = deepstack.wrap_layer(layer), (*per_layer, layer_numbers)
        if not isinstance(layers, list):
            # If all layers are of one kind, `local` is a Python bool, so that masks are not selected at run time.
            one_kind = len(set(layer_is_local)) == 1

            def scanned_layer(x: Array, scanned: tuple[Any, ...]) -> tuple[Array, Any]:
                return layer(x, layer_is_local[0] if one_kind else scanned[0], *scanned[1:])

            return jax.lax.scan(
                rematerialized(scanned_layer, self.cfg.remat), x, (jnp.asarray(layer_is_local), layers, *per_layer)
            )
        collected = []
        for is_local, *scanned in zip(layer_is_local, layers, *per_layer, strict=True):
            x, output = layer(x, is_local, *scanned)
            collected.append(output)
        return x, collected

    def _embed(self, params: PyTree, tokens: Array, *, by_width: bool = False) -> jax.Array:
        """Returns the embeddings [B, N, T, D] of tokens [B, N, T].

        by_width: whether each device looks up only its part of the width, because the table is split over fsdp.
        """
        # Cast after the lookup, because a frequent token's gradient sums thousands of rows and needs float32.
        x = self._embed_and_head(params).embed(tokens).astype(self.cfg.dtype)
        if self.cfg.scaled_embedding:
            # The factor is rounded to the model's dtype, as in transformers.
            x = x * jnp.asarray(self.cfg.width**0.5, self.cfg.dtype)
        if self.mesh is None:
            return x
        if by_width and self.cfg.width % self.mesh.shape["fsdp"] == 0:
            # Without this constraint, and with a vocabulary split over `tensor`, a device would hold the rows of all
            # devices.
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data", None, None, "fsdp")))
        # Shard the prompts here, because XLA would shard the width, like the embedding, and keep all prompts on each
        # device.
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))

    def _insert_images(
        self, params: PyTree, x: Array, images: Images | None
    ) -> tuple[jax.Array, DeepStackVectors | None]:
        """Replaces the embeddings of image tokens by the vectors of the vision tower.

        x: embeddings [B, 1, T, D], prompts first. images: images of the prompts, None without any. Returns the new
        embeddings, and the vectors that the first layers add (None without DeepStack).
        """
        if images is None:
            return x, None
        assert self.cfg.vision and self._tower
        tower, (b, m) = self._tower, images.columns.shape
        # The condition is evaluated once per batch, so one prompt with an image costs as much as an image in each.
        vectors = jax.lax.cond(
            jnp.any(images.segments > 0),
            lambda: tower(params[TOWER], images).astype(x.dtype),
            lambda: jnp.zeros((1 + len(tower.vision.deepstack_layers), b, m, self.cfg.width), x.dtype),
        )
        # Padding columns are set out of range, so that they are dropped and not written into the completions.
        columns = jnp.where(images.columns < images.positions.shape[-1], images.columns, x.shape[2])
        insert_vectors = jax.vmap(lambda row, positions, vector: row.at[positions].set(vector, mode="drop"))
        x = insert_vectors(x[:, 0], columns, vectors[0])[:, None]
        return x, DeepStackVectors(columns, vectors[1:]) if tower.vision.deepstack_layers else None

    def _embed_and_head(self, params: PyTree) -> EmbedAndHead:
        return self._outer_parts({name: leaf for name, leaf in params.items() if name not in ("layers", TOWER)})


class DeepStackVectors(NamedTuple):
    """Vectors that the first K layers of a decoder add to the hidden states of image tokens (DeepStack)."""

    columns: Array  # [B, M] index of each image token in its row; an index out of range adds nothing
    vectors: Array  # [K, B, M, D] vectors of each layer

    def wrap_layer(self, layer: Callable) -> Callable:
        """Returns `layer` with the layer's number as an additional last argument: its output has the vectors added."""
        layers_with_vectors = len(self.vectors)
        add_to = jax.vmap(lambda row, positions, vector: row.at[positions].add(vector, mode="drop"))

        def with_vectors(x: Array, *arguments: Any) -> tuple[jax.Array, Any]:
            *layer_arguments, layer_number = arguments
            x, output = layer(x, *layer_arguments)
            if isinstance(layer_number, int) and layer_number >= layers_with_vectors:
                return x, output

            def add_vectors(x: Array) -> jax.Array:
                return add_to(x[:, 0], self.columns, self.vectors[jnp.minimum(layer_number, layers_with_vectors - 1)])[
                    :, None
                ]

            return jax.lax.cond(layer_number < layers_with_vectors, add_vectors, lambda x: x, x), output

        return with_vectors


def _collected(collect: RoutingCollector | None, routing: Routing | None) -> PyTree:
    return collect(routing) if collect and routing else None


def _without_row_axis(prompt: KeyValue) -> KeyValue:
    """Removes the row axis of a prompt's keys and values: [B, K, 1, P, h] -> [B, K, P, h]."""
    return KeyValue(prompt.keys[:, :, 0], prompt.values[:, :, 0])


def _prompt_rotary_positions(prompt: Prompt) -> jax.Array:
    """Returns rotary positions of prompt tokens: [B, 1, P], or with images [B, 1, P, 3] for time, row and column."""
    if prompt.images is None:
        return prompt_positions(prompt.mask)
    return jnp.moveaxis(prompt.images.positions, 1, 2)[:, None]


def _rotary_positions(prompt: Prompt, positions: Array, after_prompt: Array) -> tuple[jax.Array, jax.Array]:
    """Returns rotary positions of prompt tokens, and of the rows [B, N, T] (with images [B, N, T, 3]) after them.

    positions [B, N, T]: index of each token in its completion. after_prompt [B, N, T]: index of each token, counted
    from the first token of its prompt; used without images, because an image has fewer positions than tokens.
    """
    if prompt.images is None:
        return _prompt_rotary_positions(prompt), after_prompt
    row_positions = (prompt.images.end[:, None, None] + positions)[..., None]
    return _prompt_rotary_positions(prompt), jnp.broadcast_to(row_positions, (*positions.shape, 3))
