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
    """Returns (1 - distinct n-grams / n-grams) max_penalty (arXiv 2502.03373, appendix C.2); 0 without n-grams.

    unit: "tokens" as in TRL's `get_repetition_penalty_reward`, or "words" of the text in lower case as in Open-R1.
    Text of an environment does not count.
    """
    if unit == "tokens":
        sequences: list[list[Any]] = list(sampled(completion_ids, loss_mask))
    elif turns:
        sequences = [" ".join(policy_texts(episode)).lower().split() for episode in turns]
    else:
        sequences = [text_of(c).lower().split() for c in completions]
    return [_repeated_share(sequence, ngram_size) * max_penalty for sequence in sequences]


def _repeated_share(sequence: list[Any], size: int) -> float:
    """Returns the share of the n-grams of a sequence that repeat an earlier one. size: n."""
    ngrams = list(zip(*(sequence[i:] for i in range(size)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
