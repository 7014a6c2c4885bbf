"""Attention over the key-value cache: how the engine's programs read and write the pages of sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.machine import sharding
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder, PerLayerKind
from jaxrl_llm.models.paged_attention import (
    HIDDEN_SCORE,
    LANES,
    LayerCache,
    PageReaders,
    Pages,
    attend,
    attend_prompts,
    finish,
)
from jaxrl_llm.rollout.jax.sizes import PAGE_TOKENS, PageKind
from jaxrl_llm.structs import AnyArray, Array, PyTree


class CacheIndices(NamedTuple):
    """Where S sequences on each of d devices read and write keys and values, in a program that reads e prompts."""

    # [d, S, n] pages of each sequence in the order of its tokens; the number of all pages: the sequence has no more
    page_table: AnyArray
    prompt_mask: AnyArray  # [d, e, P] True for real tokens of the prompts
    prompt_members: AnyArray  # [d, e, G] sequences of each prompt
    member_index: AnyArray  # [d, S] index of each sequence in `prompt_members`, flattened to e * G
    # [d, e] position of the first completion token; None if that is the number of prompt tokens. An image takes fewer
    # positions than tokens.
    prompt_end: AnyArray = None


class AttentionMask:
    """Which keys of prompts are hidden from the tokens of sequences, for layers with and without window."""

    def __init__(self, model: Decoder, indices: CacheIndices, page: int):
        """page: tokens of a page."""
        self.page, self._indices = page, indices
        longest_text = indices.page_table.shape[2] * page + indices.prompt_mask.shape[2]
        self.window = model.cfg.window if model.cfg.window < longest_text else 0
        prompt_tokens = jnp.sum(indices.prompt_mask, axis=-1)  # [d, e]

        def by_sequence(of_prompts: Array) -> jax.Array:
            """Returns, for each sequence [d, S], the value of its prompt. of_prompts: values [d, e]."""
            prompt_index = indices.member_index // indices.prompt_members.shape[2]
            return jnp.take_along_axis(of_prompts, prompt_index, axis=1)

        self._prompt_tokens = by_sequence(prompt_tokens)
        self._prompt_end = self._prompt_tokens if indices.prompt_end is None else by_sequence(indices.prompt_end)

    def rotary_positions(self, places: Array) -> jax.Array:
        """Returns the positions, for the rotary embedding, of tokens at `places` [d, S, T] of completions."""
        return self._prompt_end[..., None] + places

    def _text_places(self, places: Array) -> jax.Array:
        """Returns the number of prompt and completion tokens before tokens at `places` [d, S, T] of completions."""
        return self._prompt_tokens[..., None] + places

    def mask_prompts(self, places: Array) -> PerLayerKind:
        """Returns the mask of keys in prompts [d, e, G * T or 1, P], for completion tokens at `places` [d, S, T]."""
        prompt_mask, members = self._indices.prompt_mask, self._indices.prompt_members
        padding = ~prompt_mask[:, :, None]

        def mask(window: int) -> jax.Array:
            """Returns the mask for layers with this window; 0 = full attention, which hides only padding."""
            if not window:
                return _as_bias(padding)
            devices, prompts, group_size = members.shape
            sequences = members.reshape(devices, prompts * group_size)
            query_place = jnp.take_along_axis(self._text_places(places), sequences[..., None], axis=1)
            query_place = query_place.reshape(devices, prompts, -1)[..., None]
            key_place = jnp.maximum(jnp.cumsum(prompt_mask, axis=-1) - 1, 0)[:, :, None]
            return _as_bias(padding | (query_place - key_place >= window))

        return PerLayerKind.for_window(mask, self.window)


def make_attend(
    model: Decoder, mesh: Mesh, indices: CacheIndices, attention_mask: AttentionMask, *, page: Array, places: Array
) -> Callable[..., tuple[Array, LayerCache]]:
    """Returns `attend(is_local, query, new keys and values, cache of a layer)` -> attended, cache of the layer.

    `attend` writes the keys and values of tokens at `places` [d, S, T] of completions to `page` [d, S, T]; a page out
    of range means that the token is not real. Then the tokens attend to their prompts and to their own pages.
    """
    cfg = model.cfg
    kernel_of, one_token = partial(_kernel, mesh.devices.flat[0], cfg, attention_mask.page), places.shape[2] == 1
    prompt_masks = attention_mask.mask_prompts(places)
    numerics: dict[str, Any] = dict(soft_cap=cfg.soft_cap, precision=cfg.precision)

    def on_device(
        window: int, query: Array, new: KeyValue, layer: LayerCache, prompt_mask: Array, row_arrays: tuple
    ) -> tuple[Array, LayerCache]:
        """Writes the new keys and values of one device's sequences, and returns their attention and the cache."""
        query, new, layer, prompt_mask, row_arrays = local_part((query, new, layer, prompt_mask, row_arrays))
        indices, page, places = row_arrays
        pages = layer.pages
        offset, in_int8 = places % attention_mask.page, pages.key_scale is not None
        kernel = kernel_of(in_int8=in_int8) if one_token else None
        if kernel is not None and hasattr(kernel, "write_own"):
            pages = kernel.write_own(pages, page[:, 0], offset[:, 0], new)
        else:
            pages = pages.write(page, offset, new)
        query_by_token = jnp.swapaxes(query, 2, 3)  # [K, S, T, R, h]
        layer = layer._replace(pages=pages)
        readers = PageReaders(
            table=indices.page_table,
            places=places,
            is_real=page < pages.keys.shape[1],
            members=indices.prompt_members,
            member=indices.member_index,
        )
        if kernel is None:
            attended, layer = attend(query_by_token, layer, prompt_mask, readers, window=window, **numerics)
        else:
            query_of_token, length = query[:, :, :, 0], places[:, 0] + 1
            from_pages = kernel.attend_own(
                query_of_token, pages, indices.page_table, length, window=window, soft_cap=cfg.soft_cap
            )
            from_pages = jax.tree.map(lambda x: x[:, :, None], from_pages)  # adds the axis T = 1
            from_prompts = attend_prompts(query_by_token, layer.prompts, prompt_mask, readers, **numerics)
            attended = finish(from_prompts, from_pages)
        attended = attended.astype(query.dtype)
        return add_device_axis((jnp.swapaxes(attended, 2, 3), layer))

    heads_spec, row_spec = sharding.heads_spec(cfg.kv_heads, mesh), sharding.BATCH

    def attend_on_mesh(
        is_local: Array | bool, query: Array, new: KeyValue, layer: LayerCache
    ) -> tuple[Array, LayerCache]:
        # The window must be a static number, so it is bound here.
        on_layer = partial(on_device, attention_mask.window if is_local is True else 0)
        run = on_devices(mesh, on_layer, (heads_spec, heads_spec, heads_spec, row_spec, row_spec), heads_spec)
        return run(query, new, layer, prompt_masks.select(is_local), (indices, page, places))

    return attend_on_mesh


def score_memory(model: Decoder, mesh: Mesh, pages: Pages, indices: CacheIndices) -> jax.Array | None:
    """Returns memory for the scores of a layer's pages (`attend`), for one token a sequence.

    Returns None if a kernel attends to the pages, or if no sequence has a second page: then scores need no memory.
    """
    cfg, page_tokens, (d, sequences, columns) = model.cfg, pages.keys.shape[-1], indices.page_table.shape
    in_int8 = pages.key_scale is not None
    if columns == 1 or _kernel(mesh.devices.flat[0], cfg, page_tokens, in_int8=in_int8) is not None:
        return None
    shape = d, cfg.kv_heads, columns, sequences, cfg.heads // cfg.kv_heads * page_tokens
    return jax.lax.with_sharding_constraint(
        jnp.zeros(shape, jnp.float32), NamedSharding(mesh, sharding.heads_spec(cfg.kv_heads, mesh))
    )


def page_kind(mesh: Mesh, cfg: DecoderConfig, dtype: str = "") -> PageKind:
    """Returns the kind of pages that platform and model prescribe. dtype: "int8", or "" = dtype of the model."""
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    heads = cfg.kv_heads // (1 if sharding.heads_spec(cfg.kv_heads, mesh)[1] is None else tensor)
    # Integers have one float32 scale for each token and head, which takes four bytes.
    head_bytes = cfg.head_dim + 4 if dtype else cfg.head_dim * jnp.dtype(cfg.dtype).itemsize
    page_tokens = LANES if device.platform == "tpu" else 0  # 0: `sizes_of` chooses the tokens of a page
    return PageKind(
        devices=sharding.prompt_shards(mesh),
        dtype=dtype,
        token_bytes=2 * cfg.layers * heads * head_bytes,
        tokens=page_tokens,
        has_kernel=_kernel(device, cfg, page_tokens or PAGE_TOKENS, in_int8=dtype == "int8") is not None,
    )


def _kernel(device: Any, cfg: DecoderConfig, page: int, *, in_int8: bool) -> Any:
    """Returns the module of the platform's attention kernel for one token per sequence, None if it has no kernel.

    page: tokens of a page.
    """
    # Only the module of the platform is imported, because Pallas's compilers take a third of a second each.
    if device.platform == "gpu":
        from jaxrl_llm.models import paged_attention_gpu as kernel
    elif device.platform == "tpu" and not in_int8:
        from jaxrl_llm.models import paged_attention_tpu as kernel
    else:
        return None
    return kernel if kernel.fits(device, cfg.head_dim, cfg.dtype, page) else None


def _as_bias(is_hidden: Array) -> jax.Array:
    """Returns what attention adds to its logits: HIDDEN_SCORE for hidden keys, otherwise 0."""
    bias = jnp.where(is_hidden, HIDDEN_SCORE, 0.0).astype(jnp.float32)
    # The barrier keeps a CPU's compiler from computing the mask again in each layer.
    return jax.lax.platform_dependent(bias, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def on_devices(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `function` run by each device on its own part of the arrays.

    Without `shard_map`, the compiler would gather the pages of all devices on each of them.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def local_part(tree: PyTree) -> PyTree:
    """Removes the leading axis of the device, whose size is 1 in `on_devices`."""
    return jax.tree.map(lambda x: x[0], tree)


def add_device_axis(tree: PyTree) -> PyTree:
    """Adds the leading axis of the device, which `local_part` removes."""
    return jax.tree.map(lambda x: x[None], tree)
