"""Files of images: their sizes from headers, and their pixels. Pillow is imported only where there are some."""

from __future__ import annotations

import base64
import binascii
import io
import os
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.data.image_columns import is_pillow
from jaxrl_llm.data.images import ImageFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

# What Pillow opens here. Its other formats start programs, or are no images.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
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
ORIENTATION, SIDEWAYS = 0x0112, 5  # tag of EXIF; orientations from which on an image lies on its side
SMALL = 256  # pixels of a side of a thumbnail, at most
LOADING = Lock()  # of an image of Pillow, which several rows may share


@contextmanager
def opened(source: Any, folder: str = "") -> Iterator[Image]:
    """Opens an image of which only the header is read: bytes, a path below `folder`, a data URL, or one of Pillow.

    Raises: ValueError, saying what is wrong and what helps.
    """
    from PIL import Image, UnidentifiedImageError

    if is_pillow(source):
        with LOADING:
            _decode(source)
        yield source
        return
    # All plugins are loaded first, because a Pillow may be built without the plugin of a format.
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    with _stream(source, folder) as stream:
        try:
            image = Image.open(stream, formats=formats)
        except UnidentifiedImageError:
            raise ValueError(f"is no image in one of the formats {', '.join(formats)}: convert it") from None
        except Image.DecompressionBombError:
            raise ValueError(f"has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: make it smaller") from None
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise ValueError(f"cannot be read ({error}): replace it") from None
        with image:
            yield image


@contextmanager
def _stream(source: Any, folder: str) -> Iterator[IO[bytes]]:
    if isinstance(source, str) and not source.startswith("data:"):
        try:
            stream = path_of(source, folder).open("rb")
        except OSError as error:
            where = f"below {folder}" if folder else "of this machine"
            raise ValueError(f"cannot be read ({error.strerror}): give a file {where} (data.image_folder)") from None
        with stream:
            yield stream
        return
    yield io.BytesIO(source if isinstance(source, bytes) else _from_url(source))


def path_of(name: str, folder: str) -> Path:
    """Returns the file of an image, which is below `folder` if there is one. Raises: ValueError."""
    name = name.removeprefix("file://")
    if "://" in name:
        raise ValueError("is an address, from which nothing is fetched: download it, and give its path or bytes")
    if "\0" in name:
        raise ValueError("is no path: give one")
    if not folder:
        return Path(name).expanduser()
    root = Path(os.path.normpath(Path(folder).expanduser()))
    # Only the name decides, because a folder may have links to other places.
    path = Path(os.path.normpath(root / name))
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
    """Returns width and height as the image is seen, from its header. Raises: ValueError, for one without pixels."""
    from PIL.Image import MAX_IMAGE_PIXELS

    width, height = image.size
    if not width or not height:
        raise ValueError(f"is {width} x {height} pixels: leave it out")
    if MAX_IMAGE_PIXELS and width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"is {width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,}: make it smaller")
    return (height, width) if _orientation(image) >= SIDEWAYS else (width, height)


def check_whole(image: Image) -> None:
    """Raises: ValueError, for an image that cannot become RGB, or whose file is cut short.

    The end of a file of the usual formats is looked at, and an image is decoded only where it is not the usual one.
    """
    if image.mode.startswith(("I", "F")):
        # Pillow and transformers cut such values at 255, so that nearly all of the image is white.
        raise ValueError(
            f"has the mode {image.mode} of Pillow, with more than 8 bits in a channel: convert it to 8 bits"
        )
    if not _becomes_rgb(image.mode):
        raise ValueError(f"has the mode {image.mode} of Pillow, which has no RGB: convert it")
    stream = getattr(image, "fp", None)
    if not stream or not _ends(image, stream):
        _decode(image)


@cache
def _becomes_rgb(mode: str) -> bool:
    from PIL import Image

    try:
        Image.new(mode, (1, 1)).convert("RGB")
    except ValueError:
        return False
    return True


def _ends(image: Image, stream: IO[bytes]) -> bool:
    """Whether a file ends as its format asks."""
    at = stream.tell()
    length = stream.seek(0, io.SEEK_END)
    stream.seek(max(length - 12, 0))
    tail = stream.read(12)
    stream.seek(at)
    return {"PNG": tail[4:8] == b"IEND", "JPEG": tail[-2:] == b"\xff\xd9"}.get(str(image.format), False)


def _decode(image: Image) -> None:
    """Raises: ValueError, if an image cannot be decoded."""
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ValueError(f"cannot be decoded ({error}): replace it") from None


def _orientation(image: Image) -> int:
    """Returns the orientation of EXIF; 1: as it is. Pillow itself turns a TIFF."""
    from PIL.Image import Exif

    # image.getexif() is not used, because it decodes a PNG.
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
    # The orientation is read before decoding, as in `size_of`, because a PNG may have its EXIF at the end.
    turn = TURNS.get(_orientation(image))
    _decode(image)
    if turn:
        image = image.transpose(Pillow.Transpose[turn])
    # What is transparent shows white, as in transformers.
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = Pillow.alpha_composite(white, image)
    return np.asarray(image.convert("RGB").resize(size, Pillow.Resampling(form.resample)))


def thumbnail(image: Image) -> str:
    """Returns a small copy of an image as a data URL."""
    small = image.convert("RGB")
    small.thumbnail((SMALL, SMALL))
    # JPEG, because a photograph would be ten times as large as a PNG.
    return _url(small, "JPEG", quality=90)


def data_url(image: Image) -> str:
    """Returns an image as a data URL of a PNG, which keeps each pixel."""
    # Little compression: most of the time of a PNG is spent on it.
    return _url(image, "PNG", compress_level=1)


def _url(image: Image, kind: str, **settings: int) -> str:
    """Returns a data URL of an image in a format of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
