"""Observes a step: the numbers of each token in the loss, and the gradient of each completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.completion_gradients import make_completion_gradients
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, Batch, PyTree, TrainState

# Metrics that the loss computes for each token, with the columns of a `StepRecord` that hold them.
COLUMNS = {
    "entropy": "entropy",
    "ratio/mean": "ratio",
    "clip/fraction": "clipped",
    "kl/ref": "kl",
    "sampler/gap_mean": "gap",
    "importance/mean": "weight",
    "mask/off_policy": "masked",
}
# Columns that take the values of the first epoch, because they compare the policy with the sampler. All other columns
# are means over the epochs.
FIRST_EPOCH = ("logprobs", "loss", "gap", "weight")


class StepObserver:
    """Collects what the updates of one step compute. `ObservedLearning` calls `observe` before each update."""

    def __init__(self, learning: Learning, model: Decoder, *, with_gradient: bool, keep_states: bool = False):
        """with_gradient: whether to compute `gradient`. keep_states: whether to keep `states`."""
        self._learners, self._policy, self._mesh = [*learning.learners], learning.learners["policy"], learning.mesh
        microbatch = learning.sizes.microbatch
        self._token_numbers = make_token_numbers(self._policy, model, learning.sampling, learning.mesh, microbatch)
        self._gradients = make_completion_gradients(self._policy, learning.mesh, microbatch) if with_gradient else None
        self._visits = np.zeros(learning.sizes.prompts_per_step)  # number of updates of each prompt, [B]
        self._sums: dict[str, np.ndarray] = {}  # sums over the epochs of each column [B, G, C]
        self.batch: Batch  # batch of the updates on the host, from the first update on
        self.gradient: dict[str, np.ndarray] = {}  # "norm" and "cosine" [B, G]
        self.first_update: list[int] = []  # indices of the prompts of the first update
        self.coefficients: dict[str, float] = {}  # coefficients of the first update
        self.credit_inputs: tuple[Any, ...] = ()  # arguments of the step's credit assignment
        self._keep_states = keep_states
        self.states: States = {}  # states of the learners before the step, on the host

    def observe(self, states: States, batch: Batch, rows: np.ndarray, step: int) -> None:
        """Collects the numbers of an update of the prompts batch[rows], before it changes the states."""
        if self._keep_states and not self.states:
            # The arrays are copied, because an array on the host may share memory with one that an update donates.
            self.states = jax.tree.map(np.array, transfers.to_host({name: states[name] for name in self._learners}))
        state: TrainState = states["policy"]
        # The numbers are computed for the prompts of this update alone.
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        minibatch = jax.device_put(minibatch, NamedSharding(self._mesh, sharding.BATCH))
        coefs = self._policy.coefficients(state)
        numbers = transfers.to_host(self._token_numbers((self._policy.all_parameters(state), coefs), minibatch))
        if not self._sums:  # the first update of the step
            self.batch, self.first_update = transfers.to_host(batch), rows.tolist()
            self.coefficients = {name: float(x) for name, x in transfers.to_host(coefs).items()}
            self._sums = {name: np.zeros(self.batch.loss_mask.shape) for name in numbers}
        is_first_epoch = not self._visits[rows].any()
        for name, values in numbers.items():
            self._sums[name][rows] += values if is_first_epoch or name not in FIRST_EPOCH else 0.0
        # A prompt has one gradient, that of the first epoch. In the steps of a critic's warm-up it has none.
        if self._gradients and is_first_epoch and step > self._policy.frozen_steps:
            self._add_gradient(rows, *self._gradients(state.params, minibatch, coefs, self._policy.base.params))
        self._visits[rows] += 1

    def _add_gradient(self, rows: np.ndarray, whole: Array, norms: Array, products: Array) -> None:
        """Keeps norm and cosine of the gradients of completions.

        rows: prompts of the update. whole: norm of the update's gradient. norms: norms of the completions' gradients.
        products: their scalar products with the update's gradient.
        """
        shape = self.batch.loss_mask.shape[:2]
        self.gradient = self.gradient or {name: np.zeros(shape, np.float32) for name in ("norm", "cosine")}
        whole_norm, norm, product = (np.asarray(x, np.float64) for x in (whole, norms, products))
        self.gradient["norm"][rows] = norm
        self.gradient["cosine"][rows] = product / np.maximum(norm * whole_norm, 1e-30)

    def inputs(self) -> dict[str, np.ndarray]:
        """Returns the further inputs of the loss, as `StepRecord.inputs` holds them."""
        batch = self.batch
        inputs = {f"columns/{name}": x for name, x in batch.columns.items()}
        for field in ("images", "tree"):
            record = getattr(batch, field)
            inputs |= {f"{field}/{name}": x for name, x in vars(record).items()} if record else {}
        return inputs | ({} if batch.policy_mask is None else {"policy_mask": batch.policy_mask})

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the columns of the step [B, G, C]: those of its updates, and those of its batch."""
        batch, epochs = self.batch, self._visits.reshape(-1, 1, 1)
        means = {name: np.float32(x if name in FIRST_EPOCH else x / epochs) for name, x in self._sums.items()}
        columns = means | {"sampler_logprobs": batch.sampler_logprobs, "old_logprobs": batch.old_logprobs}
        columns |= {"ref_logprobs": batch.ref_logprobs, "values": batch.values, "returns": batch.returns}
        if batch.old_logprobs is None:  # the policy before the single update is the old policy
            columns["old_logprobs"] = means["logprobs"]
        if batch.policy_mask is not None:
            left_out = batch.loss_mask & ~batch.policy_mask
            columns["masked"] = np.float32(np.maximum(columns.get("masked", 0.0), left_out))
        return {name: np.asarray(x, np.float32) for name, x in columns.items() if x is not None}


@dataclass(kw_only=True)
class ObservedLearning(Learning):
    """The learning of a run, which shows the inputs of each update to an observer."""

    observer: StepObserver

    def update(self, states: States, batch: Batch, rows: Any, step: int) -> tuple[States, dict[str, Array]]:
        # The observer comes first, because an update donates the states.
        self.observer.observe(states, batch, rows, step)
        return super().update(states, batch, rows, step)


def observed(learning: Learning, observer: StepObserver) -> ObservedLearning:
    """Returns the learning of a run with an observer, which also keeps the arguments of the credit assignment."""

    def assign_credit(*inputs: Any) -> tuple[Batch, dict[str, Array]]:
        observer.credit_inputs = inputs
        return learning.assign_credit(*inputs)

    fields: dict[str, Any] = vars(learning) | {"assign_credit": assign_credit}
    return ObservedLearning(**fields, observer=observer)


def make_token_numbers(
    policy: Learner, model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int
) -> forward.ScoreFn:
    """Returns `numbers((all parameters, coefficients), batch) -> {column: [B, G, C]}`, 0 on untrained tokens.

    The columns are log-probabilities, the loss of each token, and the metrics of the loss in COLUMNS.
    """

    def per_token(inputs: tuple[PyTree, dict[str, Array]], batch: Batch) -> dict[str, jax.Array]:
        params, coefs = inputs
        loss, metrics = policy.objective(params, batch, coefs)
        columns = {column: metrics[name] for name, column in COLUMNS.items() if name in metrics} | {"loss": loss}
        columns["logprobs"], _ = forward.completion_logprobs(model, params, batch, sampling)
        mask = batch.loss_mask
        return {name: jnp.where(mask, jnp.broadcast_to(x, mask.shape), 0.0) for name, x in columns.items()}

    return forward.score_in_microbatches(per_token, mesh, microbatch)
