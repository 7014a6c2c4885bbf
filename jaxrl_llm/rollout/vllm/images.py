"""Prompts with images as requests of vLLM, which expands and cuts images itself.

A server gets the pixels that the trainer sees, because it resizes an image of this size to the same size. It gets one
token for each image, because it would expand each of several tokens.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import image_files, image_layout
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import ImageLimits, Images, Prompts


def server_arguments(limits: ImageLimits | None) -> tuple[str, ...]:
    """Returns vLLM's arguments for prompts with such images; None: there are none."""
    if not limits:
        return ()
    pixels = {"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
    # The limit for videos is 0, because vLLM would otherwise reserve memory for the longest video.
    counts = {"image": limits.per_prompt, "video": 0}
    return "--limit-mm-per-prompt", json.dumps(counts), "--mm-processor-kwargs", json.dumps(pixels)


def check_images(limits: ImageLimits | None) -> None:
    """Raises: UserError, for images that are all resized to one square (Gemma 3).

    A server would write the lines around them its own way, from a prompt without them.
    """
    if limits and not limits.max_pixels:
        raise UserError(
            "config.engine: prompts with images of Gemma 3 cannot be sent to vLLM: sample with the engine in JAX"
        )


class ServerPrompt(NamedTuple):
    """A prompt for a server."""

    tokens: list[int]  # one for each image
    expanded: list[int]  # as the trainer has them
    images: list[dict[str, Any]]  # the content parts of the request

    def request(self, more: list[int]) -> dict[str, Any]:
        """Returns the fields of a request for what follows the prompt and `more` tokens."""
        if not self.images:
            return {"token_ids": self.tokens + more}
        return {"token_ids": self.tokens + more, "content_parts": self.images, "return_token_ids": True}


def server_prompt(prompts: Prompts, b: int) -> ServerPrompt:
    """Returns prompt b for a server."""
    real = np.flatnonzero(prompts.mask[b])
    expanded = prompts.tokens[b, real].tolist()
    if prompts.images is None:
        return ServerPrompt(expanded, expanded, [])
    tokens = prompts.tokens[b, np.setdiff1d(real, _made_by_server(prompts.images, b))].tolist()
    return ServerPrompt(tokens, expanded, [_part(image) for image in image_layout.pixels(prompts.images, b)])


def _made_by_server(images: Images, b: int) -> np.ndarray:
    """Returns the columns of prompt b that a server makes itself, which are an image's tokens except the first."""
    segments = images.segments[b][:: len(images.segments[b]) // len(images.columns[b])]
    columns = [np.sort(images.columns[b][segments == number])[1:] for number in range(1, segments.max(initial=0) + 1)]
    return np.concatenate([np.zeros(0, np.int32), *columns])


def _part(pixels: np.ndarray) -> dict[str, Any]:
    """Returns an image as a content part: a PNG, which keeps each pixel, in a data URL."""
    from PIL import Image  # an extra, which rows with images need anyway

    return {"type": "image_url", "url": image_files.data_url(Image.fromarray(pixels))}
