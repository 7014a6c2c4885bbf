"""Prompts with pictures as requests of vLLM, which expands and cuts pictures itself.

A server gets the pixels that the trainer sees: it resizes a picture of this size to the same size. And it gets one
token for each picture: of several it would expand each.
"""

from __future__ import annotations

import json
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import image_files
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Images, PictureLimits, Prompts


def server_arguments(limits: PictureLimits | None) -> tuple[str, ...]:
    """Returns vLLM's arguments for prompts with such pictures; None: there are none."""
    if not limits:
        return ()
    pixels = {"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
    # Without a limit for videos vLLM reserves memory for the longest one.
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

    def request(self, more: list[int]) -> dict[str, Any]:
        """Returns the fields of a request for what follows the prompt and `more` tokens."""
        if not self.pictures:
            return {"token_ids": self.tokens + more}
        return {"token_ids": self.tokens + more, "content_parts": self.pictures, "return_token_ids": True}


def server_prompt(prompts: Prompts, b: int) -> ServerPrompt:
    """Returns prompt b for a server."""
    real = np.flatnonzero(prompts.mask[b])
    expanded = prompts.tokens[b, real].tolist()
    if prompts.images is None:
        return ServerPrompt(expanded, expanded, [])
    more, pictures = pictures_of(prompts.images, b)
    tokens = prompts.tokens[b, np.setdiff1d(real, more)].tolist()
    return ServerPrompt(tokens, expanded, [_part(picture) for picture in pictures])


def pictures_of(images: Images, b: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the columns of prompt b that a server makes itself, and the pixels [height, width, 3] of its pictures.

    Of the tokens of a picture the first stays.
    """
    places, segments, patches = images.places[b], images.segments[b], images.patches[b]
    side, merged = isqrt(patches.shape[1] // 3), len(segments) // len(images.columns[b])
    token_segments, more, pictures = segments[::merged], [np.zeros(0, np.int32)], []
    for number in range(1, int(segments.max(initial=0)) + 1):
        more.append(np.sort(images.columns[b][token_segments == number])[1:])
        inside = segments == number
        rows, columns = places[inside].T
        canvas = np.zeros((rows.max() + 1, columns.max() + 1, 3, side, side), np.uint8)
        canvas[rows, columns] = patches[inside].reshape(-1, 3, side, side)
        height, width = canvas.shape[0] * side, canvas.shape[1] * side
        pictures.append(canvas.transpose(0, 3, 1, 4, 2).reshape(height, width, 3))
    return np.concatenate(more), pictures


def _part(pixels: np.ndarray) -> dict[str, Any]:
    """Returns a picture as a content part: a PNG, which keeps each pixel, in a data URL."""
    from PIL import Image  # an extra, which rows with pictures need anyway

    return {"type": "image_url", "url": image_files.data_url(Image.fromarray(pixels))}
