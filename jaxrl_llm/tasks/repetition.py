"""A reward against repetition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxrl_llm.config.schema import AtLeastOne, Field
from jaxrl_llm.tasks import policy_texts, sampled, text_of


def penalty(
    completions: list[Any],
    completion_ids: list[list[int]],
    loss_mask: list[list[bool]] | None = None,
    turns: list[Any] | None = None,
    *,
    ngram_size: AtLeastOne = 3,
    max_penalty: Annotated[float, Field(float, high=0)] = -1.0,
    unit: Literal["tokens", "words"] = "tokens",
    **columns: Any,
) -> list[float]:
    """(1 - different n-grams / all n-grams) max_penalty (arXiv 2502.03373, appendix C.2); 0 if there is no n-gram.

    TRL's `get_repetition_penalty_reward` counts tokens; Open-R1's counts the words of the text in lower case.
    What an environment said does not count.
    """
    if unit == "tokens":
        sequences: list[list[Any]] = list(sampled(completion_ids, loss_mask))
    elif turns:
        sequences = [" ".join(policy_texts(episode)).lower().split() for episode in turns]
    else:
        sequences = [text_of(c).lower().split() for c in completions]
    return [_repeated(sequence, ngram_size) * max_penalty for sequence in sequences]


def _repeated(sequence: list[Any], size: int) -> float:
    grams = list(zip(*(sequence[i:] for i in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
