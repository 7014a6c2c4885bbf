"""Prompts with pictures as requests of vLLM, which expands and cuts pictures itself.

A server gets the pixels that the trainer sees, because it resizes a picture of this size to the same size. It gets one
token for each picture, because it would expand each of several tokens.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import image_files, image_layout
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Images, PictureLimits, Prompts


def server_arguments(limits: PictureLimits | None) -> tuple[str, ...]:
    """Returns vLLM's arguments for prompts with such pictures; None: there are none."""
    if not limits:
        return ()
    pixels = {"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
    # The limit for videos is 0, because vLLM would otherwise reserve memory for the longest video.
    counts = {"image": limits.per_prompt, "video": 0}
    return "--limit-mm-per-prompt", json.dumps(counts), "--mm-processor-kwargs", json.dumps(pixels)


def check_pictures(limits: PictureLimits | None) -> None:
    """Raises: UserError, for pictures that are all resized to one square (Gemma 3).

    A server would write the lines around them its own way, from a prompt without them.
    """
    if limits and not limits.max_pixels:
        raise UserError(
            "config.engine: prompts with pictures of Gemma 3 cannot be sent to vLLM: sample with the engine in JAX"
        )


class ServerPrompt(NamedTuple):
    """A prompt for a server."""

    tokens: list[int]  # one for each picture
    expanded: list[int]  # as the trainer has them
    pictures: list[dict[str, Any]]  # the content parts of the request

    def request(self, later_tokens: list[int]) -> dict[str, Any]:
        """Returns the fields of a request for what follows the prompt and `later_tokens` tokens."""
        if not self.pictures:
            return {"token_ids": self.tokens + later_tokens}
        return {"token_ids": self.tokens + later_tokens, "content_parts": self.pictures, "return_token_ids": True}


def server_prompt(prompts: Prompts, b: int) -> ServerPrompt:
    """Returns prompt b for a server."""
    real = np.flatnonzero(prompts.mask[b])
    expanded = prompts.tokens[b, real].tolist()
    if prompts.images is None:
        return ServerPrompt(expanded, expanded, [])
    tokens = prompts.tokens[b, np.setdiff1d(real, _made_by_server(prompts.images, b))].tolist()
    return ServerPrompt(tokens, expanded, [_part(picture) for picture in image_layout.pixels(prompts.images, b)])


def _made_by_server(images: Images, b: int) -> np.ndarray:
    """Returns the columns of prompt b that a server makes itself, which are a picture's tokens except the first."""
    segments = images.segments[b][:: len(images.segments[b]) // len(images.columns[b])]
    columns = [np.sort(images.columns[b][segments == number])[1:] for number in range(1, segments.max(initial=0) + 1)]
    return np.concatenate([np.zeros(0, np.int32), *columns])


def _part(pixels: np.ndarray) -> dict[str, Any]:
    """Returns a picture as a content part: a PNG, which keeps each pixel, in a data URL."""
    from PIL import Image  # an extra, which rows with pictures need anyway

    return {"type": "image_url", "url": image_files.data_url(Image.fromarray(pixels))}
