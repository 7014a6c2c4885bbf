"""Reward functions: TRL's signature, channels and weights, what they may return, and where they run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout import reward_calls
from jaxrl_llm.rollout.grading import Completions, RewardFn
from jaxrl_llm.tasks import countdown

ROOT = Path(__file__).parents[2]
CHATS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"},
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"},
]
TEXTS = [["2", "3"], ["4", "four"]]
IDS = [[[1], [2]], [[3], [4, 5]]]
BATCH = CHATS, TEXTS, IDS
SEEN: list[Any] = []
PLACE = re.compile(r"\.py:\d+")


def score(*names: str, weights: tuple[float, ...] = (), timeout: float = 60.0) -> RewardFn:
    """Of functions of this file."""
    dotted = tuple(f"{__name__}.{name}" for name in names)
    return RewardFn(dotted, weights or (1.0,) * len(names), timeout, field="config.reward.timeout")


def call(function: Any) -> list[float]:
    rows = [row for row in CHATS for _ in range(2)]
    return reward_calls.call_reward("mine.f", function, rows, [*TEXTS[0], *TEXTS[1]], [*IDS[0], *IDS[1]]).values


def right(prompts, completions, answer, **kwargs):  # as in TRL's documentation
    SEEN.append((prompts, completions, kwargs))
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content == a else None for content, a in zip(contents, answer, strict=True)]


def count(completions):
    return [0.0, 1.0, 2.0, 3.0]


def length(completions):
    return [float(len(completion)) for completion in completions]


def unsure(completions, log_metric):
    """No verdict where the text has an odd length."""
    texts = [completion[0]["content"] for completion in completions]
    log_metric("asked", len(texts))
    return [None if len(text) % 2 else float("1" in text) for text in texts]


def stuck(completions):
    re.match(r"(a+)+$", "a" * 60 + "b")


async def asynchronous(completions):
    values = await asyncio.gather(*(asyncio.sleep(0.1, x) for x in range(3)))
    return (values[1] / 2 for _ in completions)


def alarmed(completions):
    """As math-verify's own time limit does; Python refuses that outside of the main thread."""
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return [1.0] * len(completions)


def gone(completions):
    sys.exit(3)


def raising(completions):
    raise ValueError("no\nunit")


def waits(completions, answer):
    file = Path(answer[0])
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)  # nobody reads half a number
    time.sleep(600)


def appears(file: Path) -> bool:
    end = time.monotonic() + 60
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return file.exists()


def first(completions, folder):
    """Waits for `second`: one after the other they would wait in vain."""
    (Path(folder[0]) / "first").touch()
    return [float(appears(Path(folder[0]) / "second"))] * len(completions)


def with_bonus(bonus):
    def closure(completions, folder):
        print("said by a reward")
        (Path(folder[0]) / "second").touch()
        return [bonus * appears(Path(folder[0]) / "first") * x for x in alarmed(completions)]

    return closure


second = with_bonus(2.0)


def test_functions_run_in_processes_at_the_same_time_as_trl_calls_them(tmp_path, capfd, refused):
    SEEN.clear()
    rows = [row | {"folder": str(tmp_path)} for row in CHATS]
    with closing(score("right", "first", "second", "asynchronous", weights=(2.0, 0.5, 1.0, -1.0))) as judge:
        graded = judge.start(lambda: Completions(rows, TEXTS, IDS))  # in a thread
        assert appears(tmp_path / "first")  # their batch begins before it is waited for
        rewards = graded().rewards
        assert graded() is graded()
        np.testing.assert_array_equal(rewards.channels[f"{__name__}.right"], [[1, np.nan], [1, np.nan]])
        np.testing.assert_array_equal(rewards.channels[f"{__name__}.second"], [[2, 2], [2, 2]])
        np.testing.assert_array_equal(rewards.total, [[4, 2], [4, 2]])
        assert not SEEN and "said by a reward" in capfd.readouterr().out
        with refused("'lock'", "config.reward.timeout"):  # a column that cannot be sent
            judge([row | {"lock": threading.Lock()} for row in rows], TEXTS, IDS)


def test_without_a_limit_a_function_runs_in_the_thread_that_waits_for_it():
    SEEN.clear()
    with closing(score("right", "alarmed", weights=(2.0, 0.0), timeout=0)) as judge:
        threads = []
        graded = judge.start(lambda: threads.append(threading.current_thread()) or Completions(*BATCH))
        np.testing.assert_array_equal(graded().rewards.total, [[2, np.nan], [2, np.nan]])  # no verdict, not 0
        assert graded() is graded() and threads == [threading.main_thread()]
    [(prompts, _, kwargs)] = SEEN
    assert prompts == [CHATS[0]["prompt"]] * 2 + [CHATS[1]["prompt"]] * 2
    assert kwargs["completion_ids"] == [[1], [2], [3], [4, 5]]


def test_text_prompts_give_text_completions_and_the_total_is_a_weighted_sum():
    with closing(score("length", "count", weights=(0.5, -1.0), timeout=0)) as judge:
        for _ in range(2):
            np.testing.assert_allclose(judge(*BATCH).rewards.total, [[0.5, -0.5], [-1.5, -2.5]])
        rewards = judge([{"prompt": "1+1"}, {"prompt": "2+2"}], *BATCH[1:]).rewards
        np.testing.assert_array_equal(rewards.channels[f"{__name__}.length"], [[1, 1], [1, 4]])


def test_an_async_function_is_awaited_and_its_event_loop_stays():
    loops = []

    async def one(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    assert call(one) == call(one) == [1, 1, 1, 1]
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("name", "timeout", "named"),
    [("stuck", 0.3, "config.reward.timeout = 0.3"), ("gone", 60.0, "exit code 3"), ("raising", 60.0, __file__)],
    ids=["stuck", "gone", "raising"],
)
def test_what_stops_a_function_is_one_line_and_leaves_nothing(name, timeout, named, wording):
    with closing(score(name, *(["count"] if name == "stuck" else []), timeout=timeout)) as judge:
        pids = [process._process.pid for process in judge._processes.values()]
        with pytest.raises(UserError) as error:
            judge.start(lambda: Completions(*BATCH))()
        assert f"{__name__}.{name} " in str(error.value) and named in str(error.value)
        wording(PLACE.sub(".py:N", str(error.value)))
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(UserError):
            judge(*BATCH)  # never the numbers of the batch before


def test_a_trainer_that_is_killed_leaves_no_reward_behind(tmp_path):
    program = f"""
from jaxrl_llm.rollout.grading import RewardFn
judge = RewardFn(("test_rewards.waits",), (1.0,), 600.0)
judge([dict(prompt="", answer={str(tmp_path / "pid")!r})], [["2"]], [[[1]]])
"""
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=paths)
    assert appears(tmp_path / "pid")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGTERM)  # as a preempted machine sends it to all
    time.sleep(0.1)
    assert trainer.poll() is None and os.path.exists(f"/proc/{pid}/exe")
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}/exe") and time.monotonic() < end:  # a process that has ended has none
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}/exe")


def test_no_file_of_a_task_imports_jax():
    code = (
        "import sys; from jaxrl_llm import tasks; from jaxrl_llm.config.names import offered; "
        "offered(tasks.REWARDS); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_process_of_a_reward_does_not_import_jax():
    with closing(RewardFn(("arithmetic.accuracy",), (1.0,), 60.0)) as judge:
        judge(*BATCH)
        process = judge._processes["arithmetic.accuracy"]
        process.send_call(eval, "'jax' in __import__('sys').modules")
        assert process.receive_result(60) is False


def in_jax(values: Any, dtype: str = "float32") -> Any:
    import jax  # not in the processes of rewards, which import this file

    return jax.numpy.array(values, dtype)


NUMBERS = [
    [1, 0, 1, None], (1.0, 0.0, 1.0, None), [True, False, True, None], [np.True_, np.float16(0), np.int8(1), None],
    [np.array(1.0), in_jax, np.array(True), None], [Decimal(1), Fraction(0), Decimal("1.0"), None],
]  # fmt: skip
SEQUENCES = [
    np.array, lambda x: in_jax(x, "bfloat16"), iter, tuple, deque, lambda x: np.array(x) > 0.5,
]  # fmt: skip


def test_a_function_may_return_any_numbers_in_any_sequence():
    for values in NUMBERS:
        values = [in_jax(0.0) if value is in_jax else value for value in values]
        np.testing.assert_array_equal(call(lambda completions, values=values: values), [1, 0, 1, np.nan])
    for make in SEQUENCES:
        assert call(lambda completions, make=make: make([1.0, 0.0, 1.0, 0.0])) == [1, 0, 1, 0], make


def endless() -> Iterator[float]:
    while True:
        yield 1.0


WRONG = [  # what a function returns for four completions, and what the line names
    (None, "None for 4"), (1.0, "1.0 for 4"), ("good", "'good' for 4"), (b"good", "b'good' for 4"),
    (np.float32(1), "float32(1.0) for 4"), ({"a": 1, "b": 1, "c": 1, "d": 1}, "dict of 4"), ({1, 2, 3, 4}, "set of 4"),
    ([1.0] * 3, "list of 3"), (np.ones(3), "ndarray of 3"), ([], "list of 0"), (np.ones((2, 2)), "shape (2, 2)"),
    (iter([1.0] * 3), "list_iterator of 3"), (endless(), "generator of 5 for 4"),
    (np.ones((4, 1)), "[1.0] for row {'answer': '2'}, completion '2'"), ([[1.0]] * 4, "[1.0] for row"),
    ([1.0, "1.0", 1.0, 1.0], "'1.0' for row {'answer': '2'}, completion '3'"),
    ([1.0, 1.0, np.nan, 1.0], "nan for row {'answer': '4'}, completion '4'"), ([10**400] * 4, "1000000000"),
    ([-2e15] * 4, "-2000000000000000.0 for row"), ([1j] * 4, "1j for row"), ([{}] * 4, "{} for row"),
    (np.array([1, np.inf, 1, 1]), "inf for row {'answer': '2'}, completion '3'"),
]  # fmt: skip


def test_anything_else_is_refused_in_one_line(refused):
    for returned, named in WRONG:
        with refused("mine.f", named):
            call(lambda completions, returned=returned: returned)


def test_the_completion_that_makes_a_quick_function_raise_is_found(monkeypatch, wording):
    calls = []

    def quick(completions):
        calls.append(len(completions))
        return [float(completion[0]["content"]) for completion in completions]

    def lazy(completions):
        return (x for x in quick(completions))

    async def remote(completions):
        return quick(completions)

    def slow(completions):
        time.sleep(0.06)
        return quick(completions)

    def slow_alone(completions):
        return (slow if len(completions) == 1 else quick)(completions)

    monkeypatch.setattr(reward_calls, "SEARCH_SECONDS", 0.05)
    each, batch = ("'4'", "'four'"), ("4 completions", "'2'")
    # Only a quick function is called again.
    for function, said, counts in (
        (quick, each, [4, 1, 1, 1, 1]), (lazy, each, [4, 1, 1, 1, 1]), (remote, batch, [4]), (slow, batch, [4]),
        (slow_alone, batch, [4, 1]),
    ):  # fmt: skip
        calls.clear()
        with pytest.raises(UserError, match="ValueError") as error:
            call(function)
        assert calls == counts and all(word in str(error.value) for word in said)
        wording(PLACE.sub(".py:N", str(error.value)))


COUNTDOWN = [  # of 3, 4, 5 and 17
    ("3*4+5", 1), ("5+3*4", 1), ("(3*4)+5", 1), ("3+4+5", 0), ("3*4+5+0", 0), ("17", 0), ("3*4+", 0), ("", 0),
    ("__import__('os')", 0), ("3**4", 0), ("5+12", 0), ("3*4+٥", 0), ("9**9**9**9", 0),
    ("(" * 45 + "3*4+5" + ")" * 45, 1), ("9*" * 49 + "9", 0), ("3(4)+5", 0), ("03*4+5", 0), ("3*4+5" + " " * 90, 1),
    ("3*4+5" + " " * 900, 0),
]  # fmt: skip


def test_countdown_wants_every_number_once_and_the_target():
    for text, score in COUNTDOWN:
        assert countdown.accuracy([[{"content": text}]], numbers=[[3, 4, 5]], target=[17]) == [score], text
        assert countdown.accuracy([text], numbers=[[3, 4, 5]], target=[17]) == [score], text
