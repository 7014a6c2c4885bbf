"""Functions as tools.

The chat template describes the functions in the prompt. The policy writes a call in the form of its template, which
`rollout.call_forms` rewrites as `<tool_call>{"name": "calculate", "arguments": {"expression": "2*3"}}</tool_call>`. The
template puts the results into messages of the role "tool". A turn ends with the model's own stop token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from jaxrl_llm.config.names import resolve
from jaxrl_llm.errors import UserError, describe, summarize_error
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.tasks import TOOLS, calculator
from jaxrl_llm.tasks.protocol import OwnError, Reply

CLOSED = "</tool_call>"
CALL = re.compile(rf"<tool_call>(.*?){CLOSED}", re.DOTALL)


class Tools:
    """Environment that calls the functions which the policy names. A turn without a call is the last one."""

    stops = ()

    def __init__(self, *, functions: tuple[str, ...]):
        """functions: names, such as my.module.f, of functions with types and a docstring that explains the arguments.

        Raises: UserError, if a function does not exist, or if two have the same last name.
        """
        self._functions = {name.rpartition(".")[2]: resolve(name, TOOLS, "config.env.functions") for name in functions}
        if len(self._functions) != len(functions):
            raise UserError(
                f"config.env.functions = {functions}: the last parts of the names must differ, because the policy uses "
                "them to call functions"
            )

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Descriptions of the functions for the chat template. Raises: UserError, for an incomplete docstring."""
        return schemas_of(self._functions.values(), "config.env.functions")

    def reset(self, row: dict[str, Any]) -> None:
        """Ignores the row."""

    def step(self, text: str) -> Reply:
        """Calls all functions of the turn, in order."""
        return answer_calls(text, self._functions)


def schemas_of(functions: Iterable[Callable[..., Any]], field: str) -> list[dict[str, Any]]:
    """Returns the JSON schemas of functions, from their types and docstrings, for the chat template.

    field: config field with the functions. Raises: UserError, for an incomplete docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return [get_json_schema(function) for function in functions]
    except Exception as error:
        raise UserError(
            f"{field}: {describe(error)}; each argument needs a type, and a line under `Args:` in the docstring"
        ) from error


def answer_calls(text: str, functions: Mapping[str, Callable[..., Any]]) -> Reply:
    """Calls all functions that a turn names, in order. A turn without a call ends the episode.

    functions: the functions that the policy may call, by the names in its calls.
    """
    # The search ends at the last closing tag, because opening tags after it would take quadratic time.
    calls = CALL.findall(text, 0, text.rfind(CLOSED) + len(CLOSED))
    if not calls:
        return Reply(done=True)
    metrics = {"calls": float(len(calls)), "invalid": 0.0, "errors": 0.0, "own_errors": 0.0}
    return Reply(tuple(_answer(call, functions, metrics) for call in calls), metrics=metrics)


def _answer(call: str, functions: Mapping[str, Callable[..., Any]], metrics: dict[str, float]) -> str:
    """Returns the result of a call, or its error, as text for the policy. Counts errors in `metrics`.

    call: the JSON text between the tags.
    """
    try:
        request = json.loads(call)
        function, arguments = functions[request["name"]], request.get("arguments", {})
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        metrics["invalid"] += 1
        return f"error: this is no call of {', '.join(functions)}: {summarize_error(error)}"
    try:
        result = function(**arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:  # a tool may raise any error
        metrics["own_errors" if isinstance(error, OwnError) else "errors"] += 1
        return f"error: {summarize_error(error)}"


def calculate(expression: str) -> str:
    """
    Computes an arithmetic expression.

    Args:
        expression: numbers joined by + - * / // % ** and brackets
    """
    return calculator.calculated(expression, 200)


def run_python(code: str) -> str:
    """
    Runs a Python program, and returns what it prints.

    Args:
        code: the program
    """
    sandbox.require_sandbox()
    output, errors, error, _ = sandbox.run_program(code, seconds=5.0, memory=512, characters=2000)
    if error:
        raise OwnError(f"{error}\n{output}{errors}")
    return output + errors
