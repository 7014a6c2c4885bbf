"""Reward functions: TRL's signature, channels and weights, and the judges of the tasks."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import countdown, maths

CHATS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"},
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"},
]
TEXTS = [["2", "3"], ["4", "four"]]
IDS = [[[1], [2]], [[3], [4, 5]]]


def test_a_function_with_trls_signature_works_unchanged():
    seen = {}

    def reward(prompts, completions, answer, **kwargs):  # as in TRL's documentation
        seen.update(prompts=prompts, completions=completions, kwargs=kwargs)
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if content == a else None for content, a in zip(contents, answer, strict=True)]

    channels = rewards.make_score({"reward": reward}, (2.0,))(CHATS, TEXTS, IDS)
    np.testing.assert_array_equal(channels["reward"], [[1, np.nan], [1, np.nan]])
    np.testing.assert_array_equal(channels["total"], [[2, 0], [2, 0]])
    assert seen["prompts"] == [CHATS[0]["prompt"]] * 2 + [CHATS[1]["prompt"]] * 2
    assert seen["kwargs"]["completion_ids"] == [[1], [2], [3], [4, 5]]


def test_text_prompts_give_text_completions():
    rows = [{"prompt": "1+1"}, {"prompt": "2+2"}]
    channels = rewards.make_score({"length": lambda completions: [float(len(c)) for c in completions]}, (1.0,))(
        rows, TEXTS, IDS
    )
    np.testing.assert_array_equal(channels["total"], [[1, 1], [1, 4]])


def test_the_total_is_the_weighted_sum_of_the_channels():
    functions = {"a": lambda completions: [1.0] * 4, "b": lambda completions: [0.0, 1.0, 2.0, 3.0]}
    channels = rewards.make_score(functions, (0.5, -1.0))(CHATS, TEXTS, IDS)
    np.testing.assert_allclose(channels["total"], [[0.5, -0.5], [-1.5, -2.5]])


@pytest.mark.parametrize(
    ("text", "score"),
    [("3*4+5", 1.0), ("5+3*4", 1.0), ("(3*4)+5", 1.0), ("3+4+5", 0.0), ("3*4+5+0", 0.0), ("17", 0.0), ("3*4+", 0.0),
     ("", 0.0), ("__import__('os')", 0.0), ("3**4", 0.0), ("5+12", 0.0)],
)  # fmt: skip
def test_countdown_wants_every_number_once_and_the_target(text, score):
    assert countdown.accuracy([[{"content": text}]], numbers=[[3, 4, 5]], target=[17]) == [score]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("So it is \\boxed{72}.", "72", 1.0), ("\\boxed{1,234}", "1234", 1.0), ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
     ("\\boxed{71}", "72", 0.0), ("It is 72.", "72", 0.0), ("", "72", 0.0), ("\\boxed{}", "72", 0.0)],
)  # fmt: skip
def test_maths_judges_the_boxed_answer_as_mathematics(text, answer, score):
    assert maths.accuracy([[{"content": text}]], answer=[answer]) == [score]
