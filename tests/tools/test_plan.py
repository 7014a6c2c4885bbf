"""`jaxrl plan`: what it counts, and that it says of a slice what the TPU compiler says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rich.console import Console
from test_sampler import sample

from jaxrl_llm import build, sft
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as configs
from jaxrl_llm.learner.settings import HostMemory
from jaxrl_llm.machine import transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.rollout.jax import compiled, layout, programs, sizes, stream
from jaxrl_llm.tools.plan import chips, expected, phases
from jaxrl_llm.tools.plan.__main__ import main
from jaxrl_llm.tools.plan.chips import CHIPS
from jaxrl_llm.tools.plan.compiler import Compiler, Phase
from jaxrl_llm.tools.plan.expected import Endings, Usage, drawn_lengths, expected_usage
from jaxrl_llm.tools.plan.flops import flops
from jaxrl_llm.tools.plan.gpus import GPUS, allowed_memory
from jaxrl_llm.tools.plan.phases import make_plan, make_sft_plan
from jaxrl_llm.tools.plan.prompts import PlannedPrompt
from jaxrl_llm.tools.plan.search import Planner, candidates, largest

ROOT = Path(__file__).parents[2]
V5E = CHIPS["v5e"]


def test_operations_are_counted_with_loops_branches_and_recomputed_layers():
    x = jnp.ones((4, 8))

    def looped(x):
        layer = jax.checkpoint(lambda x, _: (jnp.tanh(x @ jnp.ones((8, 8))), None))
        x, _ = jax.lax.scan(layer, x, None, length=3)
        x = jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ jnp.ones((8, 8)), x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ jnp.ones((8, 8)), lambda x: x, x)

    product = 2 * 4 * 8 * 8
    assert flops(jax.jit(looped).trace(x), turns=5) == (3 + 5 + 1) * product
    # Backward, a layer costs its recomputed product and that of the gradient of x.
    scanned = lambda x: jax.lax.scan(jax.checkpoint(lambda x, _: (x @ jnp.ones((8, 8)), None)), x, None, length=3)[0]  # noqa: E731
    assert flops(jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(scanned(x))))).trace(x)) >= 6 * product
    batched = jax.jit(lambda x, y: jnp.einsum("bij,bjk->bik", x, y))
    assert flops(batched.trace(jnp.ones((7, 2, 3)), jnp.ones((7, 3, 5)))) == 7 * 2 * 2 * 3 * 5


def test_operations_in_shard_map_are_those_of_all_devices():
    mesh = tiny.mesh_of((1, 4, 2))
    rows = jax.sharding.PartitionSpec("fsdp")
    product = jax.shard_map(lambda x: x @ jnp.ones((8, 8)), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    assert flops(jax.jit(product).trace(jnp.ones((16, 8)))) == 2 * 2 * 16 * 8 * 8  # tensor computes it twice


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    config = configs.load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict({"microbatch": 16, "mesh.tensor": 2, "engine.max_sequences": 256})
    mesh = tiny.mesh_of((1, 4, 2))
    return make_plan(recipes.read(config), mesh, PlannedPrompt(8), tmp_path_factory.mktemp("dump"))


def test_a_plan_has_every_program_of_a_step_and_how_often_it_runs(plan):
    found = {phase.name.split(",")[0]: phase.times for phase in plan.phases}
    # 64 slots for 128 completions of a device.
    assert plan.stream.refills and found.pop("later prompts") > 1 and found.pop("decoding") >= 1
    of_sampler = {"a layer for the sampler": 4, "embedding and head for the sampler": 1, "prompts": 1}
    assert found == of_sampler | {"scoring of reference": 1, "the update": 1}
    sampled = sum(phase.tokens for phase in plan.phases)
    assert sampled == plan.tokens == pytest.approx(64 * 8 * 6, rel=0.02)  # half of the 12 tokens that are the limit
    assert all(phase.program and phase.compile_seconds and phase.instructions for phase in plan.phases)


def test_the_bytes_of_a_chip_are_those_of_its_shards(plan):
    numbers = sum(x.size for x in jax.tree.leaves(plan.models.model.shapes))
    split = plan.holds["policy parameters"]
    assert numbers * 4 / 8 <= split <= 1.05 * numbers * 4 / 8  # norms and biases are on each device
    assert plan.holds["policy optimizer"] == pytest.approx(2 * split, rel=1e-3)
    assert plan.holds["reference"] == split
    assert numbers * 4 / 2 <= plan.holds["sampler's copy (while it samples)"] <= 1.05 * numbers * 4 / 2
    # 256 completions over 4 devices, 12 tokens, keys and values of 4 layers, 1 of 2 heads with 32 numbers
    assert plan.holds["KV cache (while it samples)"] == (64 * 16 + 8 * 16) * 2 * 4 * 32 * 4


def test_what_lives_beside_a_program_is_counted(plan):
    by = {phase.name.split(",")[0]: phase.beside for phase in plan.phases}
    policy = plan.holds["policy parameters"] + plan.holds["policy optimizer"]
    assert by["decoding"] == by["prompts"] == pytest.approx(policy + plan.holds["reference"], abs=64)
    assert by["the update"] == plan.holds["reference"]
    assert by["scoring of reference"] == pytest.approx(policy, abs=64)
    copy = plan.holds["sampler's copy (while it samples)"]
    others = policy * 2 / 3 + plan.holds["reference"]
    for name in ("a layer for the sampler", "embedding and head for the sampler"):
        assert others < by[name] < others + copy + plan.holds["policy parameters"]


@pytest.fixture
def compilers(monkeypatch):
    """The compiler of each program of a plan: none is compiled, and each is a phase of a second."""
    used = list[Compiler]()

    def measure(compiler: Compiler, program: Program, beside: int, parts: int = 1) -> Phase:
        used.append(compiler)
        return Phase(program.name, 1, beside=beside, flops=V5E.flops)

    monkeypatch.setattr(Compiler, "measure", measure)
    return used


def test_a_sampler_on_chips_of_its_own_has_nothing_beside_it(compilers, tmp_path):
    config = configs.load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict({"engine.devices": 4, "rollout.max_lag": 1})
    recipe = recipes.read(config)
    mesh, sampler = phases.plan_meshes(jax.devices(), recipe)
    shapes = dict(data=1, fsdp=4, tensor=1), dict(data=4, fsdp=1, tensor=1)
    assert (dict(mesh.shape), dict(sampler.shape)) == shapes
    apart = make_plan(recipe, mesh, PlannedPrompt(8), tmp_path, sampler_mesh=sampler, chip=V5E)
    assert {(compiler.sampled.mesh, compiler.models.mesh, compiler.chip) for compiler in compilers} == {
        (sampler, mesh, V5E)
    }
    by = {phase.name.split(",")[0]: phase.beside for phase in apart.phases}
    assert by["decoding"] == by["prompts"] == 0
    policy = apart.holds["policy optimizer"] + apart.holds["policy parameters"] + apart.holds["reference"]
    assert all(by[name] <= policy for name in ("a layer for the sampler", "embedding and head for the sampler"))
    assert "sampler's copy (on chips of its own)" in apart.holds
    meanwhile = [phase.meanwhile for phase in apart.phases]
    assert meanwhile == [phase.name.startswith(("prompts", "decoding")) for phase in apart.phases]
    assert apart.seconds(V5E) == max(meanwhile.count(True), meanwhile.count(False)) < len(meanwhile)


def test_what_is_in_the_hosts_memory_is_on_no_chip_but_where_it_is_used(plan, compilers, tmp_path):
    recipe = replace(plan.recipe, host_memory=HostMemory(reference=True, optimizer=True))
    moved = make_plan(recipe, plan.models.mesh, PlannedPrompt(8), tmp_path)
    by = {phase.name.split(",")[0]: phase.beside for phase in moved.phases}
    assert by["decoding"] == by["prompts"] == pytest.approx(moved.holds["policy parameters"], abs=64)
    assert by["scoring of reference"] == pytest.approx(moved.holds["policy parameters"], abs=64)
    assert by["the update"] == 0
    assert by.keys() == {phase.name.split(",")[0] for phase in plan.phases}


def test_the_operations_of_scoring_and_update_are_those_of_their_tokens(plan):
    by = {phase.name.split(",")[0]: phase.flops * 8 for phase in plan.phases}
    cfg = plan.models.model.cfg
    of_layer = 2 * cfg.width * (cfg.heads + cfg.kv_heads) * cfg.head_dim + 3 * cfg.width * cfg.mlp_width
    tokens = 64 * (8 + 8 * 12)
    forward = 2 * tokens * cfg.layers * of_layer
    assert forward < by["scoring of reference"] < 1.5 * forward  # and attention and head
    assert 2.9 < by["the update"] / by["scoring of reference"] < 4.1


def test_a_plan_of_sft_has_the_programs_of_a_run(plan, tmp_path, monkeypatch):
    fields = {"mesh.fsdp": 4, "mesh.tensor": 2, "prompts_per_step": 8, "eval": None, "log.to": ()}
    config = configs.load(ROOT / "configs" / "dpo.py")
    config.update_from_flattened_dict(fields)
    ran, planned, measured, measure = list[str](), list[Program](), list[Phase](), Compiler.measure
    monkeypatch.setattr(
        sft.SupervisedLearning, "_ensure_compiled", lambda self, program, batch: ran.append(shapes_of(program))
    )
    with build.opened_run(config, tmp_path, recipes.read_sft, sft.make_run, shared=False) as (_, parts):
        learning, examples = parts.learning, parts.examples.next()
        states = learning.initial_states()
        batch = learning.scored(states, transfers.shard_batch(examples, learning.mesh))
        learning.compile(states, batch, parts.rows)
        width = batch.prompt.tokens.shape[1]

    def measure_scoring(compiler: Compiler, program: Program, beside: int) -> Phase:
        planned.append(program)
        if program.phase == "scoring":
            measured.append(measure(compiler, program, beside))
        return Phase(program.name, 1, beside=beside)

    monkeypatch.setattr(Compiler, "measure", measure_scoring)
    of_dpo = make_sft_plan(recipes.read_sft(config), tiny.mesh_of((1, 4, 2)), PlannedPrompt(width), tmp_path)
    assert [shapes_of(program) for program in planned] == ran
    assert [phase.name for phase in of_dpo.phases] == ["scoring of reference", "the update"]
    # The same model on the same mesh as in the plan of GRPO, and no sampler.
    assert of_dpo.holds == {name: x for name, x in plan.holds.items() if "samples" not in name}
    policy = of_dpo.holds["policy parameters"] + of_dpo.holds["policy optimizer"]
    assert of_dpo.phases[0].beside == pytest.approx(policy, abs=64)
    (phase,) = measured
    assert (phase.times, phase.beside, phase.flops) == (1, of_dpo.phases[0].beside, flops(planned[0].trace()) / 8)
    assert phase.program and phase.traffic and not phase.error
    config = configs.load(ROOT / "configs" / "sft.py")
    config.update_from_flattened_dict(fields | {"model.path": str(ROOT / "jaxrl_llm" / "assets" / "arithmetic")})
    of_sft = make_sft_plan(recipes.read_sft(config), tiny.mesh_of((1, 4, 2)), PlannedPrompt(width), tmp_path)
    assert [phase.name for phase in of_sft.phases] == ["the update"]


def shapes_of(program: Program) -> str:
    return str([x.str_short() for x in program.trace().jaxpr.in_avals])


def test_a_phase_takes_as_long_as_its_slowest_resource():
    phase = Phase("update", 2, flops=V5E.flops, traffic=3 * V5E.bandwidth)
    assert phase.seconds(V5E) == {"arithmetic": 1.0, "memory": 3.0, "collectives": 0.0}


def test_a_program_that_the_compiler_refuses_is_a_phase_that_does_not_fit(plan):
    planned = lambda *given: phases.SlicePlan(plan.recipe, plan.models, plan.holds, list(given), 1, plan.prompts)  # noqa: E731
    refused = planned(*plan.phases, Phase("update", 1, error="too big"))
    assert plan.fits(V5E) and not refused.fits(V5E)
    crowded = planned(Phase("update", 1, program=9 * 2**30, beside=7 * 2**30))
    assert not crowded.fits(V5E)


def test_a_search_compiles_nothing_that_cannot_fit_and_tries_meshes_that_suit(tmp_path):
    recipe = recipes.read(configs.load(ROOT / "configs" / "grpo.py"))
    found = list(candidates(recipe, 16))
    assert {(c.mesh.fsdp, c.mesh.tensor) for c in found} == {(16, 1), (8, 2)}  # the model has 2 heads of keys
    assert all(c.prompts_per_update % c.microbatch == 0 and c.microbatch % c.mesh.fsdp == 0 for c in found)
    small = make_plan(recipe, tiny.mesh_of((1, 4, 2)), PlannedPrompt(8), tmp_path, chip=V5E._replace(memory=2**-10))
    assert [phase.name for phase in small.phases] == ["sampling"] and not small.fits(V5E)


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Returns what `largest` finds for a field if a value up to `most` fits, and the values that it has tried."""

    def solve(field: str, most: int, chips: int = 1, **fields) -> tuple[int, list[int]]:
        config = configs.load(ROOT / "configs" / "grpo.py")
        config.update_from_flattened_dict(fields)
        read, tried = attrgetter(field), list[int]()

        def recipe_with(value):
            config.update_from_flattened_dict({field: value})
            return recipes.read(config)

        def plan_that_fits(planner, recipe, text):
            tried.append(read(recipe))
            assert text == f"{field} {tried[-1]}"
            return recipe if tried[-1] <= most else None

        monkeypatch.setattr(Planner, "plan_that_fits", plan_that_fits)
        planner = Planner(V5E, jax.devices()[:chips], tmp_path, Console(quiet=True))
        return max(map(read, largest(planner, field, 0, recipe_with)), default=0), tried

    return solve


@pytest.mark.parametrize(("most", "chips"), [(0, 1), (7, 1), (60, 1), (31, 4)])
def test_the_largest_microbatch_that_fits_is_exact_and_allowed(most, chips, limited):
    found, tried = limited("microbatch", most, chips, prompts_per_step=60, prompts_per_update=60)
    may = [n for n in range(1, 61) if 60 % n == 0 and n % chips == 0]
    assert found == max((n for n in may if n <= most), default=0)
    assert set(tried) <= set(may) and len(tried) == len(set(tried)) <= 9


@pytest.mark.parametrize("most", [1, 12, 1023, 50_000])
def test_the_largest_length_that_fits_is_close_after_few_tries(most, limited):
    found, tried = limited("rollout.max_completion_tokens", most)
    assert most - max(1, most / 32) <= found <= most
    assert len(tried) <= 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("grpo --solve microbatches", "config.microbatches"),
        ("grpo --solve optim.learning_rate", "--solve optim.learning_rate"),
        ("grpo --solve deterministic", "config.deterministic"),
        ("grpo --lengths 0", "--lengths 0"),
        ("grpo --lengths nan", "--lengths nan"),
        ("grpo --lengths 13", "--lengths 13"),
        ("sft --lengths 3", "--lengths"),
        ("grpo --pixels 28x28", "--pixels 28x28"),
    ],
)
def test_an_argument_that_a_plan_cannot_use_is_refused(arguments, words, monkeypatch, refused):
    monkeypatch.setattr(sys, "argv", ["plan", "--topology", "v5e:4x4", "--config", *arguments.split()])
    with refused(words):
        main()


@pytest.mark.parametrize("mean", [1, 3.5, 900, 1024])
def test_drawn_lengths_have_their_mean_and_one_seed_gives_the_same(mean):
    lengths = drawn_lengths(512, mean, 1024)
    assert lengths.min() >= 1 and lengths.max() <= 1024
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    np.testing.assert_array_equal(lengths, drawn_lengths(512, mean, 1024))


@pytest.fixture
def counted(monkeypatch):
    """What the stream of a real sampler calls, and rounds and pages of 4 tokens."""
    monkeypatch.setattr(sizes, "PAGE_TOKENS", 4)
    for module in (programs, stream, compiled, sizes, layout, expected):
        monkeypatch.setattr(module, "ROUND_TOKENS", 4)
    usage, prefill, decode = defaultdict(Usage), compiled.CallPrograms.prefill, compiled.CallPrograms.decode

    def prefilled(self, cache, prompts):
        begun = usage[compiled.prompts_name(prompts.cache_place.shape[1], self.sizes, first=cache is None)]
        begun.calls += 1
        begun.tokens += self.sizes.group_size * int((np.asarray(prompts.cache_place) < self.sizes.prompts).sum())
        return prefill(self, cache, prompts)

    def decoded(self, cache, rows, below):
        cache, sampled = decode(self, cache, rows, below)
        slots = sizes.Slots(rows.length.shape[1], rows.prompt_places.shape[1])
        count, round_ = np.asarray(sampled.count), usage[compiled.decoding_name(slots)]
        round_.calls, round_.turns, round_.tokens = (
            round_.calls + 1, round_.turns + int(count.max()), round_.tokens + int(count.sum())
        )  # fmt: skip
        return cache, sampled

    monkeypatch.setattr(compiled.CallPrograms, "prefill", prefilled)
    monkeypatch.setattr(compiled.CallPrograms, "decode", decoded)
    return usage


@pytest.mark.parametrize(
    ("bounds", "episodes"),
    [
        pytest.param(dict(most=12, pages=14), False, marks=pytest.mark.slow),
        (dict(mesh=(2, 2, 2), most=16, pages=7), True),
    ],
    ids=str,
)
def test_the_expected_calls_are_those_of_the_real_stream(bounds, episodes, counted):
    length, devices = 24, 4 if "mesh" in bounds else 1
    tool = Endings(length) if episodes else None
    config = replace(tiny.CONFIG, layers=1)
    rollouts = sample(config=config, length=length, stops=(3, 4), environments=tool, **bounds)
    lengths = rollouts.completion_mask.sum(axis=-1).reshape(-1)
    assert len({*lengths.tolist()}) > 9
    kind = sizes.PageKind(devices, observation=length if episodes else 0)
    limits = dict(kind=kind, max_sequences=bounds.get("most", 0), pages=bounds.get("pages", 0))
    of_stream = sizes.sizes_of(tiny.B, tiny.G, tiny.P, length, **limits)
    usage = expected_usage(of_stream, lengths, devices)
    assert {name: replace(count, pages=0) for name, count in usage.items()} == counted


def test_a_plan_with_more_open_groups_or_a_later_bound_decodes_less():
    lengths = drawn_lengths(16 * 4, 40, 400)

    def turns(partial: int, max_age: int) -> int:
        of_stream = sizes.sizes_of(16 + partial, 4, 8, 400, max_sequences=16 * 4)
        usage = expected_usage(of_stream, lengths, 1, partial=partial, max_age=max_age)
        return sum(program.turns for program in usage.values())

    assert turns(0, 0) > turns(4, 0) > turns(16, 0)
    assert turns(16, 1) > turns(16, 0)


@pytest.mark.parametrize(
    ("topology", "slices", "words"),
    [
        ("t4:8", 1, "--topology t4:8"),
        ("h100", 1, "--topology h100"),
        ("h100:4x8x2", 1, "--topology h100:4x8x2"),
        ("h100:0", 1, "--topology h100:0"),
        ("h100:8", 2, "--slices 2"),
        ("v5e:4x4", 1, "jaxrl_llm[tpu]"),
        ("h100:8", 1, "jaxrl_llm[cuda]"),
    ],
)
def test_a_topology_without_chips_or_compiler_is_refused(topology, slices, words, refused):
    compiler = {"jaxrl_llm[tpu]": "libtpu", "jaxrl_llm[cuda]": "jax_cuda12_plugin"}.get(words)
    if compiler and find_spec(compiler):
        pytest.skip("the compiler is installed")
    with refused(words):
        chips.topology(topology, slices)


def test_a_plan_for_gpus_allows_what_jax_takes_of_them(monkeypatch, refused):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    h100 = GPUS["h100"]
    assert allowed_memory(h100) == 0.75 * h100.memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert allowed_memory(h100) == 0.9 * h100.memory
    for share in ("much", "0", "1.5", "nan"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        with refused(f"XLA_CLIENT_MEM_FRACTION={share}"):
            chips.topology("h100:8")


def test_a_program_that_a_gpu_cannot_hold_does_not_fit(plan, tmp_path, wording):
    small = V5E._replace(memory=0.05, refuses=False)
    compiler = Compiler(plan.models, plan.recipe.sizes, tmp_path, small, 0)
    program = Program("push", "a copy", lambda: jax.jit(jnp.negative).trace(jnp.ones(2**24)), "FIX", ())
    phase = compiler.measure(program, beside=7)
    assert (phase.name, phase.beside, phase.program) == ("a copy", 7, 0)
    wording(phase.error)
    assert not phases.SlicePlan(plan.recipe, plan.models, {}, [phase], 1, plan.prompts).fits(small)
    fitting = replace(compiler, chip=small._replace(memory=0.2)).measure(program, beside=7)
    assert (fitting.program, fitting.error) == (2 * 2**26, "")


@pytest.mark.tpu
def test_the_tpu_compiler_plans_the_embedded_model():
    command = [sys.executable, "-m", "jaxrl_llm.tools.plan", "--config", str(ROOT / "configs" / "grpo.py")]
    command += ["--topology", "v5e:2x2", "--json", "--config.model.dtype=bfloat16", "--config.microbatch=16"]
    environment = os.environ | {"XLA_FLAGS": ""}  # the programs of a person's plan
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200)
    (found,) = json.loads(done.stdout)
    assert done.returncode == 0 and found["fits"], done.stderr
    assert max(phase["peak"] for phase in found["phases"]) < 2**30
