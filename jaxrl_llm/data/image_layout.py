"""Lays out images in prompts: expanded token ids, positions (M-RoPE), and patches in the order of the tower.

An image of H x W merged tokens is one token in an encoded prompt, and H W tokens, row by row, after `expand`.
The patches of a merged token are neighbours, row by row. Merged tokens are ordered row by row, or window by window,
with each window padded to its largest size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.image_format import Grid, ImageFormat
from jaxrl_llm.structs import Images, ImageSizes


class Layout(NamedTuple):
    """Positions and patches of the images of one prompt of T tokens. n: its patches with padding; m: n / merge^2."""

    positions: np.ndarray  # [3, T] int32: time, row, column
    end: int  # position of the token after the prompt
    columns: np.ndarray  # [m] int32, index of each merged token in the prompt; -1 = padding
    places: np.ndarray  # [n, 2] int32, row and column of each patch in its image; 0 in padding
    segments: np.ndarray  # [n] int32, number of the image from 1; 0 = padding


def expand(tokens: np.ndarray, grids: Sequence[Grid], form: ImageFormat) -> np.ndarray:
    """Returns the token ids of a prompt with each image token repeated for the merged tokens of its image.

    grids: grid of each image. Raises: ValueError, if the numbers of image tokens and images differ.
    """
    image_indices = np.flatnonzero(tokens == form.image_token)
    if len(image_indices) != len(grids):
        raise ValueError(f"{len(image_indices)} tokens stand for {len(grids)} images")
    repeats = np.ones(len(tokens), np.int64)
    repeats[image_indices] = [rows * columns for rows, columns in grids]
    return np.repeat(tokens, repeats)


def _starts(tokens: np.ndarray, grids: Sequence[Grid], form: ImageFormat) -> list[int]:
    """Returns the index of the first token of each image in an expanded prompt. Raises: ValueError."""
    image_indices = np.flatnonzero(tokens == form.image_token)
    sizes = [rows * columns for rows, columns in grids]
    if len(image_indices) != sum(sizes):
        raise ValueError(f"{len(image_indices)} tokens stand for images of {sum(sizes)} tokens")
    # Images are told apart by their sizes, because images without text between them are neighbours.
    return [int(image_indices[k]) for k in np.cumsum([0, *sizes])[:-1]]


def lay_out(tokens: np.ndarray, grids: Sequence[Grid], form: ImageFormat) -> Layout:
    """Returns the layout of the images of an expanded prompt.

    Text at position p has the three positions (p, p, p). The tokens of an image that begins at p have
    (p, p + row, p + column), and the text after it begins at p + max(H, W).
    Raises: ValueError, if the prompt is not expanded for these grids.
    """
    starts = _starts(tokens, grids, form)
    positions = np.empty((3, len(tokens)), np.int32)
    blocks, places, segments = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)], [np.zeros(0, np.int32)]
    text_start = position = 0  # index and position of the first token after the last image
    for number, (start, grid) in enumerate(zip(starts, grids, strict=True), 1):
        positions[:, text_start:start] = position + np.arange(start - text_start)
        position += start - text_start
        row, column = (index.ravel() for index in np.indices(grid))  # of each token of the image
        size = len(row)
        zero = np.zeros_like(row)
        offsets = [zero, row, column] if form.planes else [np.arange(size)] * 3
        positions[:, start : start + size] = position + np.stack(offsets)
        position += max(grid) if form.planes else size
        text_start = start + size
        order = _tower_order(grid, form.window)
        is_real = np.repeat(order >= 0, form.merge**2)
        places.append(np.where(is_real[:, None], _patch_places(grid, form.merge)[order].reshape(-1, 2), 0))
        segments.append(np.where(is_real, number, 0))
        blocks.append(np.where(order >= 0, start + order, -1))
    positions[:, text_start:] = position + np.arange(len(tokens) - text_start)
    end = position + len(tokens) - text_start
    columns, all_places, numbers = (np.concatenate(x).astype(np.int32) for x in (blocks, places, segments))
    return Layout(positions, end, columns, all_places, numbers)


def _tower_order(grid: Grid, window: int) -> np.ndarray:
    """Returns the row-by-row numbers of an image's merged tokens in the order of the tower; -1 = padding."""
    numbers = np.arange(grid[0] * grid[1]).reshape(grid)
    if not window:
        return numbers.ravel()
    numbers = np.pad(numbers, [(0, -side % window) for side in grid], constant_values=-1)
    rows, columns = (side // window for side in numbers.shape)
    windows = numbers.reshape(rows, window, columns, window).swapaxes(1, 2).reshape(-1, window**2)
    # The sort is stable, so that the tokens of a window stay row by row, and its padding comes last.
    return np.take_along_axis(windows, np.argsort(windows < 0, axis=1, kind="stable"), 1).ravel()


def _patch_places(grid: Grid, merge: int) -> np.ndarray:
    """Returns row and column [H W, merge^2, 2] of the patches of each merged token."""
    tokens, inner = (np.indices(shape).reshape(2, -1).T for shape in (grid, (merge, merge)))
    return merge * tokens[:, None] + inner


def patch_count(grids: Sequence[Grid], form: ImageFormat) -> int:
    """Returns the number of patches of a prompt's images, with the padding of windows."""
    window = form.window or 1
    return sum(-(-rows // window) * -(-columns // window) for rows, columns in grids) * (window * form.merge) ** 2


def image_sizes(patches: int, form: ImageFormat) -> ImageSizes:
    """Returns the sizes of the images of a batch. patches: N, patches of a prompt at most."""
    return ImageSizes(patches, 3 * form.patch**2, patches // form.merge**2)


def patches(image: np.ndarray, form: ImageFormat) -> np.ndarray:
    """Returns the patches [n, 3 patch^2] of pixels [height, width, 3], channel first, in the order of the tower."""
    grid = (image.shape[0] // form.factor, image.shape[1] // form.factor)
    split = image.reshape((grid[0], form.merge, form.patch, grid[1], form.merge, form.patch, 3))
    tokens = split.transpose((0, 3, 1, 4, 6, 2, 5)).reshape(grid[0] * grid[1], form.merge**2, -1)
    order = _tower_order(grid, form.window)
    ordered = np.where(order[:, None, None] >= 0, tokens[order], np.zeros((), image.dtype))
    return ordered.reshape(-1, tokens.shape[-1])


def pixels(images: Images, b: int) -> list[np.ndarray]:
    """Returns the pixels [height, width, 3] of the images of prompt b as the tower sees them; inverse of `patches`."""
    places, segments, patches = images.places[b], images.segments[b], images.patches[b]
    side, pixels_of_images = isqrt(patches.shape[1] // 3), []
    for number in range(1, int(segments.max(initial=0)) + 1):
        in_image = segments == number
        rows, columns = places[in_image].T
        canvas = np.zeros((rows.max() + 1, columns.max() + 1, 3, side, side), np.uint8)
        canvas[rows, columns] = patches[in_image].reshape(-1, 3, side, side)
        height, width = canvas.shape[0] * side, canvas.shape[1] * side
        pixels_of_images.append(canvas.transpose(0, 3, 1, 4, 2).reshape(height, width, 3))
    return pixels_of_images


def stack(
    tokens: np.ndarray, mask: np.ndarray, images: Sequence[Sequence[np.ndarray]], form: ImageFormat, sizes: ImageSizes
) -> Images:
    """Returns the images of a batch of expanded prompts, padded to `sizes`.

    tokens, mask: [B, P], padded on any side; images: pixels [height, width, 3] uint8 of the images of each prompt, as
    `image_files.pixels` returns them. Raises: ValueError, if a prompt is not expanded for its images.
    """
    prompts, width = tokens.shape
    result = Images.padding((prompts,), width, sizes)
    for prompt, pixels_of_prompt in enumerate(images):
        real = np.flatnonzero(mask[prompt])  # indices of the real tokens
        grids = [(image.shape[0] // form.factor, image.shape[1] // form.factor) for image in pixels_of_prompt]
        layout = lay_out(tokens[prompt, real], grids, form)
        patch_count, token_count = len(layout.segments), len(layout.columns)
        if pixels_of_prompt:
            all_patches = np.concatenate([patches(image, form) for image in pixels_of_prompt])
            result.patches[prompt, :patch_count] = all_patches
        result.places[prompt, :patch_count] = layout.places
        result.segments[prompt, :patch_count] = layout.segments
        result.columns[prompt, :token_count] = np.where(layout.columns >= 0, real[layout.columns], width)
        result.positions[prompt][:, real] = layout.positions
        result.end[prompt] = layout.end
    return result
