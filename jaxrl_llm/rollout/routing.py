"""Compares the experts that the sampler and the trainer choose for the same tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.models.attention import KeyValue, Visible, attend, prompt_visibility
from jaxrl_llm.models.decoder import Decoder, PackedRows, PerLayerKind
from jaxrl_llm.rollout.weights import WeightCopier, sampling_decoder
from jaxrl_llm.structs import Array, Batch, PyTree


def routing_agreement(model: Decoder, params: PyTree, batch: Batch, mesh: Mesh) -> float:
    """Returns the share of layers and trained tokens for which decoding and scoring choose the same experts.

    It decodes the completions of the batch again, with the weights of the in-JAX engine.
    """
    sampler = sampling_decoder(model, mesh)
    jit = partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)
    scored = jit(partial(_experts_in_scoring, model))(params, batch)
    decoded = jit(partial(_experts_in_decoding, sampler))(WeightCopier(sampler, mesh)(params), batch)
    return float(jit(_agreement)(scored, decoded, batch.loss_mask))


def _experts_in_scoring(model: Decoder, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the experts that the trainer's forward pass over whole completions chooses: [L, B, G, C, chosen].

    The axes are layers, prompts, completions of a prompt, tokens, and the experts of a token.
    """
    mask = batch.completion_mask
    assert batch.tree is None, "decoding runs chains"
    positions = jnp.broadcast_to(jnp.arange(mask.shape[-1])[None, None], mask.shape)
    rows = PackedRows(batch.completions, positions, mask.astype(int))
    return model.forward(params, batch.prompt, rows, lambda routing: routing.chosen)[2]


def _experts_in_decoding(model: Decoder, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the experts that decoding chooses, which runs one token after the other: [L, B, G, C, chosen].

    The axes are layers, prompts, completions of a prompt, tokens, and the experts of a token.
    """
    cfg, (prompts, group_size, length) = model.cfg, batch.completions.shape
    _, prompt_caches = model.prefill(params, batch.prompt)
    zeros = jnp.zeros((prompts, cfg.kv_heads, group_size, length, cfg.head_dim), cfg.dtype)
    prompt_tokens = jnp.sum(batch.prompt_mask, axis=-1)[:, None, None]
    # An image takes fewer rotary positions than tokens.
    prompt_end = prompt_tokens if batch.images is None else batch.images.end[:, None, None]
    window = cfg.window if cfg.window < length + batch.prompts.shape[1] else 0

    def step(cache: Any, tokens_and_place: tuple[Array, Array]) -> tuple[Any, jax.Array]:
        """Decodes the token at one place of all completions. cache: for each layer, own keys and those of prompts."""
        tokens, place = tokens_and_place
        positions = jnp.broadcast_to(prompt_tokens + place, (prompts, group_size, 1))

        def visible(window: int) -> Visible:
            key_places = jnp.arange(length)[None, None, None]
            row = (key_places <= place) & (key_places > place - window) if window else key_places <= place
            return Visible(row, prompt_visibility(batch.prompt_mask, positions, window))

        visible_keys = PerLayerKind.for_window(visible, window)

        def attend_layer(is_local: Array | bool, query: Array, new: KeyValue, layer: Any) -> tuple[Array, Any]:
            """Writes the new keys and values into the layer's cache, and attends to it and to the prompt."""
            own_cache, prompt = layer
            write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=3)
            own_cache = KeyValue(write(own_cache.keys, new.keys), write(own_cache.values, new.values))
            attended = attend(
                query, own_cache, visible_keys.select(is_local), prompt, soft_cap=cfg.soft_cap, precision=cfg.precision
            )
            return attended, (own_cache, prompt)

        rotary_positions = jnp.broadcast_to(prompt_end + place, (prompts, group_size, 1))
        _, cache, chosen = model.step(params, tokens[..., None], rotary_positions, cache, attend_layer)
        return cache, jnp.stack(chosen)[:, :, :, 0]

    cache = [(KeyValue(zeros, zeros), prompt_cache) for prompt_cache in prompt_caches]
    _, chosen = jax.lax.scan(step, cache, (jnp.moveaxis(batch.completions, 2, 0), jnp.arange(length)))
    return jnp.moveaxis(chosen, 0, 3)


def _agreement(chosen: Array, other_chosen: Array, mask: Array) -> jax.Array:
    """Returns the share of layers and tokens, of the tokens where `mask` is True, with the same chosen experts."""
    # Sort, because the order of the chosen experts does not matter.
    is_same = jnp.all(jnp.sort(chosen, axis=-1) == jnp.sort(other_chosen, axis=-1), axis=-1)
    return jnp.mean(is_same, where=jnp.broadcast_to(mask[None], is_same.shape))
