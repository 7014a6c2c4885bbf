"""The programs of the engine: prefill of prompts, rounds of decoding, and writing observations into pages.

A program has one shape for all its calls, and the numbers of a row depend on no other row. So a sampled token does not
depend on which sequences decode together.

Letters of shapes: d devices; n new prompts, S sequences and e prompts to read, each per device; G completions of a
group; P prompt tokens; K key heads; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from jaxrl_llm.models.paged_attention import LayerCache, Pages
from jaxrl_llm.rollout.jax.cache_attention import (
    AttentionMask,
    CacheIndices,
    add_device_axis,
    local_part,
    make_attend,
    on_devices,
    score_memory,
)
from jaxrl_llm.rollout.jax.sizes import DRAFT_PASSES, ROUND_TOKENS, StreamSizes
from jaxrl_llm.structs import AnyArray, Array, Images, Prompt, PyTree


@dataclass(frozen=True)
class GroupSampling:
    """How one call of the engine samples. These values are static: another value compiles another program."""

    group_size: int  # completions of each prompt (G)
    sampling: Sampling
    mesh: Mesh


class Cache(NamedTuple):
    """Keys and values on the devices. Each layer has arrays [d devices, K key heads, p pages, ...]."""

    prompts: list[Pages]  # entry of a layer: one page for each prompt
    pages: list[Pages]  # entry of a layer: pages of sequences


class NewPrompts(NamedTuple):
    """Prompts of the groups that start: n on each of d devices."""

    tokens: AnyArray  # [d, n, P]
    mask: AnyArray  # [d, n, P] True for real tokens
    cache_place: AnyArray  # [d, n] place of the prompt in the cache; out of range: the row is empty
    completion_number: AnyArray  # [d, n] number of the group's first completion, for its random numbers
    images: Images | None = None  # arrays [d, n, ...]; None if prompts have no images
    temperature: AnyArray = None  # [d, n] temperature of the group; None = that of `GroupSampling`


class RoundRows(NamedTuple):
    """Inputs of a decode round: S sequences, one in each slot, on each of d devices."""

    last_token: AnyArray  # [d, S] token length - 1, whose keys and values are not in the cache yet
    length: AnyArray  # [d, S] number of tokens
    limit: AnyArray  # [d, S] length at which the sequence stops in this round; 0: the row is empty
    completion_number: AnyArray  # [d, S] number of the completion, for its random numbers
    known_tokens: AnyArray  # [d, S, ROUND_TOKENS] tokens sampled before a preemption; -1: the round samples the token
    indices: CacheIndices
    prompt_places: AnyArray  # [d, e] places of the prompts in the cache
    temperature: AnyArray = None  # [d, S] temperature of the sequence; None = that of `GroupSampling`
    start: AnyArray = None  # [d, S] length at which the random numbers of the sequence begin; None = 0
    drafts: AnyArray = None  # [d, S, ROUND_TOKENS + k] drafts of the next tokens, of which a pass verifies k; -1: none


class ObservationChunks(NamedTuple):
    """Parts of observations, which a program writes into pages: one chunk for each of S sequences on d devices."""

    tokens: AnyArray  # [d, S, T], at most T tokens in a chunk
    start: AnyArray  # [d, S] place of the chunk's first token in its sequence
    count: AnyArray  # [d, S] number of real tokens
    prompt_place: AnyArray  # [d, S] place of the sequence's prompt in the cache
    indices: CacheIndices


class Sampled(NamedTuple):
    """Tokens that a decode round sampled for S sequences on each of d devices."""

    tokens: AnyArray  # [d, S, ROUND_TOKENS]
    logprobs: AnyArray  # [d, S, ROUND_TOKENS]
    count: AnyArray  # [d, S] number of real tokens
    passes: AnyArray  # [d, S] number of passes through the model that sampled them


def choose(
    logits: Array, uniform: Array, sampling: Sampling, temperature: Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Samples tokens [...] and their log-probabilities from logits [..., V] and uniform numbers [..., 2].

    temperature [...]: temperature of each row, 0 = greedy; None = that of `sampling`, which otherwise must be 1.
    """
    if temperature is not None:
        is_greedy = temperature == 0
        drawn = choose(logits / jnp.where(is_greedy, 1, temperature)[..., None], uniform, sampling)
        greedy = choose(logits, uniform, replace(sampling, temperature=0.0))
        return jnp.where(is_greedy, greedy[0], drawn[0]), jnp.where(is_greedy, greedy[1], drawn[1])
    if sampling.temperature > 0:
        return draw_tokens(mask_logits(logits, sampling), uniform)
    # Greedy decoding takes the first of equal logits, so that every program and device chooses the same token.
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = log_distribution(logits, sampling)
    return token, jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]


def uniform_numbers(key: Array, completion: Array, token_index: Array) -> jax.Array:
    """Returns two uniform random numbers [..., 2] for each token, which decide which token is sampled.

    completion [...]: number of the completion. token_index [...]: index of the token in the completion. The numbers
    equal jax.random.uniform(fold_in(key, token_index), (N, 2))[completion] for any N, so the random numbers of a
    completion do not depend on the size of the batch.
    """

    def draw_two(completion: Array, token_index: Array) -> jax.Array:
        # Threefry numbers the elements of an array with a 64-bit counter of two words. The first word is 0 here.
        counter = jnp.stack([2 * completion, 2 * completion + 1]).astype(jnp.uint32)
        token_key = jax.random.key_data(jax.random.fold_in(key, token_index))
        words = threefry_2x32(token_key, jnp.pad(counter, (2, 0)))
        bits = words[:2] ^ words[2:]
        # 23 random bits behind the exponent of 1.0 are a number in [1, 2), from which 1 is subtracted.
        return jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1

    flat_numbers = jax.vmap(draw_two)(completion.reshape(-1), token_index.reshape(-1))
    return flat_numbers.reshape(*completion.shape, 2)


def empty_cache(model: Decoder, mesh: Mesh, sizes: StreamSizes) -> Cache:
    """Returns an empty cache of these sizes on each device."""
    cfg, devices = model.cfg, sharding.prompt_shards(mesh)

    def empty(count: int, tokens: int) -> list[Pages]:
        return [
            Pages.empty((devices, cfg.kv_heads, count), tokens, cfg.head_dim, sizes.dtype or cfg.dtype)
            for _ in range(cfg.layers)
        ]

    return Cache(empty(sizes.prompts, sizes.prompt_width), empty(sizes.allocated_pages, sizes.page))


def grow(pages: int, cache: Cache) -> Cache:
    """Returns the cache with this many pages on each device: new pages are empty."""
    page_axis = 2

    def append_pages(array: Array) -> jax.Array:
        added = [pages - array.shape[page_axis] if axis == page_axis else 0 for axis in range(array.ndim)]
        return jnp.pad(array, [(0, count) for count in added])

    return cache._replace(pages=jax.tree.map(append_pages, cache.pages))


def prefill_first(
    model: Decoder, group_sampling: GroupSampling, sizes: StreamSizes, params: PyTree, prompts: NewPrompts, key: Array
) -> tuple[Cache, Array, Array]:
    """Makes an empty cache, and runs the first prompts of a call. Returns what `prefill` returns."""
    cache = empty_cache(model, group_sampling.mesh, sizes)
    return prefill(model, group_sampling, params, cache=cache, prompts=prompts, key=key)


def prefill(
    model: Decoder, group_sampling: GroupSampling, params: PyTree, cache: Cache, prompts: NewPrompts, key: Array
) -> tuple[Cache, Array, Array]:
    """Runs prompts, writes them into the cache, and samples the first token of each completion of their groups.

    Returns the cache, the tokens [d devices, n prompts, G completions], and their log-probabilities.
    """
    (devices, prompts_per_device, _), cfg = prompts.tokens.shape, model.cfg

    def by_prompt(array: Array) -> jax.Array:
        return array.reshape(devices * prompts_per_device, *array.shape[2:])

    flat_mask = by_prompt(prompts.mask)
    prompt = Prompt(by_prompt(prompts.tokens), flat_mask, jax.tree.map(by_prompt, prompts.images))
    hidden, keys_values = model.prefill(params, prompt)
    logits = model.logits(params, last_state(hidden, flat_mask)).reshape(devices, prompts_per_device, -1)
    numbers = prompts.completion_number[..., None] + jnp.arange(group_sampling.group_size)[None, None]
    first_token_index = jnp.zeros_like(numbers)
    uniform = uniform_numbers(key, numbers, first_token_index)

    def choose_tokens(uniform: Array) -> tuple[jax.Array, jax.Array]:
        return choose(logits, uniform, group_sampling.sampling, prompts.temperature)

    # All completions of a group choose from the same logits, so the map runs over the random numbers only.
    token, logprob = jax.vmap(choose_tokens, in_axes=2, out_axes=2)(uniform)

    def write_layer(pages: Pages, new: KeyValue, place: Array) -> Pages:
        # This runs in `shard_map` on one device, so the batch axis of `new` has the n prompts of the device.
        local, by_head = local_part(pages), jax.tree.map(lambda x: x.swapaxes(0, 1), new)
        return add_device_axis(local.replace(place[0], local.from_tokens(by_head)))

    heads = sharding.heads_spec(cfg.kv_heads, group_sampling.mesh)

    def write_layers(pages: list[Pages], new: list[KeyValue], place: Array) -> list[Pages]:
        return [write_layer(layer_pages, layer_new, place) for layer_pages, layer_new in zip(pages, new, strict=True)]

    write_prompts = on_devices(group_sampling.mesh, write_layers, (heads, heads, sharding.BATCH), heads)
    return cache._replace(prompts=write_prompts(cache.prompts, keys_values, prompts.cache_place)), token, logprob


def decode(
    model: Decoder,
    group_sampling: GroupSampling,
    params: PyTree,
    cache: Cache,
    rows: RoundRows,
    checked_tokens: Array,
    running_threshold: Array,
    key: Array,
) -> tuple[Cache, Sampled]:
    """Samples tokens of S sequences on each of d devices, in one decode round.

    A sequence stops at its limit, or after a token that the host must check, such as a stop token.

    checked_tokens [V]: True for the tokens that the host must check. The round ends after ROUND_TOKENS tokens, or when
    at most `running_threshold` sequences still run on every device. If the program reads fewer prompts than the cache
    has, it works on copies of them.
    """
    mesh, indices = group_sampling.mesh, rows.indices
    attention_mask = AttentionMask(model, indices, cache.pages[0].keys.shape[-1])
    layers = _decoding_layers(model, mesh, cache, rows.prompt_places, indices)

    def continues(loop_state: tuple) -> Array:
        token_count, running, *_ = loop_state
        return (token_count < ROUND_TOKENS) & jnp.any(jnp.sum(running, axis=1) > running_threshold)

    def step(loop_state: tuple) -> tuple:
        """Samples the next token of each sequence."""
        token_count, running, token, length, layers, tokens, logprobs = loop_state
        places = (length - 1)[..., None]
        # A row that has stopped writes to a page out of range, which drops the write.
        page_count = layers[0].pages.keys.shape[2]
        page = jnp.take_along_axis(indices.page_table, places // attention_mask.page, axis=2)
        page = jnp.where(running[..., None], page, page_count)
        attend = make_attend(model, mesh, indices, attention_mask, page=page, places=places)
        positions = attention_mask.rotary_positions(places)
        hidden, layers, _ = model.step(params, token[..., None], positions, layers, attend)
        logits = model.logits(params, hidden[:, :, 0])
        index = length if rows.start is None else length - rows.start
        uniform = uniform_numbers(key, rows.completion_number, index)
        new_token, logprob = choose(logits, uniform, group_sampling.sampling, rows.temperature)
        known_token = jax.lax.dynamic_index_in_dim(rows.known_tokens, token_count, axis=2, keepdims=False)
        new_token = jnp.where(known_token >= 0, known_token, new_token)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=token_count, axis=2)
        tokens, logprobs = write(tokens, new_token), write(logprobs, logprob)
        token, length = jnp.where(running, new_token, token), length + running
        running &= ~checked_tokens[new_token] & (length < rows.limit)
        return token_count + 1, running, token, length, layers, tokens, logprobs

    shape = (*rows.length.shape, ROUND_TOKENS)
    start = jnp.int32(0), rows.length < rows.limit, rows.last_token, rows.length, layers
    start = (*start, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    *_, length, layers, tokens, logprobs = jax.lax.while_loop(continues, step, start)
    count = length - rows.length
    return cache._replace(pages=[layer.pages for layer in layers]), Sampled(tokens, logprobs, count, count)


def decode_drafts(
    model: Decoder,
    group_sampling: GroupSampling,
    params: PyTree,
    cache: Cache,
    rows: RoundRows,
    checked_tokens: Array,
    running_threshold: Array,
    key: Array,
) -> tuple[Cache, Sampled]:
    """Samples tokens as `decode` does, but each pass through the model also verifies k drafted tokens per sequence.

    A draft is right if it is the token that the random numbers of its index choose. All tokens up to the first wrong
    draft, and the token in its place, are sampled by the same pass. So no draft changes a token. The round ends after
    DRAFT_PASSES passes, because the host then has better drafts.
    """
    mesh, drafted = group_sampling.mesh, rows.drafts.shape[-1] - ROUND_TOKENS
    # Each sequence has a row of the model's batch for its last token, and one for each of its drafts.
    width, (devices, slots) = drafted + 1, rows.length.shape
    indices = _with_rows_for_drafts(rows.indices, width)
    attention_mask = AttentionMask(model, indices, cache.pages[0].keys.shape[-1])
    layers = _decoding_layers(model, mesh, cache, rows.prompt_places, indices)
    last_page, page_count = indices.page_table.shape[2] - 1, cache.pages[0].keys.shape[2]
    limit = jnp.minimum(rows.limit, rows.length + ROUND_TOKENS)
    known = jnp.pad(rows.known_tokens, ((0, 0), (0, 0), (0, width)), constant_values=-1)

    def slice_from(values: Array, first: Array, size: int) -> jax.Array:
        """Returns `size` values [d, S, size] of each sequence, from the index `first` [d, S] on."""
        return jnp.take_along_axis(values, first[..., None] + jnp.arange(size)[None, None], axis=2)

    def by_row(array: Array) -> jax.Array:
        """Joins the axes of sequences and of their rows: [d, S, width, ...] -> [d, S * width, ...]."""
        return array.reshape(devices, slots * width, *array.shape[3:])

    def continues(loop_state: tuple) -> Array:
        pass_count, running, *_ = loop_state
        return (pass_count < DRAFT_PASSES) & jnp.any(jnp.sum(running, axis=1) > running_threshold)

    def step(loop_state: tuple) -> tuple:
        """Samples one token of each sequence, and one more for each draft that is right."""
        pass_count, running, token, length, passes, layers, tokens, logprobs = loop_state
        count = length - rows.length
        draft = slice_from(rows.drafts, count, drafted)
        places = (length - 1)[..., None] + jnp.arange(width)[None, None]
        # Rows after a missing draft are computed too, but their results are not used. A row beyond the limit of its
        # sequence has no page, so it must not write.
        is_real, row_places = running[..., None] & (places <= (limit - 2)[..., None]), by_row(places)[..., None]
        page_number = jnp.minimum(row_places // attention_mask.page, last_page)
        page = jnp.take_along_axis(indices.page_table, page_number, axis=2)
        page = jnp.where(by_row(is_real)[..., None], page, page_count)
        attend = make_attend(model, mesh, indices, attention_mask, page=page, places=row_places)
        inputs = by_row(jnp.concatenate([token[..., None], jnp.maximum(draft, 0)], axis=2))[..., None]
        hidden, layers, _ = model.step(params, inputs, attention_mask.rotary_positions(row_places), layers, attend)
        logits = model.logits(params, hidden[:, :, 0])
        index = places + 1 if rows.start is None else places + 1 - rows.start[..., None]
        uniform = uniform_numbers(key, jnp.repeat(rows.completion_number, width, axis=1), by_row(index))
        temperature = None if rows.temperature is None else jnp.repeat(rows.temperature, width, axis=1)
        chosen = choose(logits, uniform, group_sampling.sampling, temperature)
        new, logprob = (array.reshape(devices, slots, width) for array in chosen)
        repeated = slice_from(known, count, width)
        new = jnp.where(repeated >= 0, repeated, new)
        sampled_count, has_ended = _count_sampled(draft, new, checked_tokens[new] | (places + 2 >= limit[..., None]))

        def write(values: Array, part: Array) -> jax.Array:
            return jax.vmap(jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0)))(values, part, count)

        tokens, logprobs = write(tokens, new), write(logprobs, logprob)
        last_token = jnp.take_along_axis(new, (sampled_count - 1)[..., None], axis=2)[..., 0]
        token = jnp.where(running, last_token, token)
        length, passes = length + running * sampled_count, passes + running
        running &= ~has_ended
        return pass_count + 1, running, token, length, passes, layers, tokens, logprobs

    shape = (devices, slots, ROUND_TOKENS + width)
    start = jnp.int32(0), rows.length < limit, rows.last_token, rows.length, jnp.zeros_like(rows.length), layers
    start = (*start, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    *_, length, passes, layers, tokens, logprobs = jax.lax.while_loop(continues, step, start)
    sampled = Sampled(tokens[..., :ROUND_TOKENS], logprobs[..., :ROUND_TOKENS], length - rows.length, passes)
    return cache._replace(pages=[layer.pages for layer in layers]), sampled


def _count_sampled(draft: Array, new: Array, ends: Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many of the new tokens [d, S, k + 1] a pass has sampled, and whether the last of them ends the round.

    draft [d, S, k]: drafts of all but the last of the tokens. ends [d, S, k + 1]: True for tokens after which a
    sequence stops. A token counts if all drafts before it are right, and no token before it ends the round.
    """
    is_followed = (draft == new[..., :-1]) & ~ends[..., :-1]  # True if the next token counts too
    sampled_count = 1 + jnp.sum(jnp.cumprod(is_followed, axis=-1), axis=-1, dtype=jnp.int32)
    has_ended = jnp.take_along_axis(ends, (sampled_count - 1)[..., None], axis=2)[..., 0]
    return sampled_count, has_ended


def _with_rows_for_drafts(indices: CacheIndices, width: int) -> CacheIndices:
    """Returns the indices of S * width rows: each sequence has a row for its last token and for each draft.

    With a row of its own, a token has the same log-probability, bit for bit, whatever number of drafts before it were
    right.
    """
    columns = jnp.arange(width)
    members = indices.prompt_members[..., None] * width + columns[None, None, None]
    member_index = indices.member_index[..., None] * width + columns[None, None]
    return indices._replace(
        page_table=jnp.repeat(indices.page_table, width, axis=1),
        prompt_members=members.reshape(*members.shape[:2], -1),
        member_index=member_index.reshape(len(member_index), -1),
    )


def _decoding_layers(
    model: Decoder, mesh: Mesh, cache: Cache, prompt_places: Array, indices: CacheIndices
) -> list[LayerCache]:
    """Returns, for each layer, the prompts and pages that a decode program reads and writes, and memory for scores.

    prompt_places [d, e]: places in the cache of the e prompts that the program reads.
    """
    reads_all = prompt_places.shape[1] == cache.prompts[0].keys.shape[2]
    prompts = cache.prompts if reads_all else _copy_prompts(model, mesh, cache.prompts, prompt_places)
    scores = score_memory(model, mesh, cache.pages[0], indices)
    return [LayerCache(*layer, scores) for layer in zip(prompts, cache.pages, strict=True)]


def _copy_prompts(model: Decoder, mesh: Mesh, layers: list[Pages], place: Array) -> list[Pages]:
    """Returns copies of cached prompts, for each layer. place [d, n]: places of n prompts in the cache of a device."""
    heads = sharding.heads_spec(model.cfg.kv_heads, mesh)

    def copy(layers: list[Pages], place: Array) -> list[Pages]:
        return [add_device_axis(local_part(pages).take(place[0])) for pages in layers]

    return on_devices(mesh, copy, (heads, sharding.BATCH), heads)(layers, place)


def feed(model: Decoder, mesh: Mesh, params: PyTree, cache: Cache, chunks: ObservationChunks) -> Cache:
    """Computes the keys and values of observation chunks, and writes them into the pages of their sequences."""
    tokens, indices = chunks.tokens, chunks.indices
    places = chunks.start[..., None] + jnp.arange(tokens.shape[2])[None, None]
    attention_mask = AttentionMask(model, indices, cache.pages[0].keys.shape[-1])
    last_page = indices.page_table.shape[2] - 1
    page = jnp.take_along_axis(indices.page_table, jnp.minimum(places // attention_mask.page, last_page), axis=2)
    is_real = jnp.arange(tokens.shape[2])[None, None] < chunks.count[..., None]
    page = jnp.where(is_real, page, cache.pages[0].keys.shape[2])
    attend = make_attend(model, mesh, indices, attention_mask, page=page, places=places)
    prompts = _copy_prompts(model, mesh, cache.prompts, chunks.prompt_place)
    layers = [LayerCache(*layer) for layer in zip(prompts, cache.pages, strict=True)]
    _, layers, _ = model.step(params, tokens, attention_mask.rotary_positions(places), layers, attend)
    return cache._replace(pages=[layer.pages for layer in layers])
