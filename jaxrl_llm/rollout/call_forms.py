"""The forms in which models write calls of tools. The chat template of a model decides its form.

Environments read calls in one form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, so calls in every
other form are rewritten. `choose_form` renders an example call with the chat template, and chooses the form that reads
exactly this call from the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from jaxrl_llm.errors import UserError, describe

Call: TypeAlias = dict[str, Any]  # {"name": text, "arguments": object}
Types: TypeAlias = Mapping[str, Mapping[str, Any]]  # {name of a tool: {name of an argument: its JSON schema}}
Read: TypeAlias = Callable[[str, re.Match[str], Types], tuple[list[Call], int]]

NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # errors of a text that is no valid call
DECODER = json.JSONDecoder()
# The example chat that `choose_form` renders: a question, a call of a tool, and its result.
QUESTION = "(a-question)"
PROBE: Call = {"name": "probe_tool", "arguments": {"text": "two words", "count": 3}}
PROBE_TYPES: Types = {"probe_tool": {"text": {"type": "string"}, "count": {"type": "integer"}}}


class CallText(NamedTuple):
    """A part of a turn that calls tools."""

    start: int
    end: int
    calls: list[Call] | None  # None if the text is no valid call
    content: str  # text of the calls, without their opening


@dataclass(frozen=True)
class CallForm:
    """A form of calls: how a call begins, and how it is read."""

    name: str
    opening: re.Pattern[str]
    # Returns the calls that begin at a match of `opening`, and where they end. Raises one of NO_CALL.
    read: Read

    def find(self, text: str, types: Types) -> list[CallText]:
        """Returns the calls of a turn. text: turn with its special tokens."""
        call_texts, match = list[CallText](), self.opening.search(text)
        while match:
            try:
                calls, end = self.read(text, match, types)
                next_match = self.opening.search(text, end)
            except NO_CALL:
                # A call that cannot be read ends where the next one begins. An opening may be empty.
                next_match = self.opening.search(text, max(match.end(), match.start() + 1))
                calls, end = None, next_match.start() if next_match else len(text)
            call_texts.append(CallText(match.start(), end, calls, text[match.end() : end]))
            match = next_match
        return call_texts

    def rewrite(self, text: str, types: Types) -> str:
        """Returns a turn with all its calls in the form that environments read."""
        parts, part_start = list[str](), 0
        for part in self.find(text, types):
            bodies = [part.content] if part.calls is None else map(json.dumps, part.calls)
            parts += [text[part_start : part.start], *(f"<tool_call>{body}</tool_call>" for body in bodies)]
            part_start = part.end
        return "".join([*parts, text[part_start:]])


def argument_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """Returns the JSON schemas of the arguments of tools, which have the form of `apply_chat_template`."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions if "name" in f}


def choose_form(tokenizer: Any, template_args: Mapping[str, Any]) -> CallForm:
    """Returns the form in which a chat template writes calls. Raises: UserError, if the form is not in FORMS."""
    function = {"type": "function", "id": "000000000", "function": PROBE}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "content": "a-result", "name": PROBE["name"], "tool_call_id": function["id"]},
    ]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **template_args).rpartition(QUESTION)[2]
    except Exception as error:  # a chat template may raise any error
        raise UserError(
            f"config.env has tools, but the model's chat template does not accept their calls ({describe(error)}): use "
            "another model, or an environment whose observations are text"
        ) from error
    own_forms = [form_of_tokenizer(tokenizer)] if getattr(tokenizer, "response_template", None) else []
    for form in (*own_forms, *FORMS):
        call_texts = form.find(rendered, PROBE_TYPES)
        if [part.calls for part in call_texts] == [[PROBE]]:
            return form
    names = ", ".join(form.name for form in FORMS)
    rendered = rendered if PROBE["name"] in rendered else "nothing"
    raise UserError(
        f"config.env has tools, but the form in which the model's chat template writes calls is unknown (it writes "
        f"{rendered!r:.200}); known forms: {names}: use another model, or describe the form by response_template in "
        "its tokenizer_config.json"
    )


def form_of_tokenizer(tokenizer: Any) -> CallForm:
    """Returns the form that the `response_template` of a tokenizer describes, which transformers reads."""

    def read(text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
        tools = [{"name": name, "parameters": {"properties": dict(values)}} for name, values in types.items()]
        calls = tokenizer.parse_response(text, prefix="", tools=tools).get("tool_calls", [])
        return [{name: call["function"][name] for name in ("name", "arguments")} for call in calls], len(text)

    return CallForm("response_template", re.compile(r"\A"), read)


def _checked(call: Any, arguments: str = "arguments") -> Call:
    """Returns a call as environments read it. Raises: KeyError, TypeError."""
    if not isinstance(call["name"], str) or not isinstance(call[arguments], dict):
        raise TypeError
    return {"name": call["name"], "arguments": call[arguments]}


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Returns the text from `start` to `closing`, and where `closing` ends. Raises: ValueError, if it is missing."""
    end = text.index(closing, start)
    return text[start:end], end + len(closing)


def _hermes(text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    body, end = _until(text, match.end(), "</tool_call>")
    return [_checked(json.loads(body))], end


def _llama(text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    call, end = DECODER.raw_decode(text, match.end())
    return [_checked(call, "parameters")], end


def _mistral(text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    calls, end = DECODER.raw_decode(text, match.end())
    return [_checked(call) for call in calls], end


def _named(text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    """Reads a call whose name is a part of its opening, and whose arguments are JSON."""
    arguments, end = DECODER.raw_decode(text, match.end())
    return [_checked({"name": match["name"], "arguments": arguments})], end


def _tagged(argument: re.Pattern[str], text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    """Reads a call with a tag for each argument. The schema of the tool tells texts from other values."""
    body, end = _until(text, match.end(), "</tool_call>")
    values = {m["key"]: m["value"] for m in argument.finditer(body)}
    schemas = types.get(match["name"], {})
    texts = {key for key in values if schemas.get(key, {}).get("type", "string") == "string"}
    arguments = {key: value if key in texts else json.loads(value) for key, value in values.items()}
    return [{"name": match["name"], "arguments": arguments}], end


def _gemma(closing: str, quote: str, text: str, match: re.Match[str], types: Types) -> tuple[list[Call], int]:
    """Reads a call whose arguments are JSON with keys without quotes and with another mark around texts."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    body, end = _until(text, match.end(), closing)
    arguments = parse_content(body, "json", {"unquoted_keys": True, "string_delims": [[quote, quote]]})
    return [_checked({"name": match["name"], "arguments": arguments})], end


PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
HERMES = CallForm("Hermes, Qwen2.5 and Qwen3", re.compile(r"<tool_call>\s*(?=\{)"), _hermes)
FORMS = (
    HERMES,
    CallForm(
        "Qwen3-Coder, Qwen3.5 and Nemotron 3",
        re.compile(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"),
        partial(_tagged, PARAMETER),
    ),
    CallForm("GLM-4.5", re.compile(r"<tool_call>(?P<name>[\w.-]+)\s*"), partial(_tagged, ARGUMENT)),
    CallForm(
        "Llama 3",
        re.compile(r'(?:\A|\|>|(?<=\})[;,\s])\s*(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'),
        _llama,
    ),
    CallForm("Mistral up to version 7", re.compile(r"\[TOOL_CALLS\]\s*(?=\[)"), _mistral),
    CallForm(
        "Mistral from version 11 on", re.compile(r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]"), _named
    ),
    CallForm("Gemma 4", re.compile(r"<\|tool_call>call:(?P<name>[\w.-]+)"), partial(_gemma, "<tool_call|>", '<|"|>')),
    CallForm(
        "FunctionGemma",
        re.compile(r"<start_function_call>call:(?P<name>[\w.-]+)"),
        partial(_gemma, "<end_function_call>", "<escape>"),
    ),
    CallForm(
        "gpt-oss",
        re.compile(
            r"to=functions\.(?P<name>[\w.-]+)[^{<]{0,20}(?:<\|(?:channel|constrain)\|>[^{<]{0,20}){0,2}<\|message\|>\s*"
        ),
        _named,
    ),
)
