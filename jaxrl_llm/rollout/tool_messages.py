"""Renders results of tools as the text that a chat template writes between two turns of the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError, describe

TURN_MARK = "(a-turn-of-the-policy)"  # text in place of a turn, without blanks, tags and quotes, which templates change
MARKED_RESULTS = ("first-result", "second-result")
# Results that a template must accept. It may write them in another form: as JSON, or without the blanks at the ends.
HARD_RESULTS = ('"a" \\ \'b\'\n{"c": [1]} {{ d }}\n', "  blanks  ", "Zürich 東京 🙂", "", "3")


class ToolMessages:
    """Writes results of tools as messages of the role "tool", with the chat template and its arguments."""

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]):
        """schemas: JSON schemas of the environment's tools, or none; template_args: arguments of the chat template."""
        self._tokenizer, self._args = tokenizer, {**template_args, **({"tools": list(schemas)} if schemas else {})}
        special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if tokenizer.eos_token:
            special[tokenizer.eos_token_id] = tokenizer.eos_token
        self._special = special.keys()
        ends = "|".join(map(re.escape, sorted(special.values(), key=len, reverse=True)))
        # A tokenizer without special tokens gets a pattern that matches nothing.
        self._end = re.compile(rf"\s*({ends or '(?!)'})")

    def check(self, row_args: Mapping[str, Any]) -> None:
        """Renders difficult results. Raises: UserError, if the template does not accept or does not show results."""
        try:
            rendered = self.render_results([], MARKED_RESULTS, row_args)
            for results in (HARD_RESULTS, *((result,) for result in HARD_RESULTS)):
                self.render_results([], results, row_args)
        except Exception as error:
            # A chat template may raise any error.
            raise UserError(
                f"config.env has tools, but the model's chat template does not accept their results "
                f"({describe(error)}): use another model, or an environment whose observations are text"
            ) from error
        if not re.search(".*".join(MARKED_RESULTS), rendered, re.DOTALL):
            raise UserError(
                "config.env has tools, but the model's chat template does not show their results: use another model, "
                "or an environment whose observations are text"
            )

    def render_results(self, turn: Sequence[int], results: Sequence[str], row_args: Mapping[str, Any]) -> str:
        """Returns the text from the end of a turn, which has these token ids, to the start of the next turn.

        If the turn does not end with a special token, the text starts with one. row_args: arguments of the chat
        template from the data row.
        Raises: any error of the template; ValueError, if the template does not end a turn with a special token.
        """
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": TURN_MARK},
            # Mistral's templates require an id of nine letters or digits.
            *({"role": "tool", "content": x, "tool_call_id": f"{i:09}"} for i, x in enumerate(results)),
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{**self._args, **row_args}
        )
        # The text is cut at a mark. Comparison with a text without results would fail, because a template may write
        # the last answer in another form.
        text_after_turn = text.partition(TURN_MARK)[2]
        if not (end := self._end.match(text_after_turn)):
            raise ValueError(f"it writes {text_after_turn[:20]!r} after an answer, which is no special token")
        return text_after_turn[end.end() if turn and turn[-1] in self._special else end.start(1) :]
