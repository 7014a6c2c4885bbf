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
    """Returns the experts [L, B, G, C, chosen] of the trainer's forward pass over whole completions."""
    mask = batch.completion_mask
    assert batch.tree is None, "decoding runs chains"
    positions = jnp.broadcast_to(jnp.arange(mask.shape[-1])[None, None], mask.shape)
    rows = PackedRows(batch.completions, positions, mask.astype(int))
    return model.forward(params, batch.prompt, rows, lambda routing: routing.chosen)[2]


def _experts_in_decoding(model: Decoder, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the experts [L, B, G, C, chosen] of a decoding pass, which runs one token after the other."""
    cfg, (b, g, c) = model.cfg, batch.completions.shape
    _, prefix = model.prefill(params, batch.prompt)
    zeros = jnp.zeros((b, cfg.kv_heads, g, c, cfg.head_dim), cfg.dtype)
    prompt_tokens = jnp.sum(batch.prompt_mask, axis=-1)[:, None, None]
    # An image takes fewer positions than tokens.
    end = prompt_tokens if batch.images is None else batch.images.end[:, None, None]

    def step(cache: Any, token_and_place: tuple[Array, Array]) -> tuple[Any, jax.Array]:
        tokens, t = token_and_place
        positions = jnp.broadcast_to(prompt_tokens + t, (b, g, 1))

        def visible(window: int) -> Visible:
            places = jnp.arange(c)[None, None, None]
            row = (places <= t) & (places > t - window) if window else places <= t
            return Visible(row, prompt_visibility(batch.prompt_mask, positions, window))

        visible_keys = PerLayerKind.for_window(visible, cfg.window if cfg.window < c + batch.prompts.shape[1] else 0)

        def attend_layer(local: Array | bool, query: Array, new: KeyValue, layer: Any) -> tuple[Array, Any]:
            own_cache, prompt = layer
            own_cache = KeyValue(
                *(jax.lax.dynamic_update_slice_in_dim(x, y, t, 3) for x, y in zip(own_cache, new, strict=True))
            )
            return attend(
                query, own_cache, visible_keys.select(local), prompt, soft_cap=cfg.soft_cap, precision=cfg.precision
            ), (own_cache, prompt)

        turned = jnp.broadcast_to(end + t, (b, g, 1))
        _, cache, chosen = model.step(params, tokens[..., None], turned, cache, attend_layer)
        return cache, jnp.stack(chosen)[:, :, :, 0]

    cache = [(KeyValue(zeros, zeros), prompt) for prompt in prefix]
    _, chosen = jax.lax.scan(step, cache, (jnp.moveaxis(batch.completions, 2, 0), jnp.arange(c)))
    return jnp.moveaxis(chosen, 0, 3)


def _agreement(chosen: Array, other_chosen: Array, mask: Array) -> jax.Array:
    # Sort, because the order of the chosen experts does not matter.
    is_same = jnp.all(jnp.sort(chosen, axis=-1) == jnp.sort(other_chosen, axis=-1), axis=-1)
    return jnp.mean(is_same, where=jnp.broadcast_to(mask[None], is_same.shape))
