"""The models of a run, and the scorers and learners that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.credit import CreditFn
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.records import Call
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.packing import Packing, index_shape, minibatches, packed_shapes
from jaxrl_llm.learner.scorers import Scorer, States
from jaxrl_llm.learner.settings import HostMemory, RefreshSettings
from jaxrl_llm.learner.update import ALL_LEARN, FrozenBase, Learner, LearnerParameters
from jaxrl_llm.machine import keys, sharding, transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import LEARNING, MAX_SHAPES, RATES, Shape, ShapeCache, abstract
from jaxrl_llm.models import hf, peft
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.decoder import TOWER, Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import AnyArray, Array, Batch, PyTree, Sizes, TrainState

# (policy, reference, share of the policy) -> the reference, moved towards the policy by this share.
move_reference = jax.jit(optax.incremental_update, donate_argnums=1)


@dataclass(frozen=True)
class Models:
    """The models of a run, as their folders describe them, without weights."""

    mesh: Mesh
    folder: Path  # folder of the policy
    model: Decoder
    other_folders: dict[str, Path]  # section of the config -> folder of its model, except for the policy
    adapters: Adapters | None  # adapters of the policy; None if its parameters learn
    frozen_tower: bool = False  # whether the policy learns all parameters except those of its vision tower

    @property
    def parts(self) -> list[str]:
        """The top-level names in the policy's parameter tree that learn, if it has no adapters."""
        return [name for name in self.model.shapes if name != TOWER or not self.frozen_tower]


def describe_models(
    start: ModelSettings,
    adapter_kind: Call | None,
    paths: Mapping[str, str],
    mesh: Mesh,
    folder: Path,
    *,
    weights: bool = True,
) -> Models:
    """Finds the models of a run. folder: folder of the policy.

    start: config.model. adapter_kind: makes the kind of adapters, None if all parameters learn. paths: folders or hub
    ids of the other models, by section of the config; "" = no model. weights: whether the run will read weights, so
    that folders must have them. Raises: UserError, if a folder or model cannot be used.
    """
    other_folders = {
        name: hf.find_checkpoint(path, f"config.{name}.path", weights=weights) for name, path in paths.items() if path
    }
    model = hf.load_model(
        folder, mesh, family=start.family, dtype=start.dtype, remat=start.remat, row_parts=start.row_parts
    )
    if start.family and model.cfg.family != start.family:
        raise UserError(
            f"config.model.family = {start.family!r} has no effect, because the model in model.path has model_type "
            f"{model.cfg.family!r}, which needs no family of your own; set model.family to ''"
        )
    return Models(
        mesh=mesh,
        folder=folder,
        model=model,
        other_folders=other_folders,
        adapters=model.adapters(adapter_kind()) if adapter_kind else None,
        frozen_tower=start.vision == "frozen" and not adapter_kind,
    )


def load_frozen_base(models: Models) -> PyTree:
    """Loads the policy's parameters that do not learn: the base of adapters, or a frozen vision tower.

    Returns None if all parameters learn. Raises: UserError, if a file of the model cannot be used.
    """
    if models.adapters:
        return hf.load_base(models.folder, models.model, models.mesh, models.adapters)
    if models.frozen_tower:
        return hf.load_params(models.folder, models.model, models.mesh, learns=False, parts=(TOWER,))
    return None


def policy_parameters(models: Models, load_learned: Callable[[], PyTree], base: PyTree, seed: int) -> LearnerParameters:
    """Returns the policy's parameters: which of them learn, and their first values.

    If the policy has adapters, only the adapters learn. load_learned(): returns the first values of the parameters
    that learn; it is not called for a policy with adapters. base: parameters that do not learn, None if all learn.
    seed: seed of new adapters.
    """
    if not (adapters := models.adapters):
        shapes = models.model.shapes
        # If the vision tower is frozen, `base` holds only the tower, and the text model learns.
        frozen_base = (
            FrozenBase(base, lambda tower, learned: {**learned, **tower}) if models.frozen_tower else ALL_LEARN
        )
        return LearnerParameters({name: shapes[name] for name in models.parts}, load_learned, frozen_base)
    place = sharding.shardings(adapters.shapes, models.mesh)

    def first_adapters() -> PyTree:
        """Returns the adapters with which a run begins: those in the folder of the config, or new ones."""
        if path := adapters.kind.path:
            return jax.device_put(peft.load(Path(path).expanduser(), adapters), place)
        # The adapters are made sharded, so that no process holds all of them.
        return jax.jit(adapters.init, out_shardings=place)(keys.key(seed))

    return LearnerParameters(adapters.shapes, first_adapters, FrozenBase(base, adapters.combine))


class Reference(NamedTuple):
    """The KL anchor: the policy's learned parameters as they were at the start of the run."""

    copy: Callable[[PyTree], PyTree]  # policy's parameters at the start of the run -> reference
    load: Callable[[], PyTree]  # loads the reference from the folder, for a resumed run
    shapes: PyTree
    refresh: RefreshSettings | None  # None if the reference never moves; then checkpoints leave it out


@dataclass(kw_only=True)
class TrainedModels:
    """The scorers and learners of a run of `train` or `sft`, and the states of their models."""

    mesh: Mesh
    scorers: dict[str, Scorer]
    learners: dict[str, Learner]  # in the order of their updates: critic, then policy
    reference: Reference | None  # None if no scorer needs it, or if it is the base of new adapters

    def shapes(self) -> States:
        """Returns the shapes and shardings of the states that a checkpoint holds."""
        states: States = {name: learner.shapes for name, learner in self.learners.items()}
        moves = self.reference and self.reference.refresh
        return states | ({"reference": self.reference.shapes} if self.reference and moves else {})

    def device_shapes(self) -> States:
        """Returns the shapes and shardings of the states on the devices, including a reference that never moves."""
        return self.shapes() | ({"reference": self.reference.shapes} if self.reference else {})

    def initial_states(self) -> States:
        """Returns the states at step 0."""
        states: States = {name: learner.init() for name, learner in self.learners.items()}
        return states | ({"reference": self.reference.copy(states["policy"].params)} if self.reference else {})

    def complete_restored(self, states: States, attempt: int) -> States:
        """Adds to the states of a checkpoint what the checkpoint leaves out, a reference that never moves.

        attempt: number of rollbacks of the run if it has just rolled back, else 0. A rollback lowers learning rates.
        """
        if self.reference and "reference" not in states:
            states = states | {"reference": self.reference.load()}
        if attempt:
            learners = self.learners.items()
            states = states | {name: learner.after_rollback(states[name], attempt) for name, learner in learners}
        return states

    def policy(self, states: States) -> PyTree:
        """Returns all parameters of the policy, in the form that its model applies."""
        return self.learners["policy"].all_parameters(states["policy"])


@dataclass(kw_only=True)
class Learning(TrainedModels):
    """Scoring, credit and updates of a step of `train`, on the states of all models."""

    sampling: Sampling
    assign_credit: CreditFn
    kl_in_reward: bool  # whether credit needs the coefficient of the KL penalty
    on_host: HostMemory
    sizes: Sizes
    seed: int

    def all_device_arrays(self, frozen: Iterable[str], base: PyTree) -> States:
        """Returns all arrays of models on the devices: the states of the run, and the parameters that never learn.

        frozen: names of the models that never learn. base: parameters of the policy that do not learn, None if all
        learn.
        """
        states = self.device_shapes() | {name: self.scorers[name].params({}) for name in frozen}
        return states | ({"base": base} if base else {})

    def complete_restored(self, states: States, attempt: int) -> States:
        """Completes the states of a checkpoint, and offloads the arrays that `on_host` names."""
        return self.offload(super().complete_restored(states, attempt))

    def score(self, states: States, batch: Batch) -> dict[str, Array]:
        """Returns the columns of all scorers: {name: [B, G, C]}."""
        return {name: x for scorer in self.scorers.values() for name, x in scorer.score(states, batch).items()}

    def coefficients(self, states: States) -> dict[str, Array]:
        """Returns the policy's coefficients for the next update, or {} if credit needs none."""
        return self.learners["policy"].coefficients(states["policy"]) if self.kl_in_reward else {}

    def minibatches(self, step: int) -> list[AnyArray]:
        """Returns the indices of the prompts of each update of a step."""
        return list(minibatches(self.sizes, self.seed, step))

    def update(self, states: States, batch: Batch, rows: AnyArray, step: int) -> tuple[States, dict[str, Array]]:
        """Runs one update of each learner that learns in `step`. Donates the states. Also returns metrics.

        rows: indices of the update's prompts in the batch.
        """
        metrics: dict[str, Array] = {}
        for name, learner in self.learners.items():
            if step > learner.frozen_steps:
                state, update_metrics = learner.update(states[name], batch, rows)
                states, metrics = states | {name: state}, metrics | update_metrics
        return states, metrics

    def finish_step(self, states: States, step: int) -> States:
        """Finishes the updates of `step`: moves the reference if that is due, and offloads. Returns the new states."""
        refresh = self.reference and self.reference.refresh
        if refresh and step % refresh.every == 0:
            reference = transfers.move(states["reference"], transfers.DEVICE)
            states = states | {"reference": move_reference(states["policy"].params, reference, refresh.mix)}
        return self.offload(states)

    def offload(self, states: States) -> States:
        """Moves the arrays that `on_host` names to the host's memory. Scorers and learners move them back for use."""
        if self.on_host.reference and "reference" in states:
            states = states | {"reference": transfers.move(states["reference"], transfers.HOST)}
        if self.on_host.optimizer:
            opt_states = {name: transfers.move(states[name].opt_state, transfers.HOST) for name in self.learners}
            states = states | {name: replace(states[name], opt_state=x) for name, x in opt_states.items()}
        return states

    def compile(self, shape_cache: ShapeCache, states: States, unscored: Batch, batch: Batch, rows: AnyArray) -> None:
        """Compiles scoring and learning for this batch's shape, and in the background for the shapes that come next.

        unscored: batch before scoring and credit. batch: batch of an update on the prompts with the indices `rows`.
        Raises: UserError, if a program does not fit the memory.
        """
        states, unscored, batch, rows = abstract((states, unscored, batch, rows))

        def compile(shape: Shape) -> None:
            for program in self.programs(states, unscored, batch, rows, shape):
                program.compile()

        shape_cache.ensure_compiled(LEARNING, batch.packed_index.shape[2:], compile)
        shape_cache.compile_ahead(LEARNING, compile)

    def programs(
        self, states: States, unscored: Batch, batch: Batch, rows: AnyArray, shape: Shape
    ) -> Iterator[Program]:
        """Yields the programs of scoring and updates for packed rows of a shape.

        unscored: batch before scoring and credit. batch: batch of an update on the prompts `rows`. All may be shapes.
        """
        packed_shape = index_shape(self.sizes.group_size, self.sizes.max_completion_tokens, shape)
        index = jax.ShapeDtypeStruct(
            (len(unscored.prompts), *packed_shape), jnp.int32, sharding=unscored.prompts.sharding
        )
        text = f", {shape[0]} rows of {shape[1]} a prompt"
        for name, scorer in self.scorers.items():
            if program := scorer.program_of(f"{name}{text}", states, replace(unscored, packed_index=index)):
                yield program
        for name, learner in self.learners.items():
            yield learner.program_of(text, states[name], replace(batch, packed_index=index), rows)


def make_reference(
    models: Models, policy: Learner, parameters: LearnerParameters, refresh: RefreshSettings | None
) -> Reference | None:
    """Returns the reference of the KL penalty, None if the base of the policy's new adapters is the reference.

    refresh: how the reference follows the policy, None if it never moves. A reference that never moves has the dtypes
    of a model that never learns.
    """
    model, shapes, follows_policy = models.model, policy.shapes.params, refresh is not None
    if models.adapters and not (follows_policy or models.adapters.kind.path):
        return None
    # The output shardings of copies are explicit, because the compiler would otherwise write equal shardings in another
    # form, and scoring would be another program than the one that is compiled ahead.
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    if models.adapters:
        copy_all = jax.jit(lambda adapters: jax.tree.map(jnp.copy, adapters), out_shardings=shardings)
        return Reference(copy_all, parameters.params, shapes, refresh)
    if not follows_policy:

        def with_dtype(shape: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, dtype, sharding=shape.sharding)

        shapes = jax.tree.map(with_dtype, shapes, model.compute_dtypes(shapes))

    # Arrays that keep their dtype are copied too, because the first update donates the policy's parameters.
    @partial(jax.jit, out_shardings=shardings)
    def copy(params: PyTree) -> PyTree:
        copied = jax.tree.map(jnp.copy, params)
        return copied if follows_policy else model.cast_for_compute(copied)

    load = partial(hf.load_params, models.folder, model, models.mesh, learns=follows_policy, parts=models.parts)
    return Reference(copy, load, shapes, refresh)


def device_states(states: PyTree, on_host: HostMemory, *, during_updates: bool = False) -> PyTree:
    """Returns the states that are on the devices while a program runs that needs no offloaded state.

    states: all states. on_host: states that are offloaded to the host's memory. during_updates: whether the program is
    an update, for which the state of the optimizer is on the devices.
    """
    if on_host.reference:
        # Only the learners' states and the base of adapters stay on the devices.
        states = {name: x for name, x in states.items() if isinstance(x, TrainState) or name == "base"}
    if during_updates or not on_host.optimizer:
        return states
    return {name: replace(x, opt_state=()) if isinstance(x, TrainState) else x for name, x in states.items()}


def make_packing(models: Models, learning: Learning, shape_cache: ShapeCache) -> Packing:
    """Returns the packing of completions into rows, which chooses the row shapes with the fewest estimated seconds."""
    cfg, scorers, learners, sizes = models.model.cfg, learning.scorers, learning.learners, learning.sizes
    rates, devices = RATES[models.mesh.devices.flat[0].platform], models.mesh.devices.size
    limit = sizes.max_completion_tokens
    # In a model with experts, only a part of the parameters computes on a token.
    parameters, active_parameters = models.model.size(), models.model.size(active=True)
    scoring_passes = sum(isinstance(scorer.program, jax.stages.Wrapped) for scorer in scorers.values())
    # An update costs three forward passes.
    forward_passes = scoring_passes + 3 * sizes.epochs * len(learners)

    shards, itemsize, microbatch = sharding.prompt_shards(models.mesh), jnp.dtype(cfg.dtype).itemsize, sizes.at_once

    def seconds(shape: Shape, prompt_tokens: int, parts: np.ndarray) -> float:
        """Estimates the seconds of scoring and updates with packed rows of this shape.

        parts: number of micro-batches that each prompt is in.
        """
        rows, width = shape
        # The matrix products have a multiplication and an addition for each parameter and token.
        matrix_flops = 2 * active_parameters * (prompt_tokens + rows * width)
        # Attention has two products for each pair of a token and a token that it may see.
        pairs = cfg.layers * cfg.heads * rows * width * (width + prompt_tokens)
        flops = matrix_flops + 2 * 2 * cfg.head_dim * pairs
        computing_seconds = microbatch * (flops / rates.flops + pairs / rates.scores) / devices
        reading_seconds = parameters * itemsize / rates.bandwidth
        microbatch_seconds = computing_seconds + reading_seconds
        microbatches = math.ceil(parts.reshape(shards, -1).sum(axis=1).max() / (microbatch // shards))
        return forward_passes * microbatches * microbatch_seconds

    shapes = packed_shapes(sizes.group_size, limit)
    # An update compiles as long as three forward passes (`RATES`).
    compile_seconds = (scoring_passes + 3 * len(learners)) * rates.compile
    shape_policy = shape_cache.policy(LEARNING, shapes, compile_seconds=compile_seconds, limit=MAX_SHAPES)
    return Packing(shape_policy, seconds, limit)
