"""The optimizer, the learning rate and the coefficients of loss terms, with optax. Schedules count updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import AtLeastOne, Count, Field, NotNegative, Positive, Share
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import noise
from jaxrl_llm.health.rules.bounds import MEAN_WEIGHT, SAMPLE_SIZE, SPIKE_FACTOR
from jaxrl_llm.machine.sharding import path_name
from jaxrl_llm.structs import Array, PyTree

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    import optax

Decay: TypeAlias = Literal["constant", "linear", "cosine"]
Momentum: TypeAlias = Annotated[float, Field(float, low=0, high=0.9999)]


def count_warmup(total_steps: int, *, warmup_steps: int, warmup_ratio: float, section: str = "optim") -> int:
    """Returns the number of warm-up updates, from warmup_steps or warmup_ratio in a section of the config.

    Raises: UserError, if both are set, or if the ratio is not in [0, 1).
    """
    if warmup_steps and warmup_ratio:
        raise UserError(
            f"config.{section}.warmup_steps = {warmup_steps}: {section}.warmup_ratio = {warmup_ratio} sets the warm-up "
            "too; set one of them to 0"
        )
    if not 0 <= warmup_ratio < 1:
        raise UserError(
            f"config.{section}.warmup_ratio = {warmup_ratio}: it must be at least 0 and below 1, because it is a share "
            "of the run"
        )
    return fit_warmup(warmup_steps or round(warmup_ratio * total_steps), total_steps)


def fit_warmup(warmup: int, total_steps: int) -> int:
    """Returns the warm-up updates of a run. If the warm-up does not fit the run, it takes half of the run."""
    return warmup if warmup < total_steps else total_steps // 2


def schedule(peak: float, *, decay: Decay, end: float, total_steps: int, warmup: int = 0) -> optax.Schedule:
    """Returns a schedule: linear warm-up to `peak` over `warmup` steps, then decay to `end` at `total_steps`.

    decay: "constant" stays at `peak`; "linear" and "cosine" end at `end`. Step i of the warm-up has the rate
    peak * (i + 1) / (warmup + 1), so the rate of the first step is above 0.
    """
    import optax

    decay_steps = max(total_steps - warmup, 1)
    if decay == "constant":
        decay_schedule = optax.constant_schedule(peak)
    elif decay == "linear":
        decay_schedule = optax.linear_schedule(peak, end, decay_steps)
    else:
        decay_schedule = optax.cosine_decay_schedule(peak, decay_steps, alpha=end / peak if peak else 0.0)
    if not warmup:
        return decay_schedule
    warmup_schedule = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([warmup_schedule, decay_schedule], [warmup])


class Coefficient(NamedTuple):
    """A learning rate or the coefficient of a loss term, as a function of a state that each update changes."""

    start: float | tuple[float, ...]  # first state; `TrainState.coef_state` holds the current state
    value: Callable[[Array], Any]  # state -> coefficient, a scalar
    adapt: Callable[[Array, dict[str, Array]], Array]  # (state, metrics of an update) -> state; not called if skipped


class Optimizer(NamedTuple):
    """A gradient transformation, and the coefficients that an update needs."""

    transform: optax.GradientTransformation  # its learning rate is 1, because the update multiplies by the rate
    coefficients: dict[str, Coefficient]  # metric name -> "learning_rate" and loss coefficients
    gradient_dtype: str = "float32"  # dtype of the gradients' sum over micro-batches
    skips: tuple[str, ...] = ()  # keys of SKIPS: reasons for which this run skips updates
    backoff: LearningRateBackoff | None = None  # None if the run never rolls back


def constant(coef: float) -> Coefficient:
    """Returns a coefficient that never changes."""
    return Coefficient(coef, lambda state: state, lambda state, metrics: state)


# A gradient norm is compared with the norms of about NORM_WINDOW updates, once MIN_NORMS of them are known.
NORM_WINDOW, MIN_NORMS = 16, 8


def spike_bound() -> Coefficient:
    """Returns the bound of a gradient's norm, above which an update is a spike; 0 while too few norms are known.

    The bound is m exp(max(ln SPIKE_FACTOR, t s)). Skipped updates do not change it.
    m: mean of the last norms or of all norms, whichever is larger. When a task is solved, most batches teach nothing
    and the last norms are near 0.
    s^2: twice the mean square of the positive ln(norm / m), as for a normal distribution without its lower half.
    t: noise exceeds t s at most with this update's part of the probability `noise.RATE`. For a normal x,
    P(x > z) <= exp(-z^2 / 2) (Chernoff). For Student's t with n degrees of freedom, t^2 = n (exp(z^2 / n) - 1)
    (Wallace, Annals of Mathematical Statistics 30, 1959).
    """

    # The state is (mean of the last norms, mean of all norms, mean square of the excess ln(norm / m), number of norms).
    def usual_norm(state: Array) -> jax.Array:
        """Returns m, the larger mean of gradient norms."""
        recent_mean, mean = state[0], state[1]
        return jnp.maximum(jnp.maximum(recent_mean, mean), 1e-12)

    def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
        """Returns the state after an update with this gradient norm."""
        recent_mean, mean, mean_square, count = state
        norm, new_count = metrics["grad_norm"], count + 1
        # The excess is capped at SPIKE_FACTOR, because a norm after mere rounding errors says little about the noise.
        capped_excess = jnp.clip(jnp.log(norm / usual_norm(state)), 0.0, jnp.log(SPIKE_FACTOR))
        excess = jnp.where(new_count > 1, capped_excess, 0.0)
        # An exponential mean of the last norms needs no list of norms, so the state stays four numbers.
        recent_mean = recent_mean + (norm - recent_mean) / jnp.minimum(new_count, NORM_WINDOW)
        mean, mean_square = mean + (norm - mean) / new_count, mean_square + (excess**2 - mean_square) / new_count
        # Norms at the start that are rounding errors are ignored, because any later norm would be a spike compared with
        # them.
        is_informative = (count > 0) | (norm > jnp.finfo(jnp.float32).eps)
        return jnp.where(is_informative, jnp.stack([recent_mean, mean, mean_square, new_count]), state)

    def bound(state: Array) -> jax.Array:
        """Returns the largest gradient norm that noise explains; 0 (no bound) before MIN_NORMS norms."""
        _, _, mean_square, count = state
        test_number = jnp.maximum(count - MIN_NORMS, 0.0) + 2
        # `noise.level` computes the same by a small difference, which float32 cannot hold, so use its closed form.
        level = noise.RATE * jnp.log(2.0) / (test_number * jnp.log(test_number) ** 2)
        freedom = jnp.maximum(count - 1, 1.0)
        t = jnp.sqrt(freedom * jnp.expm1(2 * jnp.log(1 / level) / freedom))
        log_excess_of_noise = t * jnp.sqrt(2 * mean_square)
        allowed = usual_norm(state) * jnp.exp(jnp.maximum(jnp.log(SPIKE_FACTOR), log_excess_of_noise))
        return jnp.where(count >= MIN_NORMS, allowed, 0.0)

    return Coefficient((0.0, 0.0, 0.0, 0.0), bound, adapt)


def gradient_spike(metrics: dict[str, Array]) -> jax.Array:
    """Returns whether the gradient's norm is above `spike_bound`."""
    bound = metrics["grad_norm/bound"]
    return (bound > 0) & (metrics["grad_norm"] > bound)


def sampler_mismatch(metrics: dict[str, Array]) -> jax.Array:
    """Returns whether the samples come from other weights than the trainer's, by the bounds of this health rule.

    It judges the importance weights before the correction clips them, because clipped weights have no large mean.
    """
    mean, square = metrics["importance/raw_mean"], metrics["importance/raw_square"]
    low, high = MEAN_WEIGHT
    return (mean < low) | (mean > high) | (mean**2 < SAMPLE_SIZE * square)


# Reasons to skip an update: name -> function(metrics of the update) -> bool. They run on the device.
SKIPS: dict[str, Callable[[dict[str, Array]], jax.Array]] = {
    "gradient_spike": gradient_spike,
    "sampler_mismatch": sampler_mismatch,
}


class LearningRateBackoff(NamedTuple):
    """Lowers the learning rate at each rollback: multiplies it by a factor, and starts a new warm-up."""

    learning_rate: float  # factor at each rollback
    warmup_steps: int  # updates of the new warm-up

    def with_backoff(self, rate: Coefficient) -> Coefficient:
        """Returns `rate` with backoff. Its state is (state of `rate`, factor, updates since the last rollback)."""

        def value(state: Array) -> jax.Array:
            warmup = jnp.minimum((state[2] + 1) / (self.warmup_steps + 1), 1.0)
            return rate.value(state[0]) * state[1] * warmup

        def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
            return jnp.stack([rate.adapt(state[0], metrics), state[1], state[2] + 1])

        return Coefficient((0.0, 1.0, float(self.warmup_steps)), value, adapt)

    def state_after(self, rollbacks: int, state: Array) -> jax.Array:
        """Returns the state of a rate right after a rollback. rollbacks: number of rollbacks of the run."""
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

    The coefficient is c if the entropy of the last update was at most `target`, else 0. After each update, c grows by
    `step` if the update's entropy was at most `target`, and otherwise shrinks by `step`. c stays in [0, `most`].
    """

    def adapt(state: Array, metrics: dict[str, Array]) -> jax.Array:
        is_low = metrics["entropy"] <= target
        return jnp.stack([jnp.clip(state[0] + jnp.where(is_low, step, -step), 0.0, most), is_low.astype(jnp.float32)])

    return Coefficient((coef, 1.0), lambda state: state[0] * state[1], adapt)


def has_weight_decay(params: PyTree) -> PyTree:
    """Returns True for parameters with weight decay: matrices, without norms, biases and the embedding."""
    matrices = ("/kernel", "/lora_a", "/lora_b")
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith(matrices), params)


def make_optimizer(
    total_steps: int,
    coefficients: Mapping[str, Coefficient] | None = None,
    skips: tuple[str, ...] = (),
    backoff: LearningRateBackoff | None = None,
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
    """Returns AdamW with global-norm clipping. A non-finite gradient changes no parameter and no coefficient.

    total_steps: updates of the run. coefficients: coefficients of the objective, by metric name. skips: keys of SKIPS,
    further reasons to skip an update. backoff: lowers the learning rate after a rollback, None if the run never rolls
    back. clip_norm: largest norm of the gradient, 0 = no clipping. momentum_dtype: dtype of the mean of gradients. The
    mean of squared gradients stays in float32, because in bfloat16 a b2 close to 1 would add nothing to it.
    gradient_dtype: dtype of the gradients' sum over micro-batches.
    """
    import optax

    warmup = count_warmup(total_steps, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
    rate = scheduled(learning_rate, decay=decay, end=end, total_steps=total_steps, warmup=warmup)
    transforms = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    # The rate is 1 here. `update_step` multiplies by the learning rate, which depends on metrics that optax lacks.
    transforms.append(
        optax.adamw(
            1.0, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=has_weight_decay, mu_dtype=momentum_dtype
        )
    )
    # optax would apply a non-finite gradient after max_consecutive_errors, so the limit is out of reach.
    transform = optax.apply_if_finite(optax.chain(*transforms), max_consecutive_errors=2**31 - 1)
    rate = backoff.with_backoff(rate) if backoff else rate
    return Optimizer(transform, {"learning_rate": rate} | dict(coefficients or {}), gradient_dtype, skips, backoff)
