"""The prompts of a run: a tokenized data set, and batches of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.data import encoding, formats, image_rows
from jaxrl_llm.data.formats import Columns, Row
from jaxrl_llm.data.image_columns import is_pillow
from jaxrl_llm.data.image_rows import RowImages
from jaxrl_llm.data.images import ImageFormat
from jaxrl_llm.data.prompt_notes import notes_of
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.data.settings import EVAL, DataSettings, EvalSet
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed
from jaxrl_llm.structs import AnyArray, ImageSizes, Prompts
from jaxrl_llm.tasks import PREFILL

Turn: TypeAlias = dict[str, str]
OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
LAST = 16  # tokens of a prompt in which an opened thought is looked for


@dataclass(frozen=True)
class Dataset:
    """Tokenized prompts and their rows. No prompt is longer than the limit."""

    ids: list[np.ndarray]  # int32
    rows: list[Row]
    dropped: int  # number of over-long prompts that were dropped
    width: int  # P: tokens of the longest prompt
    numbers: list[int]  # number of each row in its source, from 1
    refused: int = 0  # number of rows that the convert function dropped
    read_as: str = ""  # how columns other than "prompt" and "answer" were read
    parts: dict[str, range] = field(default_factory=dict)  # rows of each source of a mixture
    notes: tuple[str, ...] = ()  # for the banner: what prompts hold, and the rows that lack a column (`columns.check`)
    source: str = ""  # that the rows come from
    images: RowImages | None = None  # of the prompts; None: the model reads none
    order_values: np.ndarray | None = None  # [N] numbers by which each epoch is sorted; None: it is shuffled

    def repeated(self) -> tuple[int, int, int]:
        """Returns how many prompts equal an earlier one, and the row numbers of the first of them and of that one."""
        # Hashes, because the tokens of a million prompts would need much memory.
        # Compared within this process alone: Python's hash of bytes has another seed in each.
        keys = (
            hash((tokens.tobytes(), self.images.digests(i) if self.images else "")) for i, tokens in enumerate(self.ids)
        )
        hashes = np.fromiter(keys, np.int64, len(self.ids))
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
        if not len(again):
            return 0, 0, 0
        return len(again), self.numbers[again[0]], self.numbers[first[inverse[again[0]]]]

    def fingerprint(self) -> str:
        """Returns a hash of the token ids and of all columns of the rows, in order."""
        digest = self._prompts()
        for row in self.rows:
            # The token ids have what the prefill says.
            digest.update(_canonical({key: x for key, x in row.items() if key != PREFILL}).encode())
        return digest.hexdigest()

    def prompts(self) -> str:
        """Returns a hash of the token ids and images of all prompts, in order."""
        return self._prompts().hexdigest()

    @cached_property
    def image_sizes(self) -> ImageSizes | None:
        """The sizes of the images of a batch; None: there are none."""
        return self.images.sizes(list(map(len, self.ids))) if self.images and self.images.count else None

    def counts(self) -> list[int]:
        """Returns the number of rows, of each source of a mixture."""
        return [len(rows) for rows in self.parts.values()] or [len(self.rows)]

    def _prompts(self) -> Any:
        # The lengths are hashed too, so that the same tokens split into other prompts have another hash.
        digest = hashlib.sha256(np.array([len(tokens) for tokens in self.ids]).tobytes())
        digest.update(np.concatenate(self.ids).tobytes())
        if self.images:
            digest.update("".join(map(self.images.digests, range(len(self.ids)))).encode())
        return digest


def load(
    settings: DataSettings, tokenizer: Any, tools: Sequence[dict[str, Any]] = (), images: ImageFormat | None = None
) -> Dataset:
    """Loads the training prompts. tools: schemas for the chat template; images: how the model reads images.

    Raises: UserError.
    """
    shared = _reading(settings, tools, images)
    if settings.mixture:
        parts = {
            name: read(part.source, tokenizer, convert=part.convert, field=f"data.mixture.{name}.convert", **shared)
            for name, part in settings.mixture.items()
        }
        dataset = join(parts)
    else:
        dataset = read(settings.source, tokenizer, convert=settings.convert, **shared)
    if tools and all(isinstance(row["prompt"], str) for row in dataset.rows):
        raise UserError("config.env.functions: all prompts are text, which shows no tools: make them lists of messages")
    if tools and any("tools" in formats.template_args(row) for row in dataset.rows):
        raise UserError(
            "config.env.functions: rows have a column 'tools' of their own, which the environment does not know: "
            "leave it out"
        )
    check_template_args_used("config.data.chat_template_args", shared["template_args"], dataset)
    _check_image_fields_used(settings, dataset)
    return replace(dataset, order_values=_numbers(dataset, settings.order_column) if settings.order_column else None)


def _numbers(dataset: Dataset, column: str) -> np.ndarray:
    """Returns the numbers [N] in a column. Raises: UserError, naming the first row that has none."""
    values = np.empty(len(dataset.rows))
    for i, row in enumerate(dataset.rows):
        value = formats.value_in(row, column)
        try:
            # A text may be a number too, because all values of a CSV file are text.
            values[i] = float(value)
        except (TypeError, ValueError):
            values[i] = np.nan
        if not np.isfinite(values[i]):
            source = next((name for name, part in dataset.parts.items() if i in part), dataset.source)
            content = formats.columns_text(row) if value is None else f"it has {value!r:.80}"
            raise UserError(
                f"config.data.order_column = {column!r}: {source} row {dataset.numbers[i]:,} has no number there "
                f"({content}): give each row a number, or set the field to '' for a shuffled order"
            )
    return values


def load_held_out(
    problems: EvalSet,
    settings: DataSettings,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    images: ImageFormat | None = None,
    *,
    section: str = EVAL,
) -> Dataset:
    """Loads the prompts of an evaluation set, and reads them like training prompts, but drops no over-long prompt.

    section: section of the config that has the set. Raises: UserError, also for an over-long prompt.
    """
    own = {"convert": problems.convert, "problems": problems.problems, "overlong": "error"}
    return read(problems.source, tokenizer, field=f"{section}.convert", **_reading(settings, tools, images) | own)


def load_eval_sets(
    eval_sets: Mapping[str, EvalSet],
    settings: DataSettings,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    images: ImageFormat | None = None,
) -> dict[str, Dataset]:
    """Loads all evaluation sets, by their sections of the config. Raises: UserError, as `load_held_out`."""
    return {
        section: load_held_out(problems, settings, tokenizer, tools, images, section=section)
        for section, problems in eval_sets.items()
    }


def all_rows(*datasets: Dataset) -> list[Row]:
    """Returns the rows of several data sets, one after the other."""
    return [row for dataset in datasets for row in dataset.rows]


def _reading(settings: DataSettings, tools: Sequence[dict[str, Any]], images: ImageFormat | None) -> dict[str, Any]:
    """Returns how all rows of a run are read, as arguments of `read`."""
    args, limit, columns = settings.template_args(tools), settings.max_prompt_tokens, settings.columns
    columns = replace(columns, images=images)
    return dict(max_prompt_tokens=limit, overlong=settings.overlong, template_args=args, columns=columns)


def join(parts: Mapping[str, Dataset]) -> Dataset:
    """Joins the sources of a mixture, one after the other. A column that a source does not have is None in its rows."""
    sets = list(parts.values())
    columns = dict.fromkeys(name for part in sets for row in part.rows for name in row)
    ends = [0, *accumulate(len(part.rows) for part in sets)]
    return Dataset(
        list(chain(*(part.ids for part in sets))),
        # None, so that a reward function gets the same columns of every row.
        [dict.fromkeys(columns) | row for part in sets for row in part.rows],
        sum(part.dropped for part in sets),
        max(part.width for part in sets),
        list(chain(*(part.numbers for part in sets))),
        sum(part.refused for part in sets),
        "; ".join(f"{name}: {part.read_as}" for name, part in parts.items() if part.read_as),
        {name: range(*ends) for name, ends in zip(parts, pairwise(ends), strict=True)},
        notes=tuple(f"{name}: {note}" for name, part in parts.items() for note in part.notes),
        source=", ".join(part.source for part in sets if part.source),
        images=image_rows.join([part.images for part in sets]),
    )


def read(
    source: str,
    tokenizer: Any,
    *,
    convert: str = "",
    field: str = "data.convert",
    columns: Columns = Columns(),  # noqa: B008
    problems: int | None = None,
    **limits: Any,
) -> Dataset:
    """Reads and tokenizes the first `problems` rows of a source (None: all); field: the one that named `convert`.

    columns: how rows are read without `convert`; limits: arguments of `tokenize`.
    """
    source_rows = load_rows(source, convert, field, columns)
    rows, numbers = source_rows.rows[:problems], source_rows.numbers[:problems]
    images = source_rows.images.take(range(len(rows))) if source_rows.images else None
    dataset = tokenize(rows, tokenizer, source=source, numbers=numbers, images=images, **limits)
    return replace(dataset, refused=source_rows.dropped, read_as=source_rows.read_as, source=source)


def _check_image_fields_used(settings: DataSettings, dataset: Dataset) -> None:
    """Raises: UserError, naming the field, if there is one for images but no image."""
    if dataset.images and dataset.images.count:
        return
    why = "no row has an image" if dataset.images else "the model reads no images"
    for name in ("image_column", "image_folder", "min_pixels", "max_pixels"):
        if value := getattr(settings, name):
            raise UserError(f"config.data.{name} = {value!r} does nothing: {why}; set it to {type(value)()!r}")


def check_template_args_used(field: str, template_args: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises: UserError, naming the field, if there are chat template arguments but no chats."""
    if template_args and all(isinstance(row["prompt"], str) for row in dataset.rows):
        raise UserError(f"{field} = {dict(template_args)} does nothing: all prompts are text; leave it empty")


def tokenize(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    overlong: str,
    source: str = "data",
    numbers: Sequence[int] = (),
    template_args: Mapping[str, Any] | None = None,
    images: RowImages | None = None,
) -> Dataset:
    """Tokenizes chats with the tokenizer's template and its arguments, and text as it is after the begin token.

    overlong: "drop" (and count) prompts above the limit, or raise an "error"; nothing is cut.
    numbers: number of each row in its source, from 1; images: images of the rows, whose tokens count.
    Raises: UserError, naming `source`, for a missing template, an over-long prompt, or if no prompt is left.
    """
    numbers = list(numbers or range(1, len(rows) + 1))
    prompts = [row["prompt"] for row in rows]
    args = [formats.template_args(row) for row in rows]
    row_args = args if any(args) else ()
    ids = encoding.encode(
        prompts,
        tokenizer,
        source,
        numbers=numbers,
        template_args=template_args,
        row_args=row_args,
        spelling=images.spelling(tokenizer) if images else {},
    )
    if begin := encoding.beginning(tokenizer):
        ids = [_with_begin_tokens(begin, t) if isinstance(p, str) else t for p, t in zip(prompts, ids, strict=True)]
    if images:
        ids = images.expand(ids, tokenizer, source, numbers)
    # An empty prompt does not fit either: its completion would have no token to follow.
    fits = [0 < len(tokens) <= max_prompt_tokens for tokens in ids]
    if overlong == "error" and not all(fits):
        i = fits.index(False)
        raise UserError(
            f"{source} row {numbers[i]}: the prompt has {len(ids[i])} tokens, config.data.max_prompt_tokens is "
            f"{max_prompt_tokens}: raise it, or drop the row (data.overlong = 'drop' does)"
        )
    fitting = [i for i, fit in enumerate(fits) if fit]
    if not fitting:
        limit = f"config.data.max_prompt_tokens = {max_prompt_tokens}"
        raise UserError(f"all {len(rows)} prompts of {source} are longer than {limit}: raise it")
    ids = [ids[i] for i in fitting]
    width = max(len(tokens) for tokens in ids)
    dropped, rows = len(rows) - len(fitting), [rows[i] for i in fitting]
    numbers, images = [numbers[i] for i in fitting], images.take(fitting) if images else None
    rows = _with_prefill(rows, ids, tokenizer)
    return Dataset(ids, rows, dropped, width, numbers, notes=notes_of(rows, numbers, tokenizer), images=images)


def check_turn_end(
    dataset: Dataset, tokenizer: Any, template_args: Mapping[str, Any], stop_ids: Sequence[int]
) -> Dataset:
    """Returns a data set with a note if the chat template ends a turn with a token at which the model does not stop."""
    end = encoding.turn_end(tokenizer, template_args)
    if end is None or end in stop_ids or all(isinstance(row["prompt"], str) for row in dataset.rows):
        return dataset
    note = (
        f"the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end)!r}, at which completions do not "
        f"stop: add {end} to eos_token_id in the model's generation_config.json, unless a base model is meant"
    )
    return replace(dataset, notes=(*dataset.notes, note))


def _with_begin_tokens(begin: list[int], tokens: np.ndarray) -> np.ndarray:
    """Puts `begin` before the token ids, unless they already start with it."""
    begins = tokens[: len(begin)].tolist() == begin
    return tokens if begins else np.concatenate([np.array(begin, np.int32), tokens])


def _with_prefill(rows: list[Row], ids: Sequence[np.ndarray], tokenizer: Any) -> list[Row]:
    """Returns rows with the column of what their prompts already say of the answer: the thought that a template opens.

    An answer that the last message begins needs none: reward functions get it as a part of the completion.
    """
    in_template = "<think>" in str(tokenizer.chat_template)
    places = []
    for i, row in enumerate(rows):
        prompt = row["prompt"]
        opens = "<think>" in prompt if isinstance(prompt, str) else in_template and prompt[-1]["role"] != "assistant"
        places += [i] if opens and PREFILL not in row else []
    ends = encoding.decode([ids[i][-LAST:].tolist() for i in places], tokenizer)
    begun = {i: found[0] for i, end in zip(places, ends, strict=True) if (found := OPENED.search(end))}
    return [row | {PREFILL: begun[i]} if i in begun else row for i, row in enumerate(rows)]


def _canonical(row: Row) -> str:
    """Returns a row as text. Equal rows give equal text in every process and for any order of columns."""
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except TypeError:
        # Keys that JSON does not support, or keys of several types.
        return json.dumps(_with_text_keys(row), sort_keys=True, default=lambda value: _with_text_keys(_plain(value)))


def _plain(value: Any) -> Any:
    """Converts a value for JSON, independent of memory addresses and of the order of a set."""
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if is_pillow(value):
        # Fingerprints in checkpoints of older runs hold this word.
        return ["picture", image_rows.digest(value)]
    if hasattr(value, "tolist"):
        # NumPy arrays and numbers.
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(_canonical, value))
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [type(value).__qualname__, vars(value)]
    named = isinstance(value, type) or type(value).__repr__ is object.__repr__
    return getattr(value, "__qualname__", type(value).__qualname__) if named else repr(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {repr(key): _with_text_keys(x) for key, x in value.items()}
    return [_with_text_keys(x) for x in value] if isinstance(value, (list, tuple)) else value


def make_prompts(dataset: Dataset, indices: Sequence[int], pad_id: int) -> Prompts:
    """Makes one batch of the rows `indices`, padded on the left, with their images.

    Raises: UserError, for an image that can no longer be read.
    """
    tokens = np.full((len(indices), dataset.width), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    # Padding is on the left, so that the last token of each prompt is in the last column, where sampling starts.
    for b, i in enumerate(indices):
        length = len(dataset.ids[i])
        tokens[b, dataset.width - length :] = dataset.ids[i]
        mask[b, dataset.width - length :] = True
    sources = [name for i in indices for name, rows in dataset.parts.items() if i in rows]
    sizes = dataset.image_sizes
    images = dataset.images.batch(indices, tokens, mask, sizes) if dataset.images and sizes else None
    rows = [dataset.rows[i] for i in indices]
    return Prompts(tokens, mask, rows, np.asarray(indices, np.int32), sources, images)


def all_prompts(dataset: Dataset, pad_id: int) -> Prompts:
    """Returns the whole data set, in order; with several processes its part of this one, each of the same size."""
    count, processes = len(dataset.rows), distributed.count()
    # The end repeats the last row.
    numbers = [min(i, count - 1) for i in range(-(-count // processes) * processes)]
    return make_prompts(dataset, numbers[distributed.part(len(numbers))], pad_id)


def decode(tokenizer: Any, completions: AnyArray, mask: AnyArray) -> tuple[list[list[str]], list[list[list[int]]]]:
    """Decodes completions [B, G, C] to B x G texts without special tokens, and B x G lists of token ids."""
    ids = [[row[m].tolist() for row, m in zip(*group, strict=True)] for group in zip(completions, mask, strict=True)]
    flat = tokenizer.batch_decode([tokens for group in ids for tokens in group], skip_special_tokens=True)
    size = completions.shape[1]
    return [flat[i : i + size] for i in range(0, len(flat), size)], ids


def decode_turns(tokenizer: Any, completions: AnyArray, mask: AnyArray, sampled: AnyArray) -> list[list[list[Turn]]]:
    """Splits completions [B, G, C] into turns, where `sampled` changes: B x G lists of {"role", "content"}.

    The role is "assistant" for tokens of the policy and "environment" for those of an observation.
    """

    def turns(tokens: np.ndarray, real: np.ndarray, by_policy: np.ndarray) -> list[Turn]:
        by_policy, tokens = by_policy[real], tokens[real]
        parts = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(by_policy)) + 1) if len(tokens) else []
        texts = tokenizer.batch_decode([tokens[part].tolist() for part in parts], skip_special_tokens=True)
        roles = ["assistant" if by_policy[part[0]] else "environment" for part in parts]
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]

    groups = zip(completions, mask, sampled, strict=True)
    return [[turns(*row) for row in zip(*group, strict=True)] for group in groups]
