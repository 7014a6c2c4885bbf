"""Tries meshes, micro-batches and remat for a TPU slice, the most promising first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxrl_llm.config.records import KeywordArguments
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.tools.plan.chips import GIB, Chip
from jaxrl_llm.tools.plan.phases import Phase, SlicePlan, make_plan, plan_meshes
from jaxrl_llm.tools.plan.prompts import PromptSizes

# A forward pass and a backward one of twice its cost are 3; full recomputation adds a forward pass.
PASSES = {"none": 3.0, "dots": 3.2, "full": 4.0}  # forward passes of an update that costs about as much


def search(
    recipe: Recipe,
    devices: Sequence[Any],
    chip: Chip,
    sizes: tuple[PromptSizes, Path, float],
    count: int,
    console: Console,
) -> list[SlicePlan]:
    """Returns the plans of the first `count` candidates that fit, the one with the shortest estimated step first.

    sizes: prompts, dump and mean of `make_plan`.
    """
    # Compiling takes minutes a candidate, so a rough estimate without the compiler decides the order.
    plans: list[SlicePlan] = []
    learning = len(devices) - recipe.sampler_devices
    for candidate in sorted(candidates(recipe, learning), key=lambda c: _promise(c, learning, chip)):
        if len(plans) == count:
            break
        text = f"mesh {dict(candidate.mesh)}, microbatch {candidate.microbatch}, remat {candidate.model.remat}"
        try:
            mesh, sampler = plan_meshes(devices, candidate)
            say = partial(_check_fits, chip=chip)
            plan = make_plan(candidate, mesh, *sizes, sampler_mesh=sampler, say=say, chip=chip)
        # This mesh does not suit the batch, the slice or the memory: the next one may.
        except UserError as error:
            console.print(f"{text}: {error}")
            continue
        fits = plan.fits(chip)
        console.print(f"{text}: {f'{plan.seconds(chip):.1f} s a step' if fits else 'does not fit'}")
        plans += [plan] if fits else []
    return sorted(plans, key=lambda plan: plan.seconds(chip))


def _check_fits(phase: Phase, chip: Chip) -> None:
    """Raises: UserError, for a phase that does not fit: the others need not be compiled."""
    if phase.error or phase.peak > chip.memory * GIB:
        raise UserError(f"does not fit: {phase.name}")


def candidates(recipe: Recipe, devices: int) -> Iterator[Recipe]:
    """Yields recipes with another mesh, micro-batch and remat. The tensor axis divides the heads of keys."""
    kv_heads = hf.load_model(hf.find(recipe.model.path, weights=False)).cfg.kv_heads
    for tensor, remat in itertools.product((1, 2, 4, 8, 16), ("full", "dots")):
        shards = devices // tensor
        if kv_heads % tensor or devices % tensor or recipe.prompts_per_update % shards:
            continue
        for at_once in (1, 2, 4, 8):
            if recipe.prompts_per_update % (shards * at_once) == 0:
                # fsdp over all that tensor leaves: it divides parameters and optimizer, which data would copy.
                mesh = KeywordArguments(dict(data=1, fsdp=shards, tensor=tensor))
                model = replace(recipe.model, remat=remat)
                yield replace(recipe, mesh=mesh, microbatch=shards * at_once, model=model)


def _promise(recipe: Recipe, devices: int, chip: Chip) -> float:
    """Rough seconds of an update without what all candidates share: recomputed passes, and the layers' collectives."""
    cfg, remat, mesh = hf.load_model(hf.find(recipe.model.path, weights=False)).cfg, recipe.model.remat, recipe.mesh
    experts, chosen = (cfg.mixture.experts, cfg.mixture.chosen) if cfg.mixture else (1, 1)
    # Three kernels [D, F] of each expert, and about two [D, D] of attention: with few key heads, key and value are
    # small.
    weights, active = (cfg.layers * cfg.width * (3 * n * cfg.mlp_width + 2 * cfg.width) for n in (experts, chosen))
    tokens = recipe.sizes.sequences_per_update * recipe.sizes.max_completion_tokens
    arithmetic = 2 * active * tokens * PASSES[remat] / devices / chip.flops
    # bfloat16 kernels, gathered for the forward pass, again for the backward one, and their gradients scattered: for
    # each micro-batch.
    gathered = 3 * 2 * weights / mesh.tensor * (recipe.prompts_per_update // recipe.microbatch)
    summed = 0.0
    # Two sums of the states in each layer and pass, 2 bytes a number, each sent twice (a reduce-scatter and a gather).
    if mesh.tensor > 1:
        summed = 2 * 2 * 2 * PASSES[remat] * cfg.layers * cfg.width * tokens / mesh.fsdp
    # The larger, and not the sum: the compiler sends while it computes.
    return max(arithmetic, (gathered + summed) / chip.ring)
