"""Rewards of tasks and forms: tables of completions and what they earn, and arguments in a config."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest

from jaxrl_llm.config.names import bind
from jaxrl_llm.config.schema import check_call
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.reward_calls import call_reward
from jaxrl_llm.rollout.settings import RewardSettings
from jaxrl_llm.tasks import REWARDS, easyr1, length, repetition, verl


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_easyr1s_mix_weighs_accuracy_and_format_and_logs_both():
    seen: dict[str, float] = {}
    texts = ["<think>x</think> \\boxed{2}", "\\boxed{2}", "<think>x</think> \\boxed{3}", "3"]
    assert easyr1.math(chat(*texts), ["2"] * 4, seen.__setitem__, format_weight=0.25) == [1.0, 0.75, 0.25, 0.0]
    assert seen == {"accuracy": 0.5, "format": 0.5}
    texts = ["<think>x</think><answer> 2 </answer>", "<answer>2</answer>", "2", "<think>x</think><answer>3</answer>"]
    assert easyr1.r1v(texts, ["2"] * 4, seen.__setitem__) == [1.0, 0.5, 0.5, 0.5]


def test_length_and_repetition_by_hand():
    ids = [[0] * n for n in (0, 10, 15, 20, 40)]
    assert length.penalty(ids, free=10, scale=10) == [0, 0, -0.5, -1, -1]
    assert length.distance(ids, target=15, scale=10) == [-1, -0.5, 0, -0.5, -1]
    found = length.cosine(["\\boxed{1}", "\\boxed{1}", "no", "no", "no"], ["1"] * 5, ids, max_tokens=20)
    middle = -0.5 - 0.5 * (1 + math.cos(math.pi * 0.75)) / 2
    assert found == pytest.approx([1.0, 0.75, middle, -0.5, -0.5])
    four = [[1, 2, 3, 4], [5] * 5, [1], []]
    assert repetition.penalty([""] * 4, four, ngram_size=2) == [0, -0.75, 0, 0]  # TRL's documented example
    assert repetition.penalty(["a B A b", "x"], [[], []], ngram_size=2, max_penalty=-3.0, unit="words") == [-1, 0]


def test_length_and_repetition_count_what_the_policy_sampled_alone():
    ids, own = [[1, 2, 7, 7, 7, 7, 3, 4]], [[True] * 2 + [False] * 4 + [True] * 2]
    turns = [[{"role": "assistant", "content": "a b"}, {"role": "environment", "content": "c c c c"}]]
    assert length.penalty(ids, loss_mask=own, free=4, scale=4) == [0]
    assert length.penalty(ids, free=4, scale=4) == [-1]
    assert length.distance(ids, loss_mask=own, target=4, scale=4) == [0]
    assert length.cosine(["\\boxed{1}"], ["1"], ids, loss_mask=own, max_tokens=4) == pytest.approx([0.5])
    assert repetition.penalty(["a b c c c c"], ids, own, turns, ngram_size=2) == [0]
    assert repetition.penalty(["a b c c c c"], ids, own, turns, ngram_size=2, unit="words") == [0]
    assert repetition.penalty(["a b c c c c"], ids, ngram_size=2, unit="words") == pytest.approx([-0.4])


def test_a_config_gives_arguments_to_functions_of_ours_and_of_a_user():
    for text in ("gsm8k.accuracy(method='flexible')", 'gsm8k.accuracy( method = "flexible" )'):
        check_call(text, REWARDS, "config.reward.functions")
        assert bind(text, REWARDS)(["it is 3"], ["3"]) == [1.0]
    check_call("test_reward_tasks.scaled(by=2.0)", REWARDS, "config.reward.functions")
    rows = [{"prompt": "?", "by": 100.0, "method": "flexible"}]
    assert call_reward("scaled", bind("test_reward_tasks.scaled(by=2.0)", REWARDS), rows, ["abc"], [[1]]).values == [
        6.0
    ]
    assert call_reward("scaled", bind("test_reward_tasks.scaled", REWARDS), rows, ["abc"], [[1]]).values == [
        300.0
    ]  # a column
    graded = call_reward(
        "gsm8k.accuracy", bind("gsm8k.accuracy", REWARDS), [rows[0] | {"answer": "3"}], ["it is 3"], [[1]]
    )
    assert graded.values == [0.0]  # strict, whatever a column of the data is called
    functions, weights = ("a.b(c=1)", "d.e"), (1.0, 0.5)
    settings = RewardSettings(timeout=0.0, unconfined=False, functions=functions, weights=weights, overlong_tokens=0)
    assert settings.channels == {"a.b": 1.0, "d.e": 0.5}


def scaled(completions, by=1.0):
    by = by if isinstance(by, float) else by[0]
    return [by * len(completion) for completion in completions]


WRONG = [  # a call, and what the line names besides the field
    ("gsm8k.accuracy(3)", ""), ("gsm8k.accuracy(method=x)", ""), ("gsm8k.accuracy(", ""), ("gsm8k.accuracy(**{})", ""),
    ("gsm8k.acuracy(method='strict')", "gsm8k.accuracy?"), ("gsm8k.accuracy(methode='strict')", "methode"),
    ("gsm8k.accuracy(answer='3')", "answer"), ("gsm8k.accuracy(method='loose')", "'loose'"),
    ("repetition.penalty(ngram_size=0)", "ngram_size"), ("repetition.penalty(max_penalty=1.0)", "max_penalty"),
    ("length.penalty(free=3)", "scale"), ("test_reward_tasks.scaled(to=2)", "'to'"),
]  # fmt: skip


def test_wrong_arguments_are_refused_in_one_line(refused):
    for text, named in WRONG:
        with refused("config.reward.functions", named):
            check_call(text, REWARDS, "config.reward.functions")


def measured(completions, log_metric):
    log_metric("long", sum(len(completion) > 1 for completion in completions) / len(completions))
    return [None if completion == "none" else 1.0 for completion in completions]


@pytest.mark.parametrize("timeout", [0, 60.0])
def test_what_a_function_logs_and_leaves_without_a_verdict_reaches_the_trainer(timeout):
    names = ("test_reward_tasks.measured", "test_reward_tasks.scaled(by=0.5)")
    rows, texts = [{"prompt": "?"}, {"prompt": "!"}], [["none", "b"], ["c", "d"]]
    with closing(RewardFn(names, (2.0, 0.0), timeout, field="config.reward.timeout")) as judge:
        _, rewards, _, metrics = judge(rows, texts, [[[1], [2]]] * 2)
    assert metrics == {"test_reward_tasks.measured/long": 0.25}
    np.testing.assert_array_equal(rewards.channels["test_reward_tasks.scaled"], [[2.0, 0.5], [0.5, 0.5]])
    # A function of weight 0 is only logged: its number is no verdict.
    np.testing.assert_array_equal(rewards.total, [[np.nan, 2.0], [2.0, 2.0]])


def test_verls_reward_is_that_of_the_data_source_of_a_row(refused):
    rows = [
        ("openai/gsm8k", "#### 72", "72", 1, 1),
        ("openai/gsm8k", "\\boxed{72}", "72", 0, 0),
        ("math_dapo", "So.\n\nAnswer: 34", "34", 1, 1),
        ("math_dapo", "Answer: 3\nANSWER: $\\frac{1}{2}$", "0.5", 1, 1),
        ("aime_2024", "\\boxed{34}", "34", -1, 0),
        ("math_dapo", "Answer: 34" + "." * 300, "34", -1, 0),
        ("DigitalLearningGmbH/MATH-lighteval", "\\boxed{\\frac12}", "\\frac{1}{2}", 1, 1),
        ("HuggingFaceH4/MATH-500", "Answer: 1", "1", 0, 0),
        ("searchR1_nq", "<answer>The Paris</answer>", ["paris"], 1, 1),
    ]
    sources, texts, answers, scores, right = map(list, zip(*rows, strict=True))
    assert verl.score(texts, answers, sources) == scores
    assert verl.accuracy(texts, answers, sources) == right
    with refused("data_source", "codecontests", error=ValueError):
        verl.score([""], ["1"], ["codecontests"])
