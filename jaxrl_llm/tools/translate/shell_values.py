"""Expands the words of a shell script with the values of its variables, and computes its tests [ … ] and [[ … ]].

shell.py calls it for each command of a recipe of another trainer. An unknown variable stays as $name in the text. The
status of a test is None if it is unknown: a text with a $ in it is, because the script does not say the variable.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.arguments import OPERATORS, calculated
from jaxrl_llm.tools.translate.shell_words import Heredoc, Lexer, Part, Word

# $name, ${name[index]} and ${name:-default}; ${name:=default} also sets the variable.
PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|@)(?:\[(\d+|@)\])?(?:(:?[-=])(.*))?", re.DOTALL)
# A brace expansion {a,b} or {1..3}, which is not computed.
BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
# A field of an unquoted value, which ends at a blank outside $(date +%s) and ${NODES[0]}. The counts bound the time.
FIELD = re.compile(r"(?:\$\((?:[^()]|\([^()]{0,200}\)){0,400}\)|\$\{[^{}]{0,400}\}|[^ \t\n])+")
# {name: elements} of variables; a variable that is no array has one element
Variables: TypeAlias = dict[str, list[str]]
MAX_LENGTH = 100_000  # characters of a variable; an element of an array counts ten more
# Arithmetic of $((…)): the shell has whole numbers, and rounds a division towards zero.
SHELL_OPERATORS = OPERATORS | {ast.Div: lambda a, b: math.trunc(a / b), ast.Mod: lambda a, b: int(math.fmod(a, b))}
# {operator of a test: comparison of two numbers, or of two texts}
COMPARISONS = {"=": operator.eq, "==": operator.eq, "-eq": operator.eq, "!=": operator.ne, "-ne": operator.ne}
COMPARISONS |= {"-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge}


@dataclass
class ShellVariables:
    """Variables of a shell script.

    The variable "@" has the arguments of the script, or of the function that is followed.
    """

    variables: Variables = field(default_factory=lambda: {"HOME": ["~"], "PWD": ["."], "@": []})

    def assign(self, word: Word) -> None:
        """Sets the variable of a word name=value, name+=value or name=(…)."""
        if not (match := word.assignment):
            return
        name, index, appends = match.groups()
        values = self.variables.get(name, []) if appends else []
        if index:
            self.forget([name])
        elif word.array is not None:
            self.variables[name] = [*values, *(value for element in word.array for value in self.fields(element))]
        else:
            self.variables[name] = ["".join(values[:1]) + self.text(word)[match.end() :], *values[1:]]
        if sum(len(value) + 10 for value in self.variables[name]) > MAX_LENGTH:
            raise UserError(f"the variable {name} grows without an end: name a script that starts a training")

    def forget(self, names: Iterable[str]) -> None:
        """Makes variables unknown, such as those that `read` sets."""
        self.variables |= {name: [f"${{{name}: it is not read}}"] for name in names}

    def text(self, word: Word) -> str:
        """Returns a word as one text, which is not split."""
        return "".join(" ".join(self.expanded(part)) for part in word.parts)

    def fields(self, word: Word) -> list[str]:
        """Returns the fields that a word becomes. An array or an unquoted variable may become several or none."""
        outside_quotes = [part.text if part.kind == "text" and not part.is_quoted else "x" for part in word.parts]
        if BRACES.search("".join(outside_quotes)):
            # "$(" marks a text that is not known.
            return [f"{self.text(word).replace('{', '$({', 1)})"]
        fields: list[str] = []
        for part in word.parts:
            expansion = list(self.expanded(part))
            if part.kind == "parameter" and not part.is_quoted and "IFS" in self.variables:
                # IFS may split the value at other characters than blanks.
                expansion = [f"$({part.text}: IFS is set)"]
            elif not part.is_quoted:
                expansion = [text for value in expansion for text in FIELD.findall(value)]
            # The first field joins the text before it, and only the last field joins the text after it, as in bash.
            if fields and expansion:
                fields[-1] += expansion.pop(0)
            fields += expansion
        return fields

    def expanded(self, part: Part) -> list[str]:
        """Returns the values that a part of a word becomes: a text, a variable, a printed text or a number."""
        if part.kind == "text":
            return [part.text]
        if part.kind == "arithmetic":
            return [self.arithmetic_result(part.text)]
        return self.command_output(part.text) if part.kind == "command" else self.parameter_values(part)

    def command_output(self, text: str) -> list[str]:
        """Returns what $(…) prints: nothing of a comment, or "." for a folder of the script."""
        if text.lstrip().startswith("#") or not text.strip():
            return []
        # The folder of the script is where files are looked for.
        if text.strip() == "pwd" or ("dirname" in text and re.search(r"\$\{?0|BASH_SOURCE", text)):
            return ["."]
        if re.match(r"cat\s*<<", text.strip()):
            *_, heredoc = (token for token in Lexer(f"{text}\n").tokens() if isinstance(token, Heredoc))
            return [self.heredoc_text(heredoc).rstrip("\n")]
        return [f"$({' '.join(text.split())})"]

    def parameter_values(self, part: Part) -> list[str]:
        """Returns what $name or ${…} is: all elements of an array, one of them, or a default."""
        if part.text == "#":
            return [str(len(self.variables["@"]))]
        # An unknown variable keeps its text, such as $LR, so that the translation can name it.
        as_written = [f"${part.text}" if re.fullmatch(r"\w+", part.text) else f"${{{part.text}}}"]
        if not (match := PARAMETER.fullmatch(part.text)):
            return as_written
        name, index, sign, default = match.groups()
        values = self.variables.get("@" if name.isdigit() else name)
        if values is not None and "@" not in (name, index):
            # One element is meant: $name is the first of an array, and $1 the first argument, as $0 is the script.
            position = int(name) - 1 if name.isdigit() else int(index or 0)
            values = values[max(position, 0) : position + 1] or None
        # A colon makes an empty text count as not set.
        if values is not None and (not sign or sign[0] != ":" or any(values)):
            return values
        if not sign:
            return as_written
        value = self.expanded_text(default, is_quoted=part.is_quoted)
        self.variables |= {name: [value]} if sign[-1] == "=" else {}
        return [value]

    def expanded_text(self, text: str, *, is_quoted: bool = True) -> str:
        """Expands a text inside the marks of a part, such as the default in ${name:-default}."""
        return self.text(Word(tuple(Lexer(text).parts("", is_quoted=is_quoted)), 0))

    def heredoc_text(self, heredoc: Heredoc) -> str:
        """Returns the text of a heredoc, whose variables are expanded if its mark is not quoted."""
        # A double quotation mark has no meaning in a heredoc.
        quoted = re.sub(r'(\\?)"', r'\1\1\\"', heredoc.text)
        return heredoc.text if heredoc.is_literal else self.expanded_text(quoted)

    def arithmetic_result(self, text: str) -> str:
        """Returns the result of an arithmetic expression $((…)); the expression itself if a variable is unknown."""
        names = {name: values[0] for name, values in self.variables.items() if len(values) == 1}
        inside = self.expanded_text(text)
        try:
            total = calculated(inside, names, SHELL_OPERATORS)
        except (ValueError, KeyError, SyntaxError, ArithmeticError, RecursionError):
            return f"$(({inside.replace(' ', '')}))"
        # The shell wraps larger numbers around.
        return str(total) if abs(total) < 2**63 else f"$(({inside}))"


def merged(states: Sequence[Variables]) -> Variables:
    """Returns variables of which it is unknown which of several states they have."""
    variables: Variables = {}
    for name in sorted({name for state in states for name in state}):
        arrays = [state.get(name, []) for state in states]
        # The first elements that the array has in each state are known, and all later elements are unknown.
        equal_elements = [len(set(values)) == 1 for values in zip(*arrays, strict=False)]
        shared_count = [*equal_elements, False].index(False)
        is_same = all(len(array) == shared_count for array in arrays)
        variables[name] = [*arrays[0][:shared_count], *([] if is_same else [f"${{{name}: a branch decides}}"])]
    return variables


def status_of_test(words: list[str]) -> bool | None:
    """Returns the status of a test, which is known for one text, -n or -z with a text, and a comparison.

    words: all words of the test, from [, [[ or `test` on.
    """
    sides = words[1:-1] if words[-1] in ("]", "]]") else words[1:]
    match sides:
        case [text] | ["-n", text]:
            return is_set(text)
        case ["-z", text]:
            return negated(is_set(text))
        case [first, sign, second]:
            return compared(first, sign, second, is_pattern=words[0] == "[[")
    return None


def negated(status: bool | None) -> bool | None:
    """Returns the opposite of a status; None if the status is unknown."""
    return None if status is None else not status


def compared(first: str, sign: str, second: str, *, is_pattern: bool = False) -> bool | None:
    """Returns whether a comparison holds. is_pattern: the second side is a pattern with * and ?."""
    compare = COMPARISONS.get(sign)
    is_equal = compare is operator.eq
    # A comparison with the empty text asks whether a variable is set. A variable that the script never sets is unset.
    if compare in (operator.eq, operator.ne) and "" in (first, second) and "$" in first + second:
        known_status = is_set(first or second)
        return negated(known_status) if is_equal else known_status
    if not compare or "$" in first + second:
        return None
    # 08 and 8 are equal.
    if all(re.fullmatch(r"\s*-?\d+\s*", side) for side in (first, second)):
        return compare(int(first), int(second))
    is_same = fnmatchcase(first, second) if is_pattern else first == second
    return is_same == is_equal if compare in (operator.eq, operator.ne) else None


def is_set(text: str) -> bool | None:
    """Whether a text is not empty; None if unknown. A variable that the script never sets counts as empty."""
    if re.fullmatch(r"\$(\w+|\{\w+\})", text):
        return False
    return None if "$" in text else bool(text)
