"""Images of a data set: their sizes are read with the rows, and their pixels when a step needs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from jaxrl_llm.data import image_files, image_layout
from jaxrl_llm.data.image_columns import is_pillow
from jaxrl_llm.data.image_format import Grid, ImageFormat
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras, progress
from jaxrl_llm.structs import ImageLimits, Images, ImageSizes

THREADS = min(16, os.cpu_count() or 1)  # threads that open images; Pillow decodes without Python's lock
CHUNK = 64  # images that are measured at a time, so that the first broken one soon ends the reading


@dataclass(frozen=True)
class LazyImage:
    """An image of a row, which is opened when a step needs it."""

    source: Any  # bytes, a path or data URL, or an image of Pillow
    folder: str  # folder that a path is relative to; "" = the current one
    where: str  # source of rows, row number and number of the image, for errors
    size: tuple[int, int]  # width and height in pixels when the rows were read

    @property
    def name(self) -> str:
        """Name of the image in logs and pages: its file (or its row), and its size."""
        is_path = isinstance(self.source, str) and not self.source.startswith("data:")
        return f"{self.source if is_path else self.where}, {self.size[0]} x {self.size[1]}"

    @cached_property
    def digest(self) -> str:
        """Hash of the content, or of the path and size of a file; equal in all processes."""
        if is_pillow(self.source):
            return digest(self.source)
        content = self.source if isinstance(self.source, bytes) else f"{self.source} {self.size}".encode()
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class RowImages:
    """Images of the rows of a data set, in their order in each prompt."""

    form: ImageFormat
    rows: list[tuple[LazyImage, ...]]

    @cached_property
    def patches_of_rows(self) -> list[int]:
        """Number of patches of each prompt, with the padding of windows."""
        return [image_layout.patch_count(self.grids(i), self.form) for i in range(len(self.rows))]

    @property
    def patches(self) -> int:
        """N: largest number of patches of a prompt."""
        return max(self.patches_of_rows, default=0)

    @property
    def sizes(self) -> ImageSizes:
        """Sizes of the images of a batch."""
        return image_layout.image_sizes(self.patches, self.form)

    @property
    def tokens(self) -> int:
        """Largest number of image tokens of a prompt."""
        return max(sum(height * width for height, width in self.grids(i)) for i in range(len(self.rows)))

    def line(self, width: int) -> str:
        """Returns number and sizes of the images as a line of the banner. width: P, tokens of the longest prompt."""
        return (
            f"{self.count:,} images, up to {self.patches:,} patches and {self.tokens:,} image tokens per prompt of up "
            f"to {width:,} tokens"
        )

    @cached_property
    def count(self) -> int:
        """Number of images in all rows."""
        return sum(map(len, self.rows))

    def grids(self, row: int) -> list[Grid]:
        """Returns the rows and columns of merged tokens of the images of a row."""
        return [self.form.grid(*image.size) for image in self.rows[row]]

    def take(self, rows: Sequence[int]) -> RowImages:
        """Returns the images of the rows with these indices."""
        return RowImages(self.form, [self.rows[i] for i in rows])

    def digests(self, row: int) -> str:
        """Returns the hashes of the images of a row as one text; "" for a row without images."""
        return "".join(image.digest for image in self.rows[row])

    def spelling(self, tokenizer: Any) -> dict[str, str]:
        """Returns {text that the chat template writes for an image: text with the image token}; {} if equal."""
        if not self.form.around:
            return {}
        begin, token, end = tokenizer.convert_ids_to_tokens(
            [self.form.around[0], self.form.image_token, self.form.around[1]]
        )
        # The tokens are inserted as text, because a tokenizer may join their line ends with neighbouring ones.
        return {begin: f"\n\n{begin}{token}{end}\n\n"}

    def expand(
        self, ids: Sequence[np.ndarray], tokenizer: Any, source: str, numbers: Sequence[int]
    ) -> list[np.ndarray]:
        """Returns the token ids of all rows with one token for each merged token of their images.

        ids: token ids of each row; numbers: number of each row in its source, from 1.
        Raises: UserError, naming source and row, if the number of image tokens differs from that of the images.
        """
        token = tokenizer.convert_ids_to_tokens((*self.form.around, self.form.image_token)[0])
        expanded = []
        for i, (tokens, number) in enumerate(zip(ids, numbers, strict=True)):
            count, images = int((tokens == self.form.image_token).sum()), len(self.rows[i])
            if count > images:
                raise UserError(
                    f"{source} row {number}: the prompt has {token} {count} times, but only {images} images: remove "
                    f"{token} from its text"
                )
            if count < images:
                raise UserError(
                    f"{source} row {number}: the chat template writes {token} {count} times for {images} images: use "
                    "the original chat template of the model, which writes it once per image"
                )
            if unsupported := sorted(set(self.form.others) & set(tokens.tolist())):
                video = tokenizer.convert_ids_to_tokens(unsupported[0])
                raise UserError(
                    f"{source} row {number}: the prompt has the token {video}, but videos are not supported: remove "
                    "the token from its text"
                )
            expanded.append(image_layout.expand(tokens, self.grids(i), self.form) if images else tokens)
        return expanded

    def batch(self, rows: Sequence[int], tokens: np.ndarray, mask: np.ndarray, sizes: ImageSizes) -> Images:
        """Opens the images of a batch of rows. tokens, mask: [B, P] of the prompts of these rows.

        Raises: UserError, for an image whose file is gone or whose size has changed.
        """
        batch_images = [image for i in rows for image in self.rows[i]]
        with ThreadPoolExecutor(THREADS) as pool:
            opened = iter(list(pool.map(partial(_pixels, form=self.form), batch_images)))
        pixels = [[next(opened) for _ in self.rows[i]] for i in rows]
        return image_layout.stack(tokens, mask, pixels, self.form, sizes)

    def check_completions(self, ids: Sequence[np.ndarray], tokenizer: Any, source: str, numbers: Sequence[int]) -> None:
        """Raises: UserError, for a completion with an image token, whose loss would be infinite.

        ids: token ids of each completion; numbers: number of its row in the source, from 1.
        """
        forbidden = [self.form.image_token, *self.form.others]
        for tokens, number in zip(ids, numbers, strict=True):
            if len(indices := np.flatnonzero(np.isin(tokens, forbidden))):
                token = tokenizer.convert_ids_to_tokens(int(tokens[indices[0]]))
                raise UserError(
                    f"{source} row {number}: the completion has {token}, which the model never samples: remove it from "
                    "the completion"
                )


def limits(*sets: RowImages | None) -> ImageLimits | None:
    """Returns the limits of the images of several data sets; None if they have no images."""
    filled = [images for images in sets if images and images.count]
    if not filled:
        return None
    form = filled[0].form
    return ImageLimits(max(len(row) for images in filled for row in images.rows), form.min_pixels, form.max_pixels)


def join(parts: Sequence[RowImages | None]) -> RowImages | None:
    """Joins the images of several data sets for one model; None if the model reads no images."""
    sets = [part for part in parts if part]
    if not sets:
        return None
    return RowImages(sets[0].form, list(chain(*(part.rows for part in sets))))


def measure(sources: Sequence[tuple[str, Sequence[Any]]], form: ImageFormat, folder: str) -> RowImages:
    """Reads the sizes of the images of all rows from their headers.

    sources: (name of the row for errors, its images) for each row; folder: folder of relative paths.
    Raises: UserError, for the first image that cannot be read.
    """
    pairs = [(f"{where}: image {k}", image) for where, row_images in sources for k, image in enumerate(row_images, 1)]
    if pairs:
        extras.require("PIL", "vision", f"{pairs[0][0]}: it")
    images: list[LazyImage] = []
    with progress.task("sizes of images", len(pairs)) as task, ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(pairs), CHUNK):
            images += pool.map(partial(_measured, form=form, folder=folder), pairs[start : start + CHUNK])
            task.advance(len(images) - start)
    remaining_images = iter(images)
    return RowImages(form, [tuple(next(remaining_images) for _ in row_images) for _, row_images in sources])


def _measured(pair: tuple[str, Any], form: ImageFormat, folder: str) -> LazyImage:
    """Returns an image with its size. pair: name for errors, and source. Raises: UserError, for an invalid image."""
    where, source = pair
    try:
        with image_files.opened(source, folder) as image:
            size = image_files.size_of(image)
            form.grid(*size)
            image_files.check_whole(image)
    except ValueError as error:
        raise UserError(f"{_described(where, source)} {error}") from None
    return LazyImage(source, folder, where, size)


def _pixels(lazy_image: LazyImage, form: ImageFormat) -> np.ndarray:
    """Returns the pixels of an image as the model sees it. Raises: UserError, if the image has changed or is gone."""
    try:
        with image_files.opened(lazy_image.source, lazy_image.folder) as image:
            size = image_files.size_of(image)
            if size != lazy_image.size:
                raise ValueError(
                    "has changed from {} x {} to {} x {} pixels during the run: restore the file".format(
                        *lazy_image.size, *size
                    )
                )
            return image_files.pixels(image, form)
    except ValueError as error:
        raise UserError(f"{_described(lazy_image.where, lazy_image.source)} {error}") from None


def thumbnail(lazy_image: LazyImage) -> str:
    """Returns a small copy of an image as a data URL. Raises: UserError, if it can no longer be read."""
    try:
        with image_files.opened(lazy_image.source, lazy_image.folder) as image:
            return image_files.thumbnail(image)
    except ValueError as error:
        raise UserError(f"{_described(lazy_image.where, lazy_image.source)} {error}") from None


def _described(where: str, source: Any) -> str:
    """Returns the place of an image, with its path if it has one, for errors."""
    if not isinstance(source, str) or source.startswith("data:"):
        return where
    return f"{where} ({source:.100})"


def digest(image: Any) -> str:
    """Returns a hash of the content of an image of Pillow, which is equal in all processes."""
    content = hashlib.sha256(f"{image.mode} {image.size} {image.info.get('transparency')!r}".encode())
    content.update(image.tobytes())
    content.update(bytes(image.getpalette() or ()))
    return content.hexdigest()
