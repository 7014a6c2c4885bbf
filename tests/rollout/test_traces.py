"""Traces: each sampled token is trained on once, with the log-probability that was reported."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from jaxrl_llm.rollout.traces import Trace, TraceCall, tree_tokens


def random_calls(rng: random.Random) -> list[TraceCall]:
    """Calls of an agent that continues, forks, samples twice, cuts its history, or writes it in another way."""
    calls = list[TraceCall]()
    for _ in range(rng.randint(1, 9)):
        few = lambda most: tuple(rng.randrange(3) for _ in range(rng.randint(1, most)))  # noqa: E731
        kind = rng.randrange(5) if calls else 0
        earlier = rng.choice(calls) if calls else None
        prompt = few(6)
        if earlier and kind in (1, 2):
            prompt = earlier.text + few(3)
        elif earlier and kind == 3:
            prompt = earlier.prompt
        elif earlier and kind == 4:
            prompt = earlier.text[: rng.randint(1, len(earlier.text))] + few(2)
        completion = few(4)
        logprobs = tuple(-rng.random() for _ in completion)
        calls.append(TraceCall(prompt, completion, logprobs, tuple(rng.randrange(3) for _ in completion)))
    return calls


def trained(trace: Trace) -> Counter:
    """Counts what is trained: each token with its log-probability, its version, and all tokens before it."""
    return Counter(
        (tuple(branch.tokens[: i + 1]), branch.logprobs[i], branch.versions[i])
        for branch in trace.branches()
        for i, is_trained in enumerate(branch.is_trained)
        if is_trained
    )


def sampled(calls: list[TraceCall]) -> Counter:
    return Counter(
        (call.prompt + call.completion[: i + 1], call.logprobs[i], call.versions[i])
        for call in calls
        for i in range(len(call.completion))
    )


def build(calls: list[TraceCall]) -> Trace:
    trace = Trace()
    for call in calls:
        trace.add(call)
    return trace


def test_each_sampled_token_is_trained_once_whatever_the_order_of_arrival():
    shapes = Counter()
    for seed in range(1000):
        rng = random.Random(seed)
        calls = random_calls(rng)
        trace, shuffled = build(calls), build(rng.sample(calls, len(calls)))
        assert trained(trace) == sampled(calls)
        assert trace.branches() == shuffled.branches() and trace.restarts == shuffled.restarts
        # No two siblings that nobody sampled begin alike: shared prefixes are there once.
        for children in [node.children for _, node in trace.nodes()] + [trace.roots()]:
            firsts = Counter(child.tokens[0] for child in children if not child.is_sampled)
            assert not firsts or max(firsts.values()) == 1
        shapes[len(trace.branches()) > 1, trace.restarts > 0] += 1
    assert min(shapes[key] for key in ((True, True), (True, False), (False, False))) > 20


def test_a_linear_trace_is_one_branch_and_a_re_rendered_turn_restarts():
    first = TraceCall((1, 2), (3, 4), (-0.1, -0.2), (0, 0))
    second = TraceCall((1, 2, 3, 4, 5), (6,), (-0.3,), (1,))
    trace = Trace()
    assert (trace.add(first), trace.add(second)) == (False, False)
    (branch,) = trace.branches()
    assert branch.tokens == [1, 2, 3, 4, 5, 6] and trace.restarts == 0
    assert branch.is_trained == [False, False, True, True, False, True]
    assert branch.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.3] and branch.versions == [-1, -1, 0, 0, -1, 1]
    # A template wrote token 4 in another way.
    assert trace.add(TraceCall((1, 2, 3, 9, 5), (7,), (-0.4,), (1,))) is True
    assert (len(trace.branches()), trace.restarts, len(trace.nodes())) == (2, 1, 7)
    # Two more completions of the first prompt are branches of their own, and no restart.
    calls = [TraceCall((1, 2), (3, token), (-0.1, -0.2), (0, 0)) for token in (4, 5)]
    assert [trace.add(call) for call in calls] == [False] * 2
    assert (len(trace.branches()), trace.restarts) == (4, 1)


def test_a_tree_has_each_sampled_token_once_and_each_token_sees_its_path():
    branched = 0
    for seed in range(1000):
        rng = random.Random(seed)
        shared = tuple(rng.randrange(3) for _ in range(rng.randint(0, 4)))
        calls = [call._replace(prompt=shared + call.prompt, number=i) for i, call in enumerate(random_calls(rng))]
        tree = tree_tokens(build(calls), len(shared))
        shuffled = tree_tokens(build(rng.sample(calls, len(calls))), len(shared))
        for one, other in zip(tree, shuffled, strict=True):
            np.testing.assert_array_equal(one, other)
        index = np.arange(len(tree.tokens))
        visible = (index <= index[:, None]) & (index[:, None] < tree.ends)
        texts = [(*shared, *tree.tokens[visible[i]].tolist()) for i in index]
        found = Counter((texts[i], tree.logprobs[i], int(tree.versions[i])) for i in index if tree.sampled[i])
        assert found == Counter((text, np.float32(x), version) for text, x, version in sampled(calls).elements())
        assert [tuple(tree.tokens[tree.numbers == i]) for i in range(len(calls))] == [x.completion for x in calls]
        assert ((tree.numbers >= 0) == tree.sampled).all()
        # No program computes a token twice that no call sampled and that follows the same text.
        assert len({texts[i] for i in index if not tree.sampled[i]}) == (~tree.sampled).sum()
        for i, before in enumerate(tree.previous):
            earlier = visible[i] & (index < i)
            np.testing.assert_array_equal(earlier, visible[before] if before >= 0 else False)
            assert (earlier.sum(), before) == (tree.depths[i], max(np.flatnonzero(earlier), default=-1))
        branched += bool((tree.previous != index - 1).any())
    assert 200 < branched < 900
