"""Results of tools as text that a chat template puts between two turns of the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError, describe

TURN = "(a-turn-of-the-policy)"  # stands for the policy's words. Templates change blanks, tags and quotes
WORDS = ("first-result", "second-result")
# What a template must take, though it may write it in another form: as JSON, or without the blanks at its ends.
HARD = ('"a" \\ \'b\'\n{"c": [1]} {{ d }}\n', "  blanks  ", "Zürich 東京 🙂", "", "3")


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
        """Tries results that are hard to write. Raises: UserError, if the template does not take or not show them."""
        try:
            shown = self.between([], WORDS, row_args)
            for results in (HARD, *((result,) for result in HARD)):
                self.between([], results, row_args)
        except Exception as error:
            # A template may raise anything.
            raise UserError(
                f"the chat template does not take results of tools: {describe(error)}: use another model, or an env "
                "whose observations are text"
            ) from error
        if not re.search(".*".join(WORDS), shown, re.DOTALL):
            raise UserError(
                "the chat template does not show results of tools: use another model, or an env whose observations "
                "are text"
            )

    def between(self, turn: Sequence[int], results: Sequence[str], row_args: Mapping[str, Any]) -> str:
        """Returns the text from the end of a turn, with these token ids, to the beginning of the next one.

        If the turn has no special token at its end, the text begins with one. row_args: arguments of the template that
        a data row has of its own.
        Raises: what the template raises; ValueError, if it does not end the turn with a special token.
        """
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": TURN},
            # Mistral's templates want an id of nine letters or digits.
            *({"role": "tool", "content": x, "tool_call_id": f"{i:09}"} for i, x in enumerate(results)),
        ]
        whole = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{**self._args, **row_args}
        )
        # The text is cut at a mark, and not compared with a text without results, because a template may write the last
        # answer in another form.
        after = whole.partition(TURN)[2]
        if not (end := self._end.match(after)):
            raise ValueError(f"it writes {after[:20]!r} after an answer, which is no special token")
        return after[end.end() if turn and turn[-1] in self._special else end.start(1) :]
