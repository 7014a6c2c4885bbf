"""The programs of the engine: the forward pass of prompts, rounds of decoding, and chunks of observations.

A program has one shape for all that it is used for, and a row's numbers depend on no other row. So what is sampled
does not depend on which sequences compute together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling, draw_tokens, log_distribution, mask_logits
from jaxrl_llm.machine import sharding
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.models.paged_attention import Pages
from jaxrl_llm.rollout.jax.reading import Hiding, Reading, lead, local_part, make_attend, on_devices
from jaxrl_llm.rollout.jax.sizes import ROUND, StreamSizes
from jaxrl_llm.structs import AnyArray, Array, Images, Prompt, PyTree


@dataclass(frozen=True)
class GroupSampling:
    """The static values of programs that sample."""

    group: int  # G
    sampling: Sampling
    mesh: Mesh


class Cache(NamedTuple):
    """The keys and values of all layers on the devices, [d, K, p, ...]."""

    prompts: list[Pages]  # a page for each prompt
    pages: list[Pages]  # of sequences


class NewPrompts(NamedTuple):
    """Prompts [d, n] of groups that begin."""

    tokens: AnyArray  # [d, n, P]
    mask: AnyArray  # [d, n, P]
    place: AnyArray  # in the cache; out of range: there is no prompt
    number: AnyArray  # of the first completion of the group
    images: Images | None = None  # arrays [d, n, ...]


class RoundRows(NamedTuple):
    """The sequences [d, S] of a round."""

    token: AnyArray  # token length - 1, whose keys and values are not in the cache yet
    length: AnyArray  # number of tokens
    limit: AnyArray  # length at which the round ends for it; 0: there is no sequence
    number: AnyArray  # of the completion, for its random numbers
    known: AnyArray  # [d, S, ROUND] tokens that were sampled before its pages were given away; -1: to be sampled
    reading: Reading
    prompt: AnyArray  # [d, e] where the prompts are in the cache
    page: AnyArray  # [d, p] where the pages are in the cache


class FedChunks(NamedTuple):
    """Chunks [d, S] of observations."""

    tokens: AnyArray  # [d, S, T]
    at: AnyArray  # place of the first token in its sequence
    count: AnyArray  # tokens that are real
    prompt: AnyArray  # where the prompt of each sequence is in the cache
    # A sequence has its own copy of its prompt. The table has pages of the cache; owner and start are those of copies
    # of all pages of the table, one sequence after the other.
    reading: Reading


class Sampled(NamedTuple):
    """Tokens with their log-probabilities: [d, S, ROUND], of which `count` [d, S] are real."""

    tokens: AnyArray
    logprobs: AnyArray
    count: AnyArray


def choose(logits: Array, uniform: Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Samples tokens [...] and their log-probabilities from logits [..., V] and uniform numbers [..., 2]."""
    if sampling.temperature > 0:
        return draw_tokens(mask_logits(logits, sampling), uniform)
    # Greedy: the first of equal logits, in every program and on every device.
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = log_distribution(logits, sampling)
    return token, jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]


def uniform_numbers(key: Array, number: Array, t: Array) -> jax.Array:
    """Returns uniform numbers [..., 2] for tokens t [...] of completions `number` [...].

    They are jax.random.uniform(fold_in(key, t), (N, 2))[number] for any N: what a completion draws does not depend on
    the size of the batch.
    """

    def draw_two(number: Array, t: Array) -> jax.Array:
        # Threefry counts the numbers of an array, and a 64-bit counter is two words, of which the first is 0 here.
        index = jnp.stack([2 * number, 2 * number + 1]).astype(jnp.uint32)
        words = threefry_2x32(jax.random.key_data(jax.random.fold_in(key, t)), jnp.pad(index, (2, 0)))
        bits = words[:2] ^ words[2:]
        # 23 random bits behind the exponent of 1.0 make a number of [1, 2).
        return jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1

    flat = jax.vmap(draw_two)(number.reshape(-1), t.reshape(-1))
    return flat.reshape(*number.shape, 2)


def empty_cache(model: Decoder, mesh: Mesh, sizes: StreamSizes) -> Cache:
    """Returns a cache of these sizes on each device."""
    cfg, devices = model.cfg, sharding.prompt_shards(mesh)

    def empty(count: int, tokens: int) -> list[Pages]:
        return [
            Pages.empty((devices, cfg.kv_heads, count), tokens, cfg.head_dim, sizes.dtype or cfg.dtype)
            for _ in range(cfg.layers)
        ]

    return Cache(empty(sizes.prompts, sizes.width), empty(sizes.pages, sizes.page))


def begin(
    model: Decoder, fixed: GroupSampling, sizes: StreamSizes, params: PyTree, prompts: NewPrompts, key: Array
) -> tuple[Cache, Array, Array]:
    """Runs the first prompts of a call. See `prefill`."""
    return prefill(model, fixed, params, empty_cache(model, fixed.mesh, sizes), prompts, key)


def prefill(
    model: Decoder, fixed: GroupSampling, params: PyTree, cache: Cache, prompts: NewPrompts, key: Array
) -> tuple[Cache, Array, Array]:
    """Runs prompts, puts them into the cache, and samples the first token of their groups.

    Returns the cache, tokens [d, n, G], and their log-probabilities.
    """
    (d, n, _), cfg = prompts.tokens.shape, model.cfg

    def by_prompt(x: Array) -> jax.Array:
        return x.reshape(d * n, *x.shape[2:])

    flat = by_prompt(prompts.mask)
    prompt = Prompt(by_prompt(prompts.tokens), flat, jax.tree.map(by_prompt, prompts.images))
    hidden, prefix = model.prefill(params, prompt)
    logits = model.logits(params, last_state(hidden, flat)).reshape(d, n, -1)
    numbers = prompts.number[..., None] + jnp.arange(fixed.group)[None, None]
    uniform = uniform_numbers(key, numbers, jnp.zeros_like(numbers))
    # A group shares its logits.
    each = jax.vmap(partial(choose, sampling=fixed.sampling), in_axes=(None, 2), out_axes=2)
    token, logprob = each(logits, uniform)

    def write(pages: Pages, new: KeyValue, place: Array) -> Pages:
        # This runs in `shard_map` on one device, so the batch axis of `new` has the n prompts of the device.
        local, by_head = local_part(pages), jax.tree.map(lambda x: x.swapaxes(0, 1), new)
        return lead(local.replace(place[0], local.from_tokens(by_head)))

    heads = sharding.heads_spec(cfg.kv_heads, fixed.mesh)

    def write_all(pages: list[Pages], new: list[KeyValue], place: Array) -> list[Pages]:
        return [write(*x, place) for x in zip(pages, new, strict=True)]

    written = on_devices(fixed.mesh, write_all, (heads, heads, sharding.BATCH), heads)
    return cache._replace(prompts=written(cache.prompts, prefix, prompts.place)), token, logprob


def decode(
    model: Decoder,
    fixed: GroupSampling,
    params: PyTree,
    cache: Cache,
    rows: RoundRows,
    ends: Array,
    below: Array,
    key: Array,
) -> tuple[Cache, Sampled]:
    """Samples tokens of sequences [d, S], each until its limit or a token after which the host must look.

    It ends after ROUND tokens, or when not more than `below` sequences go on, on each device. ends [V]: these tokens.
    With fewer prompts or pages than the cache has, they are copied, and the pages are written back.
    """
    reading = rows.reading
    prompts, pages = (
        _selected(model, fixed.mesh, cache.prompts, rows.prompt),
        _selected(model, fixed.mesh, cache.pages, rows.page),
    )
    hides = Hiding(model, reading, pages[0].keys.shape[-1])

    def go_on(loop: tuple) -> Array:
        t, alive, *_ = loop
        return (t < ROUND) & jnp.any(jnp.sum(alive, axis=1) > below)

    def step(loop: tuple) -> tuple:
        t, alive, token, length, pages, tokens, logprobs = loop
        at = (length - 1)[..., None]
        # Out of range: nothing is written of a row that does not go on.
        count = pages[0].keys.shape[2]
        page = jnp.take_along_axis(reading.table, at // hides.page, axis=2)
        page = jnp.where(alive[..., None], page, count)
        attend = make_attend(model, fixed.mesh, reading, hides, page=page, places=at, in_place=True)
        layers = list(zip(prompts, pages, strict=True))
        hidden, layers, _ = model.step(params, token[..., None], hides.positions(at), layers, attend)
        new, logprob = choose(
            model.logits(params, hidden[:, :, 0]), uniform_numbers(key, rows.number, length), fixed.sampling
        )
        known = jax.lax.dynamic_index_in_dim(rows.known, t, axis=2, keepdims=False)
        new = jnp.where(known >= 0, known, new)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=2)
        tokens, logprobs = write(tokens, new), write(logprobs, logprob)
        token, length = jnp.where(alive, new, token), length + alive
        alive &= ~ends[new] & (length < rows.limit)
        return t + 1, alive, token, length, [layer[1] for layer in layers], tokens, logprobs

    shape = (*rows.length.shape, ROUND)
    begin = jnp.int32(0), rows.length < rows.limit, rows.token, rows.length, pages
    end = jax.lax.while_loop(go_on, step, (*begin, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))
    written = _write_back(model, fixed.mesh, cache.pages, rows.page, end[4])
    return cache._replace(pages=written), Sampled(end[5], end[6], end[3] - rows.length)


def _selected(model: Decoder, mesh: Mesh, whole: list[Pages], place: Array) -> list[Pages]:
    """Returns a copy of the pages at `place` [d, n] in each layer, or the layers themselves, if these are all pages."""
    return whole if place.shape[1] == whole[0].keys.shape[2] else _taken(model, mesh, whole, place)


def _taken(model: Decoder, mesh: Mesh, whole: list[Pages], place: Array) -> list[Pages]:
    """Returns a copy of the pages at `place` [d, n] in each layer."""
    heads = sharding.heads_spec(model.cfg.kv_heads, mesh)

    def take(whole: list[Pages], place: Array) -> list[Pages]:
        return [lead(local_part(pages).take(place[0])) for pages in whole]

    return on_devices(mesh, take, (heads, sharding.BATCH), heads)(whole, place)


def _write_back(model: Decoder, mesh: Mesh, whole: list[Pages], place: Array, selected: list[Pages]) -> list[Pages]:
    """Writes the pages of `_selected` back."""
    if place.shape[1] == whole[0].keys.shape[2]:
        return selected
    heads = sharding.heads_spec(model.cfg.kv_heads, mesh)

    def write(whole: list[Pages], place: Array, selected: list[Pages]) -> list[Pages]:
        return [lead(local_part(x).replace(place[0], local_part(new))) for x, new in zip(whole, selected, strict=True)]

    return on_devices(mesh, write, (heads, sharding.BATCH, heads), heads)(whole, place, selected)


def feed(model: Decoder, mesh: Mesh, params: PyTree, cache: Cache, chunks: FedChunks) -> Cache:
    """Puts chunks of observations into the pages of their sequences."""
    tokens, at, count, prompt, reading = chunks
    places = at[..., None] + jnp.arange(tokens.shape[2])[None, None]
    hides = Hiding(model, reading, cache.pages[0].keys.shape[-1])
    last = reading.table.shape[2] - 1
    page = jnp.take_along_axis(reading.table, jnp.minimum(places // hides.page, last), axis=2)
    real = jnp.arange(tokens.shape[2])[None, None] < count[..., None]
    page = jnp.where(real, page, cache.pages[0].keys.shape[2])
    attend = make_attend(model, mesh, reading, hides, page=page, places=places, in_place=False)
    layers = list(zip(_taken(model, mesh, cache.prompts, prompt), cache.pages, strict=True))
    _, layers, _ = model.step(params, tokens, hides.positions(places), layers, attend)
    return cache._replace(pages=[pages for _, pages in layers])
