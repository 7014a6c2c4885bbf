"""Makes the plan of a run on TPUs or GPUs: the memory that its chips hold, and the phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sft
from jaxrl_llm.build import cache_memory, make_learning, stream_sizes
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Learning, Models, describe_models, device_states, make_packing
from jaxrl_llm.learner.programs import example_shapes, learning_programs
from jaxrl_llm.learner.scorers import FrozenModel, frozen_model
from jaxrl_llm.learner.settings import HostMemory
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.machine.meshes import AXES, meshes_over
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.machine.sharding import prompt_shards, shardings
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import TOWER, Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.recipe import fit
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.rollout.jax.cache_attention import page_kind
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.sizes import StreamSizes
from jaxrl_llm.rollout.weights import copy_shapes
from jaxrl_llm.structs import PromptSizes, PyTree, TrainState
from jaxrl_llm.tools.plan.chips import GIB, Chip
from jaxrl_llm.tools.plan.compiler import SAMPLING, Compiler, Phase, StepSampling
from jaxrl_llm.tools.plan.expected import drawn_lengths, expected_usage
from jaxrl_llm.tools.plan.prompts import PlannedPrompt


@dataclass(frozen=True)
class SlicePlan:
    """Plan of a run on a TPU slice or on GPUs: the memory that its chips hold, and the phases of a step."""

    recipe: Recipe | SftRecipe
    models: Models
    holds: dict[str, int]  # bytes on a chip of parameters, optimizer and other arrays, by name
    phases: list[Phase]
    tokens: int  # tokens of the completions of a step; for sft the largest number that its examples can have
    prompts: PlannedPrompt
    stream: StreamSizes | None = None  # sizes of the in-JAX engine on a chip; None for another engine and for sft

    def seconds(self, chip: Chip) -> float:
        """Returns the estimated seconds of a step."""
        # Phases with `meanwhile` run on the sampler's chips while the other phases run, so the slower sum counts.
        seconds_by_meanwhile = {True: 0.0, False: 0.0}
        for phase in self.phases:
            seconds_by_meanwhile[phase.meanwhile] += phase.times * max(phase.seconds(chip).values())
        return max(seconds_by_meanwhile.values())

    def fits(self, chip: Chip) -> bool:
        return not any(phase.error or phase.peak > chip.memory * GIB for phase in self.phases)


def make_plan(
    recipe: Recipe,
    mesh: Mesh,
    prompts: PlannedPrompt,
    dump: Path,
    mean: float = 0.0,
    *,
    sampler_mesh: Mesh | None = None,
    say: Callable[[Phase], None] = lambda phase: None,
    chip: Chip | None = None,
) -> SlicePlan:
    """Compiles the programs of a step, in the shapes of completions that all have their largest length.

    dump: empty folder in which XLA's compiler for TPUs reports the memory of programs; mean: mean tokens of a
    completion, which decides how often the sampler's programs run, 0 = half of the largest length; sampler_mesh: mesh
    of the sampler's own chips, None if the sampler shares `mesh`; say: function that gets each phase after it is
    compiled; chip: chip whose memory bounds the sampler's cache as in a run, None for no bound.
    Raises: UserError, if model or mesh do not suit the recipe. A program that does not fit is no error.
    """
    # All models are shapes with shardings, because the plan compiles programs and never runs them.
    chip_bytes = int(chip.memory * GIB) if chip else 0
    models = _models(recipe, mesh)
    for name, other_folder in models.other_folders.items():
        cfg = hf.load_model(other_folder, family=recipe.model.family).cfg
        fit.check_other_model(f"{name}.path", cfg, models.model.cfg, has_images=prompts.images is not None)
    frozen_models = {name: _frozen(models, name, recipe.model) for name in recipe.frozen}
    base = _base(models)
    learning = make_learning(recipe, models, lambda: None, base, frozen_models.__getitem__)
    states = learning.all_device_arrays(recipe.frozen, base)
    shape_cache, phases = ShapeCache(), list[Phase]()
    # Completions of the largest length decide into how many rows of how many tokens a step is packed.
    packing = make_packing(models, learning, shape_cache)
    length_limit = recipe.rollout.max_completion_tokens
    longest_lengths = np.full((recipe.prompts_per_step, recipe.group_size), length_limit)
    packed_shape = packing(longest_lengths, prompts.width).shape[1:]
    # The sampler gets the key-value cache that it would get in a run.
    own_chips, sampler_mesh = recipe.sampler_devices > 0, sampler_mesh or mesh
    cache_bytes = cache_memory(recipe, models, learning, mesh=sampler_mesh, states=states, memory=chip_bytes)
    stream = stream_sizes(recipe, models, sampler_mesh, prompts.width, cache_bytes)
    sampler = _sampler(models, recipe, sampler_mesh, cache_bytes)
    step_sampling = _step_sampling(recipe, models, learning, stream, sampler_mesh)
    # If the arrays that stay on a chip exceed its memory, no program needs to be compiled.
    learning_holds = _resident_bytes(device_states(states, recipe.host_memory))
    sampling_holds = step_sampling.holds(apart=own_chips) if recipe.chosen_engine.in_trainer else {}
    holds = learning_holds | sampling_holds
    byte_sums = sum(learning_holds.values()), sum(sampling_holds.values())
    if chip_bytes and (max(byte_sums) if own_chips else sum(byte_sums)) > chip_bytes:
        phases.append(Phase("sampling", 1, error="the arrays of sampling alone exceed the memory of a chip"))
        return SlicePlan(recipe=recipe, models=models, holds=holds, phases=phases, tokens=0, prompts=prompts)
    # Drawn completion lengths decide how often each sampling program runs.
    lengths = drawn_lengths(recipe.sizes.sequences_per_step, mean or length_limit / 2, length_limit)
    partial, max_age = recipe.rollout.partial, recipe.rollout.max_age
    usage = expected_usage(stream, lengths, prompt_shards(sampler_mesh), partial=partial, max_age=max_age)
    step_sampling = replace(step_sampling, usage=usage)
    compiler = Compiler(
        models, recipe.sizes, dump=dump, chip=chip, gathered=step_sampling.weights, sampled=step_sampling
    )
    for program in _programs(recipe, learning, sampler, packed_shape[1:], prompts.sizes):
        if step_sampling.leaves_out(program):
            continue
        on_sampler = own_chips and program.phase in SAMPLING
        # If the sampler has its own chips, its arrays take no memory of the chips that learn.
        program = program._replace(other_memory=()) if own_chips else program
        idle_bytes = 0 if on_sampler else _idle_bytes(states, program, recipe.host_memory)
        phase = compiler.measure(program, idle_bytes, packed_shape[0])
        phase = replace(phase, meanwhile=on_sampler and recipe.rollout.max_lag > 0)
        say(phase)
        phases.append(phase)
    shape_cache.close()
    engine_sizes = stream if recipe.chosen_engine.in_trainer else None
    tokens = int(lengths.sum())
    return SlicePlan(recipe, models, holds=holds, phases=phases, tokens=tokens, prompts=prompts, stream=engine_sizes)


def _step_sampling(
    recipe: Recipe, models: Models, learning: Learning, stream: StreamSizes, sampler_mesh: Mesh
) -> StepSampling:
    """Returns the bytes that the sampler works with. Its `usage` is empty, because it depends on completion lengths."""
    policy = learning.learners["policy"]
    params, in_int8 = policy.all_parameters(policy.shapes), recipe.chosen_engine.in_int8
    # The sampler decodes with its own copy of the weights, in the dtype and with the sharding of decoding.
    weight_copy = copy_shapes(models.model, sampler_mesh, models.mesh, params, in_int8=in_int8)
    return StepSampling(
        stream,
        usage={},
        cached=page_kind(sampler_mesh, models.model.cfg, recipe.chosen_engine.cache_dtype).token_bytes,
        weights=device_bytes(weight_copy),
        read=device_bytes({name: leaf for name, leaf in weight_copy.items() if name != TOWER}),
        mesh=sampler_mesh,
    )


def make_sft_plan(
    recipe: SftRecipe,
    mesh: Mesh,
    prompts: PlannedPrompt,
    dump: Path,
    *,
    say: Callable[[Phase], None] = lambda phase: None,
    chip: Chip | None = None,
) -> SlicePlan:
    """Compiles the programs of a step of `sft`, but not those of its evaluations.

    dump: empty folder in which XLA's compiler for TPUs reports the memory of programs. say: function that gets each
    phase after it is compiled. Raises: UserError, if model or mesh do not suit the recipe.
    """
    models, sizes, shape_cache = _models(recipe, mesh), recipe.sizes, ShapeCache()
    base = _base(models)
    learning = sft.make_learning(recipe, models, lambda: None, base, shape_cache)
    states = learning.device_shapes() | ({"base": base} if base else {})
    batch, scores = example_shapes(sizes, prompts.sizes, mesh)
    row_numbers: Any = jax.ShapeDtypeStruct((sizes.prompts_per_step,), jnp.int32)
    # The gathered weights of the layers are as large as a copy of the weights for decoding.
    params = learning.policy(states)
    gathered_bytes = device_bytes(copy_shapes(models.model, mesh, mesh, params, in_int8=False))
    compiler, phases = Compiler(models, sizes, dump, chip, gathered_bytes), list[Phase]()
    for program in learning.programs(batch, scores, row_numbers):
        phases.append(compiler.measure(program, _idle_bytes(states, program, HostMemory())))
        say(phases[-1])
    shape_cache.close()
    tokens = sizes.prompts_per_step * sizes.group_size * sizes.max_completion_tokens
    return SlicePlan(
        recipe=recipe, models=models, holds=_resident_bytes(states), phases=phases, tokens=tokens, prompts=prompts
    )


def _models(recipe: Recipe | SftRecipe, mesh: Mesh) -> Models:
    """Returns the models of a run. Raises: UserError, if model or mesh do not suit the recipe."""
    fit.check_batch_fits_mesh(recipe.sizes, mesh)
    if not recipe.model.path:
        raise UserError("config.model.path = '' must be a model's folder or hub id, because the plan needs its sizes")
    folder = hf.find_checkpoint(recipe.model.path, weights=False)
    models = describe_models(recipe.model, recipe.adapters, recipe.other_paths, mesh, folder, weights=False)
    fit.check_router(recipe, models.model.cfg)
    fit.check_vision(recipe, models.model.cfg)
    return models


def plan_meshes(devices: Sequence[Any], recipe: Recipe | SftRecipe) -> tuple[Mesh, Mesh]:
    """Makes the meshes of trainer and sampler as a run does. Raises: UserError, if they do not fit the devices."""
    mesh, sampler = meshes_over(devices, recipe.sampler_devices, **recipe.mesh)
    if mesh == sampler or mesh.devices.flat[0].platform != "tpu":
        return mesh, sampler

    def from_first(mesh: Mesh) -> Mesh:
        # Without a TPU, the compiler accepts a part of a slice only if the part begins with the first chip.
        return Mesh(np.array(devices[: mesh.size]).reshape(mesh.devices.shape), AXES, axis_types=mesh.axis_types)

    return from_first(mesh), from_first(sampler)


def _frozen(models: Models, name: str, start: ModelSettings) -> FrozenModel:
    """Returns a model that never learns, with the shapes of its parameters."""
    model = frozen_model(name, models.other_folders[name], start, models.mesh)
    params = _compute_shapes(model.shapes, model, models.mesh)
    # A reward model is a decoder and a readout of one score, which every device holds whole.
    if name == "reward_model":
        sharding = NamedSharding(models.mesh, PartitionSpec())

        def replicated(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        params = {"decoder": params, "readout": {"kernel": replicated(model.cfg.width, 1), "bias": replicated(1)}}
    return FrozenModel(model, params)


def _base(models: Models) -> PyTree:
    """Returns the shapes of the parameters that do not learn; None if all parameters learn."""
    shapes = _compute_shapes(models.model.shapes, models.model, models.mesh)
    if not models.adapters:
        return {TOWER: shapes[TOWER]} if models.frozen_tower else None
    shapes = models.adapters.base_shapes(shapes)

    def abstract(x: Any, placement: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)

    return jax.tree.map(abstract, shapes, shardings(shapes, models.mesh))


def _compute_shapes(shapes: PyTree, model: Decoder, mesh: Mesh) -> PyTree:
    """Returns the shapes of parameters that never learn: in the dtypes of computing, with shardings on the mesh."""

    def abstract(x: Any, dtype: Any, placement: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=placement)

    return jax.tree.map(abstract, shapes, model.compute_dtypes(shapes), shardings(shapes, mesh))


def _idle_bytes(states: PyTree, program: Program, on_host: HostMemory) -> int:
    """Returns the bytes of arrays that a chip holds while a program runs, although the program does not use them.

    states: states of all models, as shapes with shardings. on_host: states that are in the host's memory instead.
    """
    # Arrays are compared by identity, because two arrays of equal shape are different memory.
    used = {id(x) for x in jax.tree.leaves(program.states)}
    leaves = jax.tree.leaves(device_states(states, on_host, during_updates=program.phase == "update"))
    return device_bytes([x for x in leaves if id(x) not in used]) + device_bytes(program.other_memory)


def _sampler(models: Models, recipe: Recipe, mesh: Mesh, cache_bytes: int) -> Sampler:
    """Returns the in-JAX engine, which only compiles here, so that any stop token will do."""
    return Sampler(
        models.model,
        mesh,
        trainer_mesh=models.mesh,
        max_completion_tokens=recipe.rollout.max_completion_tokens,
        stop_ids=(1,),
        pad_id=0,
        max_sequences=recipe.chosen_engine.max_sequences,
        pages=recipe.chosen_engine.pages,
        cache_bytes=cache_bytes,
        in_int8=recipe.chosen_engine.in_int8,
        cache_dtype=recipe.chosen_engine.cache_dtype,
        observation_tokens=recipe.observation_tokens,
        drafts=recipe.chosen_engine.drafts,
    )


def _programs(
    recipe: Recipe, learning: Learning, sampler: Sampler, shape: tuple[int, int], prompt_sizes: PromptSizes
) -> Iterator[Program]:
    """Yields the programs of a step: those of the sampler, if it is the in-JAX engine, then scoring and updates.

    shape: (rows, tokens of a row) into which the completions of a prompt are packed.
    """
    policy = learning.learners["policy"]
    sampler_programs = sampler.programs(
        policy.all_parameters(policy.shapes),
        **recipe.sampled._asdict(),
        prompt_sizes=prompt_sizes,
        group_size=recipe.group_size,
        sampling=learning.sampling,
    )
    yield from sampler_programs if recipe.chosen_engine.in_trainer else ()
    yield from learning_programs(learning, [shape], prompt_sizes, recipe.credit.weights)


def _resident_bytes(states: PyTree) -> dict[str, int]:
    """Returns {name: bytes on a chip} of the parameters and optimizer states that stay there between programs."""
    holds = {}
    for name, state in states.items():
        if isinstance(state, TrainState):
            holds[f"{name} parameters"] = device_bytes(state.params)
            holds[f"{name} optimizer"] = device_bytes(state.opt_state)
        else:
            holds[name] = device_bytes(state)
    return holds
