"""The prompts that a plan is for. There are no rows, so `--pixels` says how large their pictures are."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxrl_llm.data import image_layout
from jaxrl_llm.data.images import read_format
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.structs import ImageSizes

PIXELS = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")


class PromptSizes(NamedTuple):
    """The sizes of a prompt."""

    width: int  # P, with the tokens of pictures
    images: ImageSizes | None = None  # None: prompts of text
    picture_tokens: int = 0  # of `width`


def prompt_sizes(recipe: Recipe | SftRecipe, width: int, pixels: str) -> PromptSizes:
    """Returns the sizes of prompts of `width` tokens. pixels: size of their pictures, WIDTHxHEIGHT[xCOUNT], or "".

    Raises: UserError, if `pixels` is no valid size, the model reads no pictures, or a prompt has no room for them.
    """
    if not pixels:
        return PromptSizes(width)
    if not (match := PIXELS.fullmatch(pixels)):
        raise UserError(
            f"--pixels {pixels}: give width and height of the pictures of a prompt, and how many it has, for example "
            "512x512 or 640x480x2"
        )
    form = read_format(
        hf.find_checkpoint(recipe.model.path, weights=False),
        min_pixels=recipe.data.min_pixels,
        max_pixels=recipe.data.max_pixels,
    )
    if not form:
        raise UserError(f"--pixels {pixels}: {recipe.model.path} reads no pictures: leave --pixels out")
    try:
        grid = form.grid(int(match[1]), int(match[2]))
    except ValueError as error:
        raise UserError(f"--pixels {pixels}: a picture that {error}") from None
    count = int(match[3] or 1)
    tokens = count * grid[0] * grid[1]
    # Text stands beside the pictures.
    if tokens >= width:
        raise UserError(
            f"--pixels {pixels}: the pictures of a prompt are {tokens:,} tokens, and it has {width:,}: raise "
            "--prompt-tokens, or lower config.data.max_pixels"
        )
    patches = image_layout.patch_count([grid] * count, form)
    return PromptSizes(width, image_layout.image_sizes(patches, form), tokens)
