"""What if: the updates of a replayed step, made once with the settings of the run and once with other ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.advantages import TURN_INPUTS
from jaxrl_llm.algorithms.credit import make_credit
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.build import Parts, make_objective, policy_learner
from jaxrl_llm.config.load import override
from jaxrl_llm.config.sections import sections
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.learner.scorers import States, score_columns
from jaxrl_llm.learner.settings import COLUMNS
from jaxrl_llm.learner.update import LearnerParameters
from jaxrl_llm.machine import transfers
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.session.record import update_metrics
from jaxrl_llm.structs import Array, PyTree, TrainState
from jaxrl_llm.tools.replay.observer import StepObserver, observed
from jaxrl_llm.tools.replay.record import UpdateOutcome, WhatIf
from jaxrl_llm.tools.report.runs import read_config

# Fields that decide about an update, but not about its samples: sections, or fields of other sections.
CHANGEABLE = ("loss.", "kl.", "entropy.", "advantage.", "importance.", "mask.", "aggregate.", "optim.")
CHANGEABLE += ("reward.weights", "reward.overlong_tokens", "health.skip")
IN_SAMPLES = ("mask.truncated",)  # fields of these sections that cannot be changed, because sampling applies them


@dataclass(frozen=True)
class ComparedRecipes:
    """The settings of a run, and those that a what-if compares with them."""

    own: Recipe
    other: Recipe
    changes: dict[str, str]


class MadeUpdates(NamedTuple):
    """The updates of a step."""

    step: int
    states: States  # states after the updates
    updates: list[dict[str, Array]]  # metrics of each update


def read_changes(folder: Path, changes: Mapping[str, str]) -> ComparedRecipes:
    """Reads the config of a run in a folder, and the same config with changed fields: {field: value as text}.

    Raises: UserError, if a field decides about the samples, or needs numbers that the run did not compute.
    """
    config, changed = read_config(folder), sections(read_config(folder))
    for name, text in changes.items():
        if name.startswith(IN_SAMPLES) or not f"{name}.".startswith(CHANGEABLE):
            raise UserError(
                f"--change {name}={text}: this field decides which samples a step has, and --change compares updates "
                f"on the same samples: change {', '.join(CHANGEABLE).replace('.,', ',')}"
            )
        section, _, field = name.rpartition(".")
        if field == "name":  # another function has other arguments, so the section is made anew
            del changed[section]
            changed.section_named(section)
    for name, text in changes.items():
        override(changed, name, text)
    # The other settings may use only columns that the run has computed for this step.
    own, other = recipes.read(config), recipes.read(changed)
    missing = (other.columns - own.columns) & {*COLUMNS, "values", "greedy_rewards", *TURN_INPUTS}
    if missing:
        raise UserError(
            f"--change {', '.join(changes)}: this setting needs {', '.join(sorted(missing))}, which the run does not "
            "compute: choose another value"
        )
    return ComparedRecipes(own, other, dict(changes))


def compare_settings(
    parts: Parts, learning: Learning, compared: ComparedRecipes, observer: StepObserver, made: MadeUpdates
) -> WhatIf:
    """Makes the updates of a replayed step with other settings, and compares them with those of the run.

    learning: learning of the run. observer: observer of the replayed step, which has kept its inputs. made: updates of
    the replayed step.
    """
    # The learning of the run is copied with the objective, optimizer and credit assignment of the other settings.
    policy, other = learning.learners["policy"], compared.other
    parameters = LearnerParameters(policy.shapes.params, dict, policy.base)
    learner = policy_learner(other, learning.mesh, make_objective(other, parts.model), parameters)
    changed_learning = replace(
        learning,
        learners=learning.learners | {"policy": replace(learner, frozen_steps=policy.frozen_steps)},
        assign_credit=make_credit(other.credit, learning.mesh),
        kl_in_reward=other.credit.kl is not None,
    )
    # The updates start from the states and the samples of the replayed step.
    states = observer.states | {"policy": converted_state(observer.states["policy"], compared, learner.shapes)}
    changed_observer = StepObserver(changed_learning, parts.model, with_gradient=True)
    changed = make_updates(observed(changed_learning, changed_observer), states, observer.credit_inputs, made.step)
    # The two changes of the parameters are compared by the cosine of the angle between them.
    initial_params = observer.states["policy"].params
    own_change, other_change = (
        jax.tree.map(np.subtract, transfers.to_host(updates.states["policy"].params), initial_params)
        for updates in (made, changed)
    )
    norms = np.sqrt(product(own_change, own_change) * product(other_change, other_change))
    return WhatIf(
        changes=compared.changes,
        own=outcome(parts, learning, observer, made),
        other=outcome(parts, changed_learning, changed_observer, changed),
        cosine=float(product(own_change, other_change) / norms) if norms else 0.0,
    )


def product(one: PyTree, other: PyTree) -> float:
    """Returns the scalar product of two trees of arrays."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return float(sum(np.vdot(np.float64(x), np.float64(y)) for x, y in pairs))


def converted_state(state: TrainState, compared: ComparedRecipes, shapes: TrainState) -> TrainState:
    """Returns the policy's state, on the host, for the optimizer of other settings, whose state has these shapes.

    A coefficient whose first value differs between the settings starts with its new value.
    """
    own, other = compared.own.optimizer.coefficients, compared.other.optimizer.coefficients
    coef_state = {
        name: state.coef_state[name]
        if name in own and own[name].start == coefficient.start
        else np.asarray(coefficient.start, np.float32)
        for name, coefficient in other.items()
    }
    # The structure depends on clip_norm, but the arrays do not.
    arrays, shapes_of_arrays = jax.tree.leaves(state.opt_state), jax.tree.leaves(shapes.opt_state)
    arrays = [array.astype(shape.dtype) for array, shape in zip(arrays, shapes_of_arrays, strict=True)]
    opt_state = jax.tree.unflatten(jax.tree.structure(shapes.opt_state), arrays)
    return TrainState(state.params, opt_state, coef_state)


def make_updates(learning: Learning, host_states: States, credit_inputs: tuple[Any, ...], step: int) -> MadeUpdates:
    """Makes the updates of a step. host_states: states of the learners before them, on the host."""
    shapes: PyTree = learning.device_shapes()
    shardings = jax.tree.map(lambda x: x.sharding, {name: shapes[name] for name in host_states})
    # The updates donate these arrays, which therefore must not share memory with the arrays on the host.
    states, updates = jax.device_put(host_states, shardings, may_alias=False), []
    sampled, scores, rewards, _ = credit_inputs  # the last one holds coefficients of the run's settings
    batch, _ = learning.assign_credit(sampled, scores, rewards, learning.coefficients(states))
    for rows in learning.minibatches(step):
        states, metrics = learning.update(states, batch, rows, step)
        updates.append(metrics)
    return MadeUpdates(step, states, updates)


def outcome(parts: Parts, learning: Learning, observer: StepObserver, made: MadeUpdates) -> UpdateOutcome:
    """Returns metrics, KL divergence and gradients of updates. observer: observer of these updates."""
    score = score_columns(parts.model, learning.sampling, learning.mesh, learning.sizes.microbatch, "logprobs")
    batch = transfers.shard_batch(observer.batch, learning.mesh)
    mask = observer.batch.loss_mask
    before, after = observer.columns(), transfers.to_host(score(learning.policy(made.states), batch))
    # The divergence compares the policy before and after the updates on the trained tokens.
    kl = k3(*(jnp.asarray(columns["logprobs"][mask]) for columns in (before, after)))
    metrics = update_metrics(transfers.to_host(made.updates))
    return UpdateOutcome(
        metrics={name: float(value) for name, value in metrics.items()},
        kl_after=float(kl.mean()),
        gradient=observer.gradient,
    )
