"""All that scores and learns in a step: the models of a run, and what is made of them."""

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
from jaxrl_llm.learner.update import ALL_LEARN, Base, Learner, Parameters
from jaxrl_llm.machine import keys, sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import LEARNING, MOST, RATES, Book, Shape, abstract
from jaxrl_llm.models import hf, peft
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.decoder import TOWER, Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import AnyArray, Array, Batch, PyTree, Sizes, TrainState

# (policy, reference, share of the policy) -> the reference, moved towards the policy.
mixed = jax.jit(optax.incremental_update, donate_argnums=1)


@dataclass(frozen=True)
class Models:
    """The models of a run, as their folders describe them. Their weights are not read."""

    mesh: Mesh
    folder: Path  # of the policy
    model: Decoder
    others: dict[str, Path]  # section of the config -> folder of that other model
    adapters: Adapters | None  # the policy's, if only they learn
    frozen_tower: bool = False  # without adapters: all parameters of the policy learn but those of its tower

    @property
    def parts(self) -> list[str]:
        """The parts of the policy's tree that learn, where no adapters do."""
        return [name for name in self.model.shapes if name != TOWER or not self.frozen_tower]


def describe_models(
    start: ModelSettings,
    adapters: Call | None,
    paths: Mapping[str, str],
    mesh: Mesh,
    folder: Path,
    *,
    weights: bool = True,
) -> Models:
    """Finds the models of a run, whose policy is in `folder`.

    adapters: kind of adapters, None if all parameters learn. paths: folders or hub ids of the other models, by section;
    "" = no model. weights: whether weights will be read. Raises: UserError, if a folder or model cannot be used.
    """
    others = {name: hf.find_checkpoint(path, f"{name}.path", weights=weights) for name, path in paths.items() if path}
    model = hf.load_model(
        folder, mesh, family=start.family, dtype=start.dtype, remat=start.remat, row_parts=start.row_parts
    )
    if start.family and model.cfg.family != start.family:
        why = f"this package reads model_type {model.cfg.family!r} of model.path"
        raise UserError(f"config.model.family = {start.family!r} does nothing: {why}; set it to ''")
    return Models(
        mesh=mesh,
        folder=folder,
        model=model,
        others=others,
        adapters=model.adapters(adapters()) if adapters else None,
        frozen_tower=start.vision == "frozen" and not adapters,
    )


def load_beside(models: Models) -> PyTree:
    """Loads the policy's parameters that do not learn; None: all do. Raises: UserError, as `hf.load_params`."""
    if models.adapters:
        return hf.load_base(models.folder, models.model, models.mesh, models.adapters)
    if models.frozen_tower:
        return hf.load_params(models.folder, models.model, models.mesh, learns=False, parts=(TOWER,))
    return None


def policy_parameters(models: Models, params: Callable[[], PyTree], base: PyTree, seed: int) -> Parameters:
    """Returns what the policy learns: adapters of `base`, or all parameters that params() returns.

    base: parameters that do not learn, None if all learn. seed: seed of new adapters.
    """
    if not (adapters := models.adapters):
        shapes = models.model.shapes
        beside = Base(base, lambda tower, learned: {**learned, **tower}) if models.frozen_tower else ALL_LEARN
        return Parameters({name: shapes[name] for name in models.parts}, params, beside)
    place = sharding.shardings(adapters.shapes, models.mesh)

    def first() -> PyTree:
        if path := adapters.kind.path:
            return jax.device_put(peft.load(Path(path).expanduser(), adapters), place)
        # Made where they stay: no process holds all of them.
        return jax.jit(adapters.init, out_shardings=place)(keys.key(seed))

    return Parameters(adapters.shapes, first, Base(base, adapters.combine))


class Reference(NamedTuple):
    """The KL anchor: the first values of the policy's parameters that learn."""

    copy: Callable[[PyTree], PyTree]  # from the policy at the start of the run
    load: Callable[[], PyTree]  # from the folder, if the policy has learned since
    shapes: PyTree
    refresh: RefreshSettings | None  # its moves towards the policy; None: it never moves, and no checkpoint holds it


@dataclass
class Learning:
    """All that computes with models in a step, in the order in which it runs."""

    mesh: Mesh
    sampling: Sampling
    scorers: dict[str, Scorer]
    assign_credit: CreditFn
    kl_in_reward: bool  # credit needs the coefficient of the KL penalty
    learners: dict[str, Learner]
    reference: Reference | None
    on_host: HostMemory
    sizes: Sizes
    seed: int

    def shapes(self) -> States:
        """Returns the states that a checkpoint holds, as shapes with shardings."""
        states: States = {name: learner.shapes for name, learner in self.learners.items()}
        moves = self.reference and self.reference.refresh
        return states | ({"reference": self.reference.shapes} if self.reference and moves else {})

    def all_shapes(self) -> States:
        """Returns the states that the devices hold, as shapes with shardings."""
        return self.shapes() | ({"reference": self.reference.shapes} if self.reference else {})

    def held(self, frozen: Iterable[str], base: PyTree) -> States:
        """Returns all that the devices hold: these states, and what never learns.

        frozen: names of models that never learn; base: the parameters beside adapters; None: there are none.
        """
        states = self.all_shapes() | {name: self.scorers[name].params({}) for name in frozen}
        return states | ({"base": base} if base else {})

    def first(self) -> States:
        """Returns the states at step 0."""
        states: States = {name: learner.init() for name, learner in self.learners.items()}
        return states | ({"reference": self.reference.copy(states["policy"].params)} if self.reference else {})

    def restored(self, states: States, attempt: int) -> States:
        """Returns the states of a checkpoint with what it leaves out.

        attempt: how often the run has gone back, if it has just done so; else 0.
        """
        if self.reference and "reference" not in states:  # it never moves, so checkpoints leave it out
            states = states | {"reference": self.reference.load()}
        if attempt:
            learners = self.learners.items()
            states = states | {name: learner.after_rollback(states[name], attempt) for name, learner in learners}
        return self.put_away(states)

    def policy(self, states: States) -> PyTree:
        """Returns all parameters of the policy, as its model takes them."""
        return self.learners["policy"].all_parameters(states["policy"])

    def score(self, states: States, batch: Batch) -> dict[str, Array]:
        """Returns the columns [B, G, C] of all scorers."""
        return {name: x for scorer in self.scorers.values() for name, x in scorer.score(states, batch).items()}

    def coefficients(self, states: States) -> dict[str, Array]:
        """Returns the policy's coefficients for the next update, if credit needs one."""
        return self.learners["policy"].coefficients(states["policy"]) if self.kl_in_reward else {}

    def minibatches(self, step: int) -> list[AnyArray]:
        """Returns the rows of each update of a step."""
        return list(minibatches(self.sizes, self.seed, step))

    def update(self, states: States, batch: Batch, rows: AnyArray, step: int) -> tuple[States, dict[str, Array]]:
        """Runs an optimizer step of each learner that learns in `step`. Donates the states. Also returns metrics."""
        metrics: dict[str, Array] = {}
        for name, learner in self.learners.items():
            if step > learner.frozen_steps:
                state, measured = learner.update(states[name], batch, rows)
                states, metrics = states | {name: state}, metrics | measured
        return states, metrics

    def settled(self, states: States, step: int) -> States:
        """Returns the states after the updates of `step`. Moves the reference towards the policy if that is due."""
        refresh = self.reference and self.reference.refresh
        if refresh and step % refresh.every == 0:
            reference = sharding.move(states["reference"], sharding.DEVICE)
            states = states | {"reference": mixed(states["policy"].params, reference, refresh.mix)}
        return self.put_away(states)

    def put_away(self, states: States) -> States:
        """Moves to the host's memory what `on_host` names. Scorers and learners bring it back to use it."""
        if self.on_host.reference and "reference" in states:
            states = states | {"reference": sharding.move(states["reference"], sharding.HOST)}
        if self.on_host.optimizer:
            away = {name: sharding.move(states[name].opt_state, sharding.HOST) for name in self.learners}
            states = states | {name: replace(states[name], opt_state=opt_state) for name, opt_state in away.items()}
        return states

    def compile(self, book: Book, states: States, plain: Batch, batch: Batch, rows: AnyArray) -> None:
        """Compiles scoring and learning for the shape of this batch, and for ordered shapes in the background.

        plain: the batch that is scored. batch: the batch of an update on `rows`.
        Raises: UserError, if a program does not fit the memory.
        """
        states, plain, batch, rows = abstract((states, plain, batch, rows))

        def compile(shape: Shape) -> None:
            for program in self.programs(states, plain, batch, rows, shape):
                program.compile()

        book.ready(LEARNING, batch.packed_index.shape[2:], compile)
        book.compile_ahead(LEARNING, compile)

    def programs(self, states: States, plain: Batch, batch: Batch, rows: AnyArray, shape: Shape) -> Iterator[Program]:
        """Yields the programs of scoring and learning for packed rows of a shape; the other arguments may be shapes."""
        packed_shape = index_shape(self.sizes.group_size, self.sizes.max_completion_tokens, shape)
        index = jax.ShapeDtypeStruct((len(plain.prompts), *packed_shape), jnp.int32, sharding=plain.prompts.sharding)
        text = f", {shape[0]} rows of {shape[1]} a prompt"
        for name, scorer in self.scorers.items():
            if program := scorer.described(f"{name}{text}", states, replace(plain, packed_index=index)):
                yield program
        for name, learner in self.learners.items():
            yield learner.described(text, states[name], replace(batch, packed_index=index), rows)


def make_reference(
    models: Models, policy: Learner, learns: Parameters, refresh: RefreshSettings | None
) -> Reference | None:
    """Returns the KL anchor. If it never moves, it has the dtypes of a model that never learns.

    None: it is the base of the policy's new adapters, without them.
    """
    model, shapes, moves = models.model, policy.shapes.params, refresh is not None
    if models.adapters and not (moves or models.adapters.kind.path):
        return None
    if models.adapters:
        copy_all = jax.jit(lambda adapters: jax.tree.map(jnp.copy, adapters))
        return Reference(copy_all, learns.params, shapes, refresh)
    if not moves:

        def with_dtype(shape: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, dtype, sharding=shape.sharding)

        shapes = jax.tree.map(with_dtype, shapes, model.compute_dtypes(shapes))

    # Arrays whose dtype stays are copied too, because the first update donates the policy's parameters.
    @jax.jit
    def copy(params: PyTree) -> PyTree:
        copied = jax.tree.map(jnp.copy, params)
        return copied if moves else model.cast_for_compute(copied)

    load = partial(hf.load_params, models.folder, model, models.mesh, learns=moves, parts=models.parts)
    return Reference(copy, load, shapes, refresh)


def resident(states: PyTree, on_host: HostMemory, *, learns: bool = False) -> PyTree:
    """Returns the states that are on the devices while nothing uses the others. learns: while learners learn."""
    if on_host.reference:  # only what learns, and the base of its adapters, stays
        states = {name: x for name, x in states.items() if isinstance(x, TrainState) or name == "base"}
    if learns or not on_host.optimizer:
        return states
    return {name: replace(x, opt_state=()) if isinstance(x, TrainState) else x for name, x in states.items()}


def make_packing(models: Models, learning: Learning, book: Book) -> Packing:
    """Returns the packing of completions into rows, in the shapes of the run."""
    cfg, scorers, learners, sizes = models.model.cfg, learning.scorers, learning.learners, learning.sizes
    rates, devices = RATES[models.mesh.devices.flat[0].platform], models.mesh.devices.size
    limit = sizes.max_completion_tokens
    weights, active = models.model.size(), models.model.size(active=True)
    programs = sum(isinstance(x.program, jax.stages.Wrapped) for x in scorers.values()) + len(learners)
    passes = programs - len(learners) + 3 * sizes.epochs * len(learners)  # an update is three times a forward pass

    shards, size, at_once = sharding.prompt_shards(models.mesh), jnp.dtype(cfg.dtype).itemsize, sizes.at_once

    def seconds(shape: Shape, prompt_tokens: int, parts: np.ndarray) -> float:
        rows, width = shape
        matrices = 2 * active * (prompt_tokens + rows * width)
        attention = 4 * cfg.layers * cfg.heads * cfg.head_dim * rows * width * (width + prompt_tokens)
        each = at_once * (matrices + attention) / rates.flops / devices + weights * size / rates.bandwidth
        microbatches = math.ceil(parts.reshape(shards, -1).sum(axis=1).max() / (at_once // shards))
        return passes * microbatches * each

    shapes, price = packed_shapes(sizes.group_size, limit), (programs + 2 * len(learners)) * rates.compile
    ladder = book.ladder(LEARNING, shapes, price=price, limit=MOST)
    return Packing(ladder, seconds, limit)
