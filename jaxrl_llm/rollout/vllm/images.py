"""Prompts with images as requests to vLLM, which resizes images and expands their tokens itself.

A server gets the resized pixels of the trainer, whose size it keeps. It gets one token for each image, because it
expands every image token that it finds.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import image_files, image_layout
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import ImageLimits, Images, Prompts


def server_arguments(limits: ImageLimits | None) -> tuple[str, ...]:
    """Returns vLLM's arguments for images within `limits`, () if prompts have no images."""
    if not limits:
        return ()
    pixels = {"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
    # The limit for videos is 0, because vLLM would otherwise reserve memory for the longest video.
    counts = {"image": limits.per_prompt, "video": 0}
    return "--limit-mm-per-prompt", json.dumps(counts), "--mm-processor-kwargs", json.dumps(pixels)


def check_images(limits: ImageLimits | None) -> None:
    """Raises: UserError, for models that resize all images to one square (Gemma 3).

    A server would write other text around their images than the trainer does.
    """
    if limits and not limits.max_pixels:
        raise UserError(
            "config.engine.name = 'vllm': vLLM writes other text around the images of Gemma 3 than the trainer; set "
            "engine.name = 'jax'"
        )


class ServerPrompt(NamedTuple):
    """A prompt in the form that a vLLM server accepts."""

    tokens: list[int]  # token ids with one token for each image, which the server expands
    expanded: list[int]  # token ids as the trainer has them, with all tokens of images
    images: list[dict[str, Any]]  # content parts of the request, one for each image

    def request(self, later_tokens: list[int]) -> dict[str, Any]:
        """Returns the fields of a request for the continuation of the prompt and `later_tokens`."""
        if not self.images:
            return {"token_ids": self.tokens + later_tokens}
        return {"token_ids": self.tokens + later_tokens, "content_parts": self.images, "return_token_ids": True}


def server_prompt(prompts: Prompts, b: int) -> ServerPrompt:
    """Returns prompt b of a batch, in the form that a server accepts."""
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
