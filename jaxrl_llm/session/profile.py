"""A trace of some steps, which XProf, TensorBoard and Perfetto open: `config.log.profile = "3:5"`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.errors import UserError


def steps_of(text: str, num_steps: int) -> range:
    """Returns the steps of "FIRST:LAST"; "": none. Raises: UserError, if the run has no such steps."""
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= num_steps:
        example = f"{min(3, num_steps)}:{min(5, num_steps)}"
        raise UserError(
            f"config.log.profile = {text!r}: give the first and the last step, from 1 to {num_steps}, such as "
            f"{example!r}"
        )
    return range(int(match[1]), int(match[2]) + 1)


class Profile:
    """Traces the steps of a range, in each process, into a folder."""

    def __init__(self, steps: range, folder: Path, say: Callable[[str], None]):
        self._steps, self._folder, self._say, self._runs = steps, folder, say, False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the block, if `number` is of the range. A run that begins within the range traces the rest of it."""
        if number in self._steps and not self._runs:
            self._runs = True
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def end(self, number: int, results: Any) -> None:
        """Ends the trace after the last step of the range, whose results it waits for, and says where it is."""
        if not self._runs or number < self._steps[-1]:
            return
        jax.block_until_ready(results)  # a step is given to the devices, and returns
        self.close()
        self._say(
            f"profile of the steps to {number}: tensorboard --logdir {self._folder}, or perfetto_trace.json.gz in it "
            "at https://ui.perfetto.dev"
        )

    def close(self) -> None:
        """Ends a trace that goes on."""
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
