"""The optimizer, the learning rate and the coefficients of loss terms, with optax. Schedules count optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config.schema import AtLeastOne, Count, Field, NotNegative, Positive, Share
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import noise
from jaxrl_llm.health.rules.bounds import MEAN_WEIGHT, SAMPLE_SIZE, SPIKE_FACTOR
from jaxrl_llm.machine.sharding import path_name
from jaxrl_llm.structs import Array, PyTree

Decay: TypeAlias = Literal["constant", "linear", "cosine"]
Momentum: TypeAlias = Annotated[float, Field(float, low=0, high=0.9999)]


def count_warmup(total_steps: int, *, warmup_steps: int, warmup_ratio: float, section: str = "optim") -> int:
    """Returns the number of warm-up steps, from the steps or the ratio in a section of the config.

    Raises: UserError, if both are set, or if the ratio is not in [0, 1).
    """
    if warmup_steps and warmup_ratio:
        raise UserError(f"{section}.warmup_steps and {section}.warmup_ratio are both set: set one of them to 0")
    if not 0 <= warmup_ratio < 1:
        raise UserError(f"{section}.warmup_ratio = {warmup_ratio}: give a share of the run from 0 to below 1")
    return fitting(warmup_steps or round(warmup_ratio * total_steps), total_steps)


def fitting(warmup: int, total_steps: int) -> int:
    """Returns the steps of a warm-up. One as long as the run takes half of it: a quick try of a config is short."""
    return warmup if warmup < total_steps else total_steps // 2


def schedule(peak: float, *, decay: Decay, end: float, total_steps: int, warmup: int = 0) -> optax.Schedule:
    """Returns a schedule: linear warm-up to `peak` over `warmup` steps, then decay to `end` at `total_steps`.

    decay: "constant" (stays at peak) | "linear" | "cosine". Step i of the warm-up has peak * (i + 1) / (warmup + 1),
    so the first step does not have rate 0.
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


class Coefficient(NamedTuple):
    """A learning rate or the coefficient of a loss term: a pure function of a state. Each update changes the state."""

    start: float | tuple[float, ...]  # first state; the current one is in `TrainState.coef_state`
    value: Callable[[Array], Any]  # state -> coefficient, a scalar
    adapt: Callable[[Array, dict[str, Array]], Array]  # (state, metrics of an update) -> state; not if it was skipped


class Optimizer(NamedTuple):
    """A gradient transformation, and the coefficients of an update."""

    transform: optax.GradientTransformation  # with learning rate 1
    coefficients: dict[str, Coefficient]  # metric name -> coefficient: "learning_rate", and the objective's
    gradient_dtype: str = "float32"  # of the sum over micro-batches
    skips: tuple[str, ...] = ()  # of SKIPS
    lowers: Lowers | None = None  # what a rollback makes of the learning rate


def constant(coef: float) -> Coefficient:
    """Returns a coefficient that never changes."""
    return Coefficient(coef, lambda state: state, lambda state, metrics: state)


# A norm is compared with those of about USUAL updates, once SEEN of them are there.
USUAL, SEEN = 16, 8


def spike_bound() -> Coefficient:
    """Returns the bound of a gradient's norm; 0 while too few are known. Skipped updates do not change it.

    m exp(max(ln SPIKE, t s)). m is the mean of the last norms or of all, whichever is larger: where a task is solved,
    most batches teach nothing and their norm is near 0. s^2 is twice the mean square of ln(norm / m) where it is above
    0, as for a normal distribution whose lower half is left out. Noise exceeds t s at most with the part of
    `noise.RATE` that this update has: P(x > z) <= exp(-z^2 / 2) for a normal x (Chernoff), and t^2 = n (exp(z^2 / n) -
    1) for Student's t with n degrees of freedom (Wallace, Annals of Mathematical Statistics 30, 1959).
    """

    def usual(state: Array) -> jax.Array:
        return jnp.maximum(jnp.maximum(state[0], state[1]), 1e-12)

    def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
        norm, count = metrics["grad_norm"], state[3] + 1
        # The excess is capped at a spike, because one norm after some that are rounding errors says little of the
        # noise.
        excess = jnp.where(count > 1, jnp.clip(jnp.log(norm / usual(state)), 0.0, jnp.log(SPIKE_FACTOR)), 0.0)
        # A mean of the last norms without a list of them: the state is four numbers.
        last = state[0] + (norm - state[0]) / jnp.minimum(count, USUAL)
        mean, square = state[1] + (norm - state[1]) / count, state[2] + (excess**2 - state[2]) / count
        # Norms of rounding errors at the start are none: without a signal, any real norm would be a spike beside them.
        known = (state[3] > 0) | (norm > jnp.finfo(jnp.float32).eps)
        return jnp.where(known, jnp.stack([last, mean, square, count]), state)

    def bound(state: Array) -> jax.Array:
        k = jnp.maximum(state[3] - SEEN, 0.0) + 2
        # This is the closed form of `noise.level`, which takes small differences.
        level = noise.RATE * jnp.log(2.0) / (k * jnp.log(k) ** 2)
        freedom = jnp.maximum(state[3] - 1, 1.0)
        t = jnp.sqrt(freedom * jnp.expm1(2 * jnp.log(1 / level) / freedom))
        allowed = usual(state) * jnp.exp(jnp.maximum(jnp.log(SPIKE_FACTOR), t * jnp.sqrt(2 * state[2])))
        return jnp.where(state[3] >= SEEN, allowed, 0.0)

    return Coefficient((0.0, 0.0, 0.0, 0.0), bound, adapt)


def gradient_spike(metrics: dict[str, Array]) -> jax.Array:
    """Returns whether the gradient is far larger than usual."""
    bound = metrics["grad_norm/bound"]
    return (bound > 0) & (metrics["grad_norm"] > bound)


def sampler_mismatch(metrics: dict[str, Array]) -> jax.Array:
    """Returns whether the samples are of other weights, with the bounds of the rule of this name.

    It judges the weights of tokens before the correction cuts them: cut ones have no large mean.
    """
    mean, square = metrics["importance/raw_mean"], metrics["importance/raw_square"]
    low, high = MEAN_WEIGHT
    return (mean < low) | (mean > high) | (mean**2 < SAMPLE_SIZE * square)


# Reasons to skip an update, decided on the device: metrics of the update -> bool.
SKIPS: dict[str, Callable[[dict[str, Array]], jax.Array]] = {
    "gradient_spike": gradient_spike,
    "sampler_mismatch": sampler_mismatch,
}


class Lowers(NamedTuple):
    """What each rollback makes of the learning rate: it is multiplied, and a new warm-up begins."""

    learning_rate: float  # factor
    warmup_steps: int  # optimizer steps

    def applied_to(self, rate: Coefficient) -> Coefficient:
        """Returns the rate with a state (state of `rate`, factor, updates since the last rollback)."""

        def value(state: Array) -> jax.Array:
            warm = jnp.minimum((state[2] + 1) / (self.warmup_steps + 1), 1.0)
            return rate.value(state[0]) * state[1] * warm

        def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
            return jnp.stack([rate.adapt(state[0], metrics), state[1], state[2] + 1])

        return Coefficient((0.0, 1.0, float(self.warmup_steps)), value, adapt)

    def after(self, rollbacks: int, state: Array) -> jax.Array:
        """Returns the state of a rate right after a rollback, the run's number `rollbacks`."""
        return state.at[1].set(self.learning_rate**rollbacks).at[2].set(0.0)


def scheduled(coef: float, *, decay: Decay, end: float, total_steps: int, warmup: int = 0) -> Coefficient:
    """Returns a coefficient that follows `schedule`. Its state counts the updates that were not skipped."""
    value = schedule(coef, decay=decay, end=end, total_steps=total_steps, warmup=warmup)
    return Coefficient(0.0, value, lambda state, metrics: state + 1)


def adaptive_kl(coef: float, sequences: int, *, target: Positive, horizon: AtLeastOne = 10_000) -> Coefficient:
    """Returns a KL coefficient under proportional control (arXiv 1909.08593).

    coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) sequences / horizon), after each update of `sequences`
    sequences. KL is the metric kl/ref, the mean of `kl.unbiased_estimator` over tokens.
    """

    def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
        return state * (1 + jnp.clip(metrics["kl/ref"] / target - 1, -0.2, 0.2) * sequences / horizon)

    return Coefficient(coef, lambda state: state, adapt)


def adaptive_entropy(coef: float, *, target: Positive, step: Positive, most: Positive) -> Coefficient:
    """Returns an entropy coefficient that keeps the entropy near a target (arXiv 2505.22312).

    It is c if the entropy of the last update was at most the target, else 0. c grows by `step` after an update with
    entropy at most the target, and otherwise shrinks by `step`. It stays in [0, `most`].
    """

    def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
        low = metrics["entropy"] <= target
        return jnp.stack([jnp.clip(state[0] + jnp.where(low, step, -step), 0.0, most), low.astype(jnp.float32)])

    return Coefficient((coef, 1.0), lambda state: state[0] * state[1], adapt)


def decayed(params: PyTree) -> PyTree:
    """Returns True for parameters with weight decay: matrices, but not norms, biases or the embedding."""
    matrices = ("/kernel", "/lora_a", "/lora_b")
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith(matrices), params)


def make_optimizer(
    total_steps: int,
    more: Mapping[str, Coefficient] | None = None,
    skips: tuple[str, ...] = (),
    lowers: Lowers | None = None,
    *,
    learning_rate: Positive,
    warmup_steps: Count,
    warmup_ratio: Share,
    decay: Decay,
    end: NotNegative,
    clip_norm: NotNegative,
    weight_decay: NotNegative,
    b1: Momentum,
    b2: Momentum,
    eps: Positive,
    momentum_dtype: Literal["float32", "bfloat16"] = "float32",
    gradient_dtype: Literal["float32", "bfloat16"] = "float32",
) -> Optimizer:
    """Returns AdamW with global-norm clipping (0: none); `more` are the coefficients of the objective.

    momentum_dtype: dtype of the mean of gradients. The mean of squared gradients stays in float32, because in bfloat16
    a b2 close to 1 would add nothing to it. gradient_dtype: dtype of the sum of gradients over micro-batches.
    A non-finite gradient changes no parameter and no coefficient. The state counts it in `total_notfinite`.
    skips: names of SKIPS, further reasons to skip an update. lowers: the learning rate after a rollback, None if the
    run does no rollback.
    """
    warmup = count_warmup(total_steps, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
    rate = scheduled(learning_rate, decay=decay, end=end, total_steps=total_steps, warmup=warmup)
    chain = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    # Rate 1, because `update_step` multiplies by the rate: it depends on metrics, which optax does not see.
    chain.append(
        optax.adamw(1.0, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed, mu_dtype=momentum_dtype)
    )
    # The limit is out of reach, because optax would apply a non-finite gradient after max_consecutive_errors.
    transform = optax.apply_if_finite(optax.chain(*chain), max_consecutive_errors=2**31 - 1)
    rate = lowers.applied_to(rate) if lowers else rate
    return Optimizer(transform, {"learning_rate": rate} | dict(more or {}), gradient_dtype, skips, lowers)
