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
from jaxrl_llm.learner.optim import SKIPS, LearningRateBackoff, Optimizer
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN, Program
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, Batch, PyTree, TrainState


class FrozenBase(NamedTuple):
    """The parameters of a model that do not learn. By default all parameters learn."""

    params: PyTree = None  # arrays, or shapes with shardings
    combine: Callable[[PyTree, PyTree], PyTree] = lambda base, learned: learned  # (frozen, learned) -> all parameters


ALL_LEARN = FrozenBase()


class LearnerParameters(NamedTuple):
    """The parameters of a learner, as arguments of `make_learner`."""

    shapes: PyTree  # shapes of the parameters that learn
    params: Callable[[], PyTree]  # returns the first values of the parameters that learn
    base: FrozenBase


@dataclass(frozen=True)
class Learner:
    """How one model learns: its update step and its settings. The training loop holds the state, a `TrainState`."""

    update_step: jax.stages.Wrapped  # (state, batch, rows, base) -> state, metrics; donates the state
    shapes: TrainState  # shapes, dtypes and shardings of the state
    init: Callable[[], TrainState]  # returns the state at step 0
    coefficients: Callable[[TrainState], Metrics]  # state -> coefficients of the next update
    gradient: Callable[[int], GradientFn]  # (prompts of a micro-batch) -> gradient function of an update, not jitted
    objective: Objective  # loss per token, which updates minimize
    aggregate: Callable[[Array], Array]  # loss mask -> weights of the tokens in the loss
    prefix: str = ""  # prefix of its metric names
    frozen_steps: int = 0  # number of first steps of the run without updates of this learner
    # Lowers the learning rate after a rollback; None if the run never rolls back.
    backoff: LearningRateBackoff | None = None
    base: FrozenBase = ALL_LEARN  # parameters that do not learn; the TrainState holds only those that learn

    def all_parameters(self, state: TrainState) -> PyTree:
        """Returns all parameters of the model without copying them. state: state of the learner, or its shapes."""
        return self.base.combine(self.base.params, state.params)

    def program_of(self, text: str, state: TrainState, batch: Batch, rows: Array) -> Program:
        """Returns the program of `update` for batches of this shape. All arguments may be shapes.

        text: end of the program's name.
        """
        trace = partial(self.update_step.trace, state, batch, rows, self.base.params)
        return Program("update", f"the {self.prefix}update{text}", trace, REMEDY, (state, self.base.params))

    def update(self, state: TrainState, batch: Batch, rows: Array) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step on the prompts batch[rows]. Donates the state. Also returns metrics."""
        state, metrics = self.update_step(transfers.move(state, transfers.DEVICE), batch, rows, self.base.params)
        return state, {f"{self.prefix}{name}": x for name, x in metrics.items()}

    def after_rollback(self, state: TrainState, rollbacks: int) -> TrainState:
        """Returns the state of a checkpoint to which the run has just rolled back.

        rollbacks: number of rollbacks of the run, including this one.
        """
        if not self.backoff:
            return state
        rate = self.backoff.state_after(rollbacks, state.coef_state["learning_rate"])
        return replace(state, coef_state=state.coef_state | {"learning_rate": rate})


def coefficients(optimizer: Optimizer, state: TrainState) -> Metrics:
    """Computes the coefficients of the next update."""
    return {name: coef.value(state.coef_state[name]) for name, coef in optimizer.coefficients.items()}


# The only metric of an objective that is not a value per token: the `ExpertLoad` of experts by the trained tokens.
LOAD = "router/load"
TRAINED = "tokens/trained"  # number of tokens over which the other metrics of an update are means
BALANCE = "router/balance_coef"  # coefficient of the load-balance loss, which is a loss of the whole batch

# (parameters, batch, coefficients) -> loss per token [B, G, C], and metrics: arrays [B, G, C] or [B, G, 1], and LOAD.
Objective: TypeAlias = Callable[[PyTree, Batch, Metrics], tuple[Array, dict[str, Any]]]
# (parameters, batch, coefficients, frozen parameters) -> gradient, and metrics of the whole batch.
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
    """Returns `objective(params, batch, coefs)` -> loss per token [B, G, C], and metrics.

    The loss is w loss_fn + coefs["kl/coef"] kl - coefs["entropy/coef"] H. The weight w is 0 outside of
    `batch.policy_mask`, and 0 for completions that `on_policy_mask` leaves out. Elsewhere it is the importance weight
    of `correct`.
    kl: estimator of `algorithms.kl`, None for no KL term. kl_weighted: whether the ratio pi / pi_old multiplies the KL
    term, which makes its gradient unbiased off-policy (arXiv 2512.02556). off_policy: threshold of `on_policy_mask`,
    0 = no completion is left out.
    """
    correct = correct or make_importance_weights()

    def objective(params: PyTree, batch: Batch, coefs: Metrics) -> tuple[Array, Metrics]:
        """Returns the loss per token [B, G, C] of a batch, and the metrics. coefs: value of each coefficient."""
        load: Any  # typed as Any, because among the metrics it takes the place of an array
        (logprobs, entropy), load = completion_logprobs_and_load(model, params, batch, sampling)
        old = old_logprobs(logprobs, batch)
        loss, metrics = loss_fn(logprobs, batch, **batch.columns)
        if batch.policy_mask is not None:
            loss = jnp.where(batch.policy_mask, loss, 0.0)
        if off_policy:
            sampling_logprobs = old if batch.sampler_logprobs is None else batch.sampler_logprobs
            is_on_policy = on_policy_mask(
                logprobs, sampling_logprobs, batch.advantages, batch.loss_mask, threshold=off_policy
            )
            loss = jnp.where(is_on_policy, loss, 0.0)
            metrics |= {"mask/off_policy": jnp.broadcast_to(1.0 - is_on_policy, loss.shape)}
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
            is_good = batch.advantages > 0
            metrics |= {"tokens/good": is_good.astype(jnp.float32), "logprobs/good": jnp.where(is_good, logprobs, 0.0)}
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
    base: FrozenBase = ALL_LEARN,
) -> Learner:
    """Returns the learner of a model.

    shapes: shapes of the parameters that learn. params(): returns the first values of these parameters. microbatch:
    prompts of a micro-batch, 0 = all prompts; every value gives the same gradient, to rounding. aggregate: maps the
    loss mask to the weights of tokens in the loss, as `aggregation_weights` does. base: parameters that do not learn,
    of which updates compute no gradients.
    """

    # Each call makes new arrays, because updates donate them, and a run that rolls back to its start needs them again.
    def coef_state() -> dict[str, np.ndarray]:
        return {name: np.asarray(coef.start, np.float32) for name, coef in optimizer.coefficients.items()}

    def state_of(params: PyTree) -> TrainState:
        return TrainState(params, optimizer.transform.init(params), coef_state())

    def with_sharding(shape: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    state_shapes = jax.eval_shape(state_of, shapes)
    placed = sharding.shardings(state_shapes, mesh)
    state_shapes = jax.tree.map(with_sharding, state_shapes, placed)
    gradient = partial(
        make_gradient, objective, mesh, aggregate=aggregate, dtype=optimizer.gradient_dtype, combine=base.combine
    )

    def init() -> TrainState:
        first_params = params()
        # out_shardings keep the optimizer state sharded, so that no device ever holds all of it.
        opt_state = jax.jit(optimizer.transform.init, out_shardings=placed.opt_state)(first_params)
        return TrainState(first_params, opt_state, jax.device_put(coef_state(), placed.coef_state))

    step = make_update_step(gradient(microbatch), optimizer, mesh, placed)
    coefs = jax.jit(partial(coefficients, optimizer))
    return Learner(
        update_step=step,
        shapes=state_shapes,
        init=init,
        coefficients=coefs,
        gradient=gradient,
        objective=objective,
        aggregate=aggregate,
        backoff=optimizer.backoff,
        base=base,
    )


def make_update_step(gradient: GradientFn, optimizer: Optimizer, mesh: Mesh, placed: TrainState) -> jax.stages.Wrapped:
    """Returns `update_step(state, batch, rows, base) -> state, metrics`: one optimizer step on batch[rows].

    It is jitted over the mesh, and donates the state. placed: shardings of the state. The metrics are means over the
    trained tokens of the update; metrics named *_max and *_min are maxima and minima.
    """

    def update_step(state: TrainState, batch: Batch, rows: Array, base: PyTree = None) -> tuple[TrainState, Metrics]:
        place = NamedSharding(mesh, sharding.BATCH)
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], place), batch)
        coefs = coefficients(optimizer, state)
        grads, metrics = gradient(state.params, batch, coefs, base)

        metrics |= coefs | {"grad_norm": optax.global_norm(grads), TRAINED: jnp.sum(batch.loss_mask)}
        # If no token is trained, momentum would still move the parameters. A NaN gradient makes the optimizer skip.
        takes_effect = metrics[TRAINED] > 0
        # If no token is trained, the metrics are empty sums and cannot show a reason to skip.
        skip_reasons = {f"skip/{name}": SKIPS[name](metrics) & takes_effect for name in optimizer.skips}
        for reason in skip_reasons.values():
            takes_effect &= ~reason
        usable_grads = jax.tree.map(lambda grad: jnp.where(takes_effect, grad, jnp.nan), grads)
        updates, opt_state = optimizer.transform.update(usable_grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda change: coefs["learning_rate"] * change, updates)
        metrics |= {"update_norm": optax.global_norm(updates)} | jax.tree.map(jnp.float32, skip_reasons)
        metrics |= {"update_size": metrics["update_norm"] / optax.global_norm(state.params)}
        # The optimizer has skipped the update if the gradient is not finite, which includes the NaN from above.
        finite_state: Any = opt_state
        metrics |= {
            "updates/skipped": finite_state.total_notfinite,
            "updates/skipped_in_a_row": finite_state.notfinite_count,
        }
        if batch.rewards is not None and {"kl/ref", "kl/coef"} <= metrics.keys():
            trained_completions = jnp.maximum(jnp.sum(jnp.any(batch.loss_mask, axis=-1)), 1)
            mean_length = metrics[TRAINED] / trained_completions
            # The mean of no rewards is NaN, which must not reach this metric.
            mean_reward = jnp.maximum(jnp.nan_to_num(jnp.nanmean(jnp.abs(batch.rewards))), 1e-6)
            metrics |= {"kl/to_reward": coefs["kl/coef"] * metrics["kl/ref"] * mean_length / mean_reward}
        # A skipped update must not advance a schedule or an adaptive coefficient.
        has_learned = jnp.isfinite(metrics["grad_norm"]) & takes_effect
        coef_state = {
            name: jnp.where(has_learned, coef.adapt(state.coef_state[name], metrics), state.coef_state[name])
            for name, coef in optimizer.coefficients.items()
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
    """Returns `gradient(params, batch, coefs, base) -> gradient, metrics` of a whole batch, for use inside a program.

    microbatch: prompts of a micro-batch, 0 = all prompts. aggregate: maps the loss mask to the weights of tokens in the
    loss. dtype: dtype of the sum over micro-batches. combine: (frozen, learned) -> all parameters.
    """

    def gradient(params: PyTree, batch: Batch, coefs: Metrics, base: PyTree = None) -> tuple[PyTree, Metrics]:
        # The weights are computed before the split into micro-batches, because their denominators count the tokens of
        # the whole update.
        weights = aggregate(batch.loss_mask)
        metric_weights = MetricWeights.of(batch.loss_mask)
        full_load = full_batch_load(objective, combine(base, params), batch, coefs, microbatch=microbatch, mesh=mesh)

        def loss(
            params: PyTree, part: Batch, weights: Array, metric_weights: MetricWeights
        ) -> tuple[Array, dict[str, Any]]:
            """Returns the loss of a micro-batch, a number, and its metrics. part: prompts of the micro-batch."""
            per_token, metrics = objective(combine(base, params), part, coefs)
            total = jnp.sum(jnp.where(part.loss_mask, per_token * weights, 0.0))
            # A micro-batch may hold only some completions of a prompt, and only these count in its metrics.
            metric_weights = metric_weights.masked(part.loss_mask)
            load: Any = metrics.pop(LOAD, None)
            metrics = {name: reduce_metric(name, values, metric_weights) for name, values in metrics.items()}
            if load is not None and BALANCE in coefs:
                balance = coefs[BALANCE] * balance_loss(load, full_load or jax.lax.stop_gradient(load))
                total, metrics = total + balance, metrics | {"loss/balance": balance}
            return total, metrics | {"loss/total": total} | ({} if load is None else {LOAD: load})

        # `map_reduce` traces this function twice. As a jitted function it is traced only once, and then inlined.
        gradient_of_part = jax.jit(jax.grad(loss, has_aux=True), inline=True)

        def visit(part: Microbatch) -> tuple[PyTree, Metrics]:
            grads, metrics = gradient_of_part(params, part.batch, *part.take((weights, metric_weights)))
            return jax.tree.map(lambda grad: grad.astype(dtype), grads), metrics

        grads, metrics = microbatches.map_reduce(
            batch, visit, join_microbatches, empty_microbatch, microbatch=microbatch, mesh=mesh
        )
        if (load := metrics.pop(LOAD, None)) is not None:
            metrics |= load_metrics(load)
        return jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params), metrics

    return gradient


def full_batch_load(
    objective: Objective, params: PyTree, batch: Batch, coefs: Metrics, *, microbatch: int, mesh: Mesh
) -> ExpertLoad | None:
    """Returns the load of experts by a whole batch, which an additional forward pass computes in micro-batches.

    Returns None if the batch is a single micro-batch, or if the run has no load-balance loss.
    """
    # The load-balance loss is a product of two means over the whole batch, so a sum over micro-batches would differ.
    count, _ = microbatches.split(batch, microbatch, mesh)
    if BALANCE not in coefs or (isinstance(count, int) and count == 1):
        return None
    load_of_part = jax.jit(lambda params, part: objective(params, part, coefs)[1][LOAD], inline=True)
    load = microbatches.map_reduce(
        batch, lambda part: load_of_part(params, part.batch), microbatch=microbatch, mesh=mesh
    )
    return jax.lax.stop_gradient(load)


class MetricReduction(NamedTuple):
    """How a metric is reduced over the tokens of a micro-batch, and combined over micro-batches."""

    reduce: Callable[[Array], Array]  # values of the tokens -> number of the micro-batch
    combine: Callable[[Array, Array], Array]  # numbers of two micro-batches -> number of both
    identity: float  # number of a micro-batch without tokens


SUM = MetricReduction(jnp.sum, jnp.add, 0.0)
# Suffix of the metric's name -> reduction; all other metrics are weighted sums.
METRIC_REDUCTIONS = {
    "_max": MetricReduction(jnp.max, jnp.maximum, -jnp.inf),
    "_min": MetricReduction(jnp.min, jnp.minimum, jnp.inf),
}


def reduction_of(metric_name: str) -> MetricReduction:
    """Returns the reduction of a metric, which the end of its name decides."""
    return METRIC_REDUCTIONS.get(metric_name[-4:], SUM)


class MetricWeights(NamedTuple):
    """Weights in the mean of a metric: of trained tokens and of their completions. All other weights are 0."""

    tokens: Array  # [B, G, C], for metrics with a value per token
    completions: Array  # [B, G, 1], for metrics with a value per completion

    @classmethod
    def of(cls, loss_mask: Array) -> MetricWeights:
        """Returns the weights of an update with the loss mask [B, G, C]."""
        completions = jnp.max(aggregation_weights(loss_mask, mode="sequence_sum"), axis=-1, keepdims=True)
        return cls(aggregation_weights(loss_mask, mode="token_mean"), completions)

    def masked(self, mask: Array) -> MetricWeights:
        """Returns the weights of the tokens in a mask [B, G, C] and of their completions. All other weights are 0."""
        has_token = jnp.any(mask, axis=-1, keepdims=True)
        return MetricWeights(jnp.where(mask, self.tokens, 0.0), jnp.where(has_token, self.completions, 0.0))


def reduce_metric(name: str, values: Array, metric_weights: MetricWeights) -> jax.Array:
    """Reduces a metric of the tokens [B, G, C], or of the completions [B, G, 1], of a micro-batch.

    Returns the micro-batch's term of the mean, or its maximum or minimum, as the metric's name says.
    """
    reduction = reduction_of(name)
    weights = metric_weights.completions if values.shape[-1] == 1 else metric_weights.tokens
    terms = values * weights if reduction is SUM else values
    return reduction.reduce(jnp.where(weights > 0, terms, reduction.identity))


def join_microbatches(left: tuple[PyTree, Metrics], right: tuple[PyTree, Metrics]) -> tuple[PyTree, Metrics]:
    """Combines the gradients and metrics of two micro-batches, or of sums over several."""
    (left_gradients, left_metrics), (right_gradients, right_metrics) = left, right
    metrics = {
        name: jax.tree.map(reduction_of(name).combine, left_metric, right_metrics[name])
        for name, left_metric in left_metrics.items()
    }
    return optax.tree.add(left_gradients, right_gradients), metrics


def empty_microbatch(shapes: tuple[PyTree, Metrics]) -> tuple[PyTree, Metrics]:
    """Returns the gradients and metrics of a micro-batch without tokens, of these shapes."""
    gradients, metrics = shapes

    def empty(name: str, metric: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.full(x.shape, reduction_of(name).identity), metric)

    return optax.tree.zeros_like(gradients), {name: empty(name, metric) for name, metric in metrics.items()}
