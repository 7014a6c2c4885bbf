"""Images in the columns and messages of rows, as EasyR1, veRL and TRL keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from jaxrl_llm.tasks import is_empty

Row: TypeAlias = dict[str, Any]
MARK = "<image>"  # stands for an image in a text, in EasyR1 and veRL
COLUMNS = ("images", "image")
KEYS = {"bytes", "path", "image", "type"}  # of an image that is a dict: of Parquet, of datasets, of qwen-vl-utils
READ = 'bytes, a path, a data URL, {"bytes": ...}, {"path": ...}, {"image": ...}, or an image of Pillow'


def column_of(row: Row, image_column: str) -> str:
    """Returns the column with the images of a row, `image_column` or one of COLUMNS; "": it has none.

    Raises: ValueError, if two have images.
    """
    names = [name for name in ((image_column,) if image_column else COLUMNS) if name in row]
    filled = [name for name in names if not is_empty(_listed(row[name]))]
    if len(filled) > 1:
        raise ValueError("has images in the columns 'images' and 'image': name one in data.image_column")
    return (filled or names or [""])[0]


def holds_some(row: Row) -> bool:
    """Returns whether a row of text would lose an image. A column `image` of text may be a name of something."""
    return any(
        not is_empty(value := _listed(row.get(name))) and not (name == "image" and isinstance(value, str))
        for name in COLUMNS
    )


def read(row: Row, image_column: str) -> tuple[Row, list[Any]]:
    """Returns a row whose messages have parts for its images, as `place` makes them, and these images.

    Raises: ValueError, saying what is wrong and what helps.
    """
    if not is_empty(_listed(row.get("videos"))):
        raise ValueError("has videos, which are not read here: leave such rows out")
    images, prompt = images_of(row, image_column), row["prompt"]
    if isinstance(prompt, str):
        if images:
            raise ValueError(
                "has images and a prompt of text, which shows none: make it a list of messages, or the message of a "
                "user with data.format_prompt = '{{ content }}'"
            )
        return row, []
    messages, images = place(prompt, images, column_of(row, image_column))
    return row | {"prompt": messages}, images


def check_none(row: Row, image_column: str, text: str) -> None:
    """Raises: ValueError, if a row whose column `text` has no MARK has images."""
    if count := len(images_of(row, image_column)):
        raise ValueError(f"has images ({count}) and no {MARK} in {text!r}: write one where each is to stand")


def images_of(row: Row, image_column: str) -> list[Any]:
    """Returns what `image` makes of the images in the column of a row. Raises: ValueError."""
    column = column_of(row, image_column)
    value = _listed(row.get(column))
    if is_empty(value):
        return []
    if not isinstance(value, (list, tuple)):
        if column == "images":
            raise ValueError(f"has the column 'images' that is {_kind(value)}: make it a list of images")
        value = [value]
    return [image(x, f"image {k}") for k, x in enumerate(value, 1)]


def image(value: Any, which: str) -> Any:
    """Returns bytes, a path or data URL, or an image of Pillow. which: for the error. Raises: ValueError."""
    if isinstance(value, dict):
        if unknown := {str(key) for key, x in value.items() if x is not None} - KEYS:
            raise ValueError(f"has {', '.join(sorted(unknown))} in {which}, which is not read: give {READ}")
        if value.get("type") not in (None, "image"):
            raise ValueError(f"has {value['type']!r} as {which}, and only images are read: leave it out")
        value = next((value[key] for key in ("bytes", "path", "image") if value.get(key) is not None), None)
        if isinstance(value, dict):
            raise ValueError(f"has a dict in a dict as {which}: give {READ}")
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if is_empty(value) or (isinstance(value, bytes) and not value):
        raise ValueError(f"has {which} that is empty: give {READ}, or leave it out")
    if isinstance(value, (str, bytes)) or is_pillow(value):
        return value
    raise ValueError(f"has {which} that is {_kind(value)}: give {READ}")


def place(prompt: list[Row], images: list[Any], column: str) -> tuple[list[Row], list[Any]]:
    """Returns messages with parts of text and of images, and the images in their order.

    Places are parts of the type image, and MARK in texts. A prompt without a place has all images before the first
    text of the user, as in TRL. images: images of `column`; "" = the row has no such column, and MARK is plain text.
    Raises: ValueError, if there is not one image for each place, or a place where an image cannot be.
    """
    messages = [_parts(message, split=bool(column)) for message in prompt]
    own = [part["image"] for part in _images(messages) if part["image"] is not None]
    if own and images:
        raise ValueError(f"has images in its messages and in the column {column!r}: leave one of them out")
    count = sum(1 for _ in _images(messages))
    if images and not count:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise ValueError(f"has images, and no message of the user that shows them: write {MARK} in one")
        user["content"] = [{"type": "image"}] * len(images) + user["content"]
        count = len(images)
    images = images or [image(x, f"image {k}") for k, x in enumerate(own, 1)]
    if count != len(images):
        raise ValueError(
            f"has other numbers of images and of places for them ({MARK}, or parts of the type image), "
            f"{len(images)} and {count}: give one for each"
        )
    if any(message["role"] == "assistant" for message in messages if any(_images([message]))):
        raise ValueError("has an image in a message of the assistant, which writes text alone: leave it out")
    return [_plain(message) for message in messages], images


def named(prompt: list[Row], names: list[str]) -> list[Row]:
    """Returns messages whose parts of images have names, for logs and pages: a template does not look at them."""
    rest = iter(names)

    def part(x: Row) -> Row:
        return {"type": "image", "name": next(rest)} if x["type"] == "image" else x

    def parts(content: Any) -> Any:
        return [part(x) for x in content] if isinstance(content, list) else content

    return [message | {"content": parts(message["content"])} for message in prompt]


def printable_value(value: Any) -> Any:
    """Returns a value of a row as it may be printed: images by their size alone, and parts of a message as text."""
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value):,} bytes>"
    if is_pillow(value):
        return f"<image of {value.size[0]} x {value.size[1]}>"
    if isinstance(value, str):
        return f"<data URL of {len(value):,} characters>" if value.startswith("data:") and len(value) > 200 else value
    if isinstance(value, dict):
        return {key: printable_value(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_value(x) for x in value]
    return value


def text_of(content: Any) -> str:
    """Returns the content of a message as text, with the names of images in brackets."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else f"[{part.get('name', 'image')}]" for part in content)


def chat_text(messages: Any) -> str:
    """Returns a prompt, or the turns of an episode, as text. A chat of several messages has the role before each."""
    if not isinstance(messages, list):
        return str(messages)
    if len(messages) == 1:
        return text_of(messages[0]["content"])
    return "\n".join(f"{message['role']}: {text_of(message['content'])}" for message in messages)


def is_pillow(value: Any) -> bool:
    """Returns whether a value is an image of Pillow, without an import of it."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _listed(value: Any) -> Any:
    """Returns an array of pandas as a list. An array of numbers stays: it is refused."""
    return value.tolist() if str(getattr(value, "dtype", "")) == "object" else value


def _kind(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"of the type {type(value).__name__}"


def _images(messages: list[Row]) -> Iterator[Row]:
    return (part for message in messages for part in message["content"] or () if part["type"] == "image")


def _parts(message: Row, *, split: bool) -> Row:
    """Returns a message with a list of parts as content; None stays, of a message that calls tools."""
    content = message.get("content")
    if content is None:
        return message | {"content": None}
    content = [content] if isinstance(content, (str, dict)) else content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"has a message with {_kind(content)} as content: give text, or a list of parts")
    return message | {"content": [part for x in content for part in _split(x, split=split)]}


def _split(part: Any, *, split: bool) -> list[Row]:
    """Returns a part, a text as a part of text, or the parts around each MARK of a text."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    values = {key: x for key, x in part.items() if x is not None} if isinstance(part, dict) else {}
    kind = values.get("type", "text" if "text" in values else "image" if "image" in values else None)
    if kind == "image" and values.keys() <= {"type", "image"}:
        return [{"type": "image", "image": values.get("image")}]
    if kind != "text" or not isinstance(values.get("text"), str):
        raise ValueError(
            f"has a message with the part {str(printable_value(part))[:80]}: give parts of text, and "
            '{"type": "image"} or {"type": "image", "image": ...} for images'
        )
    first, *others = values["text"].split(MARK) if split else [values["text"]]
    parts: list[Row] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image", "image": None}, {"type": "text", "text": text}]
    return [x for x in parts if x["type"] == "image" or x["text"]]


def _plain(message: Row) -> Row:
    """Returns a message without images with one text, and one with them without what they are."""
    parts = message["content"]
    if parts is None:
        return message
    if any(part["type"] == "image" for part in parts):
        return message | {"content": [{"type": "image"} if x["type"] == "image" else x for x in parts]}
    return message | {"content": "".join(part["text"] for part in parts)}
