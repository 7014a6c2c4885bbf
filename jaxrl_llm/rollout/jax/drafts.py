"""Drafts: guesses of the next tokens of a sequence, from what followed the same tokens in other texts of its prompt.

A decode program verifies several drafts in one pass (`programs.decode_drafts`). A wrong draft costs time, and never
changes a token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

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
        """Replaces the stored completions of these prompts by those in `episodes`."""
        for prompt in range(len(prompts.tokens)):
            numbers = range(prompt * group_size, (prompt + 1) * group_size)
            key, texts = _key(prompts, prompt), _completions(episodes, numbers)
            self._tokens += len(texts) - len(self._texts.pop(key, ()))
            self._texts[key] = texts
        while self._tokens > MAX_HISTORY:
            _, texts = self._texts.popitem(last=False)
            self._tokens -= len(texts)

    def drafts(
        self, rows: list[list[Member]], shape: tuple[int, int], prompts: Prompts, episodes: Episodes
    ) -> np.ndarray:
        """Returns drafts [devices, slots, ROUND_TOKENS + k] of the next tokens of each sequence; SEPARATOR: no draft.

        rows: decoding sequences of each device. shape: slots of a device, and k, the drafts that a pass verifies.
        """
        slots, drafts_of_pass = shape
        drafts = np.full((len(rows), slots, ROUND_TOKENS + drafts_of_pass), SEPARATOR, np.int32)
        known_texts = dict[int, np.ndarray]()  # number of a prompt -> all texts that its sequences may repeat
        for device, members in enumerate(rows):
            for row, member in enumerate(members):
                group = member.group.number
                if group not in known_texts:
                    texts = self._texts.get(_key(prompts, group), np.zeros(0, np.int32))
                    size = len(episodes.lengths) // len(prompts.tokens)
                    running = _completions(episodes, range(group * size, (group + 1) * size))
                    known_texts[group] = np.concatenate([_prompt(prompts, group), [SEPARATOR], texts, running])
                completion = episodes.tokens[member.number, : episodes.lengths[member.number]]
                text = np.concatenate([_prompt(prompts, group)[-max(CONTEXTS) :], completion])
                # After a preemption, the sequence first repeats the tokens that it has.
                repeated = completion[member.cached + 1 :]
                guessed = find_draft(known_texts[group], text, drafts.shape[-1])
                draft = np.concatenate([repeated, guessed])[: drafts.shape[-1]]
                drafts[device, row, : len(draft)] = draft
        return drafts


def find_draft(texts: np.ndarray, text: np.ndarray, size: int) -> np.ndarray:
    """Returns up to `size` tokens that followed the last tokens of `text` at their last place in `texts`."""
    for context in CONTEXTS:
        if len(text) < context or len(texts) <= context:
            continue
        is_match = texts[context:] != SEPARATOR
        for offset in range(context):
            is_match &= texts[offset : len(texts) - context + offset] == text[len(text) - context + offset]
        if is_match.any():
            start = context + int(np.flatnonzero(is_match)[-1])
            return texts[start : start + size]
    return texts[:0]


def _key(prompts: Prompts, index: int) -> bytes:
    """Returns the key under which the completions of a prompt are stored. index: index of the prompt."""
    return _prompt(prompts, index).tobytes()


def _prompt(prompts: Prompts, index: int) -> np.ndarray:
    """Returns the tokens of the prompt with this index, without padding."""
    return prompts.tokens[index][prompts.mask[index]]


def _completions(episodes: Episodes, numbers: range) -> np.ndarray:
    """Returns the tokens of these completions as one array, with a separator after each completion."""
    parts: list[Any] = [np.zeros(0, np.int32)]
    for number in numbers:
        parts += [episodes.tokens[number, : episodes.lengths[number]], [SEPARATOR]]
    return np.concatenate(parts).astype(np.int32)
