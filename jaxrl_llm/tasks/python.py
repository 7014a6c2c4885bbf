"""A Python tool: the policy writes `<python>print(2 ** 10)</python>`, and reads `<output>1024</output>`.

Each program runs in a sandbox of its own (`jaxrl_llm.sandbox`), and the policy reads what it prints and its errors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.tasks.protocol import Reply

BEGIN, END = "<python>", "</python>"


class Python:
    """Environment that runs the program between the tags. A turn without tags is the last one."""

    stops = (END,)

    def __init__(self, *, seconds: sandbox.Seconds, memory: sandbox.Mebibytes, most_characters: AtLeastOne):
        """Limits of a program: seconds; memory in MiB; most_characters of its output.

        Raises: UserError, if this machine has no sandbox.
        """
        sandbox.require_sandbox()
        self._run = partial(sandbox.run_program, seconds=seconds, memory=memory, characters=most_characters)

    def reset(self, row: dict[str, Any]) -> None:
        """Ignores the row."""

    def step(self, text: str) -> Reply:
        """Runs the last program of the turn."""
        if END not in text:
            return Reply(done=True)
        code = text.rpartition(END)[0].rpartition(BEGIN)[2]
        output, errors, error, _ = self._run(code.strip("\n"))
        shown = "\n".join(filter(None, (output.rstrip(), errors.rstrip(), error and f"error: {error}")))
        return Reply(f"<output>{shown}</output>", metrics={"programs": 1.0, "own_errors": float(bool(error))})
