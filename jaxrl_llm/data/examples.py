"""The examples of `sft`: the completions of rows as token ids, batches of them, and the position in the data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.settings import DataSettings
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Batch, PartState


class Answer(NamedTuple):
    """Token ids of a completion, and which of them are learned: not those of an environment."""

    tokens: list[int]
    learned: list[bool]


def tokenize_answers(
    dataset: data.Dataset, tokenizer: Any, settings: DataSettings, limit: int, stop_ids: Sequence[int]
) -> list[tuple[Answer, ...]]:
    """Returns each row's G completions with the end token, and () for a row of which one is above the limit of tokens.

    After the answer of a chat, the end token is the one that the template writes there, if the model stops at it:
    Gemma's template writes <end_of_turn>, and its tokenizer ends texts with <eos>.
    A column holds text, or the turns of an episode: each is encoded alone, as an environment does it.
    Raises: UserError, if the tokenizer has no end token, or if no row is left.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token: name its eos_token in tokenizer_config.json")
    turn_end = encoding.turn_end(tokenizer, settings.template_args())
    end = turn_end if turn_end is not None and turn_end in stop_ids else tokenizer.eos_token_id
    ends = [tokenizer.eos_token_id if isinstance(row["prompt"], str) else end for row in dataset.rows]
    by_column = [_answers(dataset, tokenizer, column, settings.source, ends) for column in settings.completion_columns]
    answers = [row if all(len(each.tokens) <= limit for each in row) else () for row in zip(*by_column, strict=True)]
    if not any(answers):
        raise UserError(f"all completions are longer than rollout.max_completion_tokens = {limit}: raise it")
    return answers


def _answers(dataset: data.Dataset, tokenizer: Any, column: str, source: str, ends: Sequence[int]) -> list[Answer]:
    """ends: end token of each row."""
    turns = [columns.turns(row[column]) for row in dataset.rows]
    numbers = [number for number, row in zip(dataset.numbers, turns, strict=True) for _ in row]
    encoded = encoding.encode([text for row in turns for _, text in row], tokenizer, source, numbers=numbers)
    if dataset.images:
        dataset.images.check_completions(encoded, tokenizer, source, numbers)
    ids = iter(encoded)
    answers = []
    for row, end in zip(turns, ends, strict=True):
        parts = [Answer(tokens.tolist(), [own] * len(tokens)) for (own, _), tokens in zip(row, ids, strict=False)]
        tokens, learned = (list(chain(*x)) for x in zip(*parts, ([end], [True]), strict=True))
        answers.append(Answer(tokens, learned))
    return answers


def make_batch(
    dataset: data.Dataset,
    answers: Sequence[tuple[Answer, ...]],
    kept: Sequence[int],
    length: int,
    pad_id: int,
    indices: Sequence[int],
) -> Batch:
    """Makes a Batch with the G completions of each of the rows kept[indices], on the host."""
    rows = [kept[i] for i in indices]
    prompts = data.make_prompts(dataset, rows, pad_id)
    completions = np.full((len(rows), len(answers[rows[0]]), length), pad_id, np.int32)
    mask, learned = np.zeros(completions.shape, bool), np.zeros(completions.shape, bool)
    for b, i in enumerate(rows):
        for g, answer in enumerate(answers[i]):
            used = slice(len(answer.tokens))
            completions[b, g, used], mask[b, g, used], learned[b, g, used] = answer.tokens, True, answer.learned
    return Batch(prompts.tokens, prompts.mask, completions, mask, learned, images=prompts.images)


class Examples:
    """Batches of examples, and the position in them."""

    def __init__(self, iterator: grain.DatasetIterator):
        self._iterator = iterator
        # _position: after the last batch learned from, for checkpoints.
        self._beginning = self._position = iterator.get_state()

    def next(self) -> Batch:
        """Returns the next examples, on the host."""
        return next(self._iterator)

    def learned(self) -> None:
        """Marks the last batch as learned from: the iterator stands behind it."""
        self._position = self._iterator.get_state()

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the position after the last batch learned from."""
        return PartState({"position": self._position})

    def load(self, state: PartState | None) -> None:
        """Goes on at the position of a state; None: at the start of the data."""
        self._position = state.notes["position"] if state else self._beginning
        self._iterator.set_state(self._position)
