"""What judges a completion takes linear time, whatever a collapsed policy repeats."""

from __future__ import annotations

import time

import pytest

from jaxrl_llm.config.names import bind
from jaxrl_llm.rollout import scores
from jaxrl_llm.tasks import REWARDS, judge, math
from jaxrl_llm.tasks.number_game import GUESS
from jaxrl_llm.tasks.search import Search
from jaxrl_llm.tasks.tools import Tools

LENGTH = 32_000  # characters
FUNCTIONS = [
    "math.accuracy", "math.accuracy(anchors=True)", "math.accuracy(after='</think>')", "math.is_boxed",
    "gsm8k.accuracy", "gsm8k.accuracy(method='flexible')", "gsm8k.has_mark", "choice.accuracy", "choice.is_given",
    "format.think", "format.think_answer", "format.think_boxed", "code.is_given",
    "search.exact_match", "search.f1", "search.answered", "search.with_format", "verl.score", "easyr1.math",
    "easyr1.r1v", "countdown.accuracy", "countdown.is_expression", "arithmetic.accuracy", "arithmetic.thought",
    "repetition.penalty(unit='words')",
]  # fmt: skip
UNITS = [
    " ", "\n", "A", "A ", "(A)", "9", "9,", "-", "$", "\\", "{", "}", "(", "<", ",", ": ", "the ", "A or ",
    "9" * 90 + " ", "#### ", "#### 1,", "answer: ", "option ", "option A is ", "\\boxed{", "\\boxed{1}", "\\text{",
    "√", "²", "½", "<think>", "</think>", "</think>\\boxed{", "<think></think>", "<answer>", "<answer></answer>",
    "<answer>\n", "</think> <answer>", "<search>", "<tool_call>", "<guess>", "<guess> ", "```python\n", "```py",
    "```", "```\n", "``` ",
    "<score>", "<score> ", "<score>1", "<score>1 / ", "½ ", "answer $", "answer \\(", "1\u202f",
    "√(", "√-", "√\\frac{", "√1,000", "\\binom{", "if option A ", "if the answer would be C ", "might be A. ",
    "answer is A? ",
]  # fmt: skip
COLUMNS = {"answer": ["2"], "numbers": [[1, 2]], "target": [3], "turns": None, "log_metric": lambda *_: None}


def seconds(function, *arguments) -> float:
    """Returns the processor time of this thread alone; others may still compile for earlier tests."""
    began = time.thread_time()
    function(*arguments)
    return time.thread_time() - began


def slow(function, prefixes=("",)) -> list[str]:
    """Returns the repetitions of which eight times as many take more than 24 times as long."""
    texts = [prefix + (unit * LENGTH)[:LENGTH] for prefix in prefixes for unit in UNITS]
    return [text[:60] for text in texts if is_slow(function, text)]


def is_slow(function, text: str) -> bool:
    # Linear time is 8 times as long, and quadratic time 64 times, on every processor. A few milliseconds say nothing.
    # The best of five, because the first call compiles patterns and a busy machine disturbs any of them. A short text
    # may stay in the processor's caches where a long one does not.
    whole, eighth = float("inf"), float("inf")
    for wait in (0, 0, 0.1, 0.5, 2):
        time.sleep(wait)
        whole = min(whole, seconds(function, text))
        if whole <= 0.005:
            return False
        eighth = min(eighth, seconds(function, text[: len(text) // 8]))
        if whole <= 24 * eighth:
            return False
    return True


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_takes_linear_time(name):
    function = bind(name, REWARDS)

    def reward(text: str) -> None:
        turns = [[{"role": "assistant", "content": text}]]
        answer = "B" if name.startswith("choice") else "2"
        columns = COLUMNS | {"turns": turns, "answer": [answer], "data_source": ["math_dapo"]}
        function(completions=[text], completion_ids=[[1]], **columns)

    formed = name.split(".")[0] in ("format", "easyr1")
    assert not slow(reward, ["<think>", "<think></think><answer>"] if formed else [""])


@pytest.mark.parametrize(
    "function",
    [scores.normalized, math._clean, GUESS.search, lambda text: judge._score(text, "score", 10.0),
     lambda text: Tools(functions=("tools.calculate",)).step(text), lambda text: Search.step(SEARCH, text)],
    ids=["normalized", "_clean", "GUESS", "judge", "tools", "search"],
)  # fmt: skip
def test_what_reads_a_completion_takes_linear_time(function):
    assert not slow(function)


SEARCH = Search.__new__(Search)
SEARCH._searches_left = 0


def test_an_answer_as_long_as_math_verify_gets_is_rewritten_in_linear_time():
    assert not [unit for unit in UNITS if is_slow(math._clean, (unit * math.MAX_LENGTH)[: math.MAX_LENGTH])]
