"""Drafts: guesses of the next tokens of a sequence, from what followed the same tokens in other texts of its prompt.

A decode program verifies several drafts in one pass (`programs.decode_drafts`). A wrong draft costs time, and never
changes a token.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.jax.scheduler import Member
from jaxrl_llm.rollout.jax.sizes import ROUND_TOKENS
from jaxrl_llm.structs import Prompts

CONTEXTS = (4, 2, 1)  # numbers of last tokens that must be equal; the longest context that is found counts
MAX_HISTORY = 2**22  # most tokens of earlier calls, for 16 MB
SEPARATOR = -1  # between two texts


class DraftHistory:
    """The completions of the last call for each prompt. The prompts whose calls are longest ago are forgotten first."""

    def __init__(self) -> None:
        self._texts = OrderedDict[bytes, np.ndarray]()  # token ids of a prompt -> its completions, with separators
        self._tokens = 0

    def add(self, prompts: Prompts, episodes: Episodes, group_size: int) -> None:
        """Replaces the completions of these prompts."""
        for b in range(len(prompts.tokens)):
            key, texts = _key(prompts, b), _completions(episodes, range(b * group_size, (b + 1) * group_size))
            self._tokens += len(texts) - len(self._texts.pop(key, ()))
            self._texts[key] = texts
        while self._tokens > MAX_HISTORY:
            _, texts = self._texts.popitem(last=False)
            self._tokens -= len(texts)

    def drafts(
        self, rows: list[list[Member]], shape: tuple[int, int], prompts: Prompts, episodes: Episodes
    ) -> np.ndarray:
        """Returns drafts [d, S, ROUND_TOKENS + k] of the next tokens; SEPARATOR where there is none.

        rows: decoding sequences of each device. shape: (S, k).
        """
        slots, count = shape
        drafts = np.full((len(rows), slots, ROUND_TOKENS + count), SEPARATOR, np.int32)
        known_texts = dict[int, np.ndarray]()  # number of a prompt -> all texts that its sequences may repeat
        for d, members in enumerate(rows):
            for n, member in enumerate(members):
                group = member.group.number
                if group not in known_texts:
                    texts = self._texts.get(_key(prompts, group), np.zeros(0, np.int32))
                    size = len(episodes.lengths) // len(prompts.tokens)
                    running = _completions(episodes, range(group * size, (group + 1) * size))
                    known_texts[group] = np.concatenate([_prompt(prompts, group), [SEPARATOR], texts, running])
                completion = episodes.tokens[member.number, : episodes.lengths[member.number]]
                text = np.concatenate([_prompt(prompts, group)[-max(CONTEXTS) :], completion])
                # After a preemption, the sequence first repeats the tokens that it has.
                draft = completion[member.cached + 1 :], find_draft(known_texts[group], text, drafts.shape[-1])
                draft = np.concatenate(draft)[: drafts.shape[-1]]
                drafts[d, n, : len(draft)] = draft
        return drafts


def find_draft(texts: np.ndarray, text: np.ndarray, size: int) -> np.ndarray:
    """Returns up to `size` tokens that followed the last tokens of `text` at their last place in `texts`."""
    for context in CONTEXTS:
        if len(text) < context or len(texts) <= context:
            continue
        is_match = texts[context:] != SEPARATOR
        for i in range(context):
            is_match &= texts[i : len(texts) - context + i] == text[len(text) - context + i]
        if is_match.any():
            start = context + int(np.flatnonzero(is_match)[-1])
            return texts[start : start + size]
    return texts[:0]


def _key(prompts: Prompts, b: int) -> bytes:
    return _prompt(prompts, b).tobytes()


def _prompt(prompts: Prompts, b: int) -> np.ndarray:
    """Returns the tokens of a prompt."""
    return prompts.tokens[b][prompts.mask[b]]


def _completions(episodes: Episodes, numbers: range) -> np.ndarray:
    """Returns the tokens of these completions, each with a separator behind it."""
    parts = [x for i in numbers for x in (episodes.tokens[i, : episodes.lengths[i]], [SEPARATOR])]
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
