"""Reads calls of tools from turns of the policy, and renders results as the chat template writes them between turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.rollout.call_forms import HERMES, PROBE, QUESTION, CallForm, argument_types, choose_form

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
        self._special_text = re.compile(ends or "(?!)")
        self._end = re.compile(rf"\s*({ends or '(?!)'})")

    @cached_property
    def form(self) -> CallForm:
        """The form in which the template writes calls. Raises: UserError, if it is unknown."""
        return choose_form(self._tokenizer, self._args)

    def read_turn(self, turn: Sequence[int], row_args: Mapping[str, Any]) -> str:
        """Returns the text of a turn, in which all calls have the form that environments read."""
        if self.form is HERMES:
            return self._tokenizer.decode(turn, skip_special_tokens=True)
        # Special tokens are a part of other forms.
        text = self.form.rewrite(self._tokenizer.decode(turn), self._types(row_args))
        return self._special_text.sub("", text)

    def _types(self, row_args: Mapping[str, Any]) -> Any:
        return argument_types({**self._args, **row_args}.get("tools", ()))

    def check(self, row_args: Mapping[str, Any]) -> None:
        """Renders difficult results, to check the template.

        Raises: UserError, if the template does not accept or does not show results, or writes calls in an unknown form.
        """
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
        _ = self.form  # raises UserError if the template writes calls in an unknown form

    def render_results(self, turn: Sequence[int], results: Sequence[str], row_args: Mapping[str, Any]) -> str:
        """Returns the text from the end of a turn, which has these token ids, to the start of the next turn.

        If the turn does not end with a special token, the text starts with one. row_args: arguments of the chat
        template from the data row.
        Raises: any error of the template; ValueError, if the template does not end a turn with a special token.
        """
        if self._needs_calls:
            text_after_turn = self._render_after_calls(turn, results, row_args)
        else:
            text_after_turn = self._render_after_answer(results, row_args)
        if not (end := self._end.match(text_after_turn)):
            raise ValueError(f"it writes {text_after_turn[:20]!r} after an answer, which is no special token")
        return text_after_turn[end.end() if turn and turn[-1] in self._special else end.start(1) :]

    @cached_property
    def _needs_calls(self) -> bool:
        """Whether the template shows results in its own form only after calls, as the templates of Gemma 4 do."""
        try:
            after_calls = self._render_after_calls([], MARKED_RESULTS[:1], {})
        except Exception:  # a chat template may raise any error
            return False
        try:
            return self._render_after_answer(MARKED_RESULTS[:1], {}) != after_calls
        except Exception:
            return True

    def _render_after_answer(self, results: Sequence[str], row_args: Mapping[str, Any]) -> str:
        """Returns the text after an answer that stands for a turn."""
        # The text is cut at a mark. Comparison with a text without results would fail, because a template may write
        # the last answer in another form.
        return self._render({"role": "assistant", "content": TURN_MARK}, results, row_args).partition(TURN_MARK)[2]

    def _render_after_calls(self, turn: Sequence[int], results: Sequence[str], row_args: Mapping[str, Any]) -> str:
        """Returns the text after a message with the calls of a turn. The calls keep their names, but no arguments."""
        parts = self.form.find(self._tokenizer.decode(turn), self._types(row_args)) if len(turn) else []
        names = [call["name"] for part in parts for call in part.calls or [PROBE]]
        names = (names + [PROBE["name"]] * len(results))[: len(results)]
        calls = [
            {"type": "function", "id": f"{i:09}", "function": {"name": name, "arguments": {}}}
            for i, name in enumerate(names)
        ]
        text = self._render({"role": "assistant", "content": "", "tool_calls": calls}, results, row_args, names)
        text = text.rpartition(QUESTION)[2]
        return text[self.form.find(text, {})[-1].end :]

    def _render(
        self, answer: Mapping[str, Any], results: Sequence[str], row_args: Mapping[str, Any], names: Sequence[str] = ()
    ) -> str:
        """Returns a conversation with an answer and the results of its calls. names: tools of the calls, if known."""
        messages = [
            {"role": "user", "content": QUESTION},
            answer,
            # Mistral's templates require an id of nine letters or digits.
            *({"role": "tool", "content": x, "tool_call_id": f"{i:09}"} for i, x in enumerate(results)),
        ]
        for message, name in zip(messages[2:], names, strict=False):
            message["name"] = name
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{**self._args, **row_args}
        )
