"""Sampling inside JAX: a prompt is prefilled once for its group, then a jitted decode loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.sampling import Sampling, draw, log_distribution
from jaxrl_llm.structs import Array, Prompts, PyTree, Rollouts


class Sampler:
    """The in-JAX engine. Keys come from the caller: the same key gives the same completions."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        group_size: int,
        max_completion_tokens: int,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        pad_id: int,
    ):
        self.exact = model.cfg.dtype == "float32"
        self._mesh = mesh
        self._params: PyTree = None
        self._place = jax.jit(
            partial(jax.tree_util.tree_map_with_path, partial(_as_used, jnp.dtype(model.cfg.dtype))),
            out_shardings=sharding.shardings(model.shapes(), mesh, leave_out="fsdp"),
        )
        settings = dict(group=group_size, length=max_completion_tokens, sampling=sampling)
        self._generate = jax.jit(partial(generate, model, **settings, stop_ids=stop_ids, pad_id=pad_id))

    def update_weights(self, params: PyTree) -> None:
        """Gathers over fsdp, in the dtype of the arithmetic, once here instead of for every token."""
        self._params = self._place(params)

    def generate(self, prompts: Prompts, key: jax.Array) -> Rollouts:
        tokens, mask = sharding.shard_batch((prompts.tokens, prompts.mask), self._mesh)
        rollouts = self._generate(self._params, tokens, mask, key)
        return jax.device_put(rollouts, NamedSharding(self._mesh, sharding.BATCH))


def _as_used(dtype: jnp.dtype, path: Any, leaf: Array) -> Array:
    """Kernels and the embedding are multiplied in `dtype` anyway; norms are applied in float32."""
    return leaf if sharding.path_name(path).endswith("scale") else leaf.astype(dtype)


def generate(
    model: Decoder,
    params: PyTree,
    prompts: Array,
    prompt_mask: Array,
    key: Array,
    *,
    group: int,
    length: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollouts:
    """`group` completions of at most `length` tokens for prompts [B, P].

    Token t of member (b, g) uses the uniform numbers [b, g] of fold_in(key, t): every member of
    every group has randomness of its own. Ends early when every completion has stopped.
    """
    batch = prompts.shape[0]
    stops = jnp.asarray(stop_ids, jnp.int32)

    def choose(logits: Array, t: Array) -> tuple[Array, Array]:
        logprobs = jnp.broadcast_to(log_distribution(logits, sampling), (batch, group, logits.shape[-1]))
        if sampling.temperature == 0:
            token = jnp.argmax(logprobs, axis=-1).astype(jnp.int32)
        else:
            token = draw(logprobs, jax.random.uniform(jax.random.fold_in(key, t), (batch, group, 2)))
        return token, jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]

    def write(written: tuple, t: Array, token: Array, logprob: Array, alive: Array) -> tuple:
        now = (jnp.where(alive, token, pad_id), alive, jnp.where(alive, logprob, 0.0))
        at_t = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=2)
        return tuple(at_t(before, new) for before, new in zip(written, now, strict=True))

    def is_stop(token: Array) -> Array:
        return jnp.any(token[..., None] == stops[None, None], axis=-1)

    hidden, prefix = model.prefill(params, prompts, prompt_mask)
    token, logprob = choose(model.logits(params, last_state(hidden, prompt_mask))[:, None], jnp.int32(0))
    shape = (batch, group, length)
    out = (jnp.full(shape, pad_id, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))
    out = write(out, jnp.int32(0), token, logprob, jnp.ones((batch, group), bool))

    def body(state: tuple) -> tuple:
        t, token, alive, cache, out = state
        hidden, cache = model.decode(params, token, t - 1, cache, prefix, prompt_mask)
        token, logprob = choose(model.logits(params, hidden), t)
        out = write(out, t, token, logprob, alive)
        return t + 1, token, alive & ~is_stop(token), cache, out

    state = (jnp.int32(1), token, ~is_stop(token), model.empty_cache(batch, group, length), out)
    _, _, alive, _, (completions, mask, logprobs) = jax.lax.while_loop(
        lambda state: (state[0] < length) & jnp.any(state[2]), body, state
    )
    return Rollouts(completions, mask, mask, logprobs, truncated=alive)
