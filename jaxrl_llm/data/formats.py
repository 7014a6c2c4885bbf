"""Rows as TRL, veRL, Search-R1 and EasyR1 keep them, read without a convert function (docs/data.md)."""

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
from jaxrl_llm.data.images import ImageFormat
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import search_r1, verl

Row: TypeAlias = dict[str, Any]
TEMPLATES = (".jinja", ".jinja2", ".j2", ".txt")  # endings of files with a format prompt
# Columns of formats without a prompt, and how a user gets one.
WITHOUT = {
    "chosen": "answers that hold their prompt, as TRL's preference rows may: jaxrl sft splits them, with "
    "data.rejected_column = 'rejected' (docs/preferences.md)",
    "messages": "whole conversations: make the messages before the answer the column 'prompt'",
    "text": "whole texts: name it in data.prompt_column if they are questions",
}


@dataclass(frozen=True)
class Columns:
    """How a row is read: fields of the section `data`, and what the model reads. "": as its columns say."""

    prompt_column: str = ""  # column that holds the prompt
    answer_column: str = ""  # column that becomes "answer"
    format_prompt: str = ""  # jinja template of the user's message with the variable `content`, or a file with one
    image_column: str = ""  # column that holds the images
    image_folder: str = ""  # that their paths are relative to
    pair: tuple[str, ...] = ()  # columns of the chosen and the rejected completion, which may begin with the prompt
    images: ImageFormat | None = None  # how the model reads images; None: it reads none


def read(row: Row, columns: Columns) -> tuple[Row, str]:
    """Returns a row with the column "prompt" and, if there is a known answer, "answer"; and a note on how it was read.

    Text in the column "prompt" stays text, as in TRL. Text in another column, or in a format prompt, becomes the
    message of a user, as in EasyR1. Raises: ValueError, saying what is wrong and what helps.
    """
    name = columns.prompt_column or ("problem" if "prompt" not in row and "problem" in row else "prompt")
    notes = []
    if columns.pair and _holds_prompt(row, name, columns.pair):
        row, name = split_prompt(row, columns.pair), "prompt"
        notes.append(f"the common beginning of {columns.pair[0]!r} and {columns.pair[1]!r} is the prompt, as in TRL")
    if name not in row:
        raise ValueError(_missing(row, name))
    # A row of text in a data set with images has None or an empty list.
    if not columns.images and image_columns.holds_some(row):
        raise ValueError(
            "has images, which the model does not read: leave such rows out, or use a model that does (a new one of "
            "`sft` has the section model.vision_config)"
        )
    prompt = row[name]
    if isinstance(prompt, str) and prompt and (name != "prompt" or columns.format_prompt):
        content = template(columns.format_prompt).render(content=prompt) if columns.format_prompt else prompt
        if columns.images and image_columns.MARK not in content:
            image_columns.check_none(row, columns.image_column, name)
        prompt = [{"role": "user", "content": content}]
        notes.append(f"{name!r} is the user's message")
    elif columns.format_prompt:
        raise ValueError("data.format_prompt does nothing, because the prompt is no text: leave it empty")
    # A new dict: the caller's rows stay as they were read.
    row = row | {"prompt": prompt}
    if columns.answer_column:
        # A row of JSON lines may lack it: `rows` counts.
        row["answer"] = row.get(columns.answer_column)
        notes.append(f"{columns.answer_column!r} is the answer")
    elif isinstance(row.get("reward_model"), dict) and row["reward_model"].get("ground_truth") is not None:
        row, note = _from_verl(row)
        notes.append(note)
    elif name == "problem":
        notes.append("as in EasyR1")
    # Text goes to the model as it is: no template reads these.
    if not isinstance(prompt, str) and (args := template_args(row)):
        notes.append(f"{' and '.join(sorted(args))} of a row go to the chat template")
    return row, ", ".join(notes)


def _from_verl(row: Row) -> tuple[Row, str]:
    truth = row["reward_model"]["ground_truth"]
    if isinstance(truth, dict) and truth.keys() == {"target"} and hasattr(truth["target"], "__len__"):
        return search_r1.convert(verl.convert(row)), "'reward_model' holds the accepted answers, as in Search-R1"
    return verl.convert(row), "'reward_model' holds the answer, as in veRL"


def _holds_prompt(row: Row, name: str, pair: tuple[str, ...]) -> bool:
    """Whether two columns begin with the prompt: there is no other, or it is text and they are whole conversations."""
    if any(column not in row for column in pair):
        return False
    first = row[pair[0]][0] if isinstance(row[pair[0]], (list, tuple)) and row[pair[0]] else None
    begins = isinstance(first, dict) and first.get("role") != "assistant"
    return name not in row or (isinstance(row[name], str) and begins)


def split_prompt(row: Row, pair: tuple[str, ...]) -> Row:
    """Returns a row with the longest common beginning of two columns as its prompt, and their ends in these columns.

    Both hold text or messages. A space at the end of a common text belongs to the completions, as tokenizers have it.
    Raises: ValueError, if there is no common beginning, or if a column has nothing else.
    """
    first, second = (row[column] for column in pair)
    texts = [isinstance(x, str) for x in (first, second)]
    if texts[0] != texts[1] or not all(isinstance(x, (str, list, tuple)) for x in (first, second)):
        raise ValueError(f"has {pair[0]!r} and {pair[1]!r} of other types: give both as text, or as lists of messages")
    same = list(takewhile(lambda parts: parts[0] == parts[1], zip(first, second, strict=False)))
    count = len(same) - (texts[0] and bool(same) and first[len(same) - 1] == " ")
    ends = {column: row[column][count:] for column in pair}
    if not count or not all(ends.values()):
        raise ValueError(
            f"has no column 'prompt', and {pair[0]!r} and {pair[1]!r} "
            + ("have no common beginning" if not count else "differ in nothing that follows their common beginning")
            + ": give the prompt in a column, or leave the row out"
        )
    return row | {"prompt": first[:count]} | ends


def _missing(row: Row, name: str) -> str:
    problem = f"has no column {name!r} ({columns_text(row)})"
    for column, content in WITHOUT.items():
        if name == "prompt" and column in row:
            return f"{problem}, but {column!r} holds {content}; or set data.convert"
    return (
        f"{problem}: rename one, name one in data.prompt_column, or set data.convert "
        "(eval.convert for the problems to be judged by)"
    )


def columns_text(row: Row) -> str:
    """Lists the columns of a row, for an error message."""
    return f"there is {', '.join(sorted(map(str, row)))}"


def value_in(row: Row, column: str) -> Any:
    """Returns what a row has in a column; None: nothing. "extra_info.level" is a column within a column."""
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@cache
def template(format_prompt: str) -> jinja2.Template:
    """Returns the template of a format prompt. Raises: UserError, if there is none, or if it leaves out the prompt."""
    text, where = format_prompt, f"data.format_prompt = {format_prompt!r}"
    if format_prompt.endswith(TEMPLATES):
        try:
            text = Path(format_prompt).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read ({error}): give a file with a jinja template") from None
    environment = jinja2.Environment()
    try:
        reads = jinja2.meta.find_undeclared_variables(environment.parse(text))
        compiled = environment.from_string(text.strip())
    except jinja2.TemplateError as error:
        raise UserError(f"{where} is no jinja template ({error}): mend it") from None
    if reads != {"content"}:
        raise UserError(
            f"{where} reads {', '.join(sorted(reads)) or 'nothing'}: write {{{{ content }}}} where the prompt is to "
            "stand, and no other variable"
        )
    return compiled


def template_args(row: Row) -> dict[str, Any]:
    """Returns what a row gives its chat template in the columns that TRL has for this: tools, chat_template_kwargs.

    tools: a list of JSON schemas, or its JSON. Columns of these names that hold something else are columns as others.
    """
    tools, keywords = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    listed = isinstance(tools, (list, tuple)) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
    return (without_nulls(keywords) if isinstance(keywords, dict) else {}) | (
        {"tools": without_nulls(tools)} if listed else {}
    )


def without_nulls(value: Any) -> Any:
    """Returns a value without the keys that hold None: a Parquet file has every key in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, (list, tuple)) else value
