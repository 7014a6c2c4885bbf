"""The optimiser and every schedule: optax, with warm-up counted in optimiser steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import optax

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import path_name
from jaxrl_llm.structs import Array, PyTree

Schedule: TypeAlias = Callable[[Array], Array]


def count_warmup(total_steps: int, *, warmup_steps: int, warmup_ratio: float) -> int:
    """Warm-up as optimiser steps, from either way of saying it.

    Raises: UserError, if both are given or nothing is left after the warm-up.
    """
    if warmup_steps and warmup_ratio:
        raise UserError("optim.warmup_steps and optim.warmup_ratio are both set: set one of them to 0")
    if not 0 <= warmup_ratio < 1:
        raise UserError(f"optim.warmup_ratio = {warmup_ratio}: give a share of the run from 0 to below 1")
    steps = warmup_steps or round(warmup_ratio * total_steps)
    if not 0 <= steps < max(total_steps, 1):
        raise UserError(
            f"optim.warmup_steps = {steps} but the run has {total_steps} optimiser steps: "
            "the rate would never be reached; lower it or raise num_steps"
        )
    return steps


def schedule(peak: float, *, decay: str, end: float, total_steps: int, warmup: int = 0) -> Schedule:
    """Linear warm-up to `peak` over `warmup` steps, then decay to `end` at `total_steps`.

    decay: "constant" (stays at peak) | "linear" | "cosine". The first step is never at
    rate 0: step i of the warm-up has peak * (i + 1) / (warmup + 1).
    """
    rest = max(total_steps - warmup, 1)
    if decay == "constant":
        after = optax.constant_schedule(peak)
    elif decay == "linear":
        after = optax.linear_schedule(peak, end, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, alpha=end / peak if peak else 0.0)
    if not warmup:
        return after
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def decayed(params: PyTree) -> PyTree:
    """True where weight decay applies: matrices, not norms, biases or the embedding."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith("/kernel"), params)


def make_optimizer(
    total_steps: int,
    *,
    learning_rate: float,
    warmup_steps: int,
    warmup_ratio: float,
    decay: str,
    end: float,
    clip_norm: float,
    weight_decay: float,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[optax.GradientTransformation, Schedule]:
    """AdamW behind global-norm clipping (0: none), and the learning rate by optimiser step.

    A non-finite gradient changes nothing and is counted in the state's `total_notfinite`.
    """
    warmup = count_warmup(total_steps, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
    rate = schedule(learning_rate, decay=decay, end=end, warmup=warmup, total_steps=total_steps)
    chain = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    chain.append(optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed))
    return optax.apply_if_finite(optax.chain(*chain), max_consecutive_errors=2**31 - 1), rate
