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
from jaxrl_llm.rollout import grading
from jaxrl_llm.rollout.grading import Completions, RewardFn
from jaxrl_llm.tasks import countdown

ROOT = Path(__file__).parent.parent
CHATS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"},
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"},
]
TEXTS = [["2", "3"], ["4", "four"]]
IDS = [[[1], [2]], [[3], [4, 5]]]
BATCH = CHATS, TEXTS, IDS
SEEN: list[Any] = []


def score(*names: str, weights: tuple[float, ...] = (), timeout: float = 60.0) -> RewardFn:
    """Of functions of this file."""
    dotted = tuple(f"{__name__}.{name}" for name in names)
    return RewardFn(dotted, weights or (1.0,) * len(names), timeout, field="config.reward.timeout")


def call(function: Any) -> list[float]:
    rows = [row for row in CHATS for _ in range(2)]
    return grading.call("mine.f", function, rows, [*TEXTS[0], *TEXTS[1]], [*IDS[0], *IDS[1]]).values


def right(prompts, completions, answer, **kwargs):  # as in TRL's documentation
    SEEN.append((prompts, completions, kwargs))
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content == a else None for content, a in zip(contents, answer, strict=True)]


def count(completions):
    return [0.0, 1.0, 2.0, 3.0]


def length(completions):
    return [float(len(completion)) for completion in completions]


def slow(completions):
    time.sleep(0.5)
    return [1.0] * len(completions)


slower = slow


def unsure(completions, log_metric):
    """No verdict where the text has an odd length."""
    texts = [completion[0]["content"] for completion in completions]
    log_metric("asked", len(texts))
    return [None if len(text) % 2 else float("1" in text) for text in texts]


def stuck(completions):
    re.match(r"(a+)+$", "a" * 60 + "b")


async def asynchronous(completions):
    SEEN.append(await asyncio.gather(*(asyncio.sleep(0.1, x) for x in range(3))))
    return (0.5 for _ in completions)


def alarmed(completions):
    """As math-verify's own time limit does; Python refuses that outside of the main thread."""
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return [1.0] * len(completions)


def shown(completions):
    print("said by a reward")
    return [1.0] * len(completions)


def gone(completions):
    sys.exit(3)


def raising(completions):
    raise ValueError("no\nunit")


def waits(completions, answer):
    Path(answer[0]).write_text(str(os.getpid()))
    time.sleep(600)


closure = (lambda bonus: lambda completions: [bonus] * len(completions))(2.0)


@pytest.mark.parametrize("timeout", [0, 60.0])
def test_a_function_with_trls_signature_works_unchanged(timeout):
    SEEN.clear()
    with closing(score("right", weights=(2.0,), timeout=timeout)) as judge:
        rewards = judge(*BATCH).rewards
    np.testing.assert_array_equal(rewards.channels[f"{__name__}.right"], [[1, np.nan], [1, np.nan]])
    np.testing.assert_array_equal(rewards.total, [[2, np.nan], [2, np.nan]])  # no verdict, not 0
    if timeout:
        assert not SEEN  # it ran elsewhere
    else:
        [(prompts, _, kwargs)] = SEEN
        assert prompts == [CHATS[0]["prompt"]] * 2 + [CHATS[1]["prompt"]] * 2
        assert kwargs["completion_ids"] == [[1], [2], [3], [4, 5]]


def test_text_prompts_give_text_completions():
    with closing(score("length")) as judge:
        np.testing.assert_array_equal(
            judge([{"prompt": "1+1"}, {"prompt": "2+2"}], *BATCH[1:]).rewards.total, [[1, 1], [1, 4]]
        )


def test_the_total_is_the_weighted_sum_of_the_channels():
    with closing(score("length", "count", weights=(0.5, -1.0))) as judge:
        for _ in range(3):
            np.testing.assert_allclose(judge(*BATCH).rewards.total, [[0.5, -0.5], [-1.5, -2.5]])


def test_functions_run_at_the_same_time_and_their_batch_begins_before_it_is_waited_for():
    with closing(score("slow", "slower")) as judge:
        judge(*BATCH)  # they are imported
        began = time.monotonic()
        graded = judge.start(lambda: Completions(*BATCH))
        assert time.monotonic() - began < 0.2
        time.sleep(0.8)
        waited = time.monotonic()
        np.testing.assert_array_equal(graded().rewards.total, [[2, 2], [2, 2]])
        assert time.monotonic() - waited < 0.2  # one after the other they would take a second
        assert graded() is graded()


def test_without_a_limit_a_function_runs_in_the_thread_that_waits_for_it():
    with closing(score("alarmed", timeout=0)) as judge:
        threads = []
        graded = judge.start(lambda: threads.append(threading.current_thread()) or Completions(*BATCH))
        assert graded() is graded()
        assert threads == [threading.main_thread()]


def test_a_function_may_set_an_alarm_be_a_closure_and_print(capfd):
    with closing(score("alarmed", "closure", "shown")) as judge:
        graded = judge.start(lambda: Completions(*BATCH))  # in a thread, where Python refuses alarms
        np.testing.assert_array_equal(graded().rewards.total, [[4, 4], [4, 4]])
    assert "said by a reward" in capfd.readouterr().out


def test_an_async_function_is_awaited_and_its_event_loop_stays():
    loops = []

    async def one(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    assert call(one) == call(one) == [1, 1, 1, 1]
    assert loops[0] is loops[1]
    with closing(score("asynchronous")) as judge:
        np.testing.assert_array_equal(judge(*BATCH).rewards.total, [[0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("name", "timeout", "words"),
    [("stuck", 0.5, "took longer than config.reward.timeout = 0.5 seconds for a batch of 4 completions: "
                    "make it faster, or raise config.reward.timeout (0: no limit)"),
     ("gone", 60.0, "ended its process (exit code 3): make it return or raise"),
     ("raising", 60.0, f"raised ValueError: no\nunit ({__file__}:")],
)  # fmt: skip
def test_what_stops_a_function_is_said_in_one_line_and_nothing_is_left(name, timeout, words):
    judge = score("count", name, timeout=timeout)
    pids = [process._process.pid for process in judge._processes.values()]
    began = time.monotonic()
    with closing(judge), pytest.raises(UserError, match=re.escape(f"reward {__name__}.{name} {words}")):
        judge.start(lambda: Completions(*BATCH))()
    assert time.monotonic() - began < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(UserError, match="ended its process"):
        judge(*BATCH)  # never the numbers of the batch before


def test_a_column_that_cannot_be_sent_is_named():
    rows = [row | {"lock": threading.Lock()} for row in CHATS]
    with (
        closing(score("length")) as judge,
        pytest.raises(UserError, match=r"column 'lock' cannot be sent .* config\.reward\.timeout = 0"),
    ):
        judge(rows, TEXTS, IDS)


def test_a_trainer_that_is_killed_leaves_no_reward_behind(tmp_path):
    row = '{"prompt": [{"role": "user", "content": "1+1"}], "answer": "' + str(tmp_path / "pid") + '"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 8)
    fields = (
        "num_steps=1 prompts_per_step=8 prompts_per_update=8 group_size=2 optim.warmup_steps=0 eval=none "
        f"data.source={tmp_path}/rows.jsonl reward.functions=tests.test_rewards.waits reward.weights=1. "
        "mesh.fsdp=1 rollout.max_completion_tokens=2 log.to=() health.self_test=False"
    )
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/grpo.py", "--workdir", tmp_path / "run"]
    trainer = subprocess.Popen([*command, *(f"--config.{field}" for field in fields.split())], cwd=ROOT)
    while trainer.poll() is None and not (tmp_path / "pid").exists():
        time.sleep(0.1)
    assert trainer.poll() is None
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGTERM)  # as a preempted machine sends it to all
    time.sleep(0.2)
    assert trainer.poll() is None
    assert os.path.exists(f"/proc/{pid}/exe")
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}/exe") and time.monotonic() < end:  # a process that has ended has none
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}/exe")


class Tensor:
    """What torch's tensors, and others, have in common."""

    def __init__(self, values: Any):
        self._values, self.shape = values, np.shape(values)

    def tolist(self) -> Any:
        return self._values


def test_no_file_of_a_task_imports_jax():
    code = (
        "import sys; from jaxrl_llm import tasks; from jaxrl_llm.config.names import offered; "
        "offered(tasks.REWARDS); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def in_jax(values: Any, dtype: str = "float32") -> Any:
    import jax  # not in the processes of rewards, which import this file

    return jax.numpy.array(values, dtype)


def generated(values: list[Any]) -> Iterator[Any]:
    yield from values


@pytest.mark.parametrize(
    "values",
    [[1, 0, 1, None], (1.0, 0.0, 1.0, None), [True, False, True, None], [np.True_, np.float16(0), np.int8(1), None],
     [np.array(1.0), in_jax, np.array(True), None], [Decimal(1), Fraction(0), Decimal("1.0"), None]],
    ids=["ints", "a tuple", "bools", "NumPy scalars", "arrays without dimensions", "decimals and fractions"],
)  # fmt: skip
def test_a_function_may_return_any_numbers(values):
    if in_jax in values:
        values = [in_jax(0.0) if value is in_jax else value for value in values]
    np.testing.assert_array_equal(call(lambda completions: values), [1, 0, 1, np.nan])


@pytest.mark.parametrize(
    "make",
    [np.array, in_jax, lambda x: in_jax(x, "bfloat16"), Tensor, generated, iter, tuple, deque,
     lambda x: np.array(x) > 0.5, lambda x: map(float, x)],
    ids=["NumPy", "jax", "bfloat16", "a tensor", "a generator", "an iterator", "a tuple", "a deque", "bools", "a map"],
)  # fmt: skip
def test_a_function_may_return_any_sequence(make):
    assert call(lambda completions: make([1.0, 0.0, 1.0, 0.0])) == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [(None, "returned None for 4 completions: return a list with one number each"),
     (1.0, "returned 1.0 for 4"), ("good", "returned 'good' for 4"), (b"good", "returned b'good' for 4"),
     (np.float32(1), "returned np.float32(1.0) for 4"),
     ({"a": 1, "b": 1, "c": 1, "d": 1}, "returned dict of 4 for 4 completions: return a list"),
     ({1, 2, 3, 4}, "returned set of 4"),
     ([1.0] * 3, "returned list of 3 for 4"), (np.ones(3), "returned ndarray of 3 for 4"), ([], "returned list of 0"),
     (np.ones((2, 2)), "returned ndarray of shape (2, 2) for 4 completions"),
     (iter([1.0] * 3), "returned list_iterator of 3 for 4"),
     (np.ones((4, 1)), "returned [1.0] for row {'answer': '2'}, completion '2': return a finite number, or None"),
     ([[1.0]] * 4, "returned [1.0] for row"),
     ([1.0, "1.0", 1.0, 1.0], "returned '1.0' for row {'answer': '2'}, completion '3'"),
     ([1.0, 1.0, np.nan, 1.0], "returned nan for row {'answer': '4'}, completion '4'"),
     ([10**400] * 4, "returned 1000000000"),
     ([1e39] * 4, "returned 1e+39 for row"), ([1j] * 4, "returned 1j for row"), ([{}] * 4, "returned {} for row"),
     (np.array([1, np.inf, 1, 1]), "returned inf for row {'answer': '2'}, completion '3'")],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(returned, words):
    with pytest.raises(UserError, match=re.escape(f"reward mine.f {words}")):
        call(lambda completions: returned)


def test_a_generator_without_an_end_is_refused():
    def endless():
        while True:
            yield 1.0

    with pytest.raises(UserError, match="returned generator of 5 for 4 completions"):
        call(lambda completions: endless())


def test_the_completion_that_makes_a_quick_function_raise_is_found_and_no_other_function_is_called_again(monkeypatch):
    calls = []

    def quick(completions):
        calls.append(len(completions))
        return [float(completion[0]["content"]) for completion in completions]

    with pytest.raises(UserError, match=r"raised ValueError: .* on row {'answer': '4'}, completion 'four'"):
        call(quick)
    assert calls == [4, 1, 1, 1, 1]

    def lazy(completions):
        return (float(completion[0]["content"]) for completion in completions)

    with pytest.raises(UserError, match="completion 'four'"):
        call(lazy)

    async def remote(completions):
        return quick(completions)

    whole = "on a batch of 4 completions, the first of them for row {'answer': '2'}, completion '2'"
    calls.clear()
    with pytest.raises(UserError, match=whole):
        call(remote)
    assert calls == [4]
    monkeypatch.setattr(grading, "SEARCH", 0.1)

    def slow(completions):
        time.sleep(0.15)
        return quick(completions)

    calls.clear()
    with pytest.raises(UserError, match=whole):
        call(slow)
    assert calls == [4]

    def slow_alone(completions):
        if len(completions) == 1:
            time.sleep(0.15)
        return quick(completions)

    calls.clear()
    with pytest.raises(UserError, match=whole):
        call(slow_alone)
    assert calls == [4, 1]


@pytest.mark.parametrize(
    ("text", "score"),
    [("3*4+5", 1.0), ("5+3*4", 1.0), ("(3*4)+5", 1.0), ("3+4+5", 0.0), ("3*4+5+0", 0.0), ("17", 0.0), ("3*4+", 0.0),
     ("", 0.0), ("__import__('os')", 0.0), ("3**4", 0.0), ("5+12", 0.0),
     ("3*4+٥", 0.0), ("9**9**9**9", 0.0), ("(" * 45 + "3*4+5" + ")" * 45, 1.0), ("9*" * 49 + "9", 0.0), ("3(4)+5", 0.0),
     ("03*4+5", 0.0), ("3*4+5" + " " * 90, 1.0), ("3*4+5" + " " * 900, 0.0)],
)  # fmt: skip
def test_countdown_wants_every_number_once_and_the_target(text, score):
    assert countdown.accuracy([[{"content": text}]], numbers=[[3, 4, 5]], target=[17]) == [score]
    assert countdown.accuracy([text], numbers=[[3, 4, 5]], target=[17]) == [score]
