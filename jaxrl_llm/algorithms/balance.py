"""The load of experts: its metrics, and a loss that balances it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array


class Load(NamedTuple):
    """How the routers of L layers treat some tokens, as sums over these tokens. Loads of other tokens can be added."""

    tokens: Array  # [L] their number
    choices: Array  # [L, experts] tokens that choose each expert
    probabilities: Array  # [L, experts], of the router
    entropy: Array  # [L], of the router, in nats


def balance_loss(load: Load, full: Load) -> jax.Array:
    """Returns the part of some tokens in the load-balance loss of all tokens of an update, a mean over layers.

    E sum_e f_e P_e (arXiv 2101.03961, equations 4 to 6), with E experts, f_e the share of all tokens that choose expert
    e, and P_e its mean probability. f and the number of tokens are those of `full`, so the parts of an update add up
    to its loss. The loss is k for an even load, where each token chooses k experts, and E at most. Its gradient is that
    of P.
    """
    tokens = jnp.maximum(full.tokens, 1.0)[:, None]
    # Both are divided by the tokens of all: f_e and P_e are shares, and the parts of an update add up.
    per_layer = jnp.sum(full.choices / tokens * load.probabilities / tokens, axis=-1)
    return full.choices.shape[-1] * jnp.mean(per_layer)


def load_metrics(load: Load) -> dict[str, jax.Array]:
    """Returns metrics of the load of all tokens, as means over layers.

    busiest: tokens of the busiest expert, relative to an even load. unused: number of experts that no token chooses.
    """
    experts = load.choices.shape[-1]
    total = jnp.maximum(jnp.sum(load.choices, axis=-1), 1.0)
    return {
        "router/balance": balance_loss(load, load),
        "router/busiest": jnp.mean(jnp.max(load.choices, axis=-1) / total) * experts,
        "router/unused": jnp.mean(jnp.sum(load.choices == 0, axis=-1, dtype=jnp.float32)),
        "router/entropy": jnp.mean(load.entropy / jnp.maximum(load.tokens, 1.0)),
    }
