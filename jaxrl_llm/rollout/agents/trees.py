"""Turns the traces of a step's episodes into prompts and rollouts: a group's common beginning, and a tree for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout.traces import Trace, TraceCall, TreeTokens, tree_tokens
from jaxrl_llm.structs import Prompts, Rollouts, Tree


class EpisodeTrees(NamedTuple):
    """The arrays of a step's episodes."""

    prompts: Prompts  # with the common beginnings of the calls of each group
    rollouts: Rollouts
    lost_calls: np.ndarray  # [B, G] calls at the end of an episode that have no place in its tree


def episode_trees(
    prompts: Prompts, traces: Sequence[Trace], group_size: int, length: int, *, pad_id: int
) -> EpisodeTrees:
    """Returns the arrays of B x G episodes.

    prompts: prompts of the data, which stay for a group without calls. length: C, most tokens of a tree.
    """
    b, width = prompts.tokens.shape
    tokens, mask = prompts.tokens.copy(), prompts.mask.copy()
    trees, lost_calls = list[TreeTokens](), list[int]()
    for group in range(b):
        members = [trace.calls for trace in traces[group * group_size : (group + 1) * group_size]]
        common = _common_prompt([call.prompt for calls in members for call in calls], width)
        if common:
            tokens[group], mask[group] = pad_id, False
            tokens[group, -len(common) :], mask[group, -len(common) :] = common, True
        for calls in members:
            kept, tree = _longest_tree(calls, common, length)
            trees.append(tree)
            lost_calls.append(len(calls) - kept)
    rollouts = _rollouts(trees, group_size, length, pad_id)
    lost = np.array(lost_calls).reshape(b, group_size)
    return EpisodeTrees(replace(prompts, tokens=tokens, mask=mask), rollouts, lost)


def _common_prompt(prompts: list[tuple[int, ...]], width: int) -> tuple[int, ...]:
    """Returns the longest common beginning, at most `width` tokens. Prompts with another first token do not count."""
    alike = [prompt for prompt in prompts if prompt[0] == prompts[0][0]]
    if not alike:
        return ()

    def common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]

    return reduce(common, alike)[:width]


def _longest_tree(calls: Sequence[TraceCall], common: tuple[int, ...], length: int) -> tuple[int, TreeTokens]:
    """Returns the tree of the first calls that fit into `length` tokens after the prompt, and their number."""
    numbered = [call._replace(number=i) for i, call in enumerate(calls)]
    kept = [call for call in numbered if call.prompt[: len(common)] == common]
    while True:
        trace = Trace()
        for call in kept:
            trace.add(call)
        tree = tree_tokens(trace, len(common) if kept else 0)
        if len(tree.tokens) <= length:
            return len(kept), tree
        # The limit of a session counts after the beginning of its own calls, which may be longer than the group's.
        kept.pop()


def _rollouts(trees: list[TreeTokens], group_size: int, length: int, pad_id: int) -> Rollouts:
    """Returns the trees of B x G episodes as arrays, without truncations and metrics."""
    shape = (-1, group_size, length)
    count = len(trees)
    completions = np.full((count, length), pad_id, np.int32)
    sampled, logprobs = np.zeros((count, length), bool), np.zeros((count, length), np.float32)
    versions, turn_numbers = np.full((2, count, length), -1, np.int32)
    lengths = np.array([len(tree.tokens) for tree in trees])
    mask = np.arange(length) < lengths[:, None]
    chains = Tree.chains(mask)
    previous, ends, depths = (x.copy() for x in (chains.previous, chains.ends, chains.depths))
    for i, tree in enumerate(trees):
        places = slice(lengths[i])
        completions[i, places], sampled[i, places], logprobs[i, places] = tree.tokens, tree.sampled, tree.logprobs
        versions[i, places], turn_numbers[i, places] = tree.versions, tree.numbers
        previous[i, places], ends[i, places], depths[i, places] = tree.previous, tree.ends, tree.depths
    return Rollouts(
        completions=completions.reshape(shape),
        completion_mask=mask.reshape(shape),
        loss_mask=sampled.reshape(shape),
        logprobs=logprobs.reshape(shape),
        truncated=np.zeros((count // group_size, group_size), bool),
        versions=versions.reshape(shape),
        tree=Tree(*(x.reshape(shape) for x in (previous, ends, depths))),
        turn_numbers=turn_numbers.reshape(shape),
    )


def place_rewards(turn_numbers: np.ndarray, rewards: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Returns the rewards [B, G, C] of calls on the last token of each call, and NaN elsewhere.

    turn_numbers: [B, G, C] number of the call that sampled each token. rewards: rewards of the calls of each of B x G
    episodes; () if they have none, which counts as 0 for each call.
    """
    placed = np.full(turn_numbers.shape, np.nan, np.float32)
    flat_numbers, flat_placed = (x.reshape(len(rewards), -1) for x in (turn_numbers, placed))
    for numbers, row, call_rewards in zip(flat_numbers, flat_placed, rewards, strict=True):
        for number in np.unique(numbers[numbers >= 0]):
            # The tokens of a call follow each other, even if another call's prompt parts them into two nodes.
            row[np.flatnonzero(numbers == number)[-1]] = call_rewards[number] if call_rewards else 0.0
    return placed
