"""Finds settings that fit chips: mesh, micro-batch and remat of the shortest step, or the largest value of a field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from jaxrl_llm.config.records import KeywordArguments
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.recipe import fit
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.tools.plan.chips import GIB, Chip
from jaxrl_llm.tools.plan.compiler import Phase
from jaxrl_llm.tools.plan.phases import SlicePlan, make_plan, make_sft_plan, plan_meshes
from jaxrl_llm.tools.plan.prompts import planned_prompt

# Cost of an update in forward passes, by remat. A backward pass costs two forward passes, and full recomputation one.
PASSES = {"none": 3.0, "dots": 3.2, "full": 4.0}
AnyRecipe: TypeAlias = Recipe | SftRecipe
PRECISION = 1 / 32  # relative precision to which the largest value that fits is found


@dataclass(frozen=True)
class Planner:
    """Chips, and the settings of plans for them."""

    chip: Chip
    devices: Sequence[Any]
    dump: Path  # empty folder in which XLA's compiler for TPUs reports the memory of programs
    console: Console
    mean: float = 0.0  # mean tokens of a completion; 0 = half of the limit
    width: int = 0  # tokens of a prompt; 0 = the limit of the recipe
    pixels: str = ""  # WIDTHxHEIGHT[xCOUNT] of a prompt's images; "" = no images

    def plan(self, recipe: AnyRecipe, say: Callable[[Phase], None]) -> SlicePlan:
        """Returns the plan of a recipe. Raises: UserError, if model, mesh or images do not suit the recipe."""
        prompts = planned_prompt(recipe, self.width or recipe.data.max_prompt_tokens, self.pixels)
        mesh, sampler = plan_meshes(self.devices, recipe)
        if isinstance(recipe, SftRecipe):
            return make_sft_plan(recipe, mesh, prompts, self.dump, say=say, chip=self.chip)
        return make_plan(recipe, mesh, prompts, self.dump, self.mean, sampler_mesh=sampler, say=say, chip=self.chip)

    def plan_that_fits(self, recipe: AnyRecipe, text: str) -> SlicePlan | None:
        """Returns the plan of a recipe, or None if it does not fit, and prints the result. text: name of the recipe."""

        def check_fits(phase: Phase) -> None:
            # An error ends the plan here, because the remaining phases need not be compiled.
            if phase.error or phase.peak > self.chip.memory * GIB:
                raise UserError(f"does not fit: {phase.name}")

        try:
            plan = self.plan(recipe, check_fits)
        # The error of one candidate is only printed, because another mesh may suit batch, chips and model.
        except UserError as error:
            self.console.print(f"{text}: {error}")
            return None
        fits = plan.fits(self.chip)
        self.console.print(f"{text}: {f'{plan.seconds(self.chip):.1f} s a step' if fits else 'does not fit'}")
        return plan if fits else None


def fastest(planner: Planner, recipe: AnyRecipe, count: int) -> list[SlicePlan]:
    """Returns the plans of the first `count` candidates that fit, sorted by their estimated seconds per step."""
    # A rough estimate decides the order of candidates, because compiling takes minutes per candidate.
    learning_devices = len(planner.devices) - recipe.sampler_devices
    ordered = sorted(
        candidates(recipe, learning_devices),
        key=lambda candidate: _rough_seconds(candidate, learning_devices, planner.chip),
    )

    def describe(candidate: AnyRecipe) -> str:
        return f"mesh {dict(candidate.mesh)}, microbatch {candidate.microbatch}, remat {candidate.model.remat}"

    plans = (plan for candidate in ordered if (plan := planner.plan_that_fits(candidate, describe(candidate))))
    return sorted(itertools.islice(plans, count), key=lambda plan: plan.seconds(planner.chip))


def largest(planner: Planner, field: str, start: int, recipe_with: Callable[[int], AnyRecipe]) -> list[SlicePlan]:
    """Returns [the plan with the largest value of an integer field that fits], or [] if no value fits.

    start: first value to try; recipe_with: reads the config with another value, and raises UserError for an invalid
    one. The search assumes that all smaller values fit if one fits. Above 32 the value is found to 1/32 of itself.
    """

    def allowed(value: int) -> AnyRecipe | None:
        try:
            recipe = recipe_with(value)
            fit.check_batch_fits_mesh(recipe.sizes, plan_meshes(planner.devices, recipe)[0])
        except UserError:
            return None
        return recipe

    # Values up to `low` fit, and values from `high` on do not. The target doubles until one does not fit, and then
    # halves the range between both.
    plans: list[SlicePlan] = []
    low, high, target = 0, math.inf, max(start, 1)
    while True:
        # The range includes at least one multiple of the devices, because prompts are split evenly over them.
        end = min(high, 2 * max(target, len(planner.devices)) + 1)
        value, recipe = next(_nearest(allowed, target, low, end), (0, None))
        if recipe is None:
            break
        if plan := planner.plan_that_fits(recipe, f"{field} {value}"):
            plans, low = [plan], value
        else:
            high = value
        if high - low <= max(1, low * PRECISION):
            break
        target = 2 * low if high == math.inf else (low + int(high)) // 2
    next_value = "no larger one is allowed" if high == math.inf else f"{high} does not"
    planner.console.print(f"{field} {low} fits, and {next_value}" if plans else f"no {field} fits")
    return plans


def _nearest(
    allowed: Callable[[int], AnyRecipe | None], target: int, low: int, high: float
) -> Iterator[tuple[int, AnyRecipe]]:
    """Yields the allowed values between low and high (both excluded), those closest to target first."""
    for value in sorted(range(low + 1, int(high)), key=lambda value: abs(value - target)):
        if recipe := allowed(value):
            yield value, recipe


def candidates(recipe: AnyRecipe, devices: int) -> Iterator[AnyRecipe]:
    """Yields recipes with another mesh, micro-batch and remat. The tensor axis divides the heads of keys."""
    kv_heads = _policy(recipe).kv_heads
    prompts = recipe.sizes.prompts_per_update
    for tensor, remat in itertools.product((1, 2, 4, 8, 16), ("full", "dots")):
        shards = devices // tensor
        if kv_heads % tensor or devices % tensor or prompts % shards:
            continue
        for prompts_per_shard in (1, 2, 4, 8):
            if prompts % (shards * prompts_per_shard) == 0:
                # The data axis is 1, because fsdp splits parameters and optimizer, which data would copy.
                mesh = KeywordArguments(dict(data=1, fsdp=shards, tensor=tensor))
                model = replace(recipe.model, remat=remat)
                yield replace(recipe, mesh=mesh, microbatch=shards * prompts_per_shard, model=model)


def _policy(recipe: AnyRecipe) -> DecoderConfig:
    """Returns the config of the policy's model, without its weights."""
    return hf.load_model(hf.find_checkpoint(recipe.model.path, weights=False), family=recipe.model.family).cfg


def _rough_seconds(recipe: AnyRecipe, devices: int, chip: Chip) -> float:
    """Returns the rough seconds of an update's passes and collectives, to compare candidates."""
    cfg, remat, mesh = _policy(recipe), recipe.model.remat, recipe.mesh
    experts, chosen = (cfg.mixture.experts, cfg.mixture.chosen) if cfg.mixture else (1, 1)
    # A layer has three kernels [D, F] per expert, and about two [D, D] of attention, because keys and values are small.
    # `weights` counts all experts, which are gathered; `active` only the experts that compute one token.
    weights, active = (cfg.layers * cfg.width * (3 * n * cfg.mlp_width + 2 * cfg.width) for n in (experts, chosen))
    tokens = recipe.sizes.sequences_per_update * recipe.sizes.max_completion_tokens
    arithmetic = 2 * active * tokens * PASSES[remat] / devices / chip.flops
    # Each micro-batch gathers bfloat16 kernels twice, and scatters their gradients once.
    microbatches = recipe.sizes.prompts_per_update // recipe.microbatch
    gathered_bytes = 3 * 2 * weights / mesh.tensor * microbatches
    summed_bytes = 0.0
    # Each layer sums the states twice per pass, with 2 bytes per number, sent twice (reduce-scatter and gather).
    if mesh.tensor > 1:
        summed_bytes = 2 * 2 * 2 * PASSES[remat] * cfg.layers * cfg.width * tokens / mesh.fsdp
    # The longer of computing and sending is the time, because the compiler overlaps them.
    return max(arithmetic, (gathered_bytes + summed_bytes) / chip.ring)
