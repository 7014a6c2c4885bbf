"""Sizes of the prompts of a plan. A plan reads no data, so the flag `--pixels` tells the size of a prompt's images."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxrl_llm.data import image_layout
from jaxrl_llm.data.image_format import read_format
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.structs import ImageSizes, PromptSizes

# Value of the flag --pixels: WIDTHxHEIGHT or WIDTHxHEIGHTxCOUNT.
PIXELS = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")


class PlannedPrompt(NamedTuple):
    """A prompt of a plan, in which all prompts have the same size."""

    width: int  # P, the tokens of a prompt, including those of its images
    images: ImageSizes | None = None  # None for prompts of text
    image_tokens: int = 0  # image tokens among `width`

    @property
    def sizes(self) -> PromptSizes:
        return PromptSizes(self.width, self.images)


def planned_prompt(recipe: Recipe | SftRecipe, width: int, pixels: str) -> PlannedPrompt:
    """Returns the sizes of prompts of `width` tokens. pixels: WIDTHxHEIGHT[xCOUNT] of their images, "" for text.

    Raises: UserError, if `pixels` is no valid size, the model reads no images, or the images exceed the prompt.
    """
    if not pixels:
        return PlannedPrompt(width)
    if not (match := PIXELS.fullmatch(pixels)):
        raise UserError(
            f"--pixels {pixels} must be WIDTHxHEIGHT or WIDTHxHEIGHTxCOUNT of the images of a prompt, for example "
            "512x512 or 640x480x2"
        )
    form = read_format(
        hf.find_checkpoint(recipe.model.path, weights=False),
        min_pixels=recipe.data.min_pixels,
        max_pixels=recipe.data.max_pixels,
    )
    if not form:
        raise UserError(f"--pixels {pixels} has no effect, because {recipe.model.path} reads no images: remove it")
    try:
        grid = form.grid(int(match[1]), int(match[2]))
    except ValueError as error:
        raise UserError(f"--pixels {pixels}: such an image {error}") from None
    count = int(match[3] or 1)
    tokens = count * grid[0] * grid[1]
    # The limit excludes equality, because a prompt has text in addition to its images.
    if tokens >= width:
        raise UserError(
            f"--pixels {pixels}: the images of a prompt take {tokens:,} tokens, after they are resized to at most "
            f"config.data.max_pixels, but a prompt has only {width:,}: raise --prompt-tokens, or lower data.max_pixels"
        )
    patches = image_layout.patch_count([grid] * count, form)
    return PlannedPrompt(width, image_layout.image_sizes(patches, form), tokens)
