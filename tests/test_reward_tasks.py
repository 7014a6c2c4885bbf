"""Rewards of tasks and forms: tables of completions and what they earn, and arguments in a config."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest

from jaxrl_llm.config.names import bind
from jaxrl_llm.config.schema import check_call
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.grading import RewardFn, call
from jaxrl_llm.rollout.settings import RewardSettings
from jaxrl_llm.tasks import REWARDS, choice, easyr1, gsm8k, length, repetition, verl
from jaxrl_llm.tasks import format as forms


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "answer", "strict", "flexible"),
    [("so 60 + 12.\n#### 72", "72", 1, 1), ("#### 71 no, #### 72", "72", 1, 1), ("it is 72.", "72", 0, 1),
     ("#### 1,000", "1000", 1, 1), ("#### $1,000.00", "... #### 1,000", 1, 1), ("#### -3", -3, 1, 1),
     ("#### 3 apples of 5", "3", 1, 0), ("5 - 2 = 3", "3", 0, 1), ("no number.", "3", 0, 0), ("", "0", 0, 0),
     ("####72", "72", 1, 1), ("72" + " so" * 200, "72", 0, 0), ("0.5 or .5", "0.50", 0, 1)],
)  # fmt: skip
def test_gsm8k_finds_the_number_after_the_mark_or_the_last_one(text, answer, strict, flexible):
    assert gsm8k.accuracy(chat(text), [answer]) == [strict]
    assert gsm8k.accuracy([text], [answer], method="flexible") == [flexible]
    assert gsm8k.has_mark([text]) == [float("####" in text)]


@pytest.mark.parametrize(
    ("text", "letter"),
    [("\\boxed{B}", "B"), ("\\boxed{\\text{(B)}}", "B"), ("A is wrong. <answer>b) the sun</answer>", "B"),
     ("The answer is (B).", "B"), ("**Answer:** B", "B"), ("answer: A. No, the final answer is B", "B"),
     ("(A) is false, so (B)", "B"), ("I choose\nB", "B"), ("Answer: **B**", "B"), ("B.", "B"),
     ("A long answer is a pity", ""), ("<answer>both</answer>", ""), ("\\boxed{", ""), ("", ""),
     ("The answer is A, but \\boxed{B}", "B"), ("\\boxed{\\mathbf{B}}", "B"), ("\\boxed{$B$}", "B"),
     ("\\boxed{\\text{Option B}}", "B"), ("<answer>Option B</answer>", "B"), ("<answer>Option of</answer>", "")],
)  # fmt: skip
def test_a_choice_is_found_where_it_is_stated(text, letter):
    assert choice.accuracy(chat(text), ["B"]) == [float(letter == "B")]
    assert choice.accuracy([text], [1]) == [float(letter == "B")]
    assert choice.is_given([text]) == [float(bool(letter))]


@pytest.mark.parametrize(
    ("text", "think", "answer", "boxed"),
    [("<think>\na\n</think>\nb", 1, 0, 0), ("<think>\na\nb", 0, 0, 0), ("a <think>b</think>", 0, 0, 0),
     ("<think>a<think>b</think>c", 0, 0, 0), ("<think>a</think> <answer>b</answer>", 1, 1, 0),
     ("<think>a</think><answer>b</answer> more", 1, 0, 0), ("<think>a</think> so \\boxed{2}.", 1, 0, 1)],
)  # fmt: skip
def test_forms_are_those_of_trl_and_easyr1(text, think, answer, boxed):
    assert (forms.think([text]), forms.think_answer(chat(text)), forms.think_boxed([text])) == (
        [think], [answer], [boxed]
    )  # fmt: skip


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
    assert call("scaled", bind("test_reward_tasks.scaled(by=2.0)", REWARDS), rows, ["abc"], [[1]]).values == [6.0]
    assert call("scaled", bind("test_reward_tasks.scaled", REWARDS), rows, ["abc"], [[1]]).values == [300.0]  # a column
    graded = call("gsm8k.accuracy", bind("gsm8k.accuracy", REWARDS), [rows[0] | {"answer": "3"}], ["it is 3"], [[1]])
    assert graded.values == [0.0]  # strict, whatever a column of the data is called
    functions, weights = ("a.b(c=1)", "d.e"), (1.0, 0.5)
    settings = RewardSettings(timeout=0.0, unconfined=False, functions=functions, weights=weights, overlong_tokens=0)
    assert settings.channels == {"a.b": 1.0, "d.e": 0.5}


def scaled(completions, by=1.0):
    by = by if isinstance(by, float) else by[0]
    return [by * len(completion) for completion in completions]


@pytest.mark.parametrize(
    ("text", "words"),
    [("gsm8k.accuracy(3)", "cannot be read: give a name, or a call with keywords and plain values"),
     ("gsm8k.accuracy(method=x)", "cannot be read"), ("gsm8k.accuracy(", "cannot be read"),
     ("gsm8k.accuracy(**{})", "cannot be read"), ("gsm8k.acuracy(method='strict')", "did you mean gsm8k.accuracy?"),
     ("gsm8k.accuracy(methode='strict')", "gsm8k.accuracy has no argument 'methode': it takes method"),
     ("gsm8k.accuracy(answer='3')", "gsm8k.accuracy has no argument 'answer': it takes method"),
     ("gsm8k.accuracy(method='loose')", "argument method of gsm8k.accuracy is 'loose': give one of 'strict'"),
     ("repetition.penalty(ngram_size=0)", "argument ngram_size of repetition.penalty is 0: give a value of at least 1"),
     ("repetition.penalty(max_penalty=1.0)", "is 1.0: give a value of at most 0"),
     ("length.penalty(free=3)", "length.penalty needs an argument scale: write length.penalty(scale=...)"),
     ("test_reward_tasks.scaled(to=2)", "test_reward_tasks.scaled has no argument 'to': it takes completions, by")],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(text, words):
    with pytest.raises(UserError, match=r"config\.reward\.functions") as error:
        check_call(text, REWARDS, "config.reward.functions")
    assert words in str(error.value)


def measured(completions, log_metric):
    log_metric("long", sum(len(completion) > 1 for completion in completions) / len(completions))
    return [None if completion == "none" else 1.0 for completion in completions]


@pytest.mark.parametrize("timeout", [0, 60.0])
def test_what_a_function_logs_and_leaves_without_a_verdict_reaches_the_trainer(timeout):
    names = ("test_reward_tasks.measured", "test_reward_tasks.scaled(by=0.5)")
    with closing(RewardFn(names, (2.0, 0.0), timeout, field="config.reward.timeout")) as judge:
        _, rewards, _, metrics = judge(
            [{"prompt": "?"}, {"prompt": "!"}], [["none", "b"], ["c", "d"]], [[[1], [2]]] * 2
        )
    assert metrics == {"test_reward_tasks.measured/long": 0.25}
    np.testing.assert_array_equal(rewards.channels["test_reward_tasks.scaled"], [[2.0, 0.5], [0.5, 0.5]])
    # A function of weight 0 is only logged: its number is no verdict.
    np.testing.assert_array_equal(rewards.total, [[np.nan, 2.0], [2.0, 2.0]])


def test_verls_reward_is_that_of_the_data_source_of_a_row():
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
    with pytest.raises(ValueError, match=r"data_source is .codecontests., for which verl.score has no rule"):
        verl.score([""], ["1"], ["codecontests"])
