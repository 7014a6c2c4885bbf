"""All that scores and learns in a step: the models of a run, as its config combines them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import kl, losses
from jaxrl_llm.algorithms.credit import Credit, CreditFn, make_credit
from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import arguments, resolve
from jaxrl_llm.learner import optim, update
from jaxrl_llm.learner.critic import make_critic
from jaxrl_llm.learner.packing import Packing, packed_shapes
from jaxrl_llm.learner.scorers import FROZEN, Frozen, Scorer, States, make_frozen_scorer, make_scorers
from jaxrl_llm.learner.update import ALL_LEARN, Base, Learner, Parameters
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.shapes import MOST, RATES, TRAINING, Book, Shape
from jaxrl_llm.models import hf, peft
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.structs import Array, Config, PyTree, Totals


@dataclass(frozen=True)
class Models:
    """The models of a run, as their folders describe them. Their weights are not read."""

    config: Config
    totals: Totals
    mesh: Mesh
    folder: Path  # of the policy
    model: Decoder
    others: dict[str, Path]  # section of the config -> folder of that other model
    lora: Lora | None  # the policy's adapters, if only they learn


def describe_models(config: Config, totals: Totals, mesh: Mesh, folder: Path, *, weights: bool = True) -> Models:
    """Finds the models of a config, whose policy is in `folder`. weights: False, if no weights will be read.

    Raises: UserError, for a folder or a model that cannot be used.
    """
    sections = [name for name in ("critic", *FROZEN) if name in config and config[name].path]
    others = {name: hf.find(config[name].path, f"{name}.path", weights=weights) for name in sections}
    parts = config.model.row_parts if "loss" in config else 1  # `sft` has one completion of each prompt
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat, row_parts=parts)
    lora = peft.make_lora(model, **config.lora) if "lora" in config else None
    return Models(config, totals, mesh, folder, model, others, lora)


def policy_parameters(models: Models, params: Callable[[], PyTree], base: PyTree) -> Parameters:
    """Returns what the policy learns: adapters of `base`, or all that params() gives."""
    if not (lora := models.lora):
        return Parameters(models.model.shapes(), params, ALL_LEARN)
    config, mesh = models.config, models.mesh
    first = partial(peft.first_adapters, lora, config.lora.path, config.seed, mesh)
    return Parameters(lora.shapes, first, Base(base, lora.combine))


class Reference(NamedTuple):
    """The KL anchor: the first values of the policy's parameters that learn."""

    copy: Callable[[PyTree], PyTree]  # from the policy at the start of the run
    load: Callable[[], PyTree]  # from the folder, if the policy has learned since
    shapes: PyTree
    moves: bool  # towards the policy, so checkpoints hold it


class Learning(NamedTuple):
    """The parts of a step that compute with models, in the order in which they run."""

    sampling: Sampling
    scorers: dict[str, Scorer]
    assign_credit: CreditFn
    learners: dict[str, Learner]
    reference: Reference | None

    def states(self) -> States:
        """Returns the states that a checkpoint holds, as shapes with shardings."""
        states: States = {name: learner.shapes for name, learner in self.learners.items()}
        return states | ({"reference": self.reference.shapes} if self.reference and self.reference.moves else {})

    def all_states(self) -> States:
        """Returns the states that the devices hold, as shapes with shardings."""
        return self.states() | ({"reference": self.reference.shapes} if self.reference else {})


def make_learning(
    models: Models,
    params: Callable[[], PyTree],
    frozen: dict[str, Frozen],
    base: PyTree,
    *,
    credit: Credit,
    own_samples: bool,
    exact: bool,
) -> Learning:
    """Combines scorers, credit and learners.

    params() gives the policy's first parameters, if all of them learn; base: those beside its adapters. frozen: other
    models, by section. own_samples: the weights that sample are those at the start of the step. exact: sampler and
    trainer also compute the same log-probabilities, to the rounding of float32.
    """
    config, mesh, model = models.config, models.mesh, models.model
    sampling = Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    aggregate = partial(losses.aggregation_weights, **config.aggregate)
    learns = policy_parameters(models, params, base)
    required, updates = credit.estimator.inputs, credit.updates
    scorers = make_scorers(config, model, sampling, mesh, required, updates=updates, exact=exact, base=learns.base)
    learners = {"policy": make_policy(models, learns, sampling, aggregate, off_policy=not own_samples)}
    for name, other in frozen.items():
        scorers[name] = make_frozen_scorer(name, other, config.microbatch, sampling, mesh)
    if "critic" in config:
        critic, shared = models.others.get("critic", models.folder), models.lora and not config.critic.path
        schedule = models.totals.critic_updates
        learner, scorers["critic"] = make_critic(
            config, critic, mesh, aggregate, updates=schedule, shared=learns if shared else None
        )
        learners = {"critic": learner} | learners  # first: it learns before the policy
    reference = make_reference(models, learners["policy"], learns)
    return Learning(sampling, scorers, make_credit(credit, mesh), learners, reference)


def make_policy(
    models: Models, learns: Parameters, sampling: Sampling, aggregate: Callable[[Array], Array], *, off_policy: bool
) -> Learner:
    """Builds the policy's learner; off_policy: another engine or older weights may have sampled."""
    config, totals = models.config, models.totals
    objective = update.policy_objective(
        models.model,
        resolve(config.loss.name, losses)(**arguments(config.loss)),
        sampling,
        kl=resolve(config.kl.estimator, kl) if config.kl.placement == "loss" else None,
        kl_weighted=config.kl.weighted,
        correct=make_importance_weights(off_policy=off_policy, dtype=config.model.dtype, **config.importance),
        off_policy=config.mask.off_policy,
        routed=models.model.cfg.mixture is not None,
    )
    adaptive = {"kl/to_reward": config.adaptive_warmup.kl_to_reward, "update_size": config.adaptive_warmup.update_size}
    more = optim.objective_coefficients(config, totals.scheduled_updates, totals.sequences_per_update)
    back = config.health.rollback
    lowers = optim.Lowers(back.learning_rate, back.warmup_steps) if back.rules else None
    acts = dict(adaptive=adaptive, more=more, skips=config.health.skip, lowers=lowers)
    learner = update.make_learner(
        objective,
        optim.make_optimizer(totals.scheduled_updates, **acts, **config.optim),
        mesh=models.mesh,
        microbatch=config.microbatch,
        aggregate=aggregate,
        **learns._asdict(),
    )
    return replace(learner, frozen_steps=config.critic.warmup_steps if "critic" in config else 0, lowers=lowers)


def make_reference(models: Models, policy: Learner, learns: Parameters) -> Reference | None:
    """Returns the KL anchor. If it never moves, it has the dtypes of a model that never learns.

    None: there is none, or it is the base of the policy's new adapters, without them.
    """
    config, model, shapes = models.config, models.model, policy.shapes.params
    moves = config.kl.refresh_every > 0
    if config.kl.placement == "none" or (models.lora and not (moves or config.lora.path)):
        return None
    if models.lora:
        copy_all = jax.jit(lambda adapters: jax.tree.map(jnp.copy, adapters))
        return Reference(copy_all, learns.params, shapes, moves)
    if not moves:
        of = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)  # noqa: E731
        shapes = jax.tree.map(of, shapes, model.used_dtypes(shapes))

    # A copy also where no dtype changes, because the first update donates the policy's parameters.
    @jax.jit
    def copy(params: PyTree) -> PyTree:
        copied = jax.tree.map(jnp.copy, params)
        return copied if moves else model.as_used(copied)

    load = partial(hf.load_params, models.folder, model, models.mesh, learns=moves)
    return Reference(copy, load, shapes, moves)


def make_packing(models: Models, learning: Learning, book: Book) -> Packing:
    """Returns the packing of completions into rows, in the shapes of the run."""
    config, cfg, scorers, learners = models.config, models.model.cfg, learning.scorers, learning.learners
    rates, devices = RATES[models.mesh.devices.flat[0].platform], models.mesh.devices.size
    limit = config.rollout.max_completion_tokens
    weights, active = models.model.size(), models.model.size(active=True)
    programs = sum(isinstance(x.program, jax.stages.Wrapped) for x in scorers.values()) + len(learners)
    passes = programs - len(learners) + 3 * config.epochs * len(learners)  # an update is three times a forward pass

    shards, size = sharding.prompt_shards(models.mesh), jnp.dtype(cfg.dtype).itemsize
    at_once = config.microbatch or config.prompts_per_update

    def seconds(shape: Shape, prompt_tokens: int, parts: np.ndarray) -> float:
        rows, width = shape
        of_weights = 2 * active * (prompt_tokens + rows * width)
        of_attention = 4 * cfg.layers * cfg.heads * cfg.head_dim * rows * width * (width + prompt_tokens)
        each = at_once * (of_weights + of_attention) / rates.flops / devices + weights * size / rates.bandwidth
        microbatches = math.ceil(parts.reshape(shards, -1).sum(axis=1).max() / (at_once // shards))
        return passes * microbatches * each

    shapes, price = packed_shapes(config.group_size, limit), (programs + 2 * len(learners)) * rates.compile
    ladder = book.ladder(TRAINING, shapes, price=price, limit=MOST[TRAINING])
    return Packing(ladder, seconds, limit)
