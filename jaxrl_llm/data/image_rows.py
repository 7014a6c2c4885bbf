"""The images of a data set: their sizes when its rows are read, and their pixels when a step needs them."""

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
from jaxrl_llm.data.images import Grid, ImageFormat
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras, progress
from jaxrl_llm.structs import ImageLimits, Images, ImageSizes

THREADS = min(16, os.cpu_count() or 1)  # that open images: Pillow decodes without Python's lock
FEW = 64  # images that are measured at a time: the first broken one ends the reading soon


@dataclass(frozen=True)
class LazyImage:
    """An image of a row. It is opened when a step needs it."""

    source: Any  # bytes, a path or data URL, or an image of Pillow
    folder: str  # that a path is relative to
    where: str  # source of rows, number of the row and of the image, for errors
    size: tuple[int, int]  # width and height in pixels, when the rows were read

    @property
    def name(self) -> str:
        """What logs and pages call it: its file and size, or its place and size."""
        path = isinstance(self.source, str) and not self.source.startswith("data:")
        return f"{self.source if path else self.where}, {self.size[0]} x {self.size[1]}"

    @cached_property
    def digest(self) -> str:
        """A hash of the content, or of the path and size of a file: it is the same in every process."""
        if is_pillow(self.source):
            return digest(self.source)
        content = self.source if isinstance(self.source, bytes) else f"{self.source} {self.size}".encode()
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class RowImages:
    """The images of the rows of a data set, in their order in each prompt."""

    form: ImageFormat
    rows: list[tuple[LazyImage, ...]]

    @cached_property
    def patches_of_rows(self) -> list[int]:
        """The patches of each prompt, with those that pad windows."""
        return [image_layout.patch_count(self.grids(i), self.form) for i in range(len(self.rows))]

    @property
    def patches(self) -> int:
        """N: the most patches of a prompt."""
        return max(self.patches_of_rows, default=0)

    def sizes(self, lengths: Sequence[int]) -> ImageSizes:
        """Returns the sizes of the images of each prompt in a batch; lengths: tokens of all prompts."""
        return image_layout.image_sizes(
            self.patches, self.form, image_layout.smaller_sizes(lengths, self.patches_of_rows)
        )

    @property
    def tokens(self) -> int:
        """The most tokens of the images of a prompt."""
        return max(sum(height * width for height, width in self.grids(i)) for i in range(len(self.rows)))

    def line(self, width: int) -> str:
        """Says how many there are and how large, for the banner. width: P."""
        return (
            f"{self.count:,} of at most {self.patches:,} patches; prompts of at most {width:,} tokens, "
            f"{self.tokens:,} of them of images"
        )

    @cached_property
    def count(self) -> int:
        """The number of images."""
        return sum(map(len, self.rows))

    def grids(self, row: int) -> list[Grid]:
        """Returns the rows and columns of merged tokens of the images of a row."""
        return [self.form.grid(*image.size) for image in self.rows[row]]

    def take(self, rows: Sequence[int]) -> RowImages:
        """Returns the images of these rows."""
        return RowImages(self.form, [self.rows[i] for i in rows])

    def digests(self, row: int) -> str:
        """Returns a hash of the images of a row; "": it has none."""
        return "".join(image.digest for image in self.rows[row])

    def spelling(self, tokenizer: Any) -> dict[str, str]:
        """Returns what is to stand in a text for what a chat template writes for an image; {}: the same."""
        if not self.form.around:
            return {}
        begin, token, end = tokenizer.convert_ids_to_tokens(
            [self.form.around[0], self.form.image_token, self.form.around[1]]
        )
        # The marks are inserted as text, because a tokenizer may join their line ends with those beside them.
        return {begin: f"\n\n{begin}{token}{end}\n\n"}

    def expand(
        self, ids: Sequence[np.ndarray], tokenizer: Any, source: str, numbers: Sequence[int]
    ) -> list[np.ndarray]:
        """Returns the token ids of all rows with a token for each merged token of their images.

        Raises: UserError, naming source and row, if the prompt has other placeholders than those of its images.
        """
        token = tokenizer.convert_ids_to_tokens((*self.form.around, self.form.image_token)[0])
        expanded = []
        for i, (tokens, number) in enumerate(zip(ids, numbers, strict=True)):
            count, images = int((tokens == self.form.image_token).sum()), len(self.rows[i])
            if count > images:
                raise UserError(
                    f"{source} row {number}: the prompt has {token} {count} times, more than its images "
                    f"({images}): take it out of its text"
                )
            if count < images:
                raise UserError(
                    f"{source} row {number}: the chat template writes {token} {count} times, less than the images "
                    f"({images}): use the template of the model, which writes one for each"
                )
            if others := sorted(set(self.form.others) & set(tokens.tolist())):
                raise UserError(
                    f"{source} row {number}: the prompt has the token {tokenizer.convert_ids_to_tokens(others[0])}, "
                    "and no video is read here: take it out of its text"
                )
            expanded.append(image_layout.expand(tokens, self.grids(i), self.form) if images else tokens)
        return expanded

    def batch(self, rows: Sequence[int], tokens: np.ndarray, mask: np.ndarray, sizes: ImageSizes) -> Images:
        """Opens the images of rows, of which the prompts are tokens and mask [B, P].

        Raises: UserError, for one that is gone, or that has changed its size.
        """
        chosen = [image for i in rows for image in self.rows[i]]
        with ThreadPoolExecutor(THREADS) as pool:
            opened = iter(list(pool.map(partial(_pixels, form=self.form), chosen)))
        pixels = [[next(opened) for _ in self.rows[i]] for i in rows]
        return image_layout.stack(tokens, mask, pixels, self.form, sizes)

    def check_completions(self, ids: Sequence[np.ndarray], tokenizer: Any, source: str, numbers: Sequence[int]) -> None:
        """Raises: UserError, for a completion with a token of images. None is sampled, so its loss is infinite."""
        never = [self.form.image_token, *self.form.others]
        for tokens, number in zip(ids, numbers, strict=True):
            if len(at := np.flatnonzero(np.isin(tokens, never))):
                token = tokenizer.convert_ids_to_tokens(int(tokens[at[0]]))
                raise UserError(
                    f"{source} row {number}: the completion has {token}, which no completion may have: take it out"
                )


def limits(*sets: RowImages | None) -> ImageLimits | None:
    """Returns the limits of the images of several data sets; None: there are none."""
    filled = [images for images in sets if images and images.count]
    if not filled:
        return None
    form = filled[0].form
    return ImageLimits(max(len(row) for images in filled for row in images.rows), form.min_pixels, form.max_pixels)


def join(parts: Sequence[RowImages | None]) -> RowImages | None:
    """Joins the images of several data sets for one model."""
    sets = [part for part in parts if part]
    if not sets:
        return None
    return RowImages(sets[0].form, list(chain(*(part.rows for part in sets))))


def measure(sources: Sequence[tuple[str, Sequence[Any]]], form: ImageFormat, folder: str) -> RowImages:
    """Reads the sizes of the images of all rows from their headers.

    sources: for each row, its source and number for errors, and its images. Raises: UserError, for the first image
    that cannot be read.
    """
    pairs = [(f"{where}: image {k}", image) for where, listed in sources for k, image in enumerate(listed, 1)]
    if pairs:
        extras.require("PIL", "vision", f"{pairs[0][0]}: it")
    images: list[LazyImage] = []
    with progress.task("sizes of images", len(pairs)) as task, ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(pairs), FEW):
            images += pool.map(partial(_measured, form=form, folder=folder), pairs[start : start + FEW])
            task.advance(len(images) - start)
    rest = iter(images)
    return RowImages(form, [tuple(next(rest) for _ in listed) for _, listed in sources])


def _measured(pair: tuple[str, Any], form: ImageFormat, folder: str) -> LazyImage:
    where, source = pair
    try:
        with image_files.opened(source, folder) as image:
            size = image_files.size_of(image)
            form.grid(*size)
            image_files.check_whole(image)
    except ValueError as error:
        raise UserError(f"{_place(where, source)} {error}") from None
    return LazyImage(source, folder, where, size)


def _pixels(lazy_image: LazyImage, form: ImageFormat) -> np.ndarray:
    try:
        with image_files.opened(lazy_image.source, lazy_image.folder) as image:
            size = image_files.size_of(image)
            if size != lazy_image.size:
                raise ValueError(
                    "has changed: it is {} x {} pixels, and was {} x {} when the run began: put the file back".format(
                        *size, *lazy_image.size
                    )
                )
            return image_files.pixels(image, form)
    except ValueError as error:
        raise UserError(f"{_place(lazy_image.where, lazy_image.source)} {error}") from None


def thumbnail(lazy_image: LazyImage) -> str:
    """Returns a small copy of an image as a data URL. Raises: UserError, if it can no longer be read."""
    try:
        with image_files.opened(lazy_image.source, lazy_image.folder) as image:
            return image_files.thumbnail(image)
    except ValueError as error:
        raise UserError(f"{_place(lazy_image.where, lazy_image.source)} {error}") from None


def _place(where: str, source: Any) -> str:
    if not isinstance(source, str) or source.startswith("data:"):
        return where
    return f"{where} ({source:.100})"


def digest(image: Any) -> str:
    """Returns a hash of the content of an image of Pillow, which is the same in every process."""
    content = hashlib.sha256(f"{image.mode} {image.size} {image.info.get('transparency')!r}".encode())
    content.update(image.tobytes())
    content.update(bytes(image.getpalette() or ()))
    return content.hexdigest()
