"""Turns the traces of a step's episodes into prompts and rollouts: a group's common beginning, and a tree for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
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
    group_count, max_prompt_tokens = prompts.tokens.shape
    tokens, mask = prompts.tokens.copy(), prompts.mask.copy()
    trees, lost_calls = list[TreeTokens](), list[int]()
    for group in range(group_count):
        calls_of_episodes = [trace.calls for trace in traces[group * group_size : (group + 1) * group_size]]
        # The prompt of the group is what the prompts of all its calls begin with. It is padded on the left.
        all_prompts = [call.prompt for calls in calls_of_episodes for call in calls]
        group_prompt = _common_beginning(all_prompts, max_prompt_tokens)
        if group_prompt:
            tokens[group], mask[group] = pad_id, False
            tokens[group, -len(group_prompt) :], mask[group, -len(group_prompt) :] = group_prompt, True
        for calls in calls_of_episodes:
            kept_calls, tree = _longest_tree(calls, group_prompt, length)
            trees.append(tree)
            lost_calls.append(len(calls) - kept_calls)
    rollouts = _rollouts(trees, group_size, length, pad_id)
    lost_calls_by_episode = np.array(lost_calls).reshape(group_count, group_size)
    return EpisodeTrees(replace(prompts, tokens=tokens, mask=mask), rollouts, lost_calls_by_episode)


def _common_beginning(prompts: list[tuple[int, ...]], max_tokens: int) -> tuple[int, ...]:
    """Returns the longest common beginning of prompts, at most `max_tokens` tokens.

    Prompts whose first token is not that of the first prompt do not count.
    """
    counted_prompts = [prompt for prompt in prompts if prompt[0] == prompts[0][0]]
    if not counted_prompts:
        return ()
    # Of the sorted prompts, the first and the last one differ first.
    first, last = min(counted_prompts), max(counted_prompts)
    pairs = zip(first, last, strict=False)
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[:max_tokens]


def _longest_tree(calls: Sequence[TraceCall], group_prompt: tuple[int, ...], length: int) -> tuple[int, TreeTokens]:
    """Returns how many first calls of an episode fit into `length` tokens after the group's prompt, and their tree."""
    numbered_calls = [call._replace(number=i) for i, call in enumerate(calls)]
    kept_calls = [call for call in numbered_calls if call.prompt[: len(group_prompt)] == group_prompt]
    while True:
        trace = Trace()
        for call in kept_calls:
            trace.add(call)
        tree = tree_tokens(trace, len(group_prompt) if kept_calls else 0)
        if len(tree.tokens) <= length:
            return len(kept_calls), tree
        # The limit of a session counts after the beginning of its own calls, which may be longer than the group's.
        kept_calls.pop()


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
    # Each tree fills the beginning of its row. The padding after it is a chain of tokens.
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
