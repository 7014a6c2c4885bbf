"""The text of a completion as its tokens arrive: stop strings, calls of tools, and pieces for a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.rollout.jax.open_stream import NewTokens
from jaxrl_llm.tasks.tools import CALL

CALL_START = "<tool_call>"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders write it for a character whose last bytes have not arrived


@dataclass
class ServedChoice:
    """One completion of a request."""

    index: int
    tokenizer: Any
    stops: Sequence[str] = ()
    parses_calls: bool = False  # whether calls of tools leave the text
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # version of the weights of each token
    end: str = ""  # why it has ended; "" if it continues
    text: str = ""  # text so far, without calls and without a stop string
    calls: list[dict[str, Any]] = field(default_factory=list)
    streamed: int = 0  # characters that `next_piece` has returned

    def add(self, new: NewTokens) -> None:
        """Appends tokens, up to the one that completes a stop string."""
        if self.end:
            return
        earlier_tokens = len(self.tokens)
        self.tokens += new.tokens
        self.logprobs += new.logprobs
        self.versions += [new.version] * len(new.tokens)
        self.end, self.text = new.end, self._decode(len(self.tokens))
        if any(stop in self.text for stop in self.stops):
            self._end_at_stop_string(earlier_tokens)
        if self.end and self.parses_calls:
            self._parse_calls()

    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self.calls and self.end == "stop" else self.end or None

    def next_piece(self) -> str:
        """Returns the text that has become certain since the last piece."""
        end = len(self.text)
        if not self.end:
            end = len(self.text.rstrip(INCOMPLETE))
            marks = [*self.stops, *([CALL_START] if self.parses_calls else [])]
            # Text waits if it may be the beginning of a stop string or of a call. A newline belongs to a call after it.
            if self.parses_calls:
                start = self.text.find(CALL_START)
                end = min(end, start if start >= 0 else end)
                end -= self.text[:end].endswith("\n")
            end = min([end, *(self._held_from(mark) for mark in marks)])
        piece = self.text[self.streamed : end]
        self.streamed = max(end, self.streamed)
        return piece

    def _held_from(self, mark: str) -> int:
        """Returns where the end of the text begins that is also the beginning of `mark`."""
        longest = min(len(mark) - 1, len(self.text))
        count = next((n for n in range(longest, 0, -1) if self.text.endswith(mark[:n])), 0)
        start = len(self.text) - count
        return start - (count > 0 and self.parses_calls and self.text[:start].endswith("\n"))

    def _decode(self, count: int) -> str:
        return self.tokenizer.decode(self.tokens[:count], skip_special_tokens=True)

    def _end_at_stop_string(self, earlier_tokens: int) -> None:
        """Drops the tokens after the first one that completes a stop string in the text.

        earlier_tokens: number of tokens whose text has no stop string.
        """
        for count in range(earlier_tokens + 1, len(self.tokens) + 1):
            text = self._decode(count)
            stop_starts = [text.find(stop) for stop in self.stops if stop in text]
            if stop_starts:
                self.text, self.end = text[: min(stop_starts)], "stop"
                del self.tokens[count:], self.logprobs[count:], self.versions[count:]
                return

    def _parse_calls(self) -> None:
        """Moves the calls from the text to `calls`, in the form of Hermes and Qwen. One bad call leaves all as text."""
        text, _, _ = self.text.partition(CALL_START)
        bodies = CALL.findall(self.text)
        if not bodies or self.text.count(CALL_START) != len(bodies):
            return
        with suppress(ValueError, TypeError, RecursionError):
            self.calls = [_call(**json.loads(body)) for body in bodies]
            self.text = text.removesuffix("\n")


def _call(name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a call in OpenAI's form. Raises: TypeError, if the arguments are no object."""
    if not isinstance(name, str) or not isinstance(arguments := arguments or {}, dict):
        raise TypeError
    # Mistral's templates require an id of nine letters or digits.
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}
