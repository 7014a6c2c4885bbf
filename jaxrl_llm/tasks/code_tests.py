"""Reads the tests of a row for `code.accuracy`, and finds tests that cannot judge a program."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.sandbox.program_tests import encode_tests
from jaxrl_llm.tasks import is_empty

# Words in the names of functions that may end a test, such as assertEqual.
CHECK = re.compile("assert|fail|exit", re.IGNORECASE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class RowTests(NamedTuple):
    """Tests of a row. Each is Python text, a pair of input and output, or a call: (name, arguments, result)."""

    tests: list[Any]  # [] if the row has no tests, or none that can judge a program
    fault: str = ""  # reason why the tests cannot judge a program; "" if they can


def tests_of(tests: Any, answer: Any, columns: dict[str, Any]) -> RowTests:
    """Returns the tests of a row, from the first of `tests`, `answer` and `columns` that holds tests.

    columns: {"inputs": ..., "outputs": ..., "fn_name": ...} of the row. An `answer` without an assert statement and
    without inputs belongs to another task. Raises: ValueError, for tests of another form.
    """
    tests, answer = (None if is_empty(value) else _loaded(value) for value in map(_plain, (tests, answer)))
    pairs = {key: value for key, value in _plain(columns).items() if not is_empty(value)} or None
    if not (isinstance(answer, dict) and answer.get("inputs")) and "assert" not in str(answer):
        answer = None
    chosen = next((x for x in (tests, answer, pairs) if x is not None), None)
    if chosen is None:
        return RowTests([])
    if isinstance(chosen, dict) and chosen.get("inputs") and len(chosen["inputs"]) == len(chosen.get("outputs", ())):
        cases = list(zip(chosen["inputs"], chosen["outputs"], strict=True))
        name = chosen.get("fn_name")
        if is_empty(name):
            return RowTests([(_text(i), _text(o)) for i, o in cases])
        try:
            calls = [(name, *_call(i, o)) for i, o in cases]
            # The calls are encoded for their errors alone, which mean that they cannot be sent to the judge.
            encode_tests(calls)
        except (ValueError, TypeError, RecursionError) as error:
            return RowTests([], f"an input or output of {name} must be JSON or plain data ({error})")
        return RowTests(calls)
    if isinstance(chosen, (list, tuple)) and chosen and all(isinstance(x, str) for x in chosen):
        fault = _fault(chosen)
        return RowTests([] if fault else list(chosen), fault)
    raise ValueError(
        f"a row has the tests {str(chosen)[:100]!r}, which must be a list of Python texts, or inputs and outputs"
    )


def _loaded(tests: Any) -> Any:
    """Returns the value of JSON text, and other text as one test in Python."""
    try:
        return json.loads(tests) if isinstance(tests, str) else tests
    except (ValueError, RecursionError):
        return [tests]


def _plain(value: Any) -> Any:
    """Returns a value with plain types in place of NumPy's, which rows of pandas and of functions may have."""
    if isinstance(value, np.generic):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {_plain(k): _plain(x) for k, x in value.items()} if type(value) is dict else value


def _text(stream: Any) -> str:
    """Returns standard input or output as text. stream: text, or a list of its lines."""
    return "\n".join(map(str, stream)) if isinstance(stream, (list, tuple)) else str(stream)


def _call(arguments: Any, result: Any) -> tuple[list[Any], Any]:
    """Returns the arguments of a call, and its result.

    If the arguments are text, each of its lines is JSON, and a text as result is JSON too. Otherwise a text as result
    is the result itself.
    """
    if not isinstance(arguments, str):
        return list(arguments), result
    return [*map(json.loads, arguments.splitlines())], json.loads(result) if isinstance(result, str) else result


def _fault(tests: Sequence[str]) -> str:
    """Returns the reason why tests in Python cannot judge a program; "" if all are Python and one has an assertion."""
    checks = [_check_test(test) for test in tests]
    fault = next((fault for _, fault in checks if fault), "")
    if fault or any(can_fail for can_fail, _ in checks):
        return fault
    return f"the test {shown(tests[0])} has no assertion that runs"


def shown(test: str) -> str:
    """Returns the begin of a test in one line, for messages."""
    return repr(" ".join(test.split())[:100])


@lru_cache(maxsize=10_000)
def _check_test(test: str) -> tuple[bool, str]:
    """Returns whether a test may fail, and the reason why it is no Python, "" if it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(test)
            # `compile` refuses more than `ast.parse`, such as a return outside a function.
            compile(tree, "test", "exec", dont_inherit=True)
    # Null bytes are a ValueError; deeply nested brackets are a RecursionError or MemoryError.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return False, f"the test {shown(test)} is no valid Python ({getattr(error, 'msg', error)})"
    definitions = {x.name for x in ast.walk(tree) if isinstance(x, (*FUNCTIONS, ast.ClassDef))}
    module_nodes = list(_module_nodes(tree))
    calls_own_function = any(isinstance(x, ast.Name) and x.id in definitions for x in module_nodes)
    return any(map(_is_check, ast.walk(tree) if calls_own_function else module_nodes)), ""


def _module_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when a module is executed: all but the bodies of its functions."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, FUNCTIONS):
            pending += ast.iter_child_nodes(node)


def _is_check(node: ast.AST) -> bool:
    """Returns whether a part of a test may make it fail."""
    if isinstance(node, ast.Assert):
        # An assert of a tuple, as in `assert (f(1) == 2, "text")`, never fails.
        return not isinstance(node.test, ast.Tuple) and not (isinstance(node.test, ast.Constant) and node.test.value)
    name = getattr(node, "id", getattr(node, "attr", ""))
    return isinstance(node, ast.Raise) or bool(CHECK.search(name))
