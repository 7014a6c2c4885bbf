"""Opens images: their sizes from headers, and their pixels. Pillow is imported only by functions that open one."""

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
from jaxrl_llm.data.image_format import ImageFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

# Formats that are opened. Pillow has further ones, which start programs, or are no images.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# {orientation in EXIF: the operation of PIL.Image.Transpose that undoes it}
TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
ORIENTATION = 0x0112  # EXIF tag of the orientation
FIRST_SIDEWAYS = 5  # orientations from this one on swap width and height
THUMBNAIL_SIDE = 256  # largest side of a thumbnail in pixels
LOADING = Lock()  # guards images of Pillow, because several rows may share one


@contextmanager
def opened(source: Any, folder: str = "") -> Iterator[Image]:
    """Opens an image, of which only the header is read.

    source: bytes, a path below `folder`, a data URL, or an image of Pillow; folder: "" for paths of any folder.
    Raises: ValueError, with the problem and the fix.
    """
    from PIL import Image, UnidentifiedImageError

    if is_pillow(source):
        with LOADING:
            _decode(source)
        yield source
        return
    # All plugins are loaded, because Image.OPEN then tells which formats this build of Pillow has.
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    with _stream(source, folder) as stream:
        try:
            image = Image.open(stream, formats=formats)
        except UnidentifiedImageError:
            raise ValueError(f"must be an image in one of the formats {', '.join(formats)}: convert it") from None
        except Image.DecompressionBombError:
            raise ValueError(f"must have at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: resize it") from None
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise ValueError(f"cannot be read ({error}): replace the image") from None
        with image:
            yield image


@contextmanager
def _stream(source: Any, folder: str) -> Iterator[IO[bytes]]:
    """Opens the bytes of an image that is no image of Pillow. Raises: ValueError, for a file that cannot be read."""
    if isinstance(source, str) and not source.startswith("data:"):
        try:
            stream = path_of(source, folder).open("rb")
        except OSError as error:
            place = f"below {folder}" if folder else "on this machine"
            raise ValueError(
                f"cannot be read ({error.strerror}): the path must name a file {place} (data.image_folder)"
            ) from None
        with stream:
            yield stream
        return
    yield io.BytesIO(source if isinstance(source, bytes) else _from_url(source))


def path_of(name: str, folder: str) -> Path:
    """Returns the file of an image. folder: folder that must contain the file; "" = any file.

    Raises: ValueError, for an address, or a path that leaves the folder.
    """
    name = name.removeprefix("file://")
    if "://" in name:
        raise ValueError("is an address, but images are not downloaded: download it, and store its path or bytes")
    if "\0" in name:
        raise ValueError("must be the path of a file")
    if not folder:
        return Path(name).expanduser()
    root = Path(os.path.normpath(Path(folder).expanduser()))
    # Links are not resolved, because a folder may have links to other places.
    path = Path(os.path.normpath(root / name))
    if not path.is_relative_to(root):
        raise ValueError(f"must be below data.image_folder = {folder}: move the file there, or set image_folder to ''")
    return path


def _from_url(url: str) -> bytes:
    """Returns the content of a data URL. Raises: ValueError."""
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("is a data URL without base64, but must have the form data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is a data URL with invalid base64 ({error}): replace the image") from None


def size_of(image: Image) -> tuple[int, int]:
    """Returns width and height of an image after its EXIF orientation, from its header.

    Raises: ValueError, for an image without pixels, or with too many.
    """
    from PIL.Image import MAX_IMAGE_PIXELS

    width, height = image.size
    if not width or not height:
        raise ValueError(f"is {width} x {height} pixels, and so empty: remove the image")
    if MAX_IMAGE_PIXELS and width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"is {width} x {height} pixels, but must have at most {MAX_IMAGE_PIXELS:,}: resize it")
    return (height, width) if _orientation(image) >= FIRST_SIDEWAYS else (width, height)


def check_whole(image: Image) -> None:
    """Raises: ValueError, for an image that cannot become RGB, or whose file is truncated.

    The file of a PNG or JPEG is complete if it has the right last bytes. All other images are decoded.
    """
    if image.mode.startswith(("I", "F")):
        # Pillow and transformers cut such values at 255, so that nearly the whole image would be white.
        raise ValueError(f"has more than 8 bits per channel (mode {image.mode} of Pillow): convert it to 8 bits")
    if not _becomes_rgb(image.mode):
        raise ValueError(f"has the mode {image.mode} of Pillow, which cannot become RGB: convert it to RGB")
    stream = getattr(image, "fp", None)
    if not stream or not _is_complete(image, stream):
        _decode(image)


@cache
def _becomes_rgb(mode: str) -> bool:
    from PIL import Image

    try:
        Image.new(mode, (1, 1)).convert("RGB")
    except ValueError:
        return False
    return True


def _is_complete(image: Image, stream: IO[bytes]) -> bool:
    """Returns whether the file of a PNG or JPEG has the last bytes of its format; False for other formats."""
    position = stream.tell()
    length = stream.seek(0, io.SEEK_END)
    stream.seek(max(length - 12, 0))
    tail = stream.read(12)
    stream.seek(position)
    return {"PNG": tail[4:8] == b"IEND", "JPEG": tail[-2:] == b"\xff\xd9"}.get(str(image.format), False)


def _decode(image: Image) -> None:
    """Decodes an image. Raises: ValueError, if it cannot be decoded."""
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ValueError(f"cannot be decoded ({error}): replace the image") from None


def _orientation(image: Image) -> int:
    """Returns the EXIF orientation of an image; 1 = upright. A TIFF is upright, because Pillow turns it itself."""
    from PIL.Image import Exif

    # image.getexif() is not used, because it decodes a PNG.
    if image.format == "TIFF" or not isinstance(image.info.get("exif"), bytes):
        return 1
    exif = Exif()
    try:
        exif.load(image.info["exif"])
        return value if isinstance(value := exif.get(ORIENTATION, 1), int) and value in TRANSPOSITIONS else 1
    except Exception:  # a broken EXIF may raise any error, and counts as upright
        return 1


def pixels(image: Image, form: ImageFormat) -> np.ndarray:
    """Returns the pixels [height, width, 3] uint8 that the model sees. Raises: ValueError, if it cannot be decoded."""
    from PIL import Image as Pillow

    size = form.resized(*size_of(image))
    # The orientation is read before decoding, as in `size_of`, because a PNG may have its EXIF at the end.
    transposition = TRANSPOSITIONS.get(_orientation(image))
    _decode(image)
    if transposition:
        image = image.transpose(Pillow.Transpose[transposition])
    # Transparent pixels become white, as in transformers.
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = Pillow.alpha_composite(white, image)
    return np.asarray(image.convert("RGB").resize(size, Pillow.Resampling(form.resample)))


def thumbnail(image: Image) -> str:
    """Returns a small copy of an image as a data URL."""
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    # The format is JPEG, because a photograph would be ten times as large as a PNG.
    return _url(small, "JPEG", quality=90)


def data_url(image: Image) -> str:
    """Returns an image as a data URL of a PNG, which keeps each pixel."""
    # The compression is low, because it takes most of the time of writing a PNG.
    return _url(image, "PNG", compress_level=1)


def _url(image: Image, kind: str, **settings: int) -> str:
    """Returns a data URL of an image in a format of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
