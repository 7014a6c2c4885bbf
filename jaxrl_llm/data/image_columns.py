"""Images in the columns and messages of rows, as EasyR1, veRL and TRL keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from jaxrl_llm.tasks import is_empty

Row: TypeAlias = dict[str, Any]
MARK = "<image>"  # stands for an image in texts of EasyR1 and veRL
COLUMNS = ("images", "image")  # columns of images in a row, if data.image_column names none
KEYS = {"bytes", "path", "image", "type"}  # keys of an image that is a dict, in Parquet, datasets and qwen-vl-utils
READABLE = 'bytes, a path, a data URL, {"bytes": ...}, {"path": ...}, {"image": ...}, or an image of Pillow'


def column_of(row: Row, image_column: str) -> str:
    """Returns the column with the images of a row, `image_column` or one of COLUMNS; "" if the row has none of them.

    Raises: ValueError, if two columns have images.
    """
    names = [name for name in ((image_column,) if image_column else COLUMNS) if name in row]
    filled = [name for name in names if not is_empty(_as_list(row[name]))]
    if len(filled) > 1:
        raise ValueError("has images in the columns 'images' and 'image': name one of them in data.image_column")
    return (filled or names or [""])[0]


def has_images(row: Row) -> bool:
    """Returns whether a row has images, which a text model would lose. Text in a column "image" is no image."""
    return any(
        not is_empty(value := _as_list(row.get(name))) and not (name == "image" and isinstance(value, str))
        for name in COLUMNS
    )


def read(row: Row, image_column: str) -> tuple[Row, list[Any]]:
    """Returns a row whose messages have parts for its images, as `place` makes them, and its images.

    Raises: ValueError, with the problem and the fix.
    """
    if not is_empty(_as_list(row.get("videos"))):
        raise ValueError("has videos, which are not supported: drop rows with videos")
    images, prompt = images_of(row, image_column), row["prompt"]
    if isinstance(prompt, str):
        if images:
            raise ValueError(
                "has images, but its prompt is text, which cannot hold them: make the prompt a list of messages, or "
                "set data.format_prompt = '{{ content }}'"
            )
        return row, []
    messages, images = place(prompt, images, column_of(row, image_column))
    return row | {"prompt": messages}, images


def check_none(row: Row, image_column: str, text: str) -> None:
    """Raises: ValueError, if a row has images, but its column `text` has no MARK to place them."""
    if count := len(images_of(row, image_column)):
        raise ValueError(f"has {count} images, but no {MARK} in {text!r}: write {MARK} at the place of each image")


def images_of(row: Row, image_column: str) -> list[Any]:
    """Returns the images in the column of a row: bytes, paths, data URLs, or images of Pillow. Raises: ValueError."""
    column = column_of(row, image_column)
    value = _as_list(row.get(column))
    if is_empty(value):
        return []
    if not isinstance(value, (list, tuple)):
        if column == "images":
            raise ValueError(f"has {_described(value)} in the column 'images', which must be a list of images")
        value = [value]
    return [normalize_image(x, f"image {k}") for k, x in enumerate(value, 1)]


def normalize_image(value: Any, name: str) -> Any:
    """Returns an image of a row as bytes, a path or data URL, or an image of Pillow.

    name: name of the image in errors, such as "image 1". Raises: ValueError, for a value that is no image.
    """
    if isinstance(value, dict):
        if unknown := {str(key) for key, x in value.items() if x is not None} - KEYS:
            raise ValueError(f"has the unknown key {', '.join(sorted(unknown))} in {name}, which must be {READABLE}")
        if value.get("type") not in (None, "image"):
            raise ValueError(f"has {value['type']!r} as {name}, but only images are supported: remove it")
        value = next((value[key] for key in ("bytes", "path", "image") if value.get(key) is not None), None)
        if isinstance(value, dict):
            raise ValueError(f"has a dict in a dict as {name}, which must be {READABLE}")
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if is_empty(value) or (isinstance(value, bytes) and not value):
        raise ValueError(f"has an empty {name}, which must be {READABLE}: fill or remove it")
    if isinstance(value, (str, bytes)) or is_pillow(value):
        return value
    raise ValueError(f"has {_described(value)} as {name}, which must be {READABLE}")


def place(prompt: list[Row], images: list[Any], column: str) -> tuple[list[Row], list[Any]]:
    """Returns messages with parts of text and of images, and the images in their order.

    Places of images are parts of the type image, and MARK in texts. A prompt without a place has all images before the
    first text of the user, as in TRL. images: images of `column`; column: "" if the row has no column of images, so
    that MARK is plain text. Raises: ValueError, if the numbers of images and places differ, or for a place where no
    image can be.
    """
    messages = [_with_parts(message, split=bool(column)) for message in prompt]
    message_images = [part["image"] for part in _image_parts(messages) if part["image"] is not None]
    if message_images and images:
        raise ValueError(f"has images both in its messages and in the column {column!r}: remove one of the two")
    count = sum(1 for _ in _image_parts(messages))
    if images and not count:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise ValueError(f"has images, but no message of the user that could show them: write {MARK} in a message")
        user["content"] = [{"type": "image"}] * len(images) + user["content"]
        count = len(images)
    images = images or [normalize_image(x, f"image {k}") for k, x in enumerate(message_images, 1)]
    if count != len(images):
        raise ValueError(
            f"has other numbers of images and of places for them ({MARK}, or parts of the type image), "
            f"{len(images)} and {count}: the two numbers must be equal"
        )
    if any(message["role"] == "assistant" for message in messages if any(_image_parts([message]))):
        raise ValueError("has an image in a message of the assistant, which can only hold text: remove the image")
    return [_without_images(message) for message in messages], images


def named(prompt: list[Row], names: list[str]) -> list[Row]:
    """Returns messages whose parts of images have names, for logs and pages. Chat templates ignore the names."""
    remaining_names = iter(names)

    def named_part(part: Row) -> Row:
        return {"type": "image", "name": next(remaining_names)} if part["type"] == "image" else part

    def named_content(content: Any) -> Any:
        return [named_part(part) for part in content] if isinstance(content, list) else content

    return [message | {"content": named_content(message["content"])} for message in prompt]


def printable_value(value: Any) -> Any:
    """Returns a value of a row for printing: images and long data URLs by their size alone."""
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
    """Returns the content of a message as one text, with the names of images in brackets."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else f"[{part.get('name', 'image')}]" for part in content)


def chat_text(messages: Any) -> str:
    """Returns a prompt, or the turns of an episode, as text. Each of several messages begins with its role."""
    if not isinstance(messages, list):
        return str(messages)
    if len(messages) == 1:
        return text_of(messages[0]["content"])
    return "\n".join(f"{message['role']}: {text_of(message['content'])}" for message in messages)


def is_pillow(value: Any) -> bool:
    """Returns whether a value is an image of Pillow, without importing Pillow."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _as_list(value: Any) -> Any:
    """Returns an object array of pandas as a list. An array of numbers stays an array, which is refused later."""
    return value.tolist() if str(getattr(value, "dtype", "")) == "object" else value


def _described(value: Any) -> str:
    """Returns a number or a text as it is, and any other value by its type, for errors."""
    return f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"a value of the type {type(value).__name__}"


def _image_parts(messages: list[Row]) -> Iterator[Row]:
    """Returns the parts of messages that are images or places of images."""
    return (part for message in messages for part in message["content"] or () if part["type"] == "image")


def _with_parts(message: Row, *, split: bool) -> Row:
    """Returns a message with a list of parts as content. The content None of a message that calls tools stays."""
    content = message.get("content")
    if content is None:
        return message | {"content": None}
    content = [content] if isinstance(content, (str, dict)) else content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"has a message with {_described(content)} as content, which must be text or a list of parts")
    return message | {"content": [part for x in content for part in _split(x, split=split)]}


def _split(part: Any, *, split: bool) -> list[Row]:
    """Returns the parts of one part of a message. split: whether a text is split at each MARK."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    values = {key: x for key, x in part.items() if x is not None} if isinstance(part, dict) else {}
    kind = values.get("type", "text" if "text" in values else "image" if "image" in values else None)
    if kind == "image" and values.keys() <= {"type", "image"}:
        return [{"type": "image", "image": values.get("image")}]
    if kind != "text" or not isinstance(values.get("text"), str):
        raise ValueError(
            f"has a message with the part {str(printable_value(part))[:80]}, which must be a part of text, "
            '{"type": "image"} or {"type": "image", "image": ...}'
        )
    first, *texts_after_marks = values["text"].split(MARK) if split else [values["text"]]
    parts: list[Row] = [{"type": "text", "text": first}]
    for text in texts_after_marks:
        parts += [{"type": "image", "image": None}, {"type": "text", "text": text}]
    return [x for x in parts if x["type"] == "image" or x["text"]]


def _without_images(message: Row) -> Row:
    """Returns a message whose parts of images hold no image; a message without images has one text as content."""
    parts = message["content"]
    if parts is None:
        return message
    if any(part["type"] == "image" for part in parts):
        return message | {"content": [{"type": "image"} if x["type"] == "image" else x for x in parts]}
    return message | {"content": "".join(part["text"] for part in parts)}
