"""Drafts: guesses of the next tokens, which a pass verifies, change no bit of a completion."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
import tiny
from model_parts import random_sampler
from test_sampler import Tool

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.jax import drafts
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.structs import Prompts, Rollouts

LENGTH = 70  # longer than two rounds
sampler = partial(random_sampler, max_completion_tokens=LENGTH, drafts=3)
PROMPTS = Prompts(*tiny.prompts(), [], np.arange(tiny.B))


@pytest.fixture
def passes(monkeypatch) -> list[float]:
    """Passes for each token, of each call."""
    shares, run = [], Stream.run

    def counted(stream: Stream) -> None:
        run(stream)
        shares.append(stream.passes / stream.computed_tokens)

    monkeypatch.setattr(Stream, "run", counted)
    return shares


def sample(made: Sampler, key: int = 1, temperature: float = 1.0, **options) -> Rollouts:
    return made.sample(PROMPTS, jax.random.key(key), group_size=2, sampling=Sampling(temperature), **options)


def same_bits(one: Rollouts, other: Rollouts) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    "case",
    [
        dict(pages=9),
        pytest.param(dict(temperature=0.0, drafts=1, max_sequences=6), marks=pytest.mark.slow),
        pytest.param(dict(config=tiny.GEMMA, cache_dtype="int8", shape=(2, 2, 2)), marks=pytest.mark.slow),
    ],
    ids=["few pages", "greedy and refilled", "window and int8 on 8 devices"],
)
def test_right_and_wrong_drafts_change_no_bit_of_a_completion(case, passes):
    temperature, made = case.pop("temperature", 1.0), sampler(**case)
    no_history = sample(made, temperature=temperature)
    right = sample(made, temperature=temperature)
    sample(made, key=2)  # other completions, which are wrong drafts of the next call
    wrong = sample(made, temperature=temperature)
    same_bits(no_history, right)
    same_bits(no_history, wrong)
    assert passes[1] < 0.8 and passes[1] < passes[3] <= 1
    plain = sample(sampler(**case | dict(drafts=0)), temperature=temperature)
    assert passes[-1] == 1
    assert (plain.completions == no_history.completions).all()
    np.testing.assert_allclose(plain.logprobs, no_history.logprobs, atol=1e-5)


def test_drafts_change_no_episode(passes):
    made = sampler(observation_tokens=9)
    episodes = [sample(made, environments=Tool()) for _ in range(2)]
    same_bits(*episodes)
    assert passes[1] < passes[0]
    assert (episodes[0].completion_mask & ~episodes[0].loss_mask).any()


def test_a_call_that_ends_with_its_first_groups_has_no_drafts(passes):
    def sampled(made: Sampler) -> Rollouts:
        in_flight = InFlightGroups.empty(PROMPTS, 2, LENGTH, 0)
        for key, wanted in ((1, 3), (2, tiny.B)):
            first = made.sample_first(
                in_flight, jax.random.key(key), sampling=Sampling(), wanted_groups=wanted, required_groups=[]
            )
            in_flight = first.in_flight
        return in_flight.rollouts

    made = sampler()
    same_bits(sampled(made), sampled(made))
    assert passes == [1, 1, 1, 1]


def test_a_call_with_many_sequences_has_no_drafts(passes):
    made = sampler(max_sequences=0)
    for _ in range(2):
        made.sample(PROMPTS, jax.random.key(1), group_size=16, sampling=Sampling(), max_tokens=np.full((8, 16), 20))
    assert passes == [1, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7, 1, 2, 3, 4], [9, 9]),  # four tokens decide, although two are found later
        ([8, 3, 4], [5, 6]),  # two tokens, at their last place
        ([8, 8, 2], [3, 4]),  # one token
        ([8, 8], []),
        ([6], []),  # nothing follows it
    ],
)
def test_a_draft_is_what_followed_the_longest_known_context(text, expected):
    texts = np.array([1, 2, 3, 4, 9, 9, -1, 2, 3, 4, 5, 6, -1])
    assert drafts.find_draft(texts, np.array(text), 2).tolist() == expected


def test_the_prompts_sampled_longest_ago_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(drafts, "MAX_HISTORY", 300)
    made = sampler()
    for key in range(4):
        sample(made, key=key)
        history = made._history
        assert history._tokens == sum(map(len, history._texts.values())) <= 300
    assert 0 < len(history._texts) < tiny.B
    assert list(history._texts)[-1] == PROMPTS.tokens[-1][PROMPTS.mask[-1]].tobytes()
