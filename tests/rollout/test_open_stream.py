"""The open stream: sequences that arrive at any time get the tokens that one call of the sampler gives them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import pytest
import tiny
from model_parts import random_sampler

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.open_stream import NewTokens, OpenSequence, StreamSession
from jaxrl_llm.structs import Prompts

LENGTH, STOPS, KEY = 40, (3, 4), 7
# A call that starts at most ROWS of its 3 * ROWS prompts together has the program sizes of an open stream with ROWS
# rows, except for the program of its first ROWS prompts. Programs of two sizes may differ in the last bits.
ROWS = tiny.B


@cache
def sampler() -> Sampler:
    return random_sampler(max_completion_tokens=LENGTH, max_sequences=ROWS)


@cache
def closed(temperature: float):
    """What one call of the sampler gives: tokens, log-probabilities and whether it was cut, of each number."""
    prompts = Prompts(*(np.tile(x, (3, 1)) for x in tiny.prompts()), [], np.arange(3 * ROWS))
    sampled = sampler().sample(prompts, jax.random.key(KEY), group_size=1, sampling=Sampling(temperature))
    lengths = sampled.completion_mask[:, 0].sum(axis=-1)
    arrays = sampled.completions[:, 0], sampled.logprobs[:, 0], sampled.truncated[:, 0], lengths
    return [(tokens[:n].tolist(), logprobs[:n], bool(cut)) for tokens, logprobs, cut, n in zip(*arrays, strict=True)]


def prompt(number: int) -> list[int]:
    tokens, mask = tiny.prompts()
    return tokens[number % tiny.B][mask[number % tiny.B]].tolist()


class Script:
    """Arrivals by the number of the round: {round: sequences}. `each_round` is called before each round."""

    def __init__(self, plan: dict[int, list[OpenSequence]], each_round: Callable[[int], None] = lambda number: None):
        self.plan, self.each_round, self.round, self.waiting = plan, each_round, 0, list[OpenSequence]()

    def take(self, most: int, *, wait: bool) -> list[OpenSequence] | None:
        self.each_round(self.round)
        while True:
            self.waiting += self.plan.pop(self.round, [])
            self.round += 1
            if self.waiting or not wait:
                taken, self.waiting = self.waiting[:most], self.waiting[most:]
                return taken
            if not self.plan:
                return None

    @property
    def some_wait(self) -> bool:
        return bool(self.waiting)


def request(number: int, told: dict, **fields) -> OpenSequence:
    """A request for the completion of this number, whose reports go to told[number]."""
    told[number] = []
    fixed = dict(number=number, max_tokens=LENGTH, stop_ids=frozenset(STOPS))
    return OpenSequence(prompt=prompt(number), report=told[number].append, **fixed | fields)


def joined(reports: list[NewTokens]) -> tuple[list[int], np.ndarray, str]:
    assert [one.end for one in reports[:-1]] == [""] * (len(reports) - 1)
    assert {one.version for one in reports} == {5}
    logprobs = np.array([x for one in reports for x in one.logprobs], np.float32)
    return [x for one in reports for x in one.tokens], logprobs, reports[-1].end


def run(arrivals: Script):
    stream = sampler().open_stream(arrivals, jax.random.key(KEY), rows=ROWS, prompt_width=tiny.P, sampling=Sampling())
    stream.run()
    assert stream.running == {} and sorted(stream._free_rows) == list(range(ROWS))
    assert all(not s.page_holders and not s.waiting and len(s._free_pages) == ROWS for s in stream.schedulers)
    return stream


def test_arrivals_at_any_time_get_the_tokens_of_one_call_bit_for_bit():
    told, temperatures = {}, {number: (1.0, 0.7, 0.0)[number % 3] for number in range(3 * ROWS)}
    numbers = random.Random(1).sample(range(3 * ROWS), 3 * ROWS)
    plan = {}
    for i, number in enumerate(numbers):
        plan.setdefault(i // 5 * 2, []).append(request(number, told, temperature=temperatures[number]))
    run(Script(plan))
    for number, temperature in temperatures.items():
        (tokens, logprobs, end), (expected, exact, cut) = joined(told[number]), closed(temperature)[number]
        assert tokens == expected
        assert np.allclose(logprobs, exact, atol=1e-5)
        assert (end == "length") == cut
        if number >= ROWS:
            assert logprobs.tobytes() == exact.tobytes()


def test_a_cancelled_sequence_gets_no_more_tokens_and_its_row_is_used_again():
    told = {}
    first = [request(number, told, stop_ids=frozenset(), temperature=1.0) for number in range(ROWS)]
    late = [request(number, told, temperature=1.0) for number in range(ROWS, 2 * ROWS)]
    never = request(2 * ROWS, told)
    never.cancelled = True

    def each_round(number: int) -> None:
        if number == 1:
            for sequence in first:
                sequence.cancelled = True

    run(Script({0: first, 1: [*late, never]}, each_round))
    assert all(len(told[number]) == 2 and not told[number][-1].end for number in range(ROWS)), told
    assert told[2 * ROWS] == []
    assert [joined(told[number])[0] for number in range(ROWS, 2 * ROWS)] == [
        tokens for tokens, _, _ in closed(1.0)[ROWS : 2 * ROWS]
    ]


def test_own_stop_tokens_end_a_sequence_and_drop_what_follows_them():
    told, tokens = {}, closed(1.0)[20][0]
    stop = tokens[len(tokens) // 2]
    run(Script({0: [request(20, told, stop_ids=frozenset({stop}))]}))
    assert joined(told[20])[0] == tokens[: tokens.index(stop) + 1] and told[20][-1].end == "stop"


class Conversations:
    """Sessions that talk at their own pace: a prompt has all tokens of the call before, and those of `added`."""

    def __init__(self, count: int, turns: int, *, in_sessions: bool, added: Callable[[int], list[int]]):
        self.told, self.turns, self.in_sessions, self.added = {}, turns, in_sessions, added
        self.texts, self.asked = [prompt(i)[:2] for i in range(count)], [0] * count
        self.order, self.sessions = random.Random(1), [StreamSession() for _ in range(count)]

    def take(self, most: int, *, wait: bool) -> list[OpenSequence] | None:
        ready = [i for i in range(len(self.texts)) if self.asked[i] < self.turns and self.has_ended(i)]
        ready = self.order.sample(ready, -(-len(ready) // 2))  # the others are idle for a while
        return None if wait and not ready else [self.next_request(i) for i in ready[:most]]

    def has_ended(self, i: int) -> bool:
        reports = self.told[self.number(i, self.asked[i] - 1)] if self.asked[i] else []
        return not self.asked[i] or any(one.end for one in reports)

    def number(self, i: int, turn: int) -> int:
        return turn * len(self.texts) + i

    def next_request(self, i: int) -> OpenSequence:
        if turn := self.asked[i]:
            self.texts[i] = [*self.texts[i], *joined(self.told[self.number(i, turn - 1)])[0], *self.added(i)]
        self.asked[i] += 1
        session = self.sessions[i] if self.in_sessions else None
        one = request(self.number(i, turn), self.told, max_tokens=2 + i % 3, stop_ids=frozenset(), session=session)
        one.prompt = self.texts[i]
        return one

    @property
    def some_wait(self) -> bool:
        return False


def talk(conversations: Conversations, rows: int, pages: int = 0):
    """Runs conversations. Returns tokens and log-probabilities of each call, and the stream."""
    made = random_sampler(max_completion_tokens=160, max_sequences=rows, pages=pages)
    stream = made.open_stream(conversations, jax.random.key(KEY), rows=rows, prompt_width=128, sampling=Sampling())
    stream.run()
    return {number: joined(reports)[:2] for number, reports in conversations.told.items()}, stream


@pytest.mark.parametrize(
    ("rows", "pages", "continued"),
    [(8, 0, 24), (3, 0, None), pytest.param(8, 4, None, marks=pytest.mark.slow)],
    ids=["a row each", "fewer rows than sessions", "few pages"],
)
def test_a_session_continues_in_its_row_with_the_tokens_of_a_fresh_call(rows, pages, continued):
    def added(i: int) -> list[int]:
        return [5 + i, 9] * (1 + 17 * (i == 2))

    fresh, _ = talk(Conversations(8, 4, in_sessions=False, added=added), 8)
    sampled, stream = talk(Conversations(8, 4, in_sessions=True, added=added), rows, pages)
    assert sampled.keys() == fresh.keys() and len(fresh) == 32
    for number, (tokens, logprobs) in sampled.items():
        assert tokens == fresh[number][0]
        np.testing.assert_allclose(logprobs, fresh[number][1], atol=1e-5)
    assert stream.continued == continued if continued else 0 < stream.continued < 24
    assert not stream.running and len(stream.idle) + len(stream._free_rows) == rows


def test_a_prompt_that_changes_a_token_of_its_session_begins_a_fresh_row():
    talks = Conversations(2, 3, in_sessions=True, added=lambda i: [7])
    usual = talks.next_request

    def changed(i: int) -> OpenSequence:
        one = usual(i)
        if i and talks.asked[i] > 1:
            talks.texts[i][1] = 30 - talks.texts[i][1]
        return one

    talks.next_request = changed
    _, stream = talk(talks, 4)
    assert stream.continued == 2 and len(stream.idle) == 2


def test_a_session_that_has_ended_leaves_its_row_to_others():
    talks = Conversations(4, 2, in_sessions=True, added=lambda i: [7])
    usual = talks.take

    def take(most: int, *, wait: bool) -> list[OpenSequence] | None:
        for i, session in enumerate(talks.sessions[:3]):
            session.has_ended = talks.asked[i] == 2 and talks.has_ended(i)
        return usual(most, wait=wait)

    talks.take = take
    _, stream = talk(talks, 4)
    assert stream.continued == 4 and len(stream._free_rows) >= 2 and talks.sessions[3] in stream.idle
