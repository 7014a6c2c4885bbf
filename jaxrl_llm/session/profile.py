"""Traces some steps with JAX's profiler, for XProf, TensorBoard and Perfetto: `config.log.profile = "3:5"`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.errors import UserError


def steps_of(text: str, num_steps: int) -> range:
    """Parses "FIRST:LAST" to a range of steps, which is empty for "". Raises: UserError, if the run lacks the steps."""
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= num_steps:
        example = f"{min(3, num_steps)}:{min(5, num_steps)}"
        raise UserError(
            f"config.log.profile = {text!r}: must be FIRST:LAST, two steps from 1 to config.num_steps = {num_steps}, "
            f"such as {example!r}"
        )
    return range(int(match[1]), int(match[2]) + 1)


class Profile:
    """Traces a range of steps in each process, and writes the trace into a folder."""

    def __init__(self, steps: range, folder: Path, print_line: Callable[[str], None]):
        self._steps, self._folder, self._print_line, self._is_tracing = steps, folder, print_line, False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the block if step `number` is in the range. A resumed run traces the steps that it still makes."""
        if number in self._steps and not self._is_tracing:
            self._is_tracing = True
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def end(self, number: int, results: Any) -> None:
        """Ends the trace after the last step of the range, and prints where the trace is.

        results: arrays of step `number`, for which the trace waits.
        """
        if not self._is_tracing or number < self._steps[-1]:
            return
        jax.block_until_ready(results)  # because a step returns before the devices have computed it
        self.close()
        self._print_line(
            f"profile of the steps to {number}: tensorboard --logdir {self._folder}, or perfetto_trace.json.gz in it "
            "at https://ui.perfetto.dev"
        )

    def close(self) -> None:
        """Ends the trace if one is running."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
