"""Statistics of an evaluation's scores: accuracy, pass@k and majority votes, by channel and by column."""

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
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.tasks import math as maths

Answers: TypeAlias = list[list[str | None]]  # N x G; None if the completion has no answer
Measurements: TypeAlias = dict[str, Any]
NUMBER = re.compile(r"-?\d+(?:/\d+)?")  # form in which `normalized` writes numbers
MAX_COLUMN_VALUES = 100  # most values of a column that make a table
NO_VALUE = "(none)"  # name for rows without a value in the column


def pass_at(k: int, scores: np.ndarray) -> float:
    """Unbiased pass@k (arXiv 2107.03374) from scores [N, G], G >= k: the mean of 1 - C(G-c, k) / C(G, k).

    c is the number of a problem's completions with a score of at least 1.
    """
    size = scores.shape[1]
    # Use Python's integers, because a binomial coefficient of over a thousand samples overflows a float.
    return float(np.mean([1 - comb(size - int(c), k) / comb(size, k) for c in (scores >= 1).sum(axis=1)]))


def majority_at(k: int, scores: np.ndarray, answers: Answers) -> float:
    """maj@k (self-consistency, arXiv 2203.11171) from scores [N, G] and answers, G >= k.

    The mean over the G // k sets of k completions of a problem is unbiased. The most frequent answer of a set wins. The
    set's score is the share of solutions among the completions with this answer, which is 0 or 1 if the judge looks at
    the answer alone. Equally frequent answers score their mean, and a set without answers scores 0.
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


def extract_answers(texts: list[list[str]], extract: Callable[[str], Any]) -> Answers:
    """Returns the answers of completions for majority votes. extract(text): returns the answer, None if it has none.

    Mathematically equal answers of a problem get the form of the first of them.
    """
    extracted = [[extract(text) for text in group] for group in texts]
    answers = [[None if answer is None else normalized(str(answer)) for answer in group] for group in extracted]
    return [
        [None if answer is None else forms[answer] for answer in group]
        for group, forms in zip(answers, _equal_forms(answers), strict=True)
    ]


def _equal_forms(answers: Answers) -> list[dict[str, str]]:
    """Returns, for each problem, {answer: the problem's first answer that is equal to it}."""
    forms: list[dict[str, str]] = [{} for _ in answers]
    pending = [[answer for answer in dict.fromkeys(group) if answer is not None] for group in answers]
    while any(pending):
        # Each round compares the first pending answer of every problem with the problem's other answers, in one call.
        pairs = [(i, answer_text, group[0]) for i, group in enumerate(pending) for answer_text in group[1:]]
        # Skip pairs of two numbers. They are fractions in lowest terms, so they are equal only if their texts are.
        pairs = [pair for pair in pairs if not all(NUMBER.fullmatch(answer) for answer in pair[1:])]
        verdicts = maths.equal([answer_text for _, answer_text, _ in pairs], [first for _, _, first in pairs])
        equal = {(i, answer_text) for (i, answer_text, _), verdict in zip(pairs, verdicts, strict=True) if verdict}
        for i, group in enumerate(pending):
            forms[i] |= {answer: group[0] for answer in group if answer == group[0] or (i, answer) in equal}
            pending[i] = [answer for answer in group if answer not in forms[i]]
    return forms


def normalized(answer: str) -> str:
    """Returns an answer in a canonical form, in which 1,200 equals 1200.0, and Yes equals yes."""
    text = " ".join(answer.split()).strip(" .$")
    # LaTeX commands keep their case, because \Delta is not \delta.
    text = text if "\\" in text else text.casefold()
    number = re.sub(r"(?<=\d)(?:,(?=\d{3}(?!\d))|(?:\\,| )(?=\d{3}(?![\d/])))|(?<=[+/-]) | (?=/)", "", text)
    # 1 1/2 is a mixed number. Without the blank it would become 11/2.
    mixed = re.fullmatch(r"([+-]?)(\d{1,40})(?:\\,| )(\d{1,40})/(0*[1-9]\d{0,39})", number)
    if mixed:
        sign, integer, numerator, denominator = mixed.groups()
        number = f"{sign}{int(integer) * int(denominator) + int(numerator)}/{denominator}"
    # The number of digits is bounded, because a Fraction of a million digits would take minutes.
    if re.fullmatch(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40}|\d{1,80}/0*[1-9]\d{0,39})", number):
        return str(Fraction(number))
    return text


def measure(scores: np.ndarray, channels: dict[str, np.ndarray], answers: Answers | None) -> Measurements:
    """Returns the statistics of N problems with G completions each. scores, channels [N, G]: NaN for abstention.

    A completion without a verdict scores 0. The accuracy is None if no completion has a verdict. "standard_error" is
    that of the accuracy over problems. "pass" and "majority" have values for the powers of two up to G.
    """
    count, size = scores.shape
    summaries = {name: _channel(values) for name, values in channels.items()}
    if np.isnan(scores).all():
        without_verdict: Measurements = {"problems": count, "samples": size, "accuracy": None, "standard_error": None}
        return without_verdict | {"pass": {}, "channels": summaries}
    scores = np.nan_to_num(scores)
    error = float(scores.mean(axis=1).std(ddof=1) / np.sqrt(count)) if count > 1 else None
    powers = [2**i for i in range(1, size.bit_length()) if 2**i <= size]
    measured: Measurements = {
        "problems": count,
        "samples": size,
        "accuracy": float(scores.mean()),
        "standard_error": error,
    }
    measured["pass"] = {str(k): pass_at(k, scores) for k in powers}
    if answers is not None:
        # maj@2 is left out, because it always equals the accuracy: two different votes are a tie.
        measured["majority"] = {str(k): majority_at(k, scores, answers) for k in powers if k > 2}
    return measured | {"channels": summaries}


def _channel(values: np.ndarray) -> Measurements:
    abstained = np.isnan(values)
    return {"mean": None if abstained.all() else float(values[~abstained].mean()), "abstained": int(abstained.sum())}


def measure_all(
    graded: GradedCompletions, rows: Sequence[dict[str, Any]], extract: Callable[[str], Any] | None, column: str
) -> Measurements:
    """Returns the statistics of all problems, and of the problems with each value of a column, "" = no column.

    Raises: UserError, if no row has the column, or if it has too many values.
    """
    scores, channels = graded.rewards.total, graded.rewards.channels
    answers = extract_answers(graded.texts, extract) if extract else None

    def measured_at(places: list[int]) -> Measurements:
        chosen = {name: values[places] for name, values in channels.items()}
        return measure(scores[places], chosen, answers and [answers[i] for i in places])

    measured = measured_at([*range(len(rows))])
    if not column:
        return measured
    parts = {value: measured_at(places) for value, places in rows_by_value(rows, column).items()}
    return measured | {"by": {"column": column, "values": parts}}


def rows_by_value(rows: Sequence[dict[str, Any]], column: str) -> dict[str, list[int]]:
    """Returns {value of the column: indices of its rows}. "extra_info.level" is a column within a column.

    Raises: UserError, if no row has the column, or if it has too many values for a table.
    """
    values: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        value = formats.value_in(row, column)
        values.setdefault(NO_VALUE if value is None else str(value), []).append(i)
    if set(values) == {NO_VALUE}:
        columns = ", ".join(sorted({name for row in rows for name in row}))
        raise UserError(f"--by {column}: no row has this column; the columns are {columns}")
    if len(values) > MAX_COLUMN_VALUES:
        raise UserError(
            f"--by {column}: this column has {len(values)} values, but a table has at most {MAX_COLUMN_VALUES}; choose "
            "another column"
        )
    return dict(sorted(values.items(), key=_number_first))


def _number_first(value_and_places: tuple[str, list[int]]) -> tuple[float, str]:
    """Returns the sort key of a value of a column: numbers by their size, then texts."""
    value, _ = value_and_places
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def result_lines(measured: Measurements) -> list[tuple[str, Any]]:
    """Returns the statistics as names and formatted values, for a table."""
    error = measured["standard_error"]
    accuracy = "–" if measured["accuracy"] is None else f"{measured['accuracy']:.1%}"
    rows: list[tuple[str, Any]] = [("problems", measured["problems"]), ("accuracy", accuracy)]
    rows += [("standard error", f"{error:.1%}")] if error is not None else []
    rows += [(f"pass@{k}", f"{value:.1%}") for k, value in measured["pass"].items()]
    rows += [(f"maj@{k}", f"{value:.1%}") for k, value in measured.get("majority", {}).items()]
    if len(measured["channels"]) > 1 or any(channel["abstained"] for channel in measured["channels"].values()):
        rows += [(name, channel_text(channel)) for name, channel in measured["channels"].items()]
    return rows


def channel_text(channel: Measurements) -> str:
    """Returns the mean of a channel and the number of abstentions as text."""
    mean = "–" if channel["mean"] is None else f"{channel['mean']:.4g}"
    return mean + (f" ({channel['abstained']:,} without a verdict)" if channel["abstained"] else "")
