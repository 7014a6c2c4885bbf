"""The phases of a step on TPUs or GPUs: memory, operations, traffic and an estimated time of each of their programs."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.build import cache_memory, make_learning, stream_sizes
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Learning, Models, describe_models, make_packing, resident
from jaxrl_llm.learner.programs import learning_programs
from jaxrl_llm.learner.scorers import Frozen, frozen_model
from jaxrl_llm.learner.settings import HostMemory
from jaxrl_llm.machine.compilation import Program, needed_memory
from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.machine.shapes import Book
from jaxrl_llm.machine.sharding import AXES, meshes_over, prompt_shards, shardings
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import TOWER, Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.recipe import fit
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.rollout.jax.compiled import decoding_name
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.reading import page_kind
from jaxrl_llm.rollout.jax.sizes import StreamSizes
from jaxrl_llm.rollout.weights import copy_shapes
from jaxrl_llm.structs import PyTree, TrainState
from jaxrl_llm.tools.plan.chips import GIB, Chip
from jaxrl_llm.tools.plan.collectives import BETWEEN_SLICES, Collective, collectives
from jaxrl_llm.tools.plan.expected import Usage, drawn_lengths, expected_usage
from jaxrl_llm.tools.plan.flops import flops
from jaxrl_llm.tools.plan.prompts import PromptSizes

SAMPLING = ("prompts", "decoding")  # phases of the sampler


@dataclass(frozen=True)
class Phase:
    """A program of a step, on one chip. Its time is the largest one of arithmetic, memory and collectives.

    What goes between TPU slices takes no time here: their network has no published speed.
    """

    name: str
    times: int  # that a step runs it
    error: str = ""  # why the compiler refuses it
    compile_seconds: float = 0.0
    instructions: int = 0
    program: int = 0  # bytes at its peak: arguments, temporaries and results
    beside: int = 0  # bytes of arrays that it does not use, and that are in memory with it
    fused: bool = False  # attention is the fused kernel
    turns: float = 0.0  # of the loop of tokens, in a run
    tokens: int = 0  # that a step samples with it
    flops: float = 0.0
    traffic: float = 0.0  # bytes of weights, optimizer state and KV cache that it must read and write
    collectives: tuple[Collective, ...] = ()
    meanwhile: bool = False  # the sampler's own chips run it, while the others score and learn

    @property
    def peak(self) -> int:
        return self.program + self.beside

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a chip sends, by kind of collective."""
        total: defaultdict[str, float] = defaultdict(float)
        for collective in self.collectives:
            total[collective.kind] += collective.bytes * collective.times
        return dict(total)

    @property
    def sent_in_slice(self) -> float:
        """Bytes that a chip sends to others of its slice."""
        return sum(size for kind, size in self.sent.items() if kind != BETWEEN_SLICES)

    @property
    def sent_to_hosts(self) -> float:
        """Bytes that a GPU sends to other hosts."""
        return sum(collective.to_hosts * collective.times for collective in self.collectives)

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Returns the seconds that each resource needs at the chip's published speeds.

        network: between the hosts of GPUs.
        """
        seconds = {
            "arithmetic": self.flops / chip.flops,
            "memory": self.traffic / chip.bandwidth,
            "collectives": self.sent_in_slice / chip.ring,
        }
        return seconds | ({"network": self.sent_to_hosts / chip.network} if chip.network else {})


@dataclass(frozen=True)
class StepSampling:
    """What the in-JAX engine does in a step, on a chip."""

    stream: StreamSizes
    usage: dict[str, Usage]  # by the name of a program
    cached: int  # bytes of a token in the cache
    weights: int  # bytes of the sampler's copy
    read: int  # those of them that each token of decoding reads: all but the tower
    mesh: Mesh  # of the chips that sample

    def holds(self, *, apart: bool) -> dict[str, int]:
        """Returns the bytes on a chip of what the sampler has there; apart: on chips of its own."""
        when = "on chips of its own" if apart else "while it samples"
        tokens = self.stream.pages * self.stream.page + self.stream.prompts * self.stream.width
        return {f"sampler's copy ({when})": self.weights, f"KV cache ({when})": tokens * self.cached}

    def leaves_out(self, program: Program) -> bool:
        """Whether a step is not expected to call a program that is smaller than another one."""
        first = decoding_name(self.stream.slots[0])
        return program.phase == "decoding" and program.name not in (first, *self.usage)

    def traffic(self, name: str) -> float:
        """Returns the bytes that a chip must read and write in a call of a decode program, on average."""
        if name not in self.usage:
            return 0.0
        usage, stream = self.usage[name], self.stream
        slots = next(slots for slots in stream.slots if decoding_name(slots) == name)
        # Each token reads the weights, the prompts and pages. A smaller program copies prompts and pages, and those
        # back.
        copied = stream.width * slots.prompts * (slots.prompts < stream.prompts)
        copied += 2 * stream.page * slots.pages * (slots.pages < stream.pages)
        tokens = usage.turns * slots.prompts * stream.width + usage.pages * stream.page + usage.calls * 2 * copied
        return (usage.turns * self.read + tokens * self.cached) / usage.calls


@dataclass(frozen=True)
class SlicePlan:
    """The plan of a run on a slice: what its chips hold, and the phases of a step."""

    recipe: Recipe
    models: Models
    holds: dict[str, int]  # bytes on a chip: parameters, optimizer ...
    phases: list[Phase]
    tokens: int  # of the completions of a step
    prompts: PromptSizes
    stream: StreamSizes | None = None  # of the in-JAX engine, on a chip

    def seconds(self, chip: Chip) -> float:
        """Returns the estimated seconds of a step."""
        seconds = {True: 0.0, False: 0.0}
        for phase in self.phases:
            seconds[phase.meanwhile] += phase.times * max(phase.seconds(chip).values())
        return max(seconds.values())

    def fits(self, chip: Chip) -> bool:
        return not any(phase.error or phase.peak > chip.memory * GIB for phase in self.phases)


def make_plan(
    recipe: Recipe,
    mesh: Mesh,
    prompts: PromptSizes,
    dump: Path,
    mean: float = 0.0,
    *,
    sampler_mesh: Mesh | None = None,
    say: Callable[[Phase], None] = lambda phase: None,
    chip: Chip | None = None,
) -> SlicePlan:
    """Compiles the programs of a step, in the shapes of completions that all have their largest length.

    dump: the empty folder in which XLA's compiler for TPUs reports the memory of programs.
    mean: tokens of a completion, for how often the sampler's programs run; 0: half of the largest length.
    sampler_mesh: of the sampler's own chips; None: it shares `mesh`. say: gets each phase when it is compiled.
    chip: whose memory bounds the sampler's cache as in a run; None: nothing does.
    Raises: UserError, if model or mesh do not fit. A program that does not fit is no error.
    """
    fit.check_batch_fits_mesh(recipe.sizes, mesh)
    memory = int(chip.memory * GIB) if chip else 0
    folder = hf.find(recipe.model.path, weights=False)
    models = describe_models(recipe.model, recipe.adapters, recipe.other_paths, mesh, folder, weights=False)
    fit.check_router(recipe, models.model.cfg)
    fit.check_vision(recipe, models.model.cfg)
    for name, other in models.others.items():
        cfg = hf.load_model(other).cfg
        fit.check_other_model(f"{name}.path", cfg, models.model.cfg, reads=prompts.images is not None)
    frozen = {name: _frozen(models, name, recipe.model) for name in recipe.frozen}
    base = _base(models)
    learning = make_learning(recipe, models, lambda: None, base, frozen.__getitem__)
    states = learning.held(recipe.frozen, base)
    policy = learning.learners["policy"]
    book, phases = Book(), list[Phase]()
    packing = make_packing(models, learning, book)
    limit = recipe.rollout.max_completion_tokens
    shape = packing(np.full((recipe.prompts_per_step, recipe.group_size), limit), prompts.width).shape[1:]
    apart, sampler_mesh = recipe.sampler_devices > 0, sampler_mesh or mesh
    room = cache_memory(recipe, models, learning, sampler_mesh, states, memory)
    stream = stream_sizes(recipe, models, sampler_mesh, prompts.width, room)
    sampler = _sampler(models, recipe, sampler_mesh, room)
    # The sampler's copy of the weights: in the dtype and with the sharding of decoding.
    params, in_int8 = policy.all_parameters(policy.shapes), recipe.chosen_engine.in_int8
    copy = copy_shapes(models.model, sampler_mesh, models.mesh, params, in_int8=in_int8)
    cached = page_kind(sampler_mesh, models.model.cfg, recipe.chosen_engine.cache_dtype).token_bytes
    read = device_bytes({name: leaf for name, leaf in copy.items() if name != TOWER})
    sampled = StepSampling(stream, {}, cached, device_bytes(copy), read, sampler_mesh)
    learning_holds = _holds(resident(states, recipe.host_memory))
    sampling_holds = sampled.holds(apart=apart) if recipe.chosen_engine.in_trainer else {}
    holds, sums = learning_holds | sampling_holds, (sum(learning_holds.values()), sum(sampling_holds.values()))
    if memory and (max(sums) if apart else sum(sums)) > memory:
        phases.append(Phase("sampling", 1, error="what a chip holds while it samples is too much without any program"))
        return SlicePlan(recipe, models, holds, phases, 0, prompts)
    lengths = drawn_lengths(recipe.sizes.sequences_per_step, mean or limit / 2, limit)
    usage = expected_usage(stream, lengths, prompt_shards(sampler_mesh), partial=recipe.rollout.partial)
    sampled = replace(sampled, usage=usage)
    for program in _programs(recipe, learning, sampler, shape[1:], prompts):
        if sampled.leaves_out(program):
            continue
        on_sampler = apart and program.phase in SAMPLING
        # What the sampler has is on its chips, not beside the programs of the others.
        program = program._replace(beside=()) if apart else program
        beside = 0 if on_sampler else _beside(states, program, recipe.host_memory)
        phase = _measure(models, recipe, program, beside, shape[0], sampled, dump, chip)
        phase = replace(phase, meanwhile=on_sampler and recipe.rollout.max_lag > 0)
        say(phase)
        phases.append(phase)
    book.close()
    of_engine = stream if recipe.chosen_engine.in_trainer else None
    return SlicePlan(recipe, models, holds, phases, int(lengths.sum()), prompts, of_engine)


def plan_meshes(devices: Sequence[Any], recipe: Recipe) -> tuple[Mesh, Mesh]:
    """Makes the meshes of trainer and sampler as a run does. Raises: UserError, as `meshes_over`."""
    mesh, sampler = meshes_over(devices, recipe.sampler_devices, **recipe.mesh)
    if mesh == sampler or mesh.devices.flat[0].platform != "tpu":
        return mesh, sampler

    def from_first(mesh: Mesh) -> Mesh:
        # Without its TPU, the compiler takes a part of a slice only if it begins with the first chip.
        return Mesh(np.array(devices[: mesh.size]).reshape(mesh.devices.shape), AXES, axis_types=mesh.axis_types)

    return from_first(mesh), from_first(sampler)


def _frozen(models: Models, name: str, start: ModelSettings) -> Frozen:
    """Returns a model that never learns, with the shapes of its parameters."""
    model = frozen_model(name, models.others[name], start, models.mesh)
    params = _placed(model.shapes(), model, models.mesh)
    if name == "reward_model":
        sharding = NamedSharding(models.mesh, PartitionSpec())
        replicated = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)  # noqa: E731
        params = {"decoder": params, "readout": {"kernel": replicated(model.cfg.width, 1), "bias": replicated(1)}}
    return Frozen(model, params)


def _base(models: Models) -> PyTree:
    """Returns the parameters that do not learn, as shapes; None: there are none."""
    shapes = _placed(models.model.shapes(), models.model, models.mesh)
    if not models.adapters:
        return {TOWER: shapes[TOWER]} if models.frozen_tower else None
    shapes = models.adapters.base_shapes(shapes)
    abstract = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(abstract, shapes, shardings(shapes, models.mesh))


def _placed(shapes: PyTree, model: Decoder, mesh: Mesh) -> PyTree:
    abstract = lambda x, dtype, at: jax.ShapeDtypeStruct(x.shape, dtype, sharding=at)  # noqa: E731
    return jax.tree.map(abstract, shapes, model.used_dtypes(shapes), shardings(shapes, mesh))


def _beside(states: PyTree, program: Program, on_host: HostMemory) -> int:
    """Returns the bytes on a chip of what a program does not use, and what is in memory with it."""
    # By identity: two arrays of equal shape are different memory.
    used = {id(x) for x in jax.tree.leaves(program.states)}
    leaves = jax.tree.leaves(resident(states, on_host, learns=program.phase == "update"))
    return device_bytes([x for x in leaves if id(x) not in used]) + device_bytes(program.beside)


def _sampler(models: Models, recipe: Recipe, mesh: Mesh, cache_bytes: int) -> Sampler:
    return Sampler(
        models.model,
        mesh,
        trainer=models.mesh,
        max_completion_tokens=recipe.rollout.max_completion_tokens,
        stop_ids=(1,),
        pad_id=0,
        max_sequences=recipe.chosen_engine.max_sequences,
        pages=recipe.chosen_engine.pages,
        cache_bytes=cache_bytes,
        in_int8=recipe.chosen_engine.in_int8,
        cache_dtype=recipe.chosen_engine.cache_dtype,
        observation_tokens=recipe.observation_tokens,
    )


def _programs(
    recipe: Recipe, learning: Learning, sampler: Sampler, shape: tuple[int, int], prompts: PromptSizes
) -> Iterator[Program]:
    """Yields the programs of a step. Another engine samples elsewhere."""
    policy = learning.learners["policy"]
    sampler_programs = sampler.programs(
        policy.all_parameters(policy.shapes),
        **recipe.sampled._asdict(),
        width=prompts.width,
        group=recipe.group_size,
        sampling=learning.sampling,
        image_sizes=prompts.images,
    )
    yield from sampler_programs if recipe.chosen_engine.in_trainer else ()
    yield from learning_programs(learning, [shape], prompts.width, recipe.credit.weights, prompts.images)


def _measure(
    models: Models,
    recipe: Recipe,
    program: Program,
    beside: int,
    parts: int,
    sampled: StepSampling,
    dump: Path,
    chip: Chip | None,
) -> Phase:
    """Compiles a program. parts: micro-batches that a prompt is in."""
    sizes = recipe.sizes
    prompts = sizes.prompts_per_update if program.phase == "update" else sizes.prompts_per_step
    turns = prompts // (sizes.microbatch or prompts) * parts
    times, usage = program.times, sampled.usage.get(program.name, Usage())
    if program.phase == "update":
        times = sizes.updates_per_rollout
    elif program.phase in ("prompts", "decoding"):
        times, turns = usage.calls, usage.turns / max(usage.calls, 1)
    mesh = sampled.mesh if program.phase in SAMPLING else models.mesh
    hosts = [device.process_index for device in mesh.devices.flat]
    limit = 0 if chip is None or chip.refuses else int(chip.memory * GIB)
    traced, began = program.trace(), time.perf_counter()
    try:
        compiled = program.compile(limit)
    except UserError as error:
        return Phase(program.name, times, error=str(error), beside=beside)
    seconds, text = time.perf_counter() - began, compiled.as_text() or ""
    return Phase(
        program.name,
        times,
        compile_seconds=seconds,
        instructions=text.count(" = "),
        program=needed_memory(compiled) if limit else allocated(compiled, dump),
        beside=beside,
        fused=any(kernel in text for kernel in (chip.kernels if chip else ())),
        flops=flops(traced, turns) / mesh.size,
        traffic=_traffic(program, compiled, turns, sampled),
        collectives=tuple(collectives(text, turns, hosts)),
        turns=turns if program.phase == "decoding" else 0.0,
        tokens=usage.tokens,
    )


def _traffic(program: Program, compiled: jax.stages.Compiled, turns: float, sampled: StepSampling) -> float:
    """Bytes that a chip must at least read and write: no activations, and of a scoring model what the layers gather."""
    used: Any = compiled.memory_analysis()
    if program.phase == "decoding":
        return sampled.traffic(program.name)
    if program.phase == "push":
        return used.argument_size_in_bytes + used.output_size_in_bytes
    # The cache is argument and result, and a few prompts are written into it.
    if program.phase == "prompts":
        return used.argument_size_in_bytes + used.output_size_in_bytes - 2 * used.alias_size_in_bytes
    # The gathered weights are written and read in each pass: one to score, three to learn, with the recomputed one.
    gathered = 2 * sampled.weights
    if program.phase == "scoring":
        return turns * gathered
    gradients = 2 * device_bytes(program.states[0].params)
    return turns * (3 * gathered + gradients) + used.argument_size_in_bytes + used.output_size_in_bytes


def allocated(compiled: jax.stages.Compiled, dump: Path) -> int:
    """Returns the bytes of memory that a program needs on a chip, as the compiler has placed them.

    Of one that does not say it, the arguments, temporaries and results.
    """
    used: Any = compiled.memory_analysis()
    if hasattr(used, "total_allocation_bytes"):  # JAX 0.12
        return used.total_allocation_bytes
    # The newest is of this program. The helper functions of JAX are compiled for the CPU.
    reports = [file for file in dump.glob("*memory-usage-report.txt") if ".cpu_" not in file.name]
    text = max(reports, key=lambda file: file.stat().st_mtime).read_text() if reports else ""
    match = re.search(r"Memory Space: default.*?Total bytes[^\d]*([\d,]+)", text, re.DOTALL)
    if match:
        return int(match[1].replace(",", ""))
    return needed_memory(compiled)


def _holds(states: PyTree) -> dict[str, int]:
    """Returns the bytes on a chip of what stays in memory between programs."""
    holds = {}
    for name, state in states.items():
        if isinstance(state, TrainState):
            holds[f"{name} parameters"] = device_bytes(state.params)
            holds[f"{name} optimizer"] = device_bytes(state.opt_state)
        else:
            holds[name] = device_bytes(state)
    return holds
