"""The prompts of a run: a tokenized data set, and batches of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.data import encoding, formats, image_rows
from jaxrl_llm.data.formats import Columns, Row
from jaxrl_llm.data.image_columns import is_pillow
from jaxrl_llm.data.image_format import ImageFormat
from jaxrl_llm.data.image_rows import RowImages
from jaxrl_llm.data.prompt_notes import notes_of
from jaxrl_llm.data.prompt_sizes import smaller_sizes
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.data.settings import EVAL, DataSettings, EvalSet
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed
from jaxrl_llm.structs import AnyArray, Prompts, PromptSizes
from jaxrl_llm.tasks import PREFILL

Turn: TypeAlias = dict[str, str]  # one turn of an episode: {"role": ..., "content": ...}
PrepareRows: TypeAlias = Callable[[Sequence[Row]], Sequence[Row]]
# This pattern matches an opening tag of reasoning at the end of a prompt, also if its closing tag follows directly.
OPENED_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
LAST_TOKENS = 16  # tokens at the end of a prompt that are searched for an opened thought


@dataclass(frozen=True)
class Dataset:
    """Tokenized prompts and their rows. No prompt is longer than the limit."""

    ids: list[np.ndarray]  # token ids of each prompt, int32
    rows: list[Row]
    dropped: int  # number of over-long prompts that were dropped
    width: int  # P: tokens of the longest prompt
    numbers: list[int]  # number of each row in its source, from 1
    refused: int = 0  # number of rows that the convert function dropped
    read_as: str = ""  # note on how columns other than "prompt" and "answer" were read
    parts: dict[str, range] = field(default_factory=dict)  # indices of the rows of each source; {} without a mixture
    notes: tuple[str, ...] = ()  # lines for the banner, on the form of prompts and on rows without a needed column
    source: str = ""  # source of the rows, as in the config
    images: RowImages | None = None  # images of the prompts; None if the model reads no images
    order_values: np.ndarray | None = None  # for each row, the number by which epochs are sorted; None: shuffled epochs

    def repeated(self) -> tuple[int, int, int]:
        """Returns how many prompts repeat an earlier one, the row number of the first repetition, and of its original.

        All three are 0 if no prompt is repeated.
        """

        # Hashes are compared, because the tokens of a million prompts would need much memory. Python's hash of bytes
        # differs between processes, which does no harm within one.
        def prompt_hash(index: int) -> int:
            return hash((self.ids[index].tobytes(), self.images.digests(index) if self.images else ""))

        hashes = np.fromiter(map(prompt_hash, range(len(self.ids))), np.int64, len(self.ids))
        _, first_index, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        originals = first_index[inverse]  # for each prompt, the index of the first prompt that equals it
        repetitions = np.flatnonzero(originals != np.arange(len(hashes)))
        if not len(repetitions):
            return 0, 0, 0
        return len(repetitions), self.numbers[repetitions[0]], self.numbers[originals[repetitions[0]]]

    def fingerprint(self) -> str:
        """Returns a hash of the token ids and of all columns of the rows, in order."""
        digest = self._prompt_digest()
        for row in self.rows:
            # The prefill is left out, because it is a part of the token ids.
            digest.update(_canonical({key: x for key, x in row.items() if key != PREFILL}).encode())
        return digest.hexdigest()

    def prompt_fingerprint(self) -> str:
        """Returns a hash of the token ids and images of all prompts, in order."""
        return self._prompt_digest().hexdigest()

    @cached_property
    def sizes(self) -> PromptSizes:
        """Sizes to which the prompts of a batch are padded."""
        lengths = list(map(len, self.ids))
        if not (self.images and self.images.count):
            return PromptSizes(self.width, None, smaller_sizes(lengths, [0] * len(lengths)))
        return PromptSizes(self.width, self.images.sizes, smaller_sizes(lengths, self.images.patches_of_rows))

    def counts(self) -> list[int]:
        """Returns the number of rows, or of the rows of each source of a mixture."""
        return [len(rows) for rows in self.parts.values()] or [len(self.rows)]

    def _prompt_digest(self) -> Any:
        """Returns the SHA-256 object of all prompts' token ids and images, to which a caller may add more."""
        # The lengths are hashed too, so that equal tokens that are split into other prompts have another hash.
        digest = hashlib.sha256(np.array([len(tokens) for tokens in self.ids]).tobytes())
        digest.update(np.concatenate(self.ids).tobytes())
        if self.images:
            digest.update("".join(map(self.images.digests, range(len(self.ids)))).encode())
        return digest


def load(
    settings: DataSettings,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    images: ImageFormat | None = None,
    prepare_rows: PrepareRows = list,
) -> Dataset:
    """Loads the training prompts of the section `data`.

    tools: JSON schemas of the environment's functions, for the chat template; images: image settings of the model, None
    for a text model; prepare_rows(rows): returns the rows with what an environment adds before they are tokenized.
    Raises: UserError, naming the field or the row.
    """
    read_arguments: dict[str, Any] = _read_arguments(settings, tools, images)
    read_arguments["prepare_rows"] = prepare_rows
    if settings.mixture:
        parts = {
            name: read(
                part.source, tokenizer, convert=part.convert, field=f"data.mixture.{name}.convert", **read_arguments
            )
            for name, part in settings.mixture.items()
        }
        dataset = join(parts)
    else:
        dataset = read(settings.source, tokenizer, convert=settings.convert, **read_arguments)
    if tools and all(isinstance(row["prompt"], str) for row in dataset.rows):
        raise UserError(
            "config.env.functions: all prompts are text, but only a chat template can describe functions; prompts must "
            "be lists of messages"
        )
    if tools and any("tools" in formats.template_args(row) for row in dataset.rows):
        raise UserError(
            "config.env.functions: rows have a column 'tools' with other functions, which the environment cannot call; "
            "remove this column"
        )
    check_template_args_used("config.data.chat_template_args", read_arguments["template_args"], dataset)
    _check_image_fields_used(settings, dataset)
    order_values = _column_numbers(dataset, settings.order_column) if settings.order_column else None
    return replace(dataset, order_values=order_values)


def _column_numbers(dataset: Dataset, column: str) -> np.ndarray:
    """Returns the number of each row in a column. Raises: UserError, naming the first row without a number."""
    values = np.empty(len(dataset.rows))
    for index, row in enumerate(dataset.rows):
        value = formats.value_in(row, column)
        try:
            # Text is read as a number too, because all values of a CSV file are text.
            values[index] = float(value)
        except (TypeError, ValueError):
            values[index] = np.nan
        if not np.isfinite(values[index]):
            source = next((name for name, part in dataset.parts.items() if index in part), dataset.source)
            content = formats.columns_text(row) if value is None else f"its value is {value!r:.80}"
            raise UserError(
                f"config.data.order_column = {column!r}: {source} row {dataset.numbers[index]:,} has no number in this "
                f"column ({content}); every row needs a number, or set order_column to '' for a shuffled order"
            )
    return values


def load_held_out(
    problems: EvalSet,
    settings: DataSettings,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    images: ImageFormat | None = None,
    prepare_rows: PrepareRows = list,
    *,
    section: str = EVAL,
) -> Dataset:
    """Loads the prompts of an evaluation set in the way of training prompts, but drops no over-long prompt.

    settings, tools, images, prepare_rows: arguments of `load`; section: section of the config that has the set.
    Raises: UserError, also for an over-long prompt.
    """
    set_arguments = {"convert": problems.convert, "problems": problems.problems, "overlong": "error"}
    set_arguments |= {"prepare_rows": prepare_rows}
    arguments = _read_arguments(settings, tools, images) | set_arguments
    return read(problems.source, tokenizer, field=f"{section}.convert", **arguments)


def load_eval_sets(
    eval_sets: Mapping[str, EvalSet],
    settings: DataSettings,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    images: ImageFormat | None = None,
    prepare_rows: PrepareRows = list,
) -> dict[str, Dataset]:
    """Loads all evaluation sets, by their sections of the config. Raises: UserError, as `load_held_out`."""
    return {
        section: load_held_out(problems, settings, tokenizer, tools, images, prepare_rows=prepare_rows, section=section)
        for section, problems in eval_sets.items()
    }


def all_rows(*datasets: Dataset) -> list[Row]:
    """Returns the rows of several data sets, one after the other."""
    return [row for dataset in datasets for row in dataset.rows]


def _read_arguments(
    settings: DataSettings, tools: Sequence[dict[str, Any]], images: ImageFormat | None
) -> dict[str, Any]:
    """Returns the arguments of `read` that all sources of a run share."""
    args, limit, columns = settings.template_args(tools), settings.max_prompt_tokens, settings.columns
    columns = replace(columns, images=images)
    return dict(max_prompt_tokens=limit, overlong=settings.overlong, template_args=args, columns=columns)


def join(parts: Mapping[str, Dataset]) -> Dataset:
    """Joins the sources of a mixture, one after the other. A column that a source does not have is None in its rows."""
    sets = list(parts.values())
    columns = dict.fromkeys(name for part in sets for row in part.rows for name in row)
    ends = [0, *accumulate(len(part.rows) for part in sets)]
    return Dataset(
        ids=list(chain(*(part.ids for part in sets))),
        # Missing columns become None, so that a reward function gets the same columns of every row.
        rows=[dict.fromkeys(columns) | row for part in sets for row in part.rows],
        dropped=sum(part.dropped for part in sets),
        width=max(part.width for part in sets),
        numbers=list(chain(*(part.numbers for part in sets))),
        refused=sum(part.refused for part in sets),
        read_as="; ".join(f"{name}: {part.read_as}" for name, part in parts.items() if part.read_as),
        parts={name: range(*ends) for name, ends in zip(parts, pairwise(ends), strict=True)},
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
    prepare_rows: PrepareRows = list,
    **limits: Any,
) -> Dataset:
    """Reads and tokenizes the rows of a source.

    convert, field, columns: arguments of `load_rows`; problems: number of first rows to use, None for all;
    prepare_rows: argument of `load`; limits: further arguments of `tokenize`.
    Raises: UserError, naming the source and the row.
    """
    source_rows = load_rows(source, convert, field, columns)
    rows, numbers = source_rows.rows[:problems], source_rows.numbers[:problems]
    images = source_rows.images.take(range(len(rows))) if source_rows.images else None
    dataset = tokenize(prepare_rows(rows), tokenizer, source=source, numbers=numbers, images=images, **limits)
    return replace(dataset, refused=source_rows.dropped, read_as=source_rows.read_as, source=source)


def _check_image_fields_used(settings: DataSettings, dataset: Dataset) -> None:
    """Raises: UserError, naming the field, if a field for images is set in a run without images."""
    if dataset.images and dataset.images.count:
        return
    reason = "no row has an image" if dataset.images else "the model reads no images"
    for name in ("image_column", "image_folder", "min_pixels", "max_pixels"):
        if value := getattr(settings, name):
            raise UserError(
                f"config.data.{name} = {value!r} has no effect, because {reason}: set {name} to {type(value)()!r}"
            )


def check_template_args_used(field: str, template_args: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises: UserError, naming the field, if arguments of the chat template are set, but all prompts are text."""
    if template_args and all(isinstance(row["prompt"], str) for row in dataset.rows):
        raise UserError(
            f"{field} = {dict(template_args)} has no effect, because all prompts are text and no chat template formats "
            "them: leave the field empty"
        )


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
    """Tokenizes the prompts of rows: chats with the tokenizer's chat template, and text as it is after the begin token.

    max_prompt_tokens: limit of a prompt, with the tokens of its images; overlong: "drop" to drop and count longer
    prompts, or "error"; nothing is cut. numbers: number of each row in its source, from 1; template_args: arguments of
    the chat template; images: images of the rows.
    Raises: UserError, naming `source`, for a missing template, an over-long prompt, or if no prompt is left.
    """
    numbers = list(numbers or range(1, len(rows) + 1))
    prompts = [row["prompt"] for row in rows]
    row_args = [formats.template_args(row) for row in rows]  # arguments of the chat template that a row sets
    ids = encoding.encode(
        prompts,
        tokenizer,
        source,
        numbers=numbers,
        template_args=template_args,
        row_args=row_args if any(row_args) else (),
        spelling=images.spelling(tokenizer) if images else {},
    )
    if begin := encoding.beginning(tokenizer):
        # Only prompts of text lack the begin tokens, because a chat template writes them itself.
        ids = [
            _with_begin_tokens(begin, tokens) if isinstance(prompt, str) else tokens
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
    if images:
        ids = images.expand(ids, tokenizer, source, numbers)
    # An empty prompt counts as unfit too, because its completion would have no token to follow.
    fits = [0 < len(tokens) <= max_prompt_tokens for tokens in ids]
    if overlong == "error" and not all(fits):
        unfit = fits.index(False)
        raise UserError(
            f"{source} row {numbers[unfit]}: the prompt has {len(ids[unfit])} tokens, which must be 1 to "
            f"config.data.max_prompt_tokens = {max_prompt_tokens}; raise the limit, or drop the row (data.overlong = "
            "'drop' does so for training prompts)"
        )
    fitting = [index for index, prompt_fits in enumerate(fits) if prompt_fits]
    if not fitting:
        raise UserError(
            f"config.data.max_prompt_tokens = {max_prompt_tokens}: all {len(rows)} prompts of {source} are longer; "
            "raise the limit"
        )
    ids = [ids[index] for index in fitting]
    width = max(len(tokens) for tokens in ids)
    dropped, rows = len(rows) - len(fitting), [rows[index] for index in fitting]
    numbers, images = [numbers[index] for index in fitting], images.take(fitting) if images else None
    rows = _with_prefill(rows, ids, tokenizer)
    return Dataset(ids, rows, dropped, width, numbers, notes=notes_of(rows, numbers, tokenizer), images=images)


def check_turn_end(
    dataset: Dataset, tokenizer: Any, template_args: Mapping[str, Any], stop_ids: Sequence[int]
) -> Dataset:
    """Returns a data set with a note if the chat template ends a turn with a token at which the model does not stop."""
    end_id = encoding.turn_end(tokenizer, template_args)
    if end_id is None or end_id in stop_ids or all(isinstance(row["prompt"], str) for row in dataset.rows):
        return dataset
    note = (
        f"the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end_id)!r}, but completions do not stop "
        f"at this token: add {end_id} to eos_token_id in the model's generation_config.json, unless the model is a "
        "base model"
    )
    return replace(dataset, notes=(*dataset.notes, note))


def _with_begin_tokens(begin: list[int], tokens: np.ndarray) -> np.ndarray:
    """Returns token ids with the tokens `begin` before them, unless they already start with these tokens."""
    starts_with_begin = tokens[: len(begin)].tolist() == begin
    return tokens if starts_with_begin else np.concatenate([np.array(begin, np.int32), tokens])


def _with_prefill(rows: list[Row], ids: Sequence[np.ndarray], tokenizer: Any) -> list[Row]:
    """Adds the column PREFILL to rows whose prompt ends with an opened thought, `<think>`, which begins the answer.

    A prompt whose last message begins the answer needs no prefill, because reward functions get that message as a part
    of the completion.
    """
    template_thinks = "<think>" in str(tokenizer.chat_template)
    candidates = []  # indices of rows whose prompt may end with an opened thought
    for index, row in enumerate(rows):
        prompt = row["prompt"]
        if isinstance(prompt, str):
            may_open = "<think>" in prompt
        else:
            may_open = template_thinks and prompt[-1]["role"] != "assistant"
        candidates += [index] if may_open and PREFILL not in row else []
    prompt_ends = encoding.decode([ids[index][-LAST_TOKENS:].tolist() for index in candidates], tokenizer)
    matches = {index: OPENED_THOUGHT.search(text) for index, text in zip(candidates, prompt_ends, strict=True)}
    prefills = {index: match[0] for index, match in matches.items() if match}
    return [row | {PREFILL: prefills[index]} if index in prefills else row for index, row in enumerate(rows)]


def _canonical(row: Row) -> str:
    """Returns a row as text. Equal rows give equal text in every process and for any order of columns."""
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except TypeError:
        # JSON cannot sort keys of several types, and does not support all keys.
        return json.dumps(_with_text_keys(row), sort_keys=True, default=lambda value: _with_text_keys(_plain(value)))


def _plain(value: Any) -> Any:
    """Converts a value for JSON, independent of memory addresses and of the order of a set."""
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if is_pillow(value):
        # Fingerprints in checkpoints of older runs hold this word.
        return ["picture", image_rows.digest(value)]
    if hasattr(value, "tolist"):  # a NumPy array or number
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(_canonical, value))
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [type(value).__qualname__, vars(value)]
    # The default repr has a memory address, which differs in each process. So the type's name is hashed instead.
    has_no_repr = isinstance(value, type) or type(value).__repr__ is object.__repr__
    return getattr(value, "__qualname__", type(value).__qualname__) if has_no_repr else repr(value)


def _with_text_keys(value: Any) -> Any:
    """Replaces the keys of all dicts in a value by their text, so that JSON can sort them."""
    if isinstance(value, dict):
        return {repr(key): _with_text_keys(x) for key, x in value.items()}
    return [_with_text_keys(x) for x in value] if isinstance(value, (list, tuple)) else value


def make_prompts(dataset: Dataset, indices: Sequence[int], pad_id: int) -> Prompts:
    """Makes a batch of the prompts with these indices, padded on the left with `pad_id`, with their images.

    Raises: UserError, for an image that can no longer be read.
    """
    tokens = np.full((len(indices), dataset.width), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    # Padding is on the left, so that the last token of each prompt is in the last column, where sampling starts.
    for place, index in enumerate(indices):
        start = dataset.width - len(dataset.ids[index])
        tokens[place, start:] = dataset.ids[index]
        mask[place, start:] = True
    sources = [name for index in indices for name, rows in dataset.parts.items() if index in rows]
    _, image_sizes, smaller = dataset.sizes
    images = dataset.images.batch(indices, tokens, mask, image_sizes) if dataset.images and image_sizes else None
    rows, numbers = [dataset.rows[index] for index in indices], np.asarray(indices, np.int32)
    return Prompts(tokens, mask, rows, numbers, sources=sources, images=images, smaller=smaller)


def all_prompts(dataset: Dataset, pad_id: int) -> Prompts:
    """Returns all prompts of a data set, in order; with several processes, this process's part of equal size."""
    count, processes = len(dataset.rows), distributed.count()
    # The last row is repeated until all processes get the same number of rows.
    padded_count = -(-count // processes) * processes
    numbers = [min(number, count - 1) for number in range(padded_count)]
    return make_prompts(dataset, numbers[distributed.part(len(numbers))], pad_id)


def decode(tokenizer: Any, completions: AnyArray, mask: AnyArray) -> tuple[list[list[str]], list[list[list[int]]]]:
    """Decodes completions [B, G, C] to B x G texts without special tokens, and B x G lists of token ids.

    mask: True on real tokens [B, G, C].
    """
    ids = real_tokens(completions, mask)
    texts = tokenizer.batch_decode([tokens for group in ids for tokens in group], skip_special_tokens=True)
    group_size = completions.shape[1]
    return [texts[start : start + group_size] for start in range(0, len(texts), group_size)], ids


def real_tokens(values: AnyArray, mask: AnyArray) -> list[list[list[Any]]]:
    """Returns B x G lists of the values of real tokens. values: [B, G, C]. mask: True on real tokens [B, G, C]."""
    groups = zip(values, mask, strict=True)
    return [[row[is_real].tolist() for row, is_real in zip(*group, strict=True)] for group in groups]


def decode_turns(tokenizer: Any, completions: AnyArray, mask: AnyArray, sampled: AnyArray) -> list[list[list[Turn]]]:
    """Splits completions [B, G, C] into turns, where `sampled` changes: B x G lists of {"role", "content"}.

    mask: True on real tokens. sampled: True on tokens that the policy sampled. The role is "assistant" for tokens of
    the policy and "environment" for those of an observation.
    """

    def split_turns(tokens: np.ndarray, is_real: np.ndarray, is_sampled: np.ndarray) -> list[Turn]:
        """Splits one completion [C]."""
        is_sampled, tokens = is_sampled[is_real], tokens[is_real]
        turn_starts = np.flatnonzero(np.diff(is_sampled)) + 1  # without the first turn, which starts at 0
        parts = np.split(np.arange(len(tokens)), turn_starts) if len(tokens) else []
        ids = [tokens[part].tolist() for part in parts]
        # Some tokenizers decode an empty list to one empty text.
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
        roles = ["assistant" if is_sampled[part[0]] else "environment" for part in parts]
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]

    groups = zip(completions, mask, sampled, strict=True)
    return [[split_turns(*row) for row in zip(*group, strict=True)] for group in groups]
