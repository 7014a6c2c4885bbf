"""From problems to token ids: files and tasks in, a checkpointable Grain iterator of prompts out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import tasks
from jaxrl_llm.config import resolve
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Prompts

Row = dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Tokenised prompts with their rows, none longer than the limit."""

    ids: list[list[int]]
    rows: list[Row]
    dropped: int  # over-long prompts left out
    width: int  # P: tokens of the longest prompt


def load(config: ConfigDict, tokenizer: Any, source: str = "", limit: int | None = None) -> Dataset:
    """The data set of a config's `data` section, or another source read in the same way, its first `limit` rows."""
    rows = load_rows(source or config.source, config.convert)[:limit]
    return tokenise(rows, tokenizer, max_prompt_tokens=config.max_prompt_tokens, overlong=config.overlong)


def load_rows(source: str, convert: str = "") -> list[Row]:
    """Rows of a task ("arithmetic.train"), a function of yours ("my.module.rows"), or a .jsonl or .parquet file.

    convert names a function row -> row that makes the column "prompt" (of `jaxrl_llm.tasks`, or dotted).
    Raises: UserError, naming the file, the line or row, and what is wrong with it.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = resolve(source, tasks, "data source")()
    if not rows:
        raise UserError(f"data source {source} holds no rows: nothing to learn from")
    if convert:
        rows = [_convert(source, convert, i, row) for i, row in enumerate(rows, 1)]
    for i, row in enumerate(rows, 1):
        if "prompt" not in row:
            there = ", ".join(sorted(row))
            raise UserError(f"{source} row {i} has no column 'prompt' (there is {there}): rename it, or set data.convert")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
                rows.append(row)
    except (json.JSONDecodeError, ValueError) as error:
        raise UserError(f"{path} line {number}: {error}: every line must be one JSON object") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _convert(source: str, convert: str, number: int, row: Row) -> Row:
    try:
        return resolve(convert, tasks, "data.convert")(row)
    except KeyError as error:
        there = ", ".join(sorted(row))
        raise UserError(f"{source} row {number} has no column {error}, which {convert} needs (there is {there})") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{source} row {number}: {convert} says: {error}") from None


def tokenise(rows: Sequence[Row], tokenizer: Any, *, max_prompt_tokens: int, overlong: str) -> Dataset:
    """Chats through the tokenizer's template, ending with the generation prompt; text as it is.

    overlong: what becomes of a prompt above the limit, "drop" (counted) or "error"; nothing is cut.
    Raises: UserError, for a missing template, an over-long prompt, or when none is left.
    """
    if isinstance(rows[0]["prompt"], list) and not tokenizer.chat_template:
        raise UserError("the prompts are chats but the tokenizer has no chat template: use an instruct model, or text")
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        if isinstance(row["prompt"], list)
        else row["prompt"]
        for row in rows
    ]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    fits = [0 < len(tokens) <= max_prompt_tokens for tokens in ids]
    if overlong == "error" and not all(fits):
        i = fits.index(False)
        raise UserError(
            f"row {i + 1}'s prompt has {len(ids[i])} tokens, data.max_prompt_tokens is {max_prompt_tokens}: "
            "raise it, or set data.overlong = 'drop'"
        )
    kept = [(tokens, row) for tokens, row, fit in zip(ids, rows, fits, strict=True) if fit]
    if not kept:
        raise UserError(f"all {len(rows)} prompts are longer than data.max_prompt_tokens = {max_prompt_tokens}: raise it")
    longest = max(len(tokens) for tokens, _ in kept)
    return Dataset([t for t, _ in kept], [r for _, r in kept], len(rows) - len(kept), longest)


def make_prompts(dataset: Dataset, indices: Sequence[int], pad_id: int) -> Prompts:
    """Rows `indices` as one batch, padded on the left."""
    tokens = np.full((len(indices), dataset.width), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for b, i in enumerate(indices):
        length = len(dataset.ids[i])
        tokens[b, dataset.width - length :] = dataset.ids[i]
        mask[b, dataset.width - length :] = True
    return Prompts(tokens, mask, [dataset.rows[i] for i in indices])


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
