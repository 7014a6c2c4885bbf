"""Image format of a model: its patches, tokens and pixel limits, and the size to which an image is resized.

An image of h x w pixels is resized to H x W merged tokens of `patch * merge` pixels a side, and cut into patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf

Grid: TypeAlias = tuple[int, int]  # rows and columns of merged tokens
MAX_RATIO = 200  # largest ratio of the sides of an image
BILINEAR, BICUBIC = 2, 3  # filters of Pillow, which has the same numbers for them as preprocessor_config.json


@dataclass(frozen=True)
class ImageFormat:
    """Image format of a model: sizes in pixels, and ids of tokens."""

    image_token: int  # token id of an image in a prompt, which `expand` repeats for each of its merged tokens
    patch: int  # side of a patch in pixels
    merge: int  # side of a merged token in patches
    min_pixels: int  # limits of the pixels of a resized image
    max_pixels: int
    window: int = 0  # side of an attention window in merged tokens; 0 if attention has no windows
    side: int = 0  # side in pixels of the square to which every image is resized; 0 if `smart_resize` gives the size
    planes: bool = True  # whether positions count time, rows and columns (M-RoPE)
    resample: int = BICUBIC  # filter of Pillow
    others: tuple[int, ...] = ()  # token ids that stand for unsupported content, such as video
    # Token ids before and after an image, if the chat template writes only the first of them (`RowImages.spelling`);
    # () if the chat template writes the image token itself.
    around: tuple[int, ...] = ()

    @property
    def factor(self) -> int:
        """Side of a merged token in pixels."""
        return self.patch * self.merge

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height in pixels to which an image is resized.

        A second resize gives the same size, so that a server that gets the resized image sees the same pixels.
        Raises: ValueError, if no size is within the limits.
        """
        if self.side:
            return self.side, self.side
        limits = self.factor, self.min_pixels, self.max_pixels
        rows, columns = smart_resize(height, width, *limits)
        # Narrow images under a small limit, or almost equal limits, have no stable size.
        if smart_resize(rows, columns, *limits) != (rows, columns):
            raise ValueError(
                f"is {width} x {height} pixels, which cannot be resized to between {self.min_pixels:,} and "
                f"{self.max_pixels:,} pixels: crop the image, or raise data.max_pixels"
            )
        return columns, rows

    def grid(self, width: int, height: int) -> Grid:
        """Returns the rows and columns of merged tokens of an image. Raises: ValueError, if it is too narrow."""
        width, height = self.resized(width, height)
        return height // self.factor, width // self.factor


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the multiples of `factor` nearest to an image's sides, in the limits of their product.

    Where the product is above max_pixels or below min_pixels, both sides are first multiplied by
    sqrt(limit / (height * width)), and then rounded down or up. Raises: ValueError, for a side 200 times the other.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(
            f"is {width} x {height} pixels, but no side may be more than {MAX_RATIO} times the other: crop the image"
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
    """Returns the image format of the model in a folder; None for a text model.

    min_pixels, max_pixels: limits of a resized image; 0 = those of preprocessor_config.json.
    Raises: UserError, naming the file and its key, for unsupported settings, and for invalid limits.
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
                "config.data.min_pixels and max_pixels have no effect, because this model resizes all images to one "
                "size: set both to 0"
            )
        return _square_format(int(token), model, file, processor)
    resample = int(processor.get("resample", BICUBIC))
    merge = int(vision.get("spatial_merge_size", 2))
    window = int(vision.get("window_size", 112)) // (patch * merge) if family == "qwen2_5_vl" else 0
    low, high = _limits(processor)
    limits = min_pixels or low, max_pixels or high
    if limits[0] >= limits[1]:
        raise UserError(
            f"config.data.min_pixels = {limits[0]} must be below config.data.max_pixels = {limits[1]} (a limit of 0 in "
            f"the config is replaced by that of {file})"
        )
    if limits[1] < (patch * merge) ** 2:
        raise UserError(
            f"config.data.max_pixels = {limits[1]} must be at least {(patch * merge) ** 2}, the "
            f"{patch * merge} x {patch * merge} pixels of one token"
        )
    others = tuple(int(model[name]) for name in ("video_token_id",) if model.get(name) is not None)
    return ImageFormat(int(token), patch, merge, *limits, window=window, resample=resample, others=others)


def _square_format(token: int, model: dict[str, Any], file: Path, processor: dict[str, Any]) -> ImageFormat:
    """Returns the image format of Gemma 3, which resizes each image to one square.

    token: id of the image token; model: its config.json; processor: settings in `file`.
    Raises: UserError, if the processor has another size than the model.
    """
    vision = model["vision_config"]
    side, patch = int(vision.get("image_size", 896)), int(vision.get("patch_size", 14))
    if (size := processor.get("size")) not in (None, {"height": side, "width": side}):
        raise UserError(
            f"{file}: size is {size!r}, but the model needs {side} x {side} pixels: restore the model's original file"
        )
    return ImageFormat(
        image_token=token,
        patch=patch,
        merge=side // patch // math.isqrt(int(model.get("mm_tokens_per_image", 256))),
        min_pixels=0,
        max_pixels=0,
        side=side,
        planes=False,
        resample=int(processor.get("resample", BILINEAR)),
        around=(int(model.get("boi_token_index", 255_999)), int(model.get("eoi_token_index", 256_000))),
    )


def _check_processor(file: Path, processor: dict[str, Any], patch: int, vision: dict[str, Any]) -> None:
    """Raises: UserError, for a setting of an image processor with which the model would see other pixels than here."""
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
            raise UserError(f"{file}: {key} = {processor[key]!r} is not supported: it must be {allowed[0]!r}")


def _limits(processor: dict[str, Any]) -> tuple[int, int]:
    """Returns the smallest and the largest number of pixels of a resized image.

    Older keys have precedence over newer ones, as in transformers.
    """
    size = processor.get("size") if isinstance(processor.get("size"), dict) else {}
    assert isinstance(size, dict)
    low = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    high = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    return int(low), int(high)
