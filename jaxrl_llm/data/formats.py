"""Reads rows in the formats of TRL, veRL, Search-R1 and EasyR1, without a convert function (docs/data.md)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import jinja2.meta

from jaxrl_llm.data import image_columns
from jaxrl_llm.data.image_format import ImageFormat
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import search_r1, verl

Row: TypeAlias = dict[str, Any]
TEMPLATES = (".jinja", ".jinja2", ".j2", ".txt")  # endings of files with a format prompt
# Columns of formats without a prompt, and what they hold, with the fix.
WITHOUT_PROMPT = {
    "chosen": "answers that include their prompt, as in TRL's preference rows; jaxrl sft splits them with "
    "data.rejected_column = 'rejected' (docs/preferences.md)",
    "messages": "whole conversations; make a column 'prompt' of the messages before the answer",
    "text": "whole texts; set data.prompt_column = 'text' if they are questions",
}


@dataclass(frozen=True)
class Columns:
    """Settings for reading rows: fields of the section `data`, and the image format of the model."""

    prompt_column: str = ""  # column of the prompt; "" = "prompt" or "problem"
    answer_column: str = ""  # column that becomes "answer"; "" = the column of a known format
    format_prompt: str = ""  # jinja template of the user's message with the variable `content`, or a file with one
    image_column: str = ""  # column of the images; "" = "images" or "image"
    image_folder: str = ""  # folder that paths of images are relative to
    pair: tuple[str, ...] = ()  # columns of the chosen and the rejected completion, which may begin with the prompt
    images: ImageFormat | None = None  # image format of the model; None if the model reads no images


def read(row: Row, columns: Columns) -> tuple[Row, str]:
    """Returns a row with the column "prompt", and "answer" if its format has one; and a note on how it was read.

    Text in the column "prompt" stays text, as in TRL. Text in another column, or in a format prompt, becomes the
    message of a user, as in EasyR1. Raises: ValueError, with the problem and the fix.
    """
    name = columns.prompt_column or ("problem" if "prompt" not in row and "problem" in row else "prompt")
    notes = []
    if columns.pair and _holds_prompt(row, name, columns.pair):
        row, name = split_prompt(row, columns.pair), "prompt"
        notes.append(f"the common beginning of {columns.pair[0]!r} and {columns.pair[1]!r} is the prompt, as in TRL")
    if name not in row:
        raise ValueError(_missing_prompt(row, name))
    if not columns.images and image_columns.has_images(row):
        raise ValueError(
            "has images, but the model reads text only: drop rows with images, or use a vision-language model (a new "
            "model of `sft` gets a vision tower by the section model.vision_config)"
        )
    prompt = row[name]
    if isinstance(prompt, str) and prompt and (name != "prompt" or columns.format_prompt):
        content = template(columns.format_prompt).render(content=prompt) if columns.format_prompt else prompt
        if columns.images and image_columns.MARK not in content:
            image_columns.check_none(row, columns.image_column, name)
        prompt = [{"role": "user", "content": content}]
        notes.append(f"{name!r} is the user's message")
    elif columns.format_prompt:
        raise ValueError(
            "has a prompt that is not text, so that data.format_prompt has no effect: set format_prompt to ''"
        )
    # The row is copied, because the rows of the caller must stay as they were read.
    row = row | {"prompt": prompt}
    if columns.answer_column:
        # Single rows may lack the column; `rows.load_rows` refuses a source in which all rows lack it.
        row["answer"] = row.get(columns.answer_column)
        notes.append(f"{columns.answer_column!r} is the answer")
    elif isinstance(row.get("reward_model"), dict) and row["reward_model"].get("ground_truth") is not None:
        row, note = _from_verl(row)
        notes.append(note)
    elif name == "problem":
        notes.append("as in EasyR1")
    # Only the chat template reads these columns, and a prompt of text has none.
    if not isinstance(prompt, str) and (args := template_args(row)):
        notes.append(f"the chat template gets {' and '.join(sorted(args))} of each row")
    return row, ", ".join(notes)


def _from_verl(row: Row) -> tuple[Row, str]:
    """Returns a row of veRL or Search-R1 with the column "answer", and a note on its format."""
    truth = row["reward_model"]["ground_truth"]
    if isinstance(truth, dict) and truth.keys() == {"target"} and hasattr(truth["target"], "__len__"):
        return search_r1.convert(verl.convert(row)), "'reward_model' holds the accepted answers, as in Search-R1"
    return verl.convert(row), "'reward_model' holds the answer, as in veRL"


def _holds_prompt(row: Row, name: str, pair: tuple[str, ...]) -> bool:
    """Returns whether the chosen and the rejected completion of a preference pair begin with the prompt.

    name: column of the prompt. pair: columns of the two completions. They begin with the prompt if the row has no
    column `name`, or if this column is text and the completions are whole conversations.
    """
    if any(column not in row for column in pair):
        return False
    chosen = row[pair[0]]
    first_message = chosen[0] if isinstance(chosen, (list, tuple)) and chosen else None
    is_conversation = isinstance(first_message, dict) and first_message.get("role") != "assistant"
    return name not in row or (isinstance(row[name], str) and is_conversation)


def split_prompt(row: Row, pair: tuple[str, ...]) -> Row:
    """Returns a row whose prompt is the longest common beginning of two columns, which keep the text after it.

    Both columns hold text or messages. A space at the end of the common text belongs to the completions, because
    tokenizers join a space to the next word. Raises: ValueError, if the columns have no common beginning, or if one of
    them has nothing after it.
    """
    first, second = (row[column] for column in pair)
    is_text = [isinstance(x, str) for x in (first, second)]
    if is_text[0] != is_text[1] or not all(isinstance(x, (str, list, tuple)) for x in (first, second)):
        raise ValueError(
            f"has {pair[0]!r} and {pair[1]!r} of different types: both must be text, or both lists of messages"
        )
    common = list(takewhile(lambda parts: parts[0] == parts[1], zip(first, second, strict=False)))
    ends_with_space = is_text[0] and bool(common) and first[len(common) - 1] == " "
    count = len(common) - ends_with_space
    completions = {column: row[column][count:] for column in pair}
    if not count:
        raise ValueError(
            f"has no column 'prompt', and {pair[0]!r} and {pair[1]!r} have no common beginning: add the column "
            "'prompt', or drop the row"
        )
    if not all(completions.values()):
        raise ValueError(
            f"has no column 'prompt', and one of {pair[0]!r} and {pair[1]!r} ends with their common beginning: add the "
            "column 'prompt', or drop the row"
        )
    return row | {"prompt": first[:count]} | completions


def _missing_prompt(row: Row, name: str) -> str:
    """Returns the problem and the fix for a row without the column `name` of the prompt."""
    problem = f"has no column {name!r} ({columns_text(row)})"
    for column, content in WITHOUT_PROMPT.items():
        if name == "prompt" and column in row:
            return f"{problem}, but {column!r} holds {content}; or set data.convert"
    return (
        f"{problem}: rename a column, name the column of the prompt in data.prompt_column, or set data.convert "
        "(eval.convert for evaluation problems)"
    )


def columns_text(row: Row) -> str:
    """Returns the columns of a row as text, for an error."""
    return f"columns: {', '.join(sorted(map(str, row)))}"


def value_in(row: Row, column: str) -> Any:
    """Returns the value of a column, None if the row lacks it. "extra_info.level" is a column within a column."""
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@cache
def template(format_prompt: str) -> jinja2.Template:
    """Returns the jinja template of a format prompt, which may be the name of a file.

    Raises: UserError, for an invalid template, or one without the variable `content`.
    """
    text, field = format_prompt, f"config.data.format_prompt = {format_prompt!r}"
    if format_prompt.endswith(TEMPLATES):
        try:
            text = Path(format_prompt).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{field}: the file cannot be read ({error}); name a file with a jinja template") from None
    environment = jinja2.Environment()
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        compiled = environment.from_string(text.strip())
    except jinja2.TemplateError as error:
        raise UserError(f"{field} must be a jinja template: {error}") from None
    if variables != {"content"}:
        raise UserError(
            f"{field} must have the variable {{{{ content }}}}, which stands for the prompt, and no other variable; it "
            f"has {', '.join(sorted(variables)) or 'none'}"
        )
    return compiled


def template_args(row: Row) -> dict[str, Any]:
    """Returns the arguments for the chat template in a row's columns "tools" and "chat_template_kwargs", as in TRL.

    "tools" is a list of JSON schemas, or its JSON text. Columns of these names with other values are ordinary columns.
    """
    tools, keywords = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    is_schemas = isinstance(tools, (list, tuple)) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
    return (without_nulls(keywords) if isinstance(keywords, dict) else {}) | (
        {"tools": without_nulls(tools)} if is_schemas else {}
    )


def without_nulls(value: Any) -> Any:
    """Returns a value without dict keys that hold None, because a Parquet file has every key in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, (list, tuple)) else value
