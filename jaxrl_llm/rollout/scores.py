"""What the scores of an evaluation say: accuracy, pass@k, majority votes, and all of them by channel and by column."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import comb
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.grading import Graded
from jaxrl_llm.tasks import math as maths

Answers: TypeAlias = list[list[str | None]]  # N x G; None: the completion gives no answer
Measured: TypeAlias = dict[str, Any]
NUMBER = re.compile(r"-?\d+(?:/\d+)?")  # as `normalized` writes it
MOST = 100  # values of a column that make a table
NONE = "(none)"  # value of a row without the column


def pass_at(k: int, scores: np.ndarray) -> float:
    """Unbiased pass@k (arXiv 2107.03374) from scores [N, G], G >= k: the mean of 1 - C(G-c, k) / C(G, k).

    c is the number of solutions of a problem: completions with a score of 1 or more.
    """
    size = scores.shape[1]
    # Python's integers: a binomial coefficient of over a thousand samples overflows a float.
    return float(np.mean([1 - comb(size - int(c), k) / comb(size, k) for c in (scores >= 1).sum(axis=1)]))


def majority_at(k: int, scores: np.ndarray, answers: Answers) -> float:
    """maj@k (self-consistency, arXiv 2203.11171) from scores [N, G] and answers, G >= k.

    The completions of a problem make G // k sets of k, so their mean is unbiased. Each set votes with the answers that
    it has. It earns the share of solutions among the completions with the most frequent answer, which is 0 or 1 if the
    judge looks at the answer alone. Answers that are equally frequent earn their mean, and a set without answers 0.
    """
    sets = [slice(first, first + k) for first in range(0, scores.shape[1] - k + 1, k)]
    return float(
        np.mean(
            [_vote(row[part] >= 1, group[part]) for row, group in zip(scores, answers, strict=True) for part in sets]
        )
    )


def _vote(solved: np.ndarray, answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    largest = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == largest]
    earned = [np.mean([x for x, a in zip(solved, answers, strict=True) if a == winner]) for winner in winners]
    return float(np.mean(earned)) if earned else 0.0


def answers_of(texts: list[list[str]], extract: Callable[[str], Any]) -> Answers:
    """Returns the answers of completions, as they vote. extract(text) -> answer, or None if there is none.

    Answers of a problem that are mathematically equal have the form of the first one of them.
    """
    extracted = [[extract(text) for text in group] for group in texts]
    answers = [[None if answer is None else normalized(str(answer)) for answer in group] for group in extracted]
    return [
        [None if answer is None else forms[answer] for answer in group]
        for group, forms in zip(answers, _forms(answers), strict=True)
    ]


def _forms(answers: Answers) -> list[dict[str, str]]:
    """Returns, for each problem, each of its answers with the first one that is equal to it."""
    forms: list[dict[str, str]] = [{} for _ in answers]
    pending = [[answer for answer in dict.fromkeys(group) if answer is not None] for group in answers]
    while any(pending):
        # Each round compares the first remaining answer of every problem with the problem's other answers, in one call.
        pairs = [(i, other, group[0]) for i, group in enumerate(pending) for other in group[1:]]
        # Two numbers are compared already: as fractions in lowest terms they are equal only if their texts are.
        pairs = [pair for pair in pairs if not all(NUMBER.fullmatch(answer) for answer in pair[1:])]
        verdicts = maths.equal([other for _, other, _ in pairs], [first for _, _, first in pairs])
        equal = {(i, other) for (i, other, _), verdict in zip(pairs, verdicts, strict=True) if verdict}
        for i, group in enumerate(pending):
            forms[i] |= {answer: group[0] for answer in group if answer == group[0] or (i, answer) in equal}
            pending[i] = [answer for answer in group if answer not in forms[i]]
    return forms


def normalized(answer: str) -> str:
    """Returns an answer in a simple form: 1,200 and 1200.0 are the same, Yes and yes too, but not two commands."""
    text = " ".join(answer.split()).strip(" .$")
    # LaTeX tells capitals apart: \Delta is no \delta.
    text = text if "\\" in text else text.casefold()
    number = re.sub(r"(?<=\d)(?:,(?=\d{3}(?!\d))|(?:\\,| )(?=\d{3}(?![\d/])))|(?<=[+/-]) | (?=/)", "", text)
    # 1 1/2 is a mixed number: without its blank it would be 11/2.
    mixed = re.fullmatch(r"([+-]?)(\d{1,40})(?:\\,| )(\d{1,40})/(0*[1-9]\d{0,39})", number)
    if mixed:
        sign, whole, above, below = mixed.groups()
        number = f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    # Bounded: an answer of a million digits would take a Fraction minutes.
    if re.fullmatch(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40}|\d{1,80}/0*[1-9]\d{0,39})", number):
        return str(Fraction(number))
    return text


def measure(scores: np.ndarray, channels: dict[str, np.ndarray], answers: Answers | None) -> Measured:
    """Measures N problems with G completions each. scores, channels [N, G]: NaN where a function abstained.

    A completion without a verdict has the score 0. The accuracy is None if no completion has a verdict.
    standard_error: standard error of the accuracy over problems. pass, majority: values for the powers of two up to G.
    """
    count, size = scores.shape
    summaries = {name: _channel(values) for name, values in channels.items()}
    if np.isnan(scores).all():
        nothing: Measured = {"problems": count, "samples": size, "accuracy": None, "standard_error": None}
        return nothing | {"pass": {}, "channels": summaries}
    scores = np.nan_to_num(scores)
    error = float(scores.mean(axis=1).std(ddof=1) / np.sqrt(count)) if count > 1 else None
    powers = [2**i for i in range(1, size.bit_length()) if 2**i <= size]
    measured: Measured = {"problems": count, "samples": size, "accuracy": float(scores.mean()), "standard_error": error}
    measured["pass"] = {str(k): pass_at(k, scores) for k in powers}
    if answers is not None:
        # maj@2 is left out, because two votes that differ are a tie: it would be the accuracy again.
        measured["majority"] = {str(k): majority_at(k, scores, answers) for k in powers if k > 2}
    return measured | {"channels": summaries}


def _channel(values: np.ndarray) -> Measured:
    abstained = np.isnan(values)
    return {"mean": None if abstained.all() else float(values[~abstained].mean()), "abstained": int(abstained.sum())}


def measure_all(
    graded: Graded, rows: Sequence[dict[str, Any]], extract: Callable[[str], Any] | None, by: str
) -> Measured:
    """Measures all problems, and those of each value of the column `by`; "": not by column. Raises: UserError."""
    scores, channels = graded.rewards.total, graded.rewards.channels
    answers = answers_of(graded.texts, extract) if extract else None

    def measured_at(places: list[int]) -> Measured:
        chosen = {name: values[places] for name, values in channels.items()}
        return measure(scores[places], chosen, answers and [answers[i] for i in places])

    measured = measured_at([*range(len(rows))])
    if not by:
        return measured
    parts = {value: measured_at(places) for value, places in split(rows, by).items()}
    return measured | {"by": {"column": by, "values": parts}}


def split(rows: Sequence[dict[str, Any]], column: str) -> dict[str, list[int]]:
    """Returns the places of the rows with each value of a column. "extra_info.level" is a column within a column.

    Raises: UserError, if no row has the column, or it has too many values for a table.
    """
    values: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        value = formats.value_in(row, column)
        values.setdefault(NONE if value is None else str(value), []).append(i)
    if set(values) == {NONE}:
        columns = ", ".join(sorted({name for row in rows for name in row}))
        raise UserError(f"--by {column}: no row has this column; there is {columns}")
    if len(values) > MOST:
        raise UserError(f"--by {column}: it has {len(values)} values, and a table at most {MOST}: give another column")
    return dict(sorted(values.items(), key=_number_first))


def _number_first(value_and_places: tuple[str, list[int]]) -> tuple[float, str]:
    """Returns the sort key of a value of a column: numbers by their size, then texts."""
    value, _ = value_and_places
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def lines(measured: Measured) -> list[tuple[str, Any]]:
    """Returns names and values for people."""
    error = measured["standard_error"]
    accuracy = "–" if measured["accuracy"] is None else f"{measured['accuracy']:.1%}"
    rows: list[tuple[str, Any]] = [("problems", measured["problems"]), ("accuracy", accuracy)]
    rows += [("standard error", f"{error:.1%}")] if error is not None else []
    rows += [(f"pass@{k}", f"{value:.1%}") for k, value in measured["pass"].items()]
    rows += [(f"maj@{k}", f"{value:.1%}") for k, value in measured.get("majority", {}).items()]
    if len(measured["channels"]) > 1 or any(channel["abstained"] for channel in measured["channels"].values()):
        rows += [(name, channel_text(channel)) for name, channel in measured["channels"].items()]
    return rows


def channel_text(channel: Measured) -> str:
    """Returns the mean of a channel, and how often its function abstained."""
    mean = "–" if channel["mean"] is None else f"{channel['mean']:.4g}"
    return mean + (f" ({channel['abstained']:,} without a verdict)" if channel["abstained"] else "")
