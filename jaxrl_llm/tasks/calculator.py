"""A calculator: the policy writes `<calculator>2*(3+4)</calculator>`, and reads `<result>14</result>`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne
from jaxrl_llm.tasks.protocol import Reply

OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
BEGIN, END = "<calculator>", "</calculator>"
# Larger numbers are refused, because a power of powers would compute for hours.
LARGEST = 10**100


class Calculator:
    """Environment that computes the expression between the tags. A turn without tags is the last one."""

    stops = (END,)

    def __init__(self, *, most_characters: AtLeastOne):
        """most_characters: largest length of an expression."""
        self._max_characters = most_characters

    def reset(self, row: dict[str, Any]) -> None:
        """Ignores the row."""

    def step(self, text: str) -> Reply:
        """Computes the last expression of the turn."""
        if END not in text:
            return Reply(done=True)
        expression = text.rpartition(END)[0].rpartition(BEGIN)[2].strip()
        try:
            result = calculated(expression, self._max_characters)
        except ValueError as error:
            return Reply(f"<result>error: {error}</result>", metrics={"calls": 1.0, "invalid": 1.0})
        return Reply(f"<result>{result}</result>", metrics={"calls": 1.0})


def calculated(expression: str, most_characters: int) -> str:
    """Returns the value of an expression to 12 digits. Raises: ValueError, if the text has no value."""
    if len(expression) > most_characters:
        raise ValueError(f"longer than {most_characters} characters")
    try:
        return f"{compute(ast.parse(expression, mode='eval').body):.12g}"
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(str(error)) from error


def compute(node: ast.expr, allowed: Collection[type[ast.AST]] = tuple(OPERATORS)) -> float:
    """Returns the value of numbers joined by + - * / // % ** and brackets, or only by the operators `allowed`.

    Raises: ValueError, ArithmeticError.
    """
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in allowed:
            return OPERATORS[type(op)](compute(operand, allowed))
        case ast.BinOp(left=left_operand, op=op, right=right_operand) if type(op) in allowed:
            a, b = compute(left_operand, allowed), compute(right_operand, allowed)
            if isinstance(op, ast.Pow) and (abs(b) > 1000 or abs(a) > LARGEST):
                raise ValueError("the power is too large")
            value = OPERATORS[type(op)](a, b)
            if isinstance(value, complex) or abs(value) > LARGEST:
                raise ValueError("the result is too large, or no real number")
            return value
    raise ValueError(f"{ast.unparse(node)} is no number, and none of + - * / // % **")
