"""The watchdog by itself: what it counts as a hang, and how it ends a process."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.machine import hang
from jaxrl_llm.machine.hang import WATCHDOG, Watchdog
from jaxrl_llm.machine.progress import Display
from jaxrl_llm.session.record import Timer

MINUTE = 60  # ticks


def still(watchdog: Watchdog, minutes: float, most: int) -> int:
    """Returns the ticks after which a watchdog with a bound of so many minutes ends a run that stands still."""
    return next((n for n in range(1, most) if watchdog.tick(minutes)), most)


def stepping(seconds: list[float]) -> Watchdog:
    clock = SimpleNamespace(now=0.0)
    watchdog = Watchdog(lambda: clock.now)
    for duration in [0.0, *seconds]:
        clock.now += duration
        watchdog.report_step()
    watchdog.tick(1)
    return watchdog


def test_a_run_that_stands_still_for_the_minutes_has_hung():
    assert still(Watchdog(), 2, 9999) == 2 * MINUTE
    watchdog = Watchdog()
    for _ in range(20):  # an evaluation of twenty parts, each just shorter than the bound
        assert still(watchdog, 2, 2 * MINUTE - 1) == 2 * MINUTE - 1
        watchdog.report_progress()


@pytest.mark.parametrize(("steps", "minutes"), [
    ([6.0] * 30, 2),  # ten medians are less
    ([120.0] * 30, 20),
    ([9e9, *[120.0] * 30, 9e9], 20),  # the median of the last ones: the first compiles, and another one evaluates
])  # fmt: skip
def test_ten_median_steps_may_be_longer_than_the_minutes(steps, minutes):
    assert still(stepping(steps), 2, 99999) == minutes * MINUTE


def test_a_process_that_was_stopped_for_hours_has_not_hung():
    clock = SimpleNamespace(now=0.0)
    watchdog = Watchdog(lambda: clock.now)
    watchdog.tick(2)
    clock.now += 99999
    assert not watchdog.tick(2)


def test_phases_tasks_and_their_parts_are_signs_of_life():
    def sign(act) -> bool:
        WATCHDOG.tick(1)
        act()
        return not any(WATCHDOG.tick(1, 59) for _ in range(2))  # the first tick sees the sign, if there was one

    display, timer = Display(), Timer()
    with display.task("evaluating problems", 3) as task:
        assert sign(task.advance)
    assert sign(lambda: display.task("reading the checkpoint").__enter__())
    assert sign(lambda: timer.lap("rollout"))
    assert not sign(lambda: None)


def test_a_hang_in_a_native_call_ends_with_75_and_the_stacks_of_all_threads():
    program = """
import hashlib, os, sys, threading, time
from jaxrl_llm.machine.hang import WATCHDOG
def end(code, line):
    print(line, file=sys.stderr, flush=True)
    os._exit(code)
def waits_for_ever():
    time.sleep(99)
threading.Thread(target=waits_for_ever, daemon=True).start()
WATCHDOG.start(0.01, end)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == hang.CODE == 75
    assert "in waits_for_ever" in done.stderr and "line 11 in <module>" in done.stderr
    assert "0.0167 minutes" in done.stderr.splitlines()[-1]
    assert time.monotonic() - began < 20


def test_a_wait_that_the_config_allows_is_no_hang(refused):
    config = load("grpo")
    config.health.hang_minutes = 5.0
    with refused("config.reward.timeout", "hang_minutes"):
        recipes.read(config)
