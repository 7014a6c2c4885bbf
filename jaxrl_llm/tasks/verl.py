"""Rows of veRL, {prompt, reward_model: {style, ground_truth}, data_source, ability, extra_info}, and their rewards.

`convert` reads a row. `score` and `accuracy` choose a rule by the column data_source, as veRL does
(`verl/utils/reward_score/__init__.py`). Functions of this package compare the answers: numbers by value, boxes by
math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.tasks import gsm8k, is_empty, reads, search, search_r1, text_of
from jaxrl_llm.tasks import math as maths

Verifier: TypeAlias = Callable[..., list[float | None]]
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
LAST_CHARACTERS = 300  # characters at the end of a completion that are searched for "Answer:", as in veRL


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with its ground truth as the column "answer", or as several columns if it is a dict.

    {"ground_truth": 72} becomes {"answer": "72"}; {"ground_truth": {"target": 24, "numbers": [2, 3, 4]}} becomes the
    columns target and numbers. Several answers stay a list. All other columns stay, for your own rewards.
    Raises: KeyError, if the row has no ground truth.
    """
    if not isinstance(row["reward_model"], dict):
        raise KeyError("reward_model.ground_truth")
    truth = row["reward_model"]["ground_truth"]
    # pandas reads a list as an array.
    truth = truth.tolist() if isinstance(truth, np.ndarray) else truth
    if isinstance(truth, (list, tuple)) and len(truth) == 1:
        truth = truth[0]
    return row | (truth if isinstance(truth, dict) else {"answer": truth if isinstance(truth, list) else str(truth)})


def ground_truth(answer: Any, reward_model: Any) -> Any:
    """Returns the ground truth of a row for a function of veRL: reward_model.ground_truth with its own type.

    A row without it, or with an answer from another column or a convert function, has its answer as ground truth.
    """
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None:
        return answer
    derived_answers = [convert({"reward_model": reward_model}).get("answer"), None]
    if isinstance(truth, dict) and hasattr(truth.get("target"), "__len__"):
        derived_answers.append(search_r1.convert({"reward_model": reward_model})["answer"])
    is_derived = any(str(answer) == str(derived_answer) for derived_answer in derived_answers)
    return (truth.tolist() if isinstance(truth, np.ndarray) else truth) if is_derived else answer


@reads(data_source=lambda value: _judge(value))
def score(
    completions: list[Any], answer: list[Any], data_source: list[Any], turns: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    """Returns the score of veRL: 1 or -1 for math_dapo and aime*, whose answer is after "Answer:"; 1 or 0 for others.

    Raises: ValueError, for a data_source without a rule.
    """
    right = accuracy(completions, answer, data_source, turns)
    return [
        2 * r - 1 if r is not None and _judge(source) is _after_answer else r
        for r, source in zip(right, data_source, strict=True)
    ]


@reads(data_source=lambda value: _judge(value))
def accuracy(
    completions: list[Any], answer: list[Any], data_source: list[Any], turns: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    """Returns 1 if the completion is right by the rule of its data_source, else 0.

    | data_source | rule |
    |---|---|
    | gsm8k | `gsm8k.accuracy` |
    | math_dapo, aime* | the text after the last "Answer:" is equal to the answer |
    | other names of mathematics | `math.accuracy` |
    | searchR1_* | `search.exact_match` |

    Raises: ValueError, for a data_source without a rule.
    """
    judges = [None if is_empty(source) else _judge(source) for source in data_source]
    right: list[float | None] = [None] * len(completions)
    for judge in dict.fromkeys(judge for judge in judges if judge):
        # A judge gets all of its rows at once, because math-verify judges many answers at the same time.
        rows = [i for i, row_judge in enumerate(judges) if row_judge is judge]
        judged_turns = [turns[i] for i in rows] if turns else None
        verdicts = judge([completions[i] for i in rows], [answer[i] for i in rows], turns=judged_turns)
        for i, verdict in zip(rows, verdicts, strict=True):
            right[i] = verdict
    return right


def _judge(source: Any) -> Verifier:
    """Returns the reward function for a data_source. Raises: ValueError, if no rule fits it."""
    for pattern, judge in JUDGES:
        if re.fullmatch(pattern, str(source), re.IGNORECASE):
            return judge
    raise ValueError(
        f"data_source is {source!r}, for which verl.score has no rule: name another reward function for these rows"
    )


def _after_answer(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """Returns 1 if the text after the last "Answer:" is mathematically equal to the answer, else 0."""
    return maths.equal([_stated(text_of(c)) for c in completions], answer)


def _stated(text: str) -> str:
    """Returns the text after the last "Answer:" in its line, without marks of Markdown; "" if the text has none."""
    matches = ANSWER.findall(text[-LAST_CHARACTERS:])
    return matches[-1].strip(" *`") if matches else ""


JUDGES: tuple[tuple[str, Verifier], ...] = (
    (r".*gsm8k.*", gsm8k.accuracy),
    (r"math|math_dapo.*|aime.*", _after_answer),
    (r"searchR1_.*", search.exact_match),
    (r".*math.*|numina.*", maths.accuracy),
)
