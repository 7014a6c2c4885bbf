"""Examples of `sft`: completions of rows as token ids, their batches, and the position in the data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.settings import DataSettings
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Batch, PartState

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    import grain


class Answer(NamedTuple):
    """Token ids of a completion, and which of them `sft` learns: all but those of an environment."""

    tokens: list[int]
    learned: list[bool]


def tokenize_answers(
    dataset: data.Dataset, tokenizer: Any, settings: DataSettings, limit: int, stop_ids: Sequence[int]
) -> list[tuple[Answer, ...]]:
    """Returns the G completions of each row with their end tokens; () for a row with a completion above the limit.

    limit: tokens of a completion; stop_ids: tokens at which the model stops. The end token of a chat is the one that
    its template writes after an answer, if the model stops at it; Gemma's template writes <end_of_turn>, for example,
    but its tokenizer ends texts with <eos>. A column holds text, or the turns of an episode, which are encoded one by
    one as an environment does. Raises: UserError, if the tokenizer has no end token, or if no row is left.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no end token, which sft must teach; set eos_token in its "
            "tokenizer_config.json"
        )
    turn_end = encoding.turn_end(tokenizer, settings.template_args())
    chat_end = turn_end if turn_end is not None and turn_end in stop_ids else tokenizer.eos_token_id
    end_ids = [tokenizer.eos_token_id if isinstance(row["prompt"], str) else chat_end for row in dataset.rows]
    by_column = [
        _column_answers(dataset, tokenizer, column, settings.source, end_ids) for column in settings.completion_columns
    ]
    rows = zip(*by_column, strict=True)
    answers = [row if all(len(answer.tokens) <= limit for answer in row) else () for row in rows]
    if not any(answers):
        raise UserError(f"config.rollout.max_completion_tokens = {limit}: all completions are longer; raise the limit")
    return answers


def _column_answers(
    dataset: data.Dataset, tokenizer: Any, column: str, source: str, end_ids: Sequence[int]
) -> list[Answer]:
    """Returns the completion of each row in a column, with its end token. end_ids: [N] end token of each row."""
    turns = [columns.turns(row[column]) for row in dataset.rows]
    numbers = [number for number, row in zip(dataset.numbers, turns, strict=True) for _ in row]
    encoded = encoding.encode([text for row in turns for _, text in row], tokenizer, source, numbers=numbers)
    if dataset.images:
        dataset.images.check_completions(encoded, tokenizer, source, numbers)
    ids = iter(encoded)
    answers = []
    for row, end_id in zip(turns, end_ids, strict=True):
        # `ids` goes last in zip, so that the end of a row takes no turn of the next row.
        parts = [
            Answer(tokens.tolist(), [by_policy] * len(tokens)) for (by_policy, _), tokens in zip(row, ids, strict=False)
        ]
        tokens, learned = (list(chain(*x)) for x in zip(*parts, ([end_id], [True]), strict=True))
        answers.append(Answer(tokens, learned))
    return answers


def make_batch(
    dataset: data.Dataset,
    answers: Sequence[tuple[Answer, ...]],
    indices: Sequence[int],
    *,
    kept_rows: Sequence[int],
    length: int,
    pad_id: int,
) -> Batch:
    """Makes a Batch with the G completions of each of the rows kept_rows[indices], on the host.

    kept_rows: numbers of the rows whose completions fit; length: C, tokens to which completions are padded.
    """
    rows = [kept_rows[i] for i in indices]
    prompts = data.make_prompts(dataset, rows, pad_id)
    completions = np.full((len(rows), len(answers[rows[0]]), length), pad_id, np.int32)
    mask, learned = np.zeros(completions.shape, bool), np.zeros(completions.shape, bool)
    for b, i in enumerate(rows):
        for g, answer in enumerate(answers[i]):
            used = slice(len(answer.tokens))
            completions[b, g, used], mask[b, g, used], learned[b, g, used] = answer.tokens, True, answer.learned
    return Batch(prompts.tokens, prompts.mask, completions, mask, learned, images=prompts.images)


class Examples:
    """Batches of examples, and the position in the data that checkpoints hold."""

    def __init__(self, iterator: grain.DatasetIterator):
        self._iterator = iterator
        # The position is the one after the last learned batch.
        self._start = self._position = iterator.get_state()

    def next(self) -> Batch:
        """Returns the next examples, on the host."""
        return next(self._iterator)

    def learned(self) -> None:
        """Marks the last batch as learned, so that `state` returns the position after it."""
        self._position = self._iterator.get_state()

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the position after the last learned batch."""
        return PartState({"position": self._position})

    def load(self, state: PartState | None) -> None:
        """Moves to the position of a state; None = the start of the data."""
        self._position = state.notes["position"] if state else self._start
        self._iterator.set_state(self._position)
