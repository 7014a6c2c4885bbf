"""What a session sampled, as a tree of token ids. Plain data: no engine, no text and no network.

Each call samples a completion of a prompt. A call continues an earlier one if its prompt begins with the prompt and the
completion of the earlier call, token for token. Calls that share the beginning of their prompts share its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class TraceCall(NamedTuple):
    """One completion that a session has sampled."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the completion's tokens
    versions: tuple[int, ...]  # version of the weights of each token of the completion
    number: int = 0  # number of the call in its episode

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens of the call."""
        return self.prompt + self.completion


@dataclass(eq=False)
class TraceNode:
    """A piece of text that follows its parent's text. All its tokens were sampled by one call, or none was."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of sampled tokens; empty if other programs wrote the tokens
    versions: tuple[int, ...] = ()  # version of the weights of each sampled token
    children: list[TraceNode] = field(default_factory=list)
    number: int = -1  # number of the call that sampled the tokens; -1 if other programs wrote them

    @property
    def is_sampled(self) -> bool:
        return bool(self.logprobs)

    def split(self, count: int) -> None:
        """Moves all tokens after the first `count` into a new child, which gets the children of this node."""
        rest = TraceNode(self.tokens[count:], self.logprobs[count:], self.versions[count:], self.children, self.number)
        self.tokens, self.logprobs, self.versions = self.tokens[:count], self.logprobs[:count], self.versions[:count]
        self.children = [rest]


class Branch(NamedTuple):
    """One path through a trace, from its first token to its last."""

    tokens: list[int]
    is_trained: list[bool]  # True on sampled tokens, each in one branch only
    logprobs: list[float]  # log-probabilities of sampled tokens, 0 elsewhere
    versions: list[int]  # version of the weights of sampled tokens, -1 elsewhere


class TreeTokens(NamedTuple):
    """The tokens of a trace after its prompt, depth first, each once. All arrays are [n].

    `previous`, `ends` and `depths` are those of `structs.Tree`.
    """

    tokens: np.ndarray  # int32
    sampled: np.ndarray  # bool, True on tokens that a call sampled
    logprobs: np.ndarray  # float32, log-probabilities of sampled tokens, 0 elsewhere
    versions: np.ndarray  # int32, version of the weights of sampled tokens, -1 elsewhere
    previous: np.ndarray  # int32
    ends: np.ndarray  # int32
    depths: np.ndarray  # int32
    numbers: np.ndarray  # int32, number of the call that sampled each token, -1 elsewhere


class Trace:
    """All calls of a session. Its tree and branches do not depend on the order in which calls arrive."""

    def __init__(self) -> None:
        self.calls: list[TraceCall] = []
        self.tokens = 0  # prompt and completion tokens of all calls
        self._texts = set[tuple[int, ...]]()  # texts of all calls
        self._lengths = set[int]()  # lengths of these texts
        self._starts = set[tuple[int, ...]]()  # prompts that continue no call

    def add(self, call: TraceCall) -> bool:
        """Adds a call. Returns whether it is a restart."""
        earlier_restarts, text = self.restarts, call.text
        self.calls.append(call)
        self.tokens += len(text)
        self._texts.add(text)
        self._lengths.add(len(text))
        if not any(call.prompt[:length] in self._texts for length in self._lengths):
            self._starts.add(call.prompt)
        self._starts -= {prompt for prompt in self._starts if prompt[: len(text)] == text}
        return self.restarts > earlier_restarts

    @property
    def restarts(self) -> int:
        """Number of prompts that continue no call, beyond the first one."""
        return max(len(self._starts) - 1, 0)

    def roots(self) -> list[TraceNode]:
        """Returns the trees of the trace: one, unless some prompts differ in their first token."""
        top = TraceNode()
        # A prompt that continues a call is longer than that call's prompt. So each call is inserted after those that it
        # continues. The further keys make the tree independent of the order of arrival.
        for call in sorted(self.calls, key=_order):
            node = _insert_prompt(top, call.prompt)
            if call.completion:
                node.children.append(TraceNode(call.completion, call.logprobs, call.versions, number=call.number))
        return top.children

    def nodes(self) -> list[tuple[int, TraceNode]]:
        """Returns (index of the parent, node) of all nodes, depth first. The index is -1 for a root."""
        nodes, stack = list[tuple[int, TraceNode]](), [(-1, root) for root in reversed(self.roots())]
        while stack:
            nodes.append(stack.pop())
            stack += [(len(nodes) - 1, child) for child in reversed(nodes[-1][1].children)]
        return nodes

    def branches(self) -> list[Branch]:
        """Returns the paths that end at a leaf. A sampled token is trained in the first branch that has it."""
        branches, trained = list[Branch](), set[TraceNode]()
        for root in self.roots():
            for path in _paths(root):
                branch = Branch([], [], [], [])
                for node in path:
                    count, is_sampled = len(node.tokens), node.is_sampled
                    branch.tokens.extend(node.tokens)
                    branch.is_trained.extend([is_sampled and node not in trained] * count)
                    branch.logprobs.extend(node.logprobs or [0.0] * count)
                    branch.versions.extend(node.versions or [-1] * count)
                    trained.add(node)
                branches.append(branch)
        return branches


def tree_tokens(trace: Trace, prompt_tokens: int) -> TreeTokens:
    """Returns the tokens of a trace without the first `prompt_tokens` tokens, which all its prompts must share."""
    nodes = trace.nodes()
    parents = np.array([parent for parent, _ in nodes], int)
    counts = np.array([len(node.tokens) for _, node in nodes], int)
    # If all prompts begin alike, one root holds their common beginning, and no call sampled it.
    assert not prompt_tokens or (np.sum(parents < 0) == 1 and counts[0] >= prompt_tokens and not nodes[0][1].is_sampled)
    stops = np.cumsum(counts)
    starts, index = stops - counts, np.arange(counts.sum())
    ends, first_depths = stops.copy(), np.zeros_like(stops)
    for i, parent in enumerate(parents):
        first_depths[i] = first_depths[parent] + counts[parent] if parent >= 0 else 0
    # A token is visible until the last node below its own node ends.
    for i in reversed(np.flatnonzero(parents >= 0)):
        ends[parents[i]] = max(ends[parents[i]], ends[i])
    previous, depths = index - 1, index - np.repeat(starts - first_depths, counts)
    previous[starts] = np.where(parents >= 0, stops[parents] - 1, -1)

    def by_token(values: list, dtype: type) -> np.ndarray:
        return np.array([x for of_node in values for x in of_node], dtype)[prompt_tokens:]

    def after_prompt(values: np.ndarray) -> np.ndarray:
        return np.maximum(values[prompt_tokens:] - prompt_tokens, -1).astype(np.int32)

    return TreeTokens(
        tokens=by_token([node.tokens for _, node in nodes], np.int32),
        sampled=by_token([[node.is_sampled] * len(node.tokens) for _, node in nodes], np.bool_),
        logprobs=by_token([node.logprobs or [0.0] * len(node.tokens) for _, node in nodes], np.float32),
        versions=by_token([node.versions or [-1] * len(node.tokens) for _, node in nodes], np.int32),
        previous=after_prompt(previous),
        ends=after_prompt(np.repeat(ends, counts)),
        depths=after_prompt(depths),
        numbers=by_token([[node.number] * len(node.tokens) for _, node in nodes], np.int32),
    )


def _order(call: TraceCall) -> tuple:
    return len(call.prompt), call


def _insert_prompt(top: TraceNode, prompt: tuple[int, ...]) -> TraceNode:
    """Returns the node at whose end a prompt ends. It adds the tokens that the tree does not have, as not sampled."""
    path, shared = _longest_match(top, prompt)
    node = path[-1]
    if shared < len(node.tokens):
        node.split(shared)
    known = sum(len(each.tokens) for each in path)
    if known < len(prompt):
        child = TraceNode(prompt[known:])
        node.children.append(child)
        return child
    return node


def _longest_match(top: TraceNode, prompt: tuple[int, ...]) -> tuple[list[TraceNode], int]:
    """Returns the path that shares the most tokens with a prompt, and how many of its last node's tokens it shares.

    Among equal paths the first one counts.
    """
    best, best_length, best_shared = [top], 0, 0
    stack = [([top], 0, 0)]
    while stack:
        path, length, shared = stack.pop()
        if length > best_length:
            best, best_length, best_shared = path, length, shared
        if shared == len(path[-1].tokens):
            for child in reversed(path[-1].children):
                if more := _shared(child.tokens, prompt[length:]):
                    stack.append(([*path, child], length + more, more))
    return best, best_shared


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of equal tokens at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _paths(root: TraceNode) -> Iterator[list[TraceNode]]:
    """Yields the paths from a node to its leaves, the first children first."""
    stack = [[root]]
    while stack:
        path = stack.pop()
        if not path[-1].children:
            yield path
        stack += [[*path, child] for child in reversed(path[-1].children)]
