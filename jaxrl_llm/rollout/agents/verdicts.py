"""Runs the agent of one episode, a function or a program, under its time limit. An error becomes a value."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NamedTuple

from jaxrl_llm.errors import describe
from jaxrl_llm.rollout.time_limit import CallTimeout, TimeLimit
from jaxrl_llm.tasks.agents import AgentEndpoint, turn_rewards, verdict_metrics

POLL_SECONDS = 0.05  # time between two looks at a program
OUTPUT_BYTES = 300  # bytes at the end of a program's output that an error shows


class AgentResult(NamedTuple):
    """What an agent has returned, or how it has failed."""

    metrics: dict[str, float]  # metrics of its rewards
    error: str = ""  # "" if it has not failed
    is_late: bool = False  # whether it has reached its time limit
    turn_rewards: tuple[float, ...] = ()  # rewards of its calls; () if it has judged none

    @classmethod
    def from_verdict(cls, verdict: Any) -> AgentResult:
        """Returns the result of an agent that has returned a verdict. Raises: TypeError, ValueError."""
        return cls(verdict_metrics(verdict), turn_rewards=turn_rewards(verdict))


class FunctionRunner:
    """Calls an agent that is a function (endpoint, row), plain or async."""

    def __init__(self, agent: Callable[[AgentEndpoint, dict[str, Any]], Any], seconds: float):
        """seconds: time limit of an episode, 0 = unlimited."""
        self._agent, self._seconds, self._time_limit = agent, seconds, TimeLimit(seconds)

    def __call__(self, endpoint: AgentEndpoint, row: dict[str, Any], stopped: Event) -> AgentResult:
        def call() -> AgentResult:
            try:
                verdict = self._agent(endpoint, row)
                if inspect.isawaitable(verdict):
                    verdict = asyncio.run(self._await(verdict))
                return AgentResult.from_verdict(verdict)
            except (Exception, SystemExit) as error:
                return AgentResult({}, describe(error))

        try:
            return self._time_limit.call(call)
        except TimeoutError:
            return AgentResult({}, f"it took longer than {self._seconds:g} seconds (config.env.timeout)", is_late=True)

    async def _await(self, verdict: Any) -> Any:
        """Waits for an async agent, which its time limit cancels, so that its thread ends too."""
        time_limit = asyncio.timeout(self._seconds or None)
        try:
            async with time_limit:
                return await verdict
        except TimeoutError:
            if time_limit.expired():
                raise CallTimeout from None
            raise


class CommandRunner:
    """Runs an agent that is a program. Its reward is the JSON in the file JAXRL_REWARD; none without this file."""

    def __init__(self, command: str, seconds: float):
        """seconds: time limit of an episode, 0 = unlimited."""
        self._command, self._seconds = shlex.split(command), seconds

    def __call__(self, endpoint: AgentEndpoint, row: dict[str, Any], stopped: Event) -> AgentResult:
        with TemporaryDirectory(prefix="jaxrl_agent_") as folder:
            try:
                return self._run(endpoint, row, stopped, Path(folder))
            except (OSError, ValueError, TypeError) as error:  # no such program, or a file that is no verdict
                return AgentResult({}, describe(error))

    def _run(self, endpoint: AgentEndpoint, row: dict[str, Any], stopped: Event, folder: Path) -> AgentResult:
        row_file, reward_file, output_file = (folder / name for name in ("row.json", "reward.json", "output.txt"))
        # Values that JSON does not have, such as dates, become text.
        row_file.write_text(json.dumps(row, ensure_ascii=False, default=str), encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "JAXRL_MODEL": endpoint.model,
            "JAXRL_ROW": str(row_file),
            "JAXRL_REWARD": str(reward_file),
        }
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                self._command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            is_late = not self._wait(process.pid, stopped)
        finally:
            # The program leads its group, and is reaped only below, so that no other group has this number now.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if is_late:
            return AgentResult({}, f"it took longer than {self._seconds:g} seconds (config.env.timeout)", is_late=True)
        if code:
            text = output_file.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace").strip()
            return AgentResult({}, f"it ended with exit code {code}: {text}")
        return AgentResult.from_verdict(json.loads(reward_file.read_bytes()) if reward_file.exists() else None)

    def _wait(self, process_id: int, stopped: Event) -> bool:
        """Waits for the end of a program without reaping it. Returns False if its time is over, or the run stops."""
        end = time.monotonic() + self._seconds if self._seconds else float("inf")
        while not os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > end or stopped.wait(POLL_SECONDS):
                return False
        return True
