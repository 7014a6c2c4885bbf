"""A Python tool: the policy writes `<python>print(2 ** 10)</python>`, and reads `<output>1024</output>`.

Each program runs in a process of its own, which the kernel confines (`host.sandbox`). It needs Linux 5.13 or later.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne, Positive
from jaxrl_llm.envs.protocol import Reply
from jaxrl_llm.host import sandbox

__all__ = ("Python",)

BEGIN, END = "<python>", "</python>"


class Python:
    """Runs what stands between the tags. A turn without them is the last one."""

    stops = (END,)

    def __init__(self, *, seconds: Positive, memory: AtLeastOne, most_characters: AtLeastOne):
        """seconds: of a program; memory: of a program in MiB; most_characters: of its output. Raises: UserError."""
        sandbox.refuse_without()
        self._run = partial(sandbox.run, seconds=seconds, memory=memory, characters=most_characters)

    def reset(self, row: dict[str, Any]) -> None:
        """Needs nothing of the row."""

    def step(self, text: str) -> Reply:
        """Runs the last program of the turn."""
        if END not in text:
            return Reply(done=True)
        code = text.rpartition(END)[0].rpartition(BEGIN)[2]
        output, error, _ = self._run(code.strip("\n"))
        said = output.rstrip() + (f"\nerror: {error}" if error else "")
        return Reply(f"<output>{said}</output>", metrics={"programs": 1.0} | ({"errors": 1.0} if error else {}))
