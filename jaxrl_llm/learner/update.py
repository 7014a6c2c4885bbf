"""Updates: the objective of the policy, and the optimizer step. Only this module calls jax.grad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms.balance import ExpertLoad, balance_loss, load_metrics
from jaxrl_llm.algorithms.importance import ImportanceFn, make_importance_weights, on_policy_mask
from jaxrl_llm.algorithms.kl import unbiased_estimator
from jaxrl_llm.algorithms.losses import LossFn, Metrics, aggregation_weights, importance_ratio, old_logprobs
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import microbatches
from jaxrl_llm.learner.forward import REMEDY, completion_logprobs_and_load
from jaxrl_llm.learner.microbatches import Microbatch
from jaxrl_llm.learner.optim import SKIPS, Lowers, Optimizer
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN, Program
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, Batch, PyTree, TrainState


class Base(NamedTuple):
    """The parameters of a model that do not learn, beside those that do. Without any, all parameters learn."""

    params: PyTree = None  # arrays, or shapes with shardings
    combine: Callable[[PyTree, PyTree], PyTree] = lambda base, learned: learned  # -> all parameters


ALL_LEARN = Base()


class Parameters(NamedTuple):
    """The parameters of a learner that learn, and those that do not, as arguments of `make_learner`."""

    shapes: PyTree  # of those that learn
    params: Callable[[], PyTree]  # returns their first values
    base: Base


@dataclass(frozen=True)
class Learner:
    """A model in training. The loop holds its TrainState."""

    update_step: jax.stages.Wrapped  # (state, batch, rows, base) -> state, metrics; donates the state
    shapes: TrainState  # shapes, dtypes and shardings of the state
    init: Callable[[], TrainState]  # returns the state at step 0
    coefficients: Callable[[TrainState], Metrics]  # state -> coefficients of the next update
    gradient: Callable[[int], GradientFn]  # micro-batch size -> the gradient that an update takes, not jitted
    prefix: str = ""  # prefix of its metric names
    frozen_steps: int = 0  # first steps of the run, in which it does not learn
    lowers: Lowers | None = None  # what a rollback makes of its learning rate
    base: Base = ALL_LEARN  # what does not learn; its TrainState holds only what learns

    def all_parameters(self, state: TrainState) -> PyTree:
        """Returns all parameters of the model. Copies nothing; shapes are enough."""
        return self.base.combine(self.base.params, state.params)

    def described(self, text: str, state: TrainState, batch: Batch, rows: Array) -> Program:
        """Returns what `update` runs for batches of this shape; all arguments may be shapes."""
        trace = partial(self.update_step.trace, state, batch, rows, self.base.params)
        return Program("update", f"the {self.prefix}update{text}", trace, REMEDY, (state, self.base.params))

    def update(self, state: TrainState, batch: Batch, rows: Array) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step on batch[rows]. Donates the state."""
        state, metrics = self.update_step(sharding.move(state, sharding.DEVICE), batch, rows, self.base.params)
        return state, {f"{self.prefix}{name}": x for name, x in metrics.items()}

    def after_rollback(self, state: TrainState, rollbacks: int) -> TrainState:
        """Returns the state of a checkpoint right after the run has gone back to it, for the time `rollbacks`."""
        if not self.lowers:
            return state
        rate = self.lowers.after(rollbacks, state.coef_state["learning_rate"])
        return replace(state, coef_state=state.coef_state | {"learning_rate": rate})


def coefficients(optimizer: Optimizer, state: TrainState) -> Metrics:
    """Computes the coefficients of the next update."""
    return {name: c.value(state.coef_state[name]) for name, c in optimizer.coefficients.items()}


# Metric of an objective that is no value per token, but the Load of experts by the trained tokens.
LOAD = "router/load"
TRAINED = "tokens/trained"  # the number of tokens over which the other metrics of an update are means
BALANCE = "router/balance_coef"  # the coefficient of the load-balance loss, which is no loss of a single token

# The metrics are arrays [B, G, C] or [B, G, 1], and the `ExpertLoad` of experts.
Objective: TypeAlias = Callable[[PyTree, Batch, Metrics], tuple[Array, dict[str, Any]]]
GradientFn: TypeAlias = Callable[[PyTree, Batch, Metrics, PyTree], tuple[PyTree, Metrics]]


def policy_objective(
    model: Decoder,
    loss_fn: LossFn,
    sampling: Sampling,
    *,
    kl: Callable[[Array, Array], Array] | None = None,
    kl_weighted: bool = False,
    correct: ImportanceFn | None = None,
    off_policy: float = 0.0,
) -> Objective:
    """Returns `objective(params, batch, coefs)` -> per-token loss and metrics.

    w loss_fn + coefs["kl/coef"] kl - coefs["entropy/coef"] H. kl is an estimator of `algorithms.kl`, or None for no KL
    term. kl_weighted multiplies it by the ratio pi / pi_old, which makes its gradient unbiased off-policy
    (arXiv 2512.02556). w is 0 outside `batch.policy_mask`, and 0 for completions that `on_policy_mask` excludes
    (off_policy is its threshold; 0: none). Elsewhere, w is the importance weight from `correct`.
    """
    correct = correct or make_importance_weights()

    def objective(params: PyTree, batch: Batch, coefs: Metrics) -> tuple[Array, Metrics]:
        # Its place among the metrics is that of an array.
        load: Any
        (logprobs, entropy), load = completion_logprobs_and_load(model, params, batch, sampling)
        old = old_logprobs(logprobs, batch)
        loss, metrics = loss_fn(logprobs, batch, **batch.columns)
        if batch.policy_mask is not None:
            loss = jnp.where(batch.policy_mask, loss, 0.0)
        if off_policy:
            drawn_by = old if batch.sampler_logprobs is None else batch.sampler_logprobs
            stays = on_policy_mask(logprobs, drawn_by, batch.advantages, batch.loss_mask, threshold=off_policy)
            loss = jnp.where(stays, loss, 0.0)
            metrics |= {"mask/off_policy": jnp.broadcast_to(1.0 - stays, loss.shape)}
        if batch.sampler_logprobs is not None:
            gap = jnp.where(batch.loss_mask, jnp.abs(logprobs - batch.sampler_logprobs), 0.0)
            metrics |= {"sampler/gap_mean": gap, "sampler/gap_max": gap}
            weights, mismatch = correct(old, batch.sampler_logprobs, batch.loss_mask)
            loss, metrics = loss * weights, metrics | mismatch
        metrics |= {"loss/policy": loss, "entropy": entropy}
        ref: Array = batch.ref_logprobs
        if ref is not None:
            metrics |= {"kl/ref": unbiased_estimator(sampling)(logprobs, ref)}
        if batch.advantages is not None:
            good = batch.advantages > 0
            metrics |= {"tokens/good": good.astype(jnp.float32), "logprobs/good": jnp.where(good, logprobs, 0.0)}
        if kl is not None:
            term = coefs["kl/coef"] * kl(logprobs, ref)
            if kl_weighted:
                term = term * importance_ratio(logprobs - old)
            loss = loss + term
            metrics |= {"loss/kl": term, "loss/kl_alone": jnp.where(batch.advantages == 0, term, 0.0)}
        if "entropy/coef" in coefs:
            loss = loss - coefs["entropy/coef"] * entropy
            metrics |= {"loss/entropy": -coefs["entropy/coef"] * entropy}
        return loss, metrics | ({} if load is None else {LOAD: load})

    return objective


def make_learner(
    objective: Objective,
    optimizer: Optimizer,
    shapes: PyTree,
    params: Callable[[], PyTree],
    mesh: Mesh,
    *,
    microbatch: int,
    aggregate: Callable[[Array], Array],
    base: Base = ALL_LEARN,
) -> Learner:
    """Returns a learner. params() gives the first values of the parameters that learn, of these shapes.

    An update goes over micro-batches of `microbatch` prompts (0: all at once). Every `microbatch` gives the same
    gradient, to rounding. aggregate maps the loss mask to weights, as `aggregation_weights` does. base: the parameters
    that do not learn; they are neither donated nor differentiated.
    """

    # New arrays at each call: the first update donates them, and a run that goes back to its beginning needs others.
    def coef_state() -> dict[str, np.ndarray]:
        return {name: np.asarray(c.start, np.float32) for name, c in optimizer.coefficients.items()}

    states = jax.eval_shape(lambda p: TrainState(p, optimizer.transform.init(p), coef_state()), shapes)
    placed = sharding.shardings(states, mesh)
    states = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), states, placed)
    gradient = partial(
        make_gradient, objective, mesh, aggregate=aggregate, dtype=optimizer.gradient_dtype, combine=base.combine
    )

    def init() -> TrainState:
        first = params()
        # out_shardings keep the optimizer state sharded: no device ever holds the whole of it.
        opt_state = jax.jit(optimizer.transform.init, out_shardings=placed.opt_state)(first)
        return TrainState(first, opt_state, jax.device_put(coef_state(), placed.coef_state))

    step = make_update_step(gradient(microbatch), optimizer, mesh, placed)
    coefs = jax.jit(partial(coefficients, optimizer))
    return Learner(step, states, init, coefs, gradient, lowers=optimizer.lowers, base=base)


def make_update_step(gradient: GradientFn, optimizer: Optimizer, mesh: Mesh, placed: TrainState) -> jax.stages.Wrapped:
    """Returns `update_step(state, batch, rows, base) -> state, metrics`: one optimizer step on batch[rows].

    It is jitted over the mesh, and donates the state. placed: the shardings of the state.
    Metrics are means over the trained tokens of the whole update; *_max and *_min are maxima and minima.
    """

    def update_step(state: TrainState, batch: Batch, rows: Array, base: PyTree = None) -> tuple[TrainState, Metrics]:
        place = NamedSharding(mesh, sharding.BATCH)
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], place), batch)
        coefs = coefficients(optimizer, state)
        grads, metrics = gradient(state.params, batch, coefs, base)

        metrics |= coefs | {"grad_norm": optax.global_norm(grads), TRAINED: jnp.sum(batch.loss_mask)}
        # Momentum would move the parameters even if no token is trained. NaN makes the optimizer skip such an update.
        takes_effect = metrics[TRAINED] > 0
        # Metrics of no token are sums of nothing: no reason can be seen in them.
        refused = {f"skip/{name}": SKIPS[name](metrics) & takes_effect for name in optimizer.skips}
        for reason in refused.values():
            takes_effect &= ~reason
        usable = jax.tree.map(lambda g: jnp.where(takes_effect, g, jnp.nan), grads)
        updates, opt_state = optimizer.transform.update(usable, state.opt_state, state.params)
        updates = jax.tree.map(lambda x: coefs["learning_rate"] * x, updates)
        metrics |= {"update_norm": optax.global_norm(updates)} | jax.tree.map(jnp.float32, refused)
        metrics |= {"update_size": metrics["update_norm"] / optax.global_norm(state.params)}
        # An update is skipped if the gradient is not finite or no token was trained.
        finite: Any = opt_state
        metrics |= {"updates/skipped": finite.total_notfinite, "updates/skipped_in_a_row": finite.notfinite_count}
        if batch.rewards is not None and {"kl/ref", "kl/coef"} <= metrics.keys():
            length = metrics[TRAINED] / jnp.maximum(jnp.sum(jnp.any(batch.loss_mask, axis=-1)), 1)
            # The mean is NaN if no completion has a verdict, and the bound of the warm-up must not depend on it.
            reward = jnp.maximum(jnp.nan_to_num(jnp.nanmean(jnp.abs(batch.rewards))), 1e-6)
            metrics |= {"kl/to_reward": coefs["kl/coef"] * metrics["kl/ref"] * length / reward}
        # A skipped update must not advance a schedule or an adaptive coefficient.
        learned = jnp.isfinite(metrics["grad_norm"]) & takes_effect
        coef_state = {
            name: jnp.where(learned, c.adapt(state.coef_state[name], metrics), state.coef_state[name])
            for name, c in optimizer.coefficients.items()
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, coef_state), metrics

    return jax.jit(update_step, donate_argnums=0, out_shardings=(placed, None), compiler_options=ROUND_AS_WRITTEN)


def make_gradient(
    objective: Objective,
    mesh: Mesh,
    microbatch: int,
    *,
    aggregate: Callable[[Array], Array],
    dtype: str,
    combine: Callable[[PyTree, PyTree], PyTree] = ALL_LEARN.combine,
) -> GradientFn:
    """Returns `gradient(params, batch, coefs, base) -> gradient, metrics` of the whole batch, for use inside a program.

    microbatch: prompts at a time, 0 = all. dtype: dtype of the sum over micro-batches. combine, base: fields of `Base`.
    """

    def gradient(params: PyTree, batch: Batch, coefs: Metrics, base: PyTree = None) -> tuple[PyTree, Metrics]:
        # The weights are computed before the split into micro-batches, because their denominators count the whole
        # update.
        weights = aggregate(batch.loss_mask)
        shares = Shares.of(batch.loss_mask)
        full_load = full_batch_load(objective, combine(base, params), batch, coefs, microbatch=microbatch, mesh=mesh)

        def loss(params: PyTree, part: Batch, weights: Array, shares: Shares) -> tuple[Array, dict[str, Any]]:
            per_token, metrics = objective(combine(base, params), part, coefs)
            total = jnp.sum(jnp.where(part.loss_mask, per_token * weights, 0.0))
            # A part of a group counts only its own tokens.
            shares = shares.within(part.loss_mask)
            load: Any = metrics.pop(LOAD, None)
            metrics = {name: reduce(name, x, shares) for name, x in metrics.items()}
            if load is not None and BALANCE in coefs:
                balance = coefs[BALANCE] * balance_loss(load, full_load or jax.lax.stop_gradient(load))
                total, metrics = total + balance, metrics | {"loss/balance": balance}
            return total, metrics | {"loss/total": total} | ({} if load is None else {LOAD: load})

        # Inlined into the loop over micro-batches: jitted, so that tracing twice costs one trace.
        gradient_of_part = jax.jit(jax.grad(loss, has_aux=True), inline=True)

        def visit(part: Microbatch) -> tuple[PyTree, Metrics]:
            grads, metrics = gradient_of_part(params, part.batch, *part.take((weights, shares)))
            return jax.tree.map(lambda g: g.astype(dtype), grads), metrics

        grads, metrics = microbatches.over(batch, visit, join, nothing, microbatch=microbatch, mesh=mesh)
        if (load := metrics.pop(LOAD, None)) is not None:
            metrics |= load_metrics(load)
        return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), metrics

    return gradient


def full_batch_load(
    objective: Objective, params: PyTree, batch: Batch, coefs: Metrics, *, microbatch: int, mesh: Mesh
) -> ExpertLoad | None:
    """Returns the load of a whole batch in several micro-batches, from a forward pass of its own.

    None: the load-balance loss does not need it.
    """
    # The loss is a product of two means over the whole batch: parts alone would not add up to it.
    count, _ = microbatches.split(batch, microbatch, mesh)
    if BALANCE not in coefs or (isinstance(count, int) and count == 1):
        return None
    load_of_part = jax.jit(lambda params, part: objective(params, part, coefs)[1][LOAD], inline=True)
    load = microbatches.over(batch, lambda part: load_of_part(params, part.batch), microbatch=microbatch, mesh=mesh)
    return jax.lax.stop_gradient(load)


class Reduction(NamedTuple):
    """How a metric of tokens is reduced, and joined over micro-batches."""

    reduce: Callable[[Array], Array]
    join: Callable[[Array, Array], Array]
    nothing: float  # of no tokens


SUM = Reduction(jnp.sum, jnp.add, 0.0)
REDUCTIONS = {"_max": Reduction(jnp.max, jnp.maximum, -jnp.inf), "_min": Reduction(jnp.min, jnp.minimum, jnp.inf)}


class Shares(NamedTuple):
    """What each trained token, and each completion that has some, counts in the mean of a metric; 0 for all others."""

    tokens: Array  # [B, G, C]
    completions: Array  # [B, G, 1]

    @classmethod
    def of(cls, mask: Array) -> Shares:
        """Returns the shares of an update with the loss mask [B, G, C]."""
        completions = jnp.max(aggregation_weights(mask, mode="sequence_sum"), axis=-1, keepdims=True)
        return cls(aggregation_weights(mask, mode="token_mean"), completions)

    def within(self, mask: Array) -> Shares:
        """Returns the shares of the tokens that a mask has, and of their completions."""
        has_token = jnp.any(mask, axis=-1, keepdims=True)
        return Shares(jnp.where(mask, self.tokens, 0.0), jnp.where(has_token, self.completions, 0.0))


def reduce(name: str, values: Array, shares_of: Shares) -> jax.Array:
    """Reduces a metric of tokens [B, G, C], or of completions [B, G, 1], of a micro-batch.

    Returns its term of the mean, or its maximum or minimum.
    """
    how = REDUCTIONS.get(name[-4:], SUM)
    shares = shares_of.completions if values.shape[-1] == 1 else shares_of.tokens
    terms = values * shares if how is SUM else values
    return how.reduce(jnp.where(shares > 0, terms, how.nothing))


def join(sums: tuple[PyTree, Metrics], more: tuple[PyTree, Metrics]) -> tuple[PyTree, Metrics]:
    """Joins gradients and metrics of micro-batches."""
    joins = {name: REDUCTIONS.get(name[-4:], SUM).join for name in sums[1]}
    metrics = {name: jax.tree.map(joins[name], x, more[1][name]) for name, x in sums[1].items()}
    return optax.tree.add(sums[0], more[0]), metrics


def nothing(shapes: tuple[PyTree, Metrics]) -> tuple[PyTree, Metrics]:
    """Returns gradients and metrics of no tokens, of these shapes."""

    def empty(name: str, metric: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.full(x.shape, REDUCTIONS.get(name[-4:], SUM).nothing), metric)

    return optax.tree.zeros_like(shapes[0]), {name: empty(name, metric) for name, metric in shapes[1].items()}
