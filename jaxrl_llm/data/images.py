"""How a model reads pictures, and how large they are then.

A picture of h x w pixels is resized to H x W merged tokens of `patch * merge` pixels a side, and cut into patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf

Grid: TypeAlias = tuple[int, int]  # rows and columns of merged tokens
MAX_RATIO = 200  # of a picture's sides
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of its filters are those of a preprocessor_config.json


@dataclass(frozen=True)
class ImageFormat:
    """How a model reads pictures: sizes in pixels, and ids of tokens."""

    image_token: int  # stands for a picture in a prompt, and after `expand` for each of its merged tokens
    patch: int  # pixels of a side
    merge: int  # patches of a side of a merged token
    min_pixels: int
    max_pixels: int
    window: int = 0  # merged tokens of a side of a window of attention; 0: none
    side: int = 0  # of every picture; 0: as `smart_resize` says
    planes: bool = True  # positions count time, rows and columns (M-RoPE)
    resample: int = BICUBIC
    others: tuple[int, ...] = ()  # tokens that stand for what is not read, such as video
    # The tokens before and after a picture, of which a chat template writes the first alone (`spelling`); (): it writes
    # the placeholder, and what else there is.
    around: tuple[int, ...] = ()

    @property
    def factor(self) -> int:
        """Pixels of a side of a merged token."""
        return self.patch * self.merge

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height in pixels of a picture as the model sees it. Raises: ValueError.

        A second resize gives the same size, so that a server that gets the resized picture sees the same pixels.
        """
        if self.side:
            return self.side, self.side
        limits = self.factor, self.min_pixels, self.max_pixels
        rows, columns = smart_resize(height, width, *limits)
        # Narrow pictures under a small limit, or limits that are almost equal.
        if smart_resize(rows, columns, *limits) != (rows, columns):
            raise ValueError(
                f"is {width} x {height} pixels, for which there is no size between {self.min_pixels:,} and "
                f"{self.max_pixels:,} pixels: cut it, or set data.max_pixels to more"
            )
        return columns, rows

    def grid(self, width: int, height: int) -> Grid:
        """Returns the rows and columns of merged tokens of a picture. Raises: ValueError, if it is too narrow."""
        width, height = self.resized(width, height)
        return height // self.factor, width // self.factor


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the multiples of `factor` nearest to a picture's sides, in the limits of their product.

    Where the product is above max_pixels or below min_pixels, both sides are first multiplied by
    sqrt(limit / (height * width)), and then rounded down or up. Raises: ValueError, for a side 200 times the other.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(
            f"is {width} x {height} pixels, and no side may be more than {MAX_RATIO} times the other: cut it"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor


def read_format(folder: Path, *, min_pixels: int = 0, max_pixels: int = 0) -> ImageFormat | None:
    """Returns how the model of a folder reads pictures; None: it reads none. Limits of 0 are those of the folder.

    Raises: UserError, naming a file and its key, for settings that are not read here, and for limits that are none.
    """
    model = hf.read_config(folder)
    vision = model.get("vision_config")
    token = model.get("image_token_id", model.get("image_token_index"))
    if not isinstance(vision, dict) or token is None:
        return None
    file, processor = hf.read_image_processor(folder)
    family = str(model.get("model_type", ""))
    patch = int(vision.get("patch_size", 16 if family.startswith("qwen3") else 14))
    _check_processor(file, processor, patch, vision)
    if family == "gemma3":
        if min_pixels or max_pixels:
            raise UserError(
                "config.data.min_pixels and max_pixels do nothing: the model resizes all pictures to one size; set "
                "both to 0"
            )
        return _squares(int(token), model, file, processor)
    resample = int(processor.get("resample", BICUBIC))
    merge = int(vision.get("spatial_merge_size", 2))
    window = int(vision.get("window_size", 112)) // (patch * merge) if family == "qwen2_5_vl" else 0
    low, high = _limits(processor)
    limits = min_pixels or low, max_pixels or high
    if limits[0] >= limits[1]:
        raise UserError(
            f"config.data.min_pixels and max_pixels are {limits[0]} and {limits[1]} (0: those of {file}): make the "
            "first smaller than the second"
        )
    if limits[1] < (patch * merge) ** 2:
        raise UserError(
            f"config.data.max_pixels = {limits[1]} is less than a token of {patch * merge} x {patch * merge} pixels: "
            "raise it"
        )
    others = tuple(int(model[name]) for name in ("video_token_id",) if model.get(name) is not None)
    return ImageFormat(int(token), patch, merge, *limits, window=window, resample=resample, others=others)


def _squares(token: int, model: dict[str, Any], file: Path, processor: dict[str, Any]) -> ImageFormat:
    """Returns how Gemma 3 reads pictures: each is resized to one square. Raises: UserError, for another size."""
    vision = model["vision_config"]
    side, patch = int(vision.get("image_size", 896)), int(vision.get("patch_size", 14))
    if (size := processor.get("size")) not in (None, {"height": side, "width": side}):
        raise UserError(f"{file}: size is {size!r}, and the model reads {side} x {side} pixels: restore the file")
    return ImageFormat(
        token,
        patch,
        side // patch // math.isqrt(int(model.get("mm_tokens_per_image", 256))),
        0,
        0,
        side=side,
        planes=False,
        resample=int(processor.get("resample", BILINEAR)),
        around=(int(model.get("boi_token_index", 255_999)), int(model.get("eoi_token_index", 256_000))),
    )


def _check_processor(file: Path, processor: dict[str, Any], patch: int, vision: dict[str, Any]) -> None:
    """Raises: UserError, for a setting that would give other pixels than those that are made here."""
    merge = vision.get("spatial_merge_size", 2)
    expected: dict[str, tuple[Any, ...]] = {
        "do_resize": (True, None),
        "do_convert_rgb": (True, None),
        "do_rescale": (True, None),
        "do_pan_and_scan": (False, None),
        "patch_size": (patch, None),
        "merge_size": (merge, None),
    }
    for key, allowed in expected.items():
        if processor.get(key) not in allowed:
            raise UserError(f"{file}: {key} is {processor[key]!r}, and only {allowed[0]!r} is read here: change it")


def _limits(processor: dict[str, Any]) -> tuple[int, int]:
    """Returns the least and the most pixels of a picture. The older keys come first, as in transformers."""
    size = processor.get("size") if isinstance(processor.get("size"), dict) else {}
    assert isinstance(size, dict)
    low = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    high = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    return int(low), int(high)
