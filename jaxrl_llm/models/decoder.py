"""The decoder of all model families: pure functions over a parameter tree.

Prompts [B, P] run once per group. Completions are in rows [B, N, T], one or several to a row. All rows of a group
attend to one copy of the keys and values of their prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
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
    bounded,
    causal_within,
    head_major,
    in_prompt,
    prompt_positions,
    token_major,
    without,
)
from jaxrl_llm.models.blocks import Block, EmbedAndHead, Linear
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.models.rope import rotary
from jaxrl_llm.models.skeleton import Skeleton, parameters, recomputed
from jaxrl_llm.models.vision import Tower
from jaxrl_llm.structs import Array, Images, Prompt, PyTree

# What to keep of a layer's routing of completion rows [B, N, T, ...].
Collect: TypeAlias = Callable[[Routing], PyTree]
TOWER = "visual"  # the part of the parameter tree that reads images


def last_state(hidden: Array, mask: Array) -> jax.Array:
    """Hidden state [B, D] of the last real token. hidden is [B, P, D]; mask [B, P] may be padded left or right."""
    # argmax returns the first True of the reversed mask, which is the last real token.
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


class PerKind(NamedTuple):
    """A value for the layers with full attention, and one for the local layers."""

    full: Any
    local: Any

    @classmethod
    def for_window(cls, make: Callable[[int], Any], window: int) -> PerKind:
        """Returns make(window) for local layers, and make(0) for the others."""
        full = make(0)
        return cls(full, make(window) if window else full)

    def of(self, local: Array | bool) -> Any:
        """Returns the value of a layer. In a scan, the layer's kind is known only at run time."""
        if self.full is self.local or isinstance(local, bool):
            return self.local if local is True else self.full
        return jax.tree.map(lambda full, in_local: jnp.where(local, in_local, full), self.full, self.local)


class Decoder:
    """Pure functions over a parameter tree {"layers", "embed", "norm", "head", "visual"}; some have no head or tower.

    "layers" is either stacked [L, ...] and scanned (training), so that XLA compiles one layer, or a list of layers
    from `unstack` (sampling), because a scan would copy each layer's slice of the stack for every token.
    A layer that differs from others does so in arrays, which the scan selects: masks and rotary angles.
    """

    def __init__(self, cfg: DecoderConfig, mesh: Mesh | None = None):
        self.cfg = cfg
        self.mesh = mesh
        self._block = Skeleton(lambda: Block(cfg, nnx.Rngs(0), mesh))
        self._ends = Skeleton(lambda: EmbedAndHead(cfg, nnx.Rngs(0)))
        self._tower = Tower(cfg, cfg.vision, mesh) if cfg.vision else None

    def init(self, key: Array) -> PyTree:
        """Initializes float32 parameters; kernels and embedding are normal(0, 0.02)."""
        block_key, ends_key = jax.random.split(key)

        # One layer is traced, and vmap stacks it: the program does not grow with the number of layers.
        def block(key: Array) -> PyTree:
            return parameters(Block(self.cfg, nnx.Rngs(key)))

        blocks = jax.vmap(block)(jax.random.split(block_key, self.cfg.layers))
        params = {"layers": blocks, **parameters(EmbedAndHead(self.cfg, nnx.Rngs(ends_key)))}
        return params | {TOWER: self._tower.init(jax.random.fold_in(key, 2))} if self._tower else params

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the parameter tree."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def size(self, *, active: bool = False) -> int:
        """Returns the number of parameters; active: only those that a token meets, with the chosen experts."""
        sizes = {path_name(path): x.size for path, x in jax.tree_util.tree_leaves_with_path(self.shapes)}
        if active and (mixture := self.cfg.mixture):
            expert_kernels = [name for name in sizes if "experts/" in name and "router" not in name]
            sizes |= {name: sizes[name] * mixture.chosen // mixture.experts for name in expert_kernels}
        return sum(sizes.values())

    def adapters(self, kind: AdapterKind) -> Adapters:
        """Returns adapters beside kernels of the layers. Raises: UserError, if the targets are in no name of one."""
        nodes = nnx.iter_graph(self._block.empty)
        kernels = {
            f"layers/{'/'.join(map(str, path))}/kernel": (self.cfg.layers, *node.kernel.get_value().shape)
            for path, node in nodes
            if isinstance(node, Linear)
        }
        return make_adapters(kind, kernels, names.module_table(self.cfg.family))

    def as_used(self, params: PyTree) -> PyTree:
        """Casts parameters to the dtype of their products. Norms and routers compute in float32, and stay in it.

        A model that never learns may be stored so: the casts of the forward pass give the same numbers.
        """
        dtypes = self.used_dtypes(params)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)

    def used_dtypes(self, params: PyTree) -> PyTree:
        """Returns the dtype of each parameter after `as_used`; `params` may be shapes."""

        # A kernel in int8 has integers and scales.
        def stays(path: Any) -> bool:
            return path_name(path).endswith(("scale", "norm/bias", "qvalue", "router/kernel"))

        def dtype(path: Any, x: Any) -> jnp.dtype:
            return jnp.dtype(x.dtype if stays(path) else self.cfg.dtype)

        return jax.tree_util.tree_map_with_path(dtype, params)

    def prefill(self, params: PyTree, prompt: Prompt) -> tuple[jax.Array, Any]:
        """Runs prompts [B, P] -> hidden [B, P, D], and the keys and values [B, K, P, h] of each layer."""
        angles = self._angles(_prompt_places(prompt))
        attend_packed = self._attend_packed(prompt.mask[:, None].astype(jnp.int32), reach=self._reach(prompt))

        def layer(x: Array, local: Array | bool, params_l: PyTree) -> tuple[Array, KeyValue]:
            block = self._block(params_l)
            query, keys_values = head_major(*block.project(x, angles.of(local)))
            x, _ = block.finish(x, token_major(attend_packed(local, query, keys_values)))
            return x, _without_row_axis(keys_values)

        x, deep = self._with_images(params, self._embed(params, prompt.tokens[:, None]), prompt.images)
        x, prefix = self._through(layer, x, params["layers"], deep=deep)
        return self._embed_and_head(params).norm(x)[:, 0], prefix

    def forward(
        self,
        params: PyTree,
        prompt: Prompt,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        collect: Collect | None = None,
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Runs prompts [B, P] and their completion rows [B, N, T] -> hidden [B, P, D] and [B, N, T, D], collected.

        positions [B, N, T] count from the first token of a completion. segment_ids [B, N, T] number the completions
        of a row. Each matrix product covers the tokens of prompts and rows together.
        collected: result of `collect` for the routing of the rows, with a leading axis of layers, None without experts.
        """
        length = prompt.tokens.shape[1]

        def join(x_prompts: Array, x_rows: Array) -> jax.Array:
            """[B, 1, P, ...] and [B, N, T, ...] -> [B, 1, P + N * T, ...]."""
            x_rows = x_rows.reshape(len(x_rows), 1, -1, *x_rows.shape[3:])
            return jnp.concatenate([x_prompts, x_rows], axis=2)

        def split(x: Array) -> tuple[jax.Array, jax.Array]:
            return x[:, :, :length], x[:, :, length:].reshape(*tokens.shape, *x.shape[3:])

        # Padding has no position: a completion goes on where the real tokens of its prompt end.
        after_prompt = jnp.sum(prompt.mask, axis=-1)[:, None, None] + positions
        angles = self._angles(join(*_places(prompt, positions, after_prompt)))
        attend_prompts = self._attend_packed(prompt.mask[:, None].astype(jnp.int32), reach=self._reach(prompt))
        attend_packed = self._attend_packed(segment_ids, prompt.mask, after_prompt)

        def layer(x: Array, local: Array | bool, params_l: PyTree) -> tuple[Array, PyTree]:
            block = self._block(params_l)
            x_prompts, x_rows = zip(*(split(y) for y in block.project(x, angles.of(local))), strict=True)
            # Prompts first: the rows of a group read these very keys and values, and gradients flow back through them.
            query, prefix = head_major(*x_prompts)
            from_prompts = attend_prompts(local, query, prefix)
            from_packed = attend_packed(local, *head_major(*x_rows), _without_row_axis(prefix))
            x, routing = block.finish(x, join(token_major(from_prompts), token_major(from_packed)))
            return x, _collected(collect, jax.tree.map(lambda y: split(y)[1], routing))

        x = self._embed(params, join(prompt.tokens[:, None], tokens), by_width=True)
        x, deep = self._with_images(params, x, prompt.images)
        x, collected = self._through(layer, x, params["layers"], deep=deep)
        x_prompts, x_rows = split(self._embed_and_head(params).norm(x))
        return x_prompts[:, 0], x_rows, collected

    def extend(
        self,
        params: PyTree,
        prefix: Any,
        prompt: Prompt,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        collect: Collect | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Runs rows [B, N, T], as `forward`, after the prompts of `prefill` -> hidden [B, N, T, D], collected."""
        after_prompt = jnp.sum(prompt.mask, axis=-1)[:, None, None] + positions
        angles = self._angles(after_prompt if prompt.images is None else prompt.images.end[:, None, None] + positions)
        attend_packed = self._attend_packed(segment_ids, prompt.mask, after_prompt)

        def layer(x: Array, local: Array | bool, params_l: PyTree, prefix_l: KeyValue) -> tuple[Array, PyTree]:
            block = self._block(params_l)
            attended = attend_packed(local, *head_major(*block.project(x, angles.of(local))), prefix_l)
            x, routing = block.finish(x, token_major(attended))
            return x, _collected(collect, routing)

        x, collected = self._through(layer, self._embed(params, tokens, by_width=True), params["layers"], prefix)
        return self._embed_and_head(params).norm(x), collected

    def step(
        self,
        params: PyTree,
        tokens: Array,
        positions: Array,
        cache: list[Any],
        attend: Callable[..., tuple[Array, Any]],
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        """Runs the next tokens [B, N, T] of rows, at `positions` in their texts, with the parameters of `unstack`.

        After a prompt with images, positions count from its `Images.end`.

        attend(local, query, keys and values of these tokens, cache of a layer) -> attended, and the cache with them.
        Returns hidden [B, N, T, D], the cache of each layer, and the experts [B, N, T, chosen] of each layer or None.
        """
        angles = self._angles(positions)

        def layer(x: Array, local: Array | bool, params_l: PyTree, cache_l: Any) -> tuple[Array, Any]:
            block = self._block(params_l)
            attended, cache_l = attend(local, *head_major(*block.project(x, angles.of(local))), cache_l)
            x, routing = block.finish(x, token_major(attended))
            return x, (cache_l, routing and routing.chosen)

        x, outputs = self._through(layer, self._embed(params, tokens), params["layers"], cache)
        cache, chosen = map(list, zip(*outputs, strict=True))
        return self._embed_and_head(params).norm(x), cache, chosen

    def logits(self, params: PyTree, hidden: Array) -> jax.Array:
        """hidden [..., D] -> float32 logits [..., V]."""
        # Products in the model's dtype, sums in float32: the log-probabilities are differences of logits.
        flat, kernel = (
            x.astype(self.cfg.dtype) for x in (hidden.reshape(-1, hidden.shape[-1]), self.head_kernel(params))
        )
        logits = jnp.matmul(flat, kernel, precision=self.cfg.precision, preferred_element_type=jnp.float32)
        return without(bounded(logits, self.cfg.final_soft_cap), self.cfg.never).reshape(*hidden.shape[:-1], -1)

    def head_kernel(self, params: PyTree) -> jax.Array:
        """The head's kernel [D, V], in float32."""
        return params["embed"]["embedding"].T if self.cfg.tied_head else params["head"]["kernel"]

    def unstack(self, params: PyTree) -> PyTree:
        """Returns the parameter tree with the stacked layers as a list."""
        # Slices copy: for as long as both live, the parameters of the layers are in memory twice.
        layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(self.cfg.layers)]
        return params | {"layers": layers}

    def _angles(self, positions: Array) -> PerKind:
        full = rotary(positions, self.cfg.rope)
        return PerKind(full, rotary(positions, self.cfg.local_rope) if self.cfg.local_rope else full)

    def _window(self, length: int) -> int:
        """Returns the window of local layers; 0, if it hides nothing from texts of this length."""
        return self.cfg.window if self.cfg.window < length else 0

    def _reach(self, prompt: Prompt) -> jax.Array | None:
        """Returns the index [B, 1, P] of the last token that each token of a prompt sees; None: of all, itself."""
        images = prompt.images
        if images is None or not self.cfg.vision or not self.cfg.vision.two_way:
            return None
        (b, m), index = images.columns.shape, jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)
        segments = images.segments.reshape(b, m, -1)[..., 0]
        last = jax.vmap(partial(jax.ops.segment_max, num_segments=m + 1))(images.columns, segments)

        def reach_of_prompt(columns: Array, last: Array, segments: Array) -> jax.Array:
            return index.at[columns].set(last[segments], mode="drop")

        return jax.vmap(reach_of_prompt)(images.columns, last, segments)[:, None]

    def _attend_packed(
        self,
        segment_ids: Array,
        prompt_mask: Array | None = None,
        positions: Array | None = None,
        reach: Array | None = None,
    ) -> Callable[..., jax.Array]:
        """Returns `attend(local, query, row, prompt)`, causal within each completion of rows [B, N, T].

        It is the platform's kernel, if this fits. positions [B, N, T] count from the first token of the prompt.
        reach [B, N, T], without a prompt: index of the last token that a token sees; None: itself.
        """
        cfg, length = self.cfg, segment_ids.shape[-1]
        window = self._window(length + (0 if prompt_mask is None else prompt_mask.shape[-1]))

        def visible(window: int) -> Visible:
            prompt = None if prompt_mask is None else in_prompt(prompt_mask, positions, window)
            return Visible(causal_within(segment_ids, window, reach), prompt)

        masks, cap = PerKind.for_window(visible, window), cfg.soft_cap
        if self.mesh is not None:
            device = self.mesh.devices.flat[0]
            if attention_tpu.fits(device, cfg.head_dim, cfg.dtype, length):
                # The kernel has its own masks; `masks` of this function is never computed, because jit drops it.
                return self._attend_tpu(segment_ids, prompt_mask, window, reach)
            if attention_gpu.fits(device, cfg.head_dim, cfg.dtype, cap):
                return lambda local, query, row, prompt=None: attention_gpu.attend_gpu(
                    query, row, segment_ids, masks.of(local), prompt, mesh=self.mesh
                )
        return lambda local, query, row, prompt=None: attend(
            query, row, masks.of(local), prompt, soft_cap=cap, precision=cfg.precision
        )

    def _attend_tpu(
        self, segment_ids: Array, prompt_mask: Array | None, window: int, reach: Array | None
    ) -> Callable[..., jax.Array]:
        """Returns `_attend_packed` by the TPU's kernel, whose masks are static: the two kinds of layers have two."""

        def kernel(window: int) -> Callable[..., jax.Array]:
            ahead = self.cfg.vision.two_way if self.cfg.vision and reach is not None else 0
            limits = attention_tpu.AttentionLimits(window, self.cfg.soft_cap, reach, ahead)
            return lambda query, row, prompt: attention_tpu.attend_tpu(
                query, row, segment_ids, prompt, prompt_mask, limits=limits, mesh=self.mesh
            )

        def attend(local: Array | bool, query: Array, row: KeyValue, prompt: KeyValue | None = None) -> jax.Array:
            # Known when the program is traced: no `cond`, which would compile both kernels.
            if not window or isinstance(local, bool):
                return kernel(window if local is True else 0)(query, row, prompt)
            return jax.lax.cond(local, kernel(window), kernel(0), query, row, prompt)

        return attend

    def _through(
        self, layer: Callable, x: Array, layers: PyTree, *per_layer: Any, deep: Deep | None = None
    ) -> tuple[Array, Any]:
        """Runs x through all layers. `layer(x, local, its parameters, ...)` returns x and an output to collect."""
        kinds = self.cfg.kinds
        if deep is not None:
            numbers = range(self.cfg.layers) if isinstance(layers, list) else jnp.arange(self.cfg.layers)
            layer, per_layer = deep.added(layer), (*per_layer, numbers)
        if not isinstance(layers, list):
            # `local` is a Python bool if all layers are of one kind, so their masks need no selection at run time.
            same = len(set(kinds)) == 1

            def scanned_layer(x: Array, scanned: tuple[Any, ...]) -> tuple[Array, Any]:
                return layer(x, kinds[0] if same else scanned[0], *scanned[1:])

            return jax.lax.scan(recomputed(scanned_layer, self.cfg.remat), x, (jnp.asarray(kinds), layers, *per_layer))
        collected = []
        for local, *scanned in zip(kinds, layers, *per_layer, strict=True):
            x, more = layer(x, local, *scanned)
            collected.append(more)
        return x, collected

    def _embed(self, params: PyTree, tokens: Array, *, by_width: bool = False) -> jax.Array:
        """by_width: the table is split over fsdp. Each device looks up its part of the width, and sends it on."""
        # The cast follows the lookup: a frequent token's gradient sums thousands of rows, which must happen in float32.
        x = self._embed_and_head(params).embed(tokens).astype(self.cfg.dtype)
        if self.cfg.gemma:
            # Rounded, as in transformers.
            x = x * jnp.asarray(self.cfg.width**0.5, self.cfg.dtype)
        if self.mesh is None:
            return x
        if by_width and self.cfg.width % self.mesh.shape["fsdp"] == 0:
            # The constraint keeps a device from holding the rows of all devices, if the vocabulary is split over
            # tensor.
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data", None, None, "fsdp")))
        # This constraint shards the prompts. XLA would shard the width, as in the embedding, and keep all prompts on a
        # device.
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, BATCH))

    def _with_images(self, params: PyTree, x: Array, images: Images | None) -> tuple[jax.Array, Deep | None]:
        """Replaces embeddings [B, 1, T, D], which begin with those of prompts, by the vectors of images.

        Also returns what the first layers add.
        """
        if images is None:
            return x, None
        assert self.cfg.vision and self._tower
        tower, (b, m) = self._tower, images.columns.shape
        # The condition is one for the whole batch: one prompt with an image costs as much as an image in each.
        vectors = jax.lax.cond(
            jnp.any(images.segments > 0),
            lambda: tower(params[TOWER], images).astype(x.dtype),
            lambda: jnp.zeros((1 + len(tower.vision.deep), b, m, self.cfg.width), x.dtype),
        )
        # Out of range, and so dropped: behind the prompt there may be completions.
        columns = jnp.where(images.columns < images.positions.shape[-1], images.columns, x.shape[2])
        replaced = jax.vmap(lambda row, at, vector: row.at[at].set(vector, mode="drop"))
        x = replaced(x[:, 0], columns, vectors[0])[:, None]
        return x, Deep(columns, vectors[1:]) if tower.vision.deep else None

    def _embed_and_head(self, params: PyTree) -> EmbedAndHead:
        return self._ends({name: leaf for name, leaf in params.items() if name not in ("layers", TOWER)})


class Deep(NamedTuple):
    """What the first K layers of a decoder add to the hidden states of images (DeepStack)."""

    columns: Array  # [B, M] of the hidden states; out of range: nothing is added
    vectors: Array  # [K, B, M, D]

    def added(self, layer: Callable) -> Callable:
        """Returns a layer with the number of the layer as its last argument, which adds its vectors to its output."""
        count = len(self.vectors)
        add_to = jax.vmap(lambda row, at, vector: row.at[at].add(vector, mode="drop"))

        def with_vectors(x: Array, *arguments: Any) -> tuple[jax.Array, Any]:
            *usual, number = arguments
            x, output = layer(x, *usual)
            if isinstance(number, int) and number >= count:
                return x, output

            def add(x: Array) -> jax.Array:
                return add_to(x[:, 0], self.columns, self.vectors[jnp.minimum(number, count - 1)])[:, None]

            return jax.lax.cond(number < count, add, lambda x: x, x), output

        return with_vectors


def _collected(collect: Collect | None, routing: Routing | None) -> PyTree:
    return collect(routing) if collect and routing else None


def _without_row_axis(prompt: KeyValue) -> KeyValue:
    """Removes the row axis of a prompt's keys and values: [B, K, 1, P, h] -> [B, K, P, h]."""
    return KeyValue(prompt.keys[:, :, 0], prompt.values[:, :, 0])


def _prompt_places(prompt: Prompt) -> jax.Array:
    """Positions of prompt tokens in the rotary embedding, [B, 1, P], or [B, 1, P, 3] in time, rows and columns."""
    if prompt.images is None:
        return prompt_positions(prompt.mask)
    return jnp.moveaxis(prompt.images.positions, 1, 2)[:, None]


def _places(prompt: Prompt, positions: Array, after_prompt: Array) -> tuple[jax.Array, jax.Array]:
    """Positions of prompt tokens, and of the rows [B, N, T], or [B, N, T, 3], that go on after them.

    An image takes fewer positions than tokens. after_prompt counts tokens, as masks do.
    """
    if prompt.images is None:
        return _prompt_places(prompt), after_prompt
    rows = (prompt.images.end[:, None, None] + positions)[..., None]
    return _prompt_places(prompt), jnp.broadcast_to(rows, (*positions.shape, 3))
