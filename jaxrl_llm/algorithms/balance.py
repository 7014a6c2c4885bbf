"""The load of a mixture's experts: metrics of the load, and a loss that balances it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array


class ExpertLoad(NamedTuple):
    """Sums, over some tokens, of what the routers of L layers decide. The loads of disjoint tokens can be added."""

    tokens: Array  # [L] number of tokens
    choices: Array  # [L, experts] number of tokens that are sent to each expert
    probabilities: Array  # [L, experts] sum of the router's probabilities
    entropy: Array  # [L] sum of the router's entropies, in nats


def balance_loss(load: ExpertLoad, update_load: ExpertLoad) -> jax.Array:
    """Returns the load-balance loss of an update, or the part of it that belongs to some of its tokens.

    load: load of these tokens. update_load: load of all tokens of the update. The loss is the mean over layers of
    E sum_e f_e P_e (arXiv 2101.03961, equations 4 to 6), with E experts, f_e the share of all tokens that are sent to
    expert e, and P_e the expert's mean probability. f comes from `update_load`, so the parts of an update add up to its
    loss. If each token is sent to k experts, the loss is k for an even load, and at most E. Only P has a gradient.
    """
    tokens = jnp.maximum(update_load.tokens, 1.0)[:, None]
    # Both factors are divided by the number of all tokens, so that f_e and P_e are shares and the parts add up.
    per_layer = jnp.sum(update_load.choices / tokens * load.probabilities / tokens, axis=-1)
    return update_load.choices.shape[-1] * jnp.mean(per_layer)


def load_metrics(load: ExpertLoad) -> dict[str, jax.Array]:
    """Returns metrics of the load of a batch, as means over layers.

    router/balance: load-balance loss. router/busiest: tokens of the busiest expert, relative to an even load.
    router/unused: number of experts without a token. router/entropy: mean entropy of the router, in nats.
    """
    experts = load.choices.shape[-1]
    total = jnp.maximum(jnp.sum(load.choices, axis=-1), 1.0)
    return {
        "router/balance": balance_loss(load, load),
        "router/busiest": jnp.mean(jnp.max(load.choices, axis=-1) / total) * experts,
        "router/unused": jnp.mean(jnp.sum(load.choices == 0, axis=-1, dtype=jnp.float32)),
        "router/entropy": jnp.mean(load.entropy / jnp.maximum(load.tokens, 1.0)),
    }
