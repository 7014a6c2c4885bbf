"""Rewards for the length of a completion, in tokens that the policy sampled.

DAPO's overlong penalty is `config.reward.overlong_tokens`.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne, Count
from jaxrl_llm.tasks import math as maths
from jaxrl_llm.tasks import reads, sampled


def penalty(completion_ids: list[list[int]], *, free: Count, scale: AtLeastOne, **columns: Any) -> list[float]:
    """Returns -min(max(n - free, 0) / scale, 1) for n tokens: 0 up to `free` tokens, and -1 from free + scale on."""
    return [-min(max(len(ids) - free, 0) / scale, 1.0) for ids in sampled(completion_ids, columns.get("loss_mask"))]


def distance(completion_ids: list[list[int]], *, target: Count, scale: AtLeastOne, **columns: Any) -> list[float]:
    """Returns -min(|n - target| / scale, 1) for n tokens, the bounded length term of LCPO-Exact (arXiv 2503.04697)."""
    return [-min(abs(len(ids) - target) / scale, 1.0) for ids in sampled(completion_ids, columns.get("loss_mask"))]


@reads(answer=maths.expected_text)
def cosine(
    completions: list[Any],
    answer: list[Any],
    completion_ids: list[list[int]],
    *,
    max_tokens: AtLeastOne,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    **columns: Any,
) -> list[float | None]:
    """Returns the cosine reward of arXiv 2502.03373: short is good for a right completion, and bad for a wrong one.

    r = long + (short - long) (1 + cos(pi n / max_tokens)) / 2, with n at most max_tokens. `math.accuracy` decides which
    completions are right. The paper has 2 and 1 for right, -10 and 0 for wrong completions; the defaults are Open-R1's.
    """
    ends = {1.0: (right_short, right_long), 0.0: (wrong_short, wrong_long)}

    def reward(right: float, tokens: int) -> float:
        short, long = ends[right]
        return long + (short - long) * (1 + math.cos(math.pi * min(tokens / max_tokens, 1.0))) / 2

    verdicts = zip(maths.accuracy(completions, answer), sampled(completion_ids, columns.get("loss_mask")), strict=True)
    return [None if right is None else reward(right, len(ids)) for right, ids in verdicts]
