"""How sequences read and write the pages of a cache, in the programs of the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.machine import sharding
from jaxrl_llm.models import paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder, PerLayerKind
from jaxrl_llm.models.paged_attention import HIDDEN_SCORE, PageReaders, Pages, attend, attend_prompts, finish
from jaxrl_llm.rollout.jax.sizes import PAGE, PageKind
from jaxrl_llm.structs import AnyArray, Array, PyTree


class Reading(NamedTuple):
    """Where sequences [d, S] read and write their keys and values; e prompts and p pages are there, n of a sequence."""

    table: AnyArray  # [d, S, n] pages of each sequence, in order; p: it has no more
    owner: AnyArray  # [d, p] sequence of each page
    start: AnyArray  # [d, p] place of the page's first token among those of its sequence
    prompt_mask: AnyArray  # [d, e, P]
    members: AnyArray  # [d, e, G] sequences of each prompt
    member: AnyArray  # [d, S] place of each sequence in `members`, without the axis of e
    end: AnyArray = None  # [d, e] position of the first completion token; None: the tokens of the prompt


class Hiding:
    """Which keys are hidden from the tokens of sequences, for layers of both kinds."""

    def __init__(self, model: Decoder, reading: Reading, page: int):
        self.page, self._reading = page, reading
        longest = reading.table.shape[2] * page + reading.prompt_mask.shape[2]
        self.window = model.cfg.window if model.cfg.window < longest else 0
        lengths = jnp.sum(reading.prompt_mask, axis=-1)  # [d, e]

        def by_sequence(x: Array) -> jax.Array:
            return jnp.take_along_axis(x, reading.member // reading.members.shape[2], axis=1)

        self._prompt_tokens = by_sequence(lengths)
        self._end = self._prompt_tokens if reading.end is None else by_sequence(reading.end)

    def positions(self, places: Array) -> jax.Array:
        """Positions, for the rotary embedding, of tokens at `places` [d, S, T] of completions."""
        return self._end[..., None] + places

    def _in_text(self, places: Array) -> jax.Array:
        """Tokens of the text before tokens at `places`: a picture has more tokens than positions."""
        return self._prompt_tokens[..., None] + places

    def in_pages(self, places: Array) -> PerLayerKind:
        """Returns what is hidden in pages [d, p, T, s] from tokens at `places` [d, S, T]."""
        reading = self._reading
        at = jnp.take_along_axis(places, reading.owner[..., None], axis=1)[..., None]
        keys = (reading.start[..., None] + jnp.arange(self.page)[None, None])[:, :, None]
        return PerLayerKind.for_window(
            lambda window: _hidden((keys > at) | (keys <= at - window) if window else keys > at), self.window
        )

    def in_prompts(self, places: Array) -> PerLayerKind:
        """Returns what is hidden in prompts [d, e, G * T or 1, P] from tokens at `places` [d, S, T]."""
        mask, members = self._reading.prompt_mask, self._reading.members
        padding = ~mask[:, :, None]

        def hidden(window: int) -> jax.Array:
            if not window:
                return _hidden(padding)
            d, e, g = members.shape
            at = jnp.take_along_axis(self._in_text(places), members.reshape(d, e * g)[..., None], axis=1)
            from_prompt = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, :, None]
            return _hidden(padding | (at.reshape(d, e, -1)[..., None] - from_prompt >= window))

        return PerLayerKind.for_window(hidden, self.window)


def make_attend(
    model: Decoder, mesh: Mesh, reading: Reading, hides: Hiding, *, page: Array, places: Array, in_place: bool
) -> Callable[..., tuple[Array, Any]]:
    """Returns `attend(local, query, keys and values, (prompts, own pages) of a layer)` -> attended, the pages.

    It writes tokens at `places` [d, S, T] to `page` [d, S, T], and attends to prompts and own pages. in_place: it reads
    all pages where they are, otherwise copies of those in the table.
    """
    cfg = model.cfg
    kernel_of, one_each = partial(_kernel, mesh.devices.flat[0], cfg, hides.page), in_place and places.shape[2] == 1
    in_pages, in_prompts = hides.in_pages(places), hides.in_prompts(places)
    numbers: dict[str, Any] = dict(soft_cap=cfg.soft_cap, precision=cfg.precision)

    def on_device(
        window: int, query: Array, now: KeyValue, layer: tuple[Pages, Pages], hidden: tuple, rows: tuple
    ) -> tuple[Array, tuple[Pages, Pages]]:
        query, now, (prompts, pages), (page_hidden, prompt_hidden), (reading, page, places) = local_part(
            (query, now, layer, hidden, rows)
        )
        offset, in_int8 = places % hides.page, pages.key_scale is not None
        kernel = kernel_of(in_int8=in_int8) if one_each else None
        if kernel is paged_attention_tpu:
            pages = paged_attention_tpu.write_own(pages, page[:, 0], offset[:, 0], now)
        else:
            pages = pages.write(page, offset, now)
        by_token = jnp.swapaxes(query, 2, 3)  # [K, S, T, R, h]
        if in_place:
            read, table = pages, reading.table
        else:
            read = pages.take(jnp.minimum(reading.table.reshape(-1), pages.keys.shape[1] - 1))
            table = jnp.arange(reading.table.size).reshape(reading.table.shape)
        readers = PageReaders(table, reading.owner, reading.members, reading.member)
        if kernel is None:
            attended = attend(by_token, prompts, read, (page_hidden, prompt_hidden), readers, **numbers)
        else:
            seen = kernel.attend_own(query[:, :, :, 0], pages, table, places[:, 0] + 1, window, cfg.soft_cap)
            to_pages = jax.tree.map(lambda x: x[:, :, None], seen)  # one token
            attended = finish(attend_prompts(by_token, prompts, prompt_hidden, readers, **numbers), to_pages)
        attended = attended.astype(query.dtype)
        return lead((jnp.swapaxes(attended, 2, 3), (prompts, pages)))

    heads, rows = sharding.heads_spec(cfg.kv_heads, mesh), sharding.BATCH

    def attend_on_mesh(local: Array | bool, query: Array, now: KeyValue, layer: Any) -> tuple[Array, Any]:
        hidden = in_pages.select(local), in_prompts.select(local)
        # The window of a kernel is static.
        on_layer = partial(on_device, hides.window if local is True else 0)
        run = on_devices(mesh, on_layer, (heads, heads, heads, rows, rows), heads)
        return run(query, now, layer, hidden, (reading, page, places))

    return attend_on_mesh


def page_kind(mesh: Mesh, cfg: DecoderConfig, dtype: str = "") -> PageKind:
    """Returns the pages that the platform prescribes for a model; dtype: "int8", or "" for that of the model."""
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    heads = cfg.kv_heads // (1 if sharding.heads_spec(cfg.kv_heads, mesh)[1] is None else tensor)
    # Integers have a scale in float32.
    each = cfg.head_dim + 4 if dtype else cfg.head_dim * jnp.dtype(cfg.dtype).itemsize
    tokens = paged_attention_tpu.LANES if device.platform == "tpu" else 0
    in_place = _kernel(device, cfg, tokens or PAGE, in_int8=dtype == "int8") is not None
    return PageKind(sharding.prompt_shards(mesh), dtype, 2 * cfg.layers * heads * each, tokens, in_place)


def _kernel(device: Any, cfg: DecoderConfig, page: int, *, in_int8: bool) -> Any:
    """Returns the module of the platform's kernel for sequences that compute one token each, or None."""
    kernels = [paged_attention_gpu] if in_int8 else [paged_attention_tpu, paged_attention_gpu]
    return next((kernel for kernel in kernels if kernel.fits(device, cfg.head_dim, cfg.dtype, page)), None)


def _hidden(hide: Array) -> jax.Array:
    # One barrier: a CPU's compiler would compute it again in each layer.
    hidden = jnp.where(hide, HIDDEN_SCORE, 0.0).astype(jnp.float32)
    return jax.lax.platform_dependent(hidden, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def on_devices(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    # Each device reads and writes its own part. Left to itself, the compiler would gather the pages of all devices.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def local_part(tree: PyTree) -> PyTree:
    """Removes the leading axis, of one device."""
    return jax.tree.map(lambda x: x[0], tree)


def lead(tree: PyTree) -> PyTree:
    """Adds the leading axis of one device."""
    return jax.tree.map(lambda x: x[None], tree)
