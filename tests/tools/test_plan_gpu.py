"""`jaxrl plan` for GPUs: what XLA's compiler for them says, without one. It needs the cuda extra."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_attention import traced_gradient_of_score
from test_collectives import CONFIG, PARTS, SIZES, lower, parameter_bytes, sent, state_bytes

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as configs
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.meshes import mesh_over
from jaxrl_llm.models import paged_attention_gpu
from jaxrl_llm.models.paged_attention import Pages
from jaxrl_llm.tools.plan import chips
from jaxrl_llm.tools.plan.chips import GPU_KERNELS
from jaxrl_llm.tools.plan.collectives import collectives
from jaxrl_llm.tools.plan.gpus import GPUS
from jaxrl_llm.tools.plan.phases import make_plan
from jaxrl_llm.tools.plan.prompts import PlannedPrompt

ROOT = Path(__file__).parents[2]
EIGHT = (1, 8, 1)
CUDNN, TRITON = GPU_KERNELS


@pytest.mark.gpu_compile
@pytest.mark.parametrize("kind", GPUS)
def test_a_description_is_one_that_xla_reads(kind):
    chip, devices = chips.topology(f"{kind}:2x4")
    assert [device.process_index for device in devices] == 4 * [0] + 4 * [1]
    assert {(device.platform, device.device_kind) for device in devices} == {("gpu", GPUS[kind].name)}
    assert devices[0].compute_capability == f"{GPUS[kind].capability}.0"
    assert chip.network == GPUS[kind].network and not chip.refuses


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Returns the plan of the embedded model for eight H100s, and its compiled programs by name."""
    config = configs.load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict({"model.dtype": "bfloat16", "microbatch": 16})
    chip, devices = chips.topology("h100:8")
    compiled, compile = {}, Program.compile

    def remember(program: Program, memory: int = 0) -> Any:
        compiled[program.name] = compile(program, memory)
        return compiled[program.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "compile", remember)
        mesh = mesh_over(devices, **config.mesh)
        plan = make_plan(recipes.read(config), mesh, PlannedPrompt(8), tmp_path_factory.mktemp("dump"), chip=chip)
    return plan, compiled


@pytest.mark.gpu_compile
def test_a_program_holds_its_arguments_results_and_temporaries(planned):
    plan, compiled = planned
    assert len(plan.phases) == len(compiled) >= 6
    for phase in plan.phases:
        sizes = compiled[phase.name].memory_analysis()
        arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
        assert phase.program == arguments + results + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
        # The state of the update and the cache are donated, so they are there once.
        donates = phase.name.startswith(("the update", "decoding", "later prompts"))
        assert (sizes.alias_size_in_bytes > 0.9 * results) == donates


@pytest.mark.gpu_compile
def test_attention_is_cudnns_and_that_of_decoding_our_kernel(planned):
    plan, compiled = planned
    for phase in plan.phases:
        text = compiled[phase.name].as_text()
        pushes, decodes = phase.name.startswith(("a layer", "embedding")), phase.name.startswith("decoding")
        assert phase.fused == (not pushes)
        assert (TRITON in text) == decodes
        assert (CUDNN in text) == (not pushes and not decodes)
        assert ("fmhaScaleBiasSoftmaxBackward" in text) == phase.name.startswith("the update")


@pytest.mark.gpu_compile
def test_no_parameter_of_a_layer_is_gathered_outside_of_the_loop():
    mesh = mesh_over(chips.topology("h100:8")[1], data=1, fsdp=8, tensor=1)
    found = collectives(lower("update", CONFIG, mesh, SIZES).compile().as_text())
    inside = [c for c in found if CONFIG.layers in c.loops]
    outside = [c for c in found if CONFIG.layers not in c.loops]
    layers, head = parameter_bytes(EIGHT, "layers"), parameter_bytes(EIGHT, "head")
    gathered = lambda where: sent([c for c in where if c.kind == "all-gather"])  # noqa: E731
    # Forward and backward; and one sum of gradients, which a GPU's compiler sends once, and not as an all-reduce.
    assert 1.9 * PARTS * layers < gathered(inside) <= 2.05 * PARTS * layers
    assert sent(inside) <= 3.05 * PARTS * layers
    assert PARTS * head <= gathered(outside) <= 1.1 * PARTS * head + 2 * state_bytes(EIGHT)
    assert sent(outside) <= PARTS * (2.1 * head + 4 * state_bytes(EIGHT))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_score_and_gradient_compile_with_cudnn_and_no_score_matrix(kind):
    mesh = mesh_over(chips.topology(f"{kind}:4")[1], data=1, fsdp=2, tensor=2)
    text = traced_gradient_of_score(mesh, b=4, g=4, p=256, t=1024).lower().compile().as_text()
    assert CUDNN in text and "fmhaScaleBiasSoftmaxBackward" in text
    assert not re.search(r"f32\[[\d,]*1024,1280\]", text)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize(("r", "h", "dtype"), [(7, 64, "bfloat16"), (4, 128, "float32"), (4, 128, "int8")])
def test_the_kernel_of_decoding_compiles_for_a_gpu(kind, r, h, dtype):
    mesh = mesh_over(chips.topology(f"{kind}:1")[1], data=1, fsdp=1, tensor=1)
    place = NamedSharding(mesh, PartitionSpec())
    shaped = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    k, page, count, rows = 2, 64, 32, 8
    scales = 2 * [shaped((k, count, page), "float32")] if dtype == "int8" else []
    pages = Pages(shaped((k, count, h, page), dtype), shaped((k, count, page, h), dtype), *scales)
    query = shaped((k, rows, r, h), "bfloat16" if dtype == "int8" else dtype)
    table, length = shaped((rows, 4), "int32"), shaped((rows,), "int32")
    assert paged_attention_gpu.fits(mesh.devices.flat[0], h, query.dtype.name, page)
    compiled = jax.jit(partial(paged_attention_gpu.attend_own, window=100)).lower(query, pages, table, length).compile()
    assert TRITON in compiled.as_text()
