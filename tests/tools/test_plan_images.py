"""`jaxrl plan` for prompts with images: the programs are those of a run, and the tower counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny

from jaxrl_llm import build
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as configs
from jaxrl_llm.data import prompt_sizes
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.models.decoder import TOWER
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.rollout.weights import copy_shapes
from jaxrl_llm.structs import ImageSizes
from jaxrl_llm.tools.plan import phases
from jaxrl_llm.tools.plan.__main__ import image_line
from jaxrl_llm.tools.plan.compiler import Compiler, Phase, StepSampling
from jaxrl_llm.tools.plan.flops import flops
from jaxrl_llm.tools.plan.phases import SlicePlan
from jaxrl_llm.tools.plan.prompts import PlannedPrompt, planned_prompt

ROOT = Path(__file__).parents[2]
LARGEST = "84x28x2"  # images of a prompt of configs/pictures.py with the most patches
MESH = (1, 4, 2)


def recipe_of(name: str = "pictures", **fields: Any) -> Recipe:
    config = configs.load(ROOT / "configs" / f"{name}.py")
    config.update_from_flattened_dict(fields)
    return recipes.read(config)


class Planned(NamedTuple):
    plan: SlicePlan
    programs: list[Program]
    sampled: StepSampling


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Returns the plan of a recipe and its programs, of which none is compiled."""

    def make(recipe: Recipe, prompts: PlannedPrompt) -> Planned:
        programs, samplings = list[Program](), list[StepSampling]()

        def measure(compiler: Compiler, program: Program, beside: int, parts: int) -> Phase:
            assert compiler.sampled
            programs.append(program)
            samplings.append(compiler.sampled)
            return Phase(program.name, 1)

        monkeypatch.setattr(Compiler, "measure", measure)
        plan = phases.make_plan(recipe, tiny.mesh_of(MESH), prompts, tmp_path)
        return Planned(plan, programs, samplings[0])

    return make


def shapes_of(program: Program) -> list[str]:
    return [x.str_short() for x in program.trace().jaxpr.in_avals]


@pytest.mark.slow
def test_the_programs_of_a_plan_are_those_of_a_run(planned, tmp_path, monkeypatch):
    # A plan has prompts of one size.
    monkeypatch.setattr(prompt_sizes, "SHARES", ())
    fields = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), MESH, strict=True))
    config = configs.load(ROOT / "configs" / "pictures.py")
    config.update_from_flattened_dict(fields)
    with build.opened_run(config, tmp_path, recipes.read, build.make_run, shared=False) as (_, parts):
        width, images = parts.dataset.width, parts.dataset.sizes.images
        run = [(program.name, shapes_of(program)) for program in parts.programs()]
    recipe = recipe_of(**fields)
    prompts = planned_prompt(recipe, width, LARGEST)
    assert prompts.images == images
    programs = planned(recipe, prompts).programs
    assert {program.phase for program in programs} == {"push", "prompts", "decoding", "scoring", "update"}
    for program in programs:
        assert (program.name, shapes_of(program)) in run
    # Without images they are others.
    text = {program.phase: shapes_of(program) for program in planned(recipe, PlannedPrompt(width)).programs}
    for program in programs:
        assert program.phase in ("push", "decoding") or text[program.phase] != shapes_of(program)


def test_the_operations_of_the_tower_are_those_of_its_patches(planned):
    recipe = recipe_of()
    few, many = (planned_prompt(recipe, 64, pixels) for pixels in ("56x56", "112x112"))
    assert few.images and many.images and many.images.patches == 4 * few.images.patches
    of_small, of_large = (planned(recipe, prompts) for prompts in (few, many))
    assert image_line(of_small.plan) == "prompts of 64 tokens, 4 of them of images of 16 patches"
    cfg = of_large.plan.models.model.cfg
    tower = cfg.vision
    assert tower
    of_patch = tower.depth * (4 * tower.width**2 + 3 * tower.width * tower.mlp_width)
    of_patch += many.images.numbers * tower.width
    merged = tower.merge_size**2 * tower.width
    of_patch += merged * (merged + cfg.width) / tower.merge_size**2
    more = 2 * recipe.prompts_per_step * of_patch * (many.images.patches - few.images.patches)
    for phase, passes in {"prompts": 1, "scoring": 1, "update": 3}.items():
        small, large = (
            flops(next(program for program in of.programs if program.phase == phase).trace())
            for of in (of_small, of_large)
        )
        # And attention; in the update the layers are also recomputed, and of the patches no gradient is.
        assert 0.8 * passes * more < large - small < 1.6 * passes * more


def test_a_plan_for_texts_says_so_and_a_token_of_decoding_reads_no_tower(planned):
    plan, _, sampled = planned(recipe_of(), PlannedPrompt(16))
    assert image_line(plan) == "prompts of 16 tokens of text: --pixels plans for images"
    mesh, model = plan.models.mesh, plan.models.model
    copy = copy_shapes(model, mesh, mesh, model.shapes, in_int8=False)
    assert sampled.weights - sampled.read == device_bytes(copy[TOWER]) > 0
    assert sampled.weights == device_bytes(copy)


@pytest.mark.parametrize(
    ("recipe", "model", "expected"),
    [
        ("qwen2_5_vl_3b_geo3k", "qwen2_5_vl_3b", (361, 25 * 64, 588)),
        ("qwen2_5_vl_7b_geo3k", "qwen2_5_vl_7b", (361, 25 * 64, 588)),
        ("qwen3_vl_4b_geo3k_lora", "qwen3_vl_4b", (256, 1024, 768)),
    ],
)
def test_images_are_resized_as_the_recipe_and_the_folder_say(recipe, model, expected):
    made = recipe_of(f"recipes/{recipe}", **{"model.path": str(ROOT / "jaxrl_llm" / "assets" / model)})
    tokens, patches, numbers = expected
    # Smaller ones are enlarged to the limit.
    for pixels in ("512x512", "100x100"):
        prompts = planned_prompt(made, 512, pixels)
        assert prompts == PlannedPrompt(512, ImageSizes(patches, numbers, patches // 4), tokens)
    assert planned_prompt(made, 1024, "512x512x2").image_tokens == 2 * tokens


WRONG = ("512", "0x28", "28x28x0", "-28x28", "28x28x2x2", "28x9999", "112x112", "84x28x6")


@pytest.mark.parametrize("pixels", WRONG)
def test_wrong_pixels_are_refused(pixels, refused):
    with refused(f"--pixels {pixels}"):
        planned_prompt(recipe_of(), 16, pixels)
