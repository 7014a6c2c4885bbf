"""Pictures: how a model reads them, their sizes, and their pixels. Pillow is imported only where there are some.

A picture of h x w pixels is resized to H x W merged tokens of `patch * merge` pixels a side, and cut into patches.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.models import hf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

Grid: TypeAlias = tuple[int, int]  # rows and columns of merged tokens
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
MAX_RATIO = 200  # of a picture's sides
# What Pillow opens here. Its other formats start programs, or are no pictures.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
BICUBIC = 3  # Pillow's numbers of its filters are those of a preprocessor_config.json
# How an orientation of EXIF is undone (names of PIL.Image.Transpose).
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
ORIENTATION, SIDEWAYS = 0x0112, 5  # tag of EXIF; orientations from which on a picture lies on its side


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
    file, processor = _processor(folder)
    family = str(model.get("model_type", ""))
    patch = int(vision.get("patch_size", 16 if family.startswith("qwen3") else 14))
    _check_processor(file, processor, patch, vision)
    resample = int(processor.get("resample", BICUBIC))
    if family == "gemma3":
        side = int(vision.get("image_size", 896))
        merge = side // patch // math.isqrt(int(model.get("mm_tokens_per_image", 256)))
        return ImageFormat(int(token), patch, merge, 0, 0, side=side, planes=False, resample=resample)
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


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file with the settings of pictures, and these. That of version 5 of transformers comes first."""
    if (folder / PROCESSOR).is_file():
        nested = hf.read_config(folder, PROCESSOR).get("image_processor")
        if isinstance(nested, dict):
            return folder / PROCESSOR, nested
    if not (folder / PREPROCESSOR).is_file():
        raise UserError(f"{folder} has no {PREPROCESSOR}, which says how the model reads pictures: restore the file")
    return folder / PREPROCESSOR, hf.read_config(folder, PREPROCESSOR)


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


@contextmanager
def opened(picture: Any, folder: str = "") -> Iterator[Image]:
    """Opens a picture of which only the header is read: bytes, a path below `folder`, a data URL, or one of Pillow.

    Raises: ValueError, saying what is wrong and what helps.
    """
    extras.require("PIL", "vision", "a row with pictures")
    from PIL import Image, UnidentifiedImageError

    if isinstance(picture, Image.Image):
        yield picture
        return
    # Of all plugins: a Pillow may be built without one.
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    with _stream(picture, folder) as stream:
        try:
            image = Image.open(stream, formats=formats)
        except UnidentifiedImageError:
            raise ValueError(f"is no picture in one of the formats {', '.join(formats)}: convert it") from None
        except Image.DecompressionBombError:
            raise ValueError(f"has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: make it smaller") from None
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise ValueError(f"cannot be read ({error}): replace it") from None
        with image:
            yield image


@contextmanager
def _stream(picture: Any, folder: str) -> Iterator[IO[bytes]]:
    if isinstance(picture, str) and not picture.startswith("data:"):
        try:
            stream = path_of(picture, folder).open("rb")
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror}): give a file that is there") from None
        with stream:
            yield stream
        return
    yield io.BytesIO(picture if isinstance(picture, bytes) else _from_url(picture))


def path_of(name: str, folder: str) -> Path:
    """Returns the file of a picture, which is below `folder` if there is one. Raises: ValueError."""
    if "://" in name:
        raise ValueError("is an address, from which nothing is fetched: download it, and give its path or bytes")
    if "\0" in name:
        raise ValueError("is no path: give one")
    if not folder:
        return Path(name).expanduser()
    root = Path(folder).expanduser().resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"is not below the folder {folder} (data.image_folder): move it there, or leave that empty")
    return path


def _from_url(url: str) -> bytes:
    """Returns the content of a data URL. Raises: ValueError."""
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("is a data URL without base64: write data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is a data URL with broken base64 ({error}): replace it") from None


def size_of(image: Image) -> tuple[int, int]:
    """Returns width and height as the picture is seen, from its header. Raises: ValueError, for one without pixels."""
    from PIL.Image import MAX_IMAGE_PIXELS

    width, height = image.size
    if not width or not height:
        raise ValueError(f"is {width} x {height} pixels: leave it out")
    if MAX_IMAGE_PIXELS and width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"is {width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,}: make it smaller")
    return (height, width) if _orientation(image) >= SIDEWAYS else (width, height)


def _orientation(image: Image) -> int:
    """Returns the orientation of EXIF; 1: as it is. Pillow itself turns a TIFF."""
    from PIL.Image import Exif

    # Not image.getexif(), which decodes a PNG.
    if image.format == "TIFF" or not isinstance(image.info.get("exif"), bytes):
        return 1
    exif = Exif()
    try:
        exif.load(image.info["exif"])
        return value if isinstance(value := exif.get(ORIENTATION, 1), int) and value in TURNS else 1
    except Exception:
        # A broken EXIF may raise anything, and says nothing.
        return 1


def pixels(image: Image, form: ImageFormat) -> np.ndarray:
    """Returns the pixels [height, width, 3] uint8 that the model sees. Raises: ValueError, if it cannot be decoded."""
    from PIL import Image as Pillow

    size = form.resized(*size_of(image))
    try:
        image.load()
        if turn := TURNS.get(_orientation(image)):
            image = image.transpose(Pillow.Transpose[turn])
        # What is transparent shows white, as in transformers.
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
            image = Pillow.alpha_composite(white, image)
        image = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ValueError(f"cannot be decoded ({error}): replace it") from None
    # The filter also runs on a picture that has the size: it is the identity then.
    return np.asarray(image.resize(size, Pillow.Resampling(form.resample)))
