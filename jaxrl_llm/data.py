"""From problems to token ids: files and tasks in, a checkpointable Grain iterator of prompts out."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config import resolve
from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.structs import Config, Prompts

Row = dict[str, Any]
FILES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Dataset:
    """Tokenised prompts with their rows, none longer than the limit."""

    ids: list[list[int]]
    rows: list[Row]
    dropped: int  # over-long prompts left out
    width: int  # P: tokens of the longest prompt
    numbers: list[int]  # each row's number in its source, from 1

    def fingerprint(self) -> str:
        """A hash of the token ids, in order."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()


def load(config: Config, tokenizer: Any) -> Dataset:
    """The prompts to learn from, as the `data` section says."""
    rows = load_rows(config.data.source, config.data.convert)
    limits = dict(max_prompt_tokens=config.data.max_prompt_tokens, overlong=config.data.overlong)
    return tokenise(rows, tokenizer, **limits, source=config.data.source)


def load_held_out(config: Config, tokenizer: Any) -> Dataset:
    """The prompts to be judged by, as the `eval` section says; an over-long one is an error: the exam stays whole."""
    rows = load_rows(config.eval.source, config.data.convert)[: config.eval.problems]
    limits = dict(max_prompt_tokens=config.data.max_prompt_tokens, overlong="error")
    return tokenise(rows, tokenizer, **limits, source=config.eval.source)


def load_rows(source: str, convert: str = "") -> list[Row]:
    """Rows of a task ("arithmetic.train"), a function of yours ("my.module.rows"), or a .jsonl or .parquet file.

    convert names a function row -> row that makes the column "prompt" (of `jaxrl_llm.tasks`, or dotted).
    Raises: UserError, naming the file, the line or row, and what is wrong with it.
    """
    path = Path(source)
    if path.suffix in FILES and not path.exists():
        raise UserError(f"data file {path} does not exist: give the path of one that does")
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _made(source)
    if not rows:
        raise UserError(f"{source} holds no rows: give a data source that has some")
    if convert:
        rows = [_convert(source, convert, i, row) for i, row in enumerate(rows, 1)]
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{source} row {i} is {row!r}: make every row a dict of columns")
        if "prompt" not in row:
            raise UserError(f"{source} row {i} has no column 'prompt' ({_there(row)}): rename one, or set data.convert")
        if not _is_prompt(row["prompt"]):
            raise UserError(
                f"{source} row {i}: prompt is {row['prompt']!r}: give text, or a list of messages with role and content"
            )
    return rows


def _made(source: str) -> list[Row]:
    function = resolve(source, tasks, "data source")
    try:
        return list(function())
    except Exception as error:  # their own code
        raise UserError(f"data source {source} raised {describe(error)}") from error


def _is_prompt(prompt: Any) -> bool:
    chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    return bool(prompt) and (chat or isinstance(prompt, str))


def _there(row: Row) -> str:
    return f"there is {', '.join(sorted(row))}"


def _read_jsonl(path: Path) -> list[Row]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file of yours") from None
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{path} line {number}: {error}: every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise UserError(f"{path} line {number} is {type(row).__name__}: every line must be one JSON object")
    return row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): give a Parquet file") from None


def _convert(source: str, convert: str, number: int, row: Row) -> Row:
    function = resolve(convert, tasks, "data.convert")
    try:
        return function(row)
    except KeyError as error:
        raise UserError(f"{source} row {number} has no column {error} for {convert} ({_there(row)}): add it") from error
    except Exception as error:  # their own code
        raise UserError(f"{source} row {number}: {convert} raised {describe(error)}") from error


def tokenise(
    rows: Sequence[Row], tokenizer: Any, *, max_prompt_tokens: int, overlong: str, source: str = "data"
) -> Dataset:
    """Chats through the tokenizer's template, ending with the generation prompt; text as it is.

    overlong: what becomes of a prompt above the limit, "drop" (counted) or "error"; nothing is cut.
    Raises: UserError, naming `source`, for a missing template, an over-long prompt, or when none is left.
    """
    texts = [_text(source, number, row["prompt"], tokenizer) for number, row in enumerate(rows, 1)]
    ids = encode(texts, tokenizer, source)
    fits = [0 < len(tokens) <= max_prompt_tokens for tokens in ids]
    if overlong == "error" and not all(fits):
        i = fits.index(False)
        raise UserError(
            f"{source} row {i + 1}: the prompt has {len(ids[i])} tokens, max_prompt_tokens is {max_prompt_tokens}: "
            "raise it, or drop the row (data.overlong = 'drop' does)"
        )
    kept = [i for i, fit in enumerate(fits) if fit]
    if not kept:
        limit = f"max_prompt_tokens = {max_prompt_tokens}"
        raise UserError(f"all {len(rows)} prompts of {source} are longer than {limit}: raise it")
    ids = [ids[i] for i in kept]
    width = max(len(tokens) for tokens in ids)
    return Dataset(ids, [rows[i] for i in kept], len(rows) - len(kept), width, [i + 1 for i in kept])


def encode(texts: list[str], tokenizer: Any, source: str) -> list[list[int]]:
    """Token ids of texts, nothing added. Raises: UserError, for a text of which the tokenizer loses something."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for text, back in zip(texts, tokenizer.batch_decode(ids), strict=True):
        if len("".join(back.split())) < len("".join(unicodedata.normalize("NFC", text).split())):
            raise UserError(f"{source}: the model's tokenizer cannot write {text[:200]!r}, only {back[:200]!r}")
    return ids


def _text(source: str, number: int, prompt: Any, tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(f"{source} holds chats but the tokenizer has no chat template: use an instruct model, or text")
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template's own refusals
        raise UserError(f"{source} row {number}: the chat template does not take the prompt: {error}") from error


def make_prompts(dataset: Dataset, indices: Sequence[int], pad_id: int) -> Prompts:
    """Rows `indices` as one batch, padded on the left."""
    tokens = np.full((len(indices), dataset.width), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for b, i in enumerate(indices):
        length = len(dataset.ids[i])
        tokens[b, dataset.width - length :] = dataset.ids[i]
        mask[b, dataset.width - length :] = True
    return Prompts(tokens, mask, [dataset.rows[i] for i in indices], np.asarray(indices, np.int32))


def iterate(size: int, batch: int, seed: int, collate: Callable[[Sequence[int]], Any]) -> grain.DatasetIterator:
    """Endless shuffled batches over `size` rows, shuffled anew each epoch.

    Its `get_state()` is a small dict that puts another one at the same place by `set_state`.
    """
    dataset = grain.MapDataset.range(size).seed(seed).shuffle().repeat().batch(batch, batch_fn=collate)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def batches(dataset: Dataset, batch: int, pad_id: int) -> Iterator[Prompts]:
    """The data set once, in order; the last batch is filled up by repeating its last row."""
    for start in range(0, len(dataset.rows), batch):
        last = len(dataset.rows) - 1
        yield make_prompts(dataset, [min(i, last) for i in range(start, start + batch)], pad_id)


def decode(tokenizer: Any, completions: np.ndarray, mask: np.ndarray) -> tuple[list[list[str]], list[list[list[int]]]]:
    """Completions [B, G, C] -> B x G texts without special tokens, and B x G token ids."""
    ids = [[row[m].tolist() for row, m in zip(*group, strict=True)] for group in zip(completions, mask, strict=True)]
    flat = tokenizer.batch_decode([tokens for group in ids for tokens in group], skip_special_tokens=True)
    size = completions.shape[1]
    return [flat[i : i + size] for i in range(0, len(flat), size)], ids
