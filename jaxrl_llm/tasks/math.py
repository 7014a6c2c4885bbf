"""Rewards for mathematics with a known answer: math-verify judges the content of the last \\boxed{}.

A table in tests/tasks/test_math.py lists forms of an answer that count as equal, and forms that do not.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from contextlib import suppress
from decimal import Decimal
from functools import cache, partial
from numbers import Number
from typing import Any

from jaxrl_llm.errors import printable
from jaxrl_llm.machine.process import Pool, cpus
from jaxrl_llm.tasks import abstaining, answer_texts, deadline, reads, text_of
from jaxrl_llm.tasks.notation import rewritten, unwrapped

# Time limits of one answer (most take 0.01 s), and of all answers of a batch.
ANSWER_SECONDS, BATCH_SECONDS = 5.0, 60.0
MAX_LENGTH = 2000  # characters of an answer; a longer answer earns 0
SMALL = 1e-3  # numbers below this bound need six correct digits, and all others six correct decimals
PROCESSES, ANSWERS_PER_PROCESS = 8, 32  # largest number of processes, and answers for which one is started


@reads(answer=lambda value: expected_text(value))
def accuracy(
    completions: list[Any], answer: list[Any], *, after: str = "", anchors: bool = False, **columns: Any
) -> list[float | None]:
    """Returns 1 if the last \\boxed{} of the completion is mathematically equal to the answer, else 0.

    after: mark, such as "</think>", after whose last occurrence the box must be, "" for no mark; anchors: whether the
    formula after the last "answer" counts in a completion without a box, as in "The answer is $5$".
    A box earns 0 if it is empty, not closed, longer than MAX_LENGTH characters, or not judged in time. A line on stderr
    counts the answers that were not judged in time.
    Raises: ValueError, if the answer of a row is neither text nor a number.
    """
    texts = answer_texts(completions, columns)
    texts = [text.rpartition(after)[2] if after in text else "" for text in texts] if after else texts
    boxes = [
        last_box(text) or (_if_balanced(anchored(text)) if anchors and not BOX.search(text) else "") for text in texts
    ]
    return abstaining(_judge, boxes, answer)


def equal(texts: list[str], answer: list[Any]) -> list[float | None]:
    """Returns 1 if a text, which may be a box, is mathematically equal to the answer, else 0."""
    return abstaining(_judge, [last_box(text) or _if_balanced(text) for text in texts], answer)


def _if_balanced(text: str) -> str:
    """Returns a text if its braces are balanced, else "", because math-verify would read 34 in "34} or {35"."""
    return text if last_box(f"\\boxed{{{text}}}") == text.strip() else ""


def _judge(texts: list[str], answer: list[Any]) -> list[float]:
    """Returns 1 for each text that is equal to its answer, else 0. Texts that are not judged in time earn 0."""
    pairs = [(_clean(text), _clean(expected_text(a))) for text, a in zip(texts, answer, strict=True)]
    # Verdicts are kept in a dict, so that equal pairs of a group are judged once.
    verdict_of = {pair: _plainly_equal(*pair) for pair in pairs}
    # Only undecided pairs go to the processes of math-verify, because most answers are plain text or numbers.
    undecided = [pair for pair, verdict in verdict_of.items() if verdict is None]
    size = min(PROCESSES, cpus(), -(-len(undecided) // ANSWERS_PER_PROCESS))
    batch_seconds = min(BATCH_SECONDS, deadline() - time.monotonic())
    if undecided:
        verdicts = _pool().map(undecided, size=size, call_seconds=ANSWER_SECONDS, total_seconds=batch_seconds)
        verdict_of |= zip(undecided, verdicts, strict=True)
    late = [pair[0] for pair in pairs if verdict_of[pair] is None]
    if late:
        line = f"math.accuracy: {len(late)} of {len(pairs)} answers were not judged in time and earn 0, the first is "
        print(line + printable(late[0][:100].replace("\n", " ")), file=sys.stderr, flush=True)
    return [float(bool(verdict_of[pair])) for pair in pairs]


def is_boxed(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the last \\boxed{} of the completion is closed and not empty, else 0."""
    return [float(bool(last_box(text_of(c)))) for c in completions]


BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The formula begins at most 50 characters after the word "answer".
ANCHOR = re.compile(r"answer[^$\\]{0,50}(\$\$?|\\\(|\\\[)", re.IGNORECASE)
CLOSING = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}


def anchored(text: str) -> str:
    """Returns the formula $…$, $$…$$, \\(…\\) or \\[…\\] after the last "answer" with a formula; "" if none has one."""
    anchors = list(ANCHOR.finditer(text))
    if not anchors:
        return ""
    start = anchors[-1].end()
    end = text.find(CLOSING[anchors[-1][1]], start)
    return text[start:end].strip() if end >= 0 else ""


def last_box(text: str) -> str | None:
    """Returns the content of the last \\boxed{} or \\fbox{}; None if the text has no box, or the last is not closed.

    A last box that is not closed invalidates earlier boxes too, because the completion was cut while it wrote its final
    answer.
    """
    openings = list(BOX.finditer(text))
    if not openings:
        return None
    start, depth = openings[-1].end(), 1
    for mark in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):  # \{ and \} are no braces
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if not depth:
            return text[start : mark.start()].strip()
    return None


def expected_text(answer: Any) -> str:
    """Returns the answer of a row as text, without GSM8K's "####" and all text before it, or without its box."""
    if isinstance(answer, Number) and not isinstance(answer, complex) and math.isfinite(answer):  # pyright: ignore
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"column 'answer' is {answer!r}, but must be text or a number (set data.convert)")
    answer = answer.split("####")[-1]
    return last_box(answer) or answer


NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3}){1,99}|\d{1,300})(?:\.\d{1,300})?", re.ASCII)
PERCENT = re.compile(rf"({NUMBER.pattern})\s*\\?%", re.ASCII)
BASE = re.compile(r"(\d[\dA-Fa-f]*)_\{?(?:\\text\{)?\(?(\w+)\)?\}{0,2}", re.ASCII)
BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS_IN_A_ROW = re.compile(r"-?\d+(?:\.\d+)?(?: \d+(?:\.\d+)?)+")
PHRASE = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
# Words that are no products of letters. As products, "Tom" would equal "Mot", and the order "ABC" would equal "CBA".
# Short words in lower case, and two capitals, are products.
WORD = re.compile(r"[^\W\d_]{4}|[A-Z][a-z]|[A-Z]{3}")


def _clean(text: str) -> str:
    """Rewrites an answer for math-verify; returns "" if it is too long."""
    return rewritten(text) if len(text) <= MAX_LENGTH else ""


def _plainly_equal(box: str, answer: str) -> bool | None:
    """Compares equal text, integers, percents, numbers with a base, choices (A) and words.

    Returns None if math-verify must decide.
    """
    pair = (box, answer)
    if not box or box == answer:
        return bool(box)
    if all(re.fullmatch(r"-?\d{1,300}", text, re.ASCII) for text in pair):
        return int(box) == int(answer)
    if _is_same_percent(*pair):
        return True
    if any(BASE.fullmatch(text) for text in pair):
        return _digits(box) == _digits(answer)
    if {_brackets(box), _brackets(answer)} == {"set", "tuple"} or _is_endless(box) != _is_endless(answer):
        return False
    choices = [_choice(text) for text in pair]
    if all(choices):
        return choices[0] == choices[1]
    words = [_words(text) for text in pair]
    if words[0] == words[1] != "":
        return True
    # Words that differ only in their case are different names, although math-verify reads X as x.
    if words[0].casefold() == words[1].casefold():
        return False
    # "5 7" is no number, although math-verify reads 12.
    if NUMBERS_IN_A_ROW.fullmatch(box):
        return False
    # Two different phrases are no mathematics, which math-verify would read as products of their letters.
    if all(PHRASE.fullmatch(text) for text in words) and ("\\" in box + answer or WORD.search(unwrapped(answer))):
        return False
    return None


def _is_same_percent(box: str, answer: str) -> bool:
    """Returns whether the two differ only in a percent sign: 50\\% equals 50 here, but 0.5 for math-verify."""
    percents = [PERCENT.fullmatch(text) for text in (box, answer)]
    bare = [match[1] if match else text for match, text in zip(percents, (box, answer), strict=True)]
    if bool(percents[0]) == bool(percents[1]) or not all(NUMBER.fullmatch(text) for text in bare):
        return False
    return len({Decimal(text.replace(",", "")) for text in bare}) == 1


def _digits(text: str) -> tuple[str, str]:
    """Returns the digits of a number, and its base or "". math-verify would read 52_8 as 52."""
    match = BASE.fullmatch(text)
    digits, base = match.groups() if match else (text, "")
    return digits.upper().lstrip("0"), str(BASES.index(base) + 2) if base in BASES else base


def _brackets(text: str) -> str:
    """Returns "set" for \\{1,2\\}, "tuple" for (1,2), [1,2] and the like, else ""."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set"
    return "tuple" if "," in text and text[0] in "([" and text[-1] in ")]" else ""


def _is_endless(text: str) -> bool:
    """Returns whether a list has no end, as in 1, 2, \\ldots"""
    return "," in text and bool(re.search(r"\\[lc]?dots|\.\.|…", text))


def _words(text: str) -> str:
    """Returns a text with words in lower case for comparison. Single letters and commands keep their case."""
    text = re.sub(r"\b([AaPp])\.m\b\.?", r"\1m", " ".join(unwrapped(text).split()))
    text = re.sub(r"(?<=[^\W\d_])\.$", "", text)
    return text if "\\" in text else re.sub(r"[^\W\d_]{2,}", lambda word: word[0].casefold(), text)


def _choice(text: str) -> str:
    """Returns "A" for A, (A), \\text{(A)}, A. and (A) 5; "" for anything else."""
    match = re.fullmatch(
        r"(?:Option |Choice |Answer |option |choice )?\(?([A-Z])(?:\)?|[.):]\s+(?!and\b|or\b)[^()]*)", unwrapped(text)
    )
    return match[1] if match else ""


@cache
def _pool() -> Pool:
    return Pool(_equal, _prepare)


def _prepare() -> None:
    """Imports math-verify in a new process of the pool, so that the import does not count as time of an answer."""
    # math-verify warns about its missing time limit, but the pool has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _equal("\\sqrt{4}", "2")


def _equal(box: str, answer: str) -> bool:
    """Returns math-verify's verdict. Runs in a process of the pool, because its import takes half a second."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify's units are off, because it reads 2t, 5m and x+2c as 2, 5 and x+2, and 5\\text{ million} as 5.
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    # The default any_match is not used, because it takes a fraction out of a text that cannot be read as a whole.
    box_values, answer_values = (
        parse(f"\\boxed{{{text}}}", config, extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore
        for text in (box, answer)
    )
    _read_imaginary(box_values, answer_values)
    if not (box_values and answer_values) or any(_computes_with_infinity(x[0]) for x in (box_values, answer_values)):
        return False
    are_equal = partial(verify, timeout_seconds=None, allow_set_relation_comp=True)
    if are_equal(answer_values, box_values):
        return not _differ_below(SMALL, *map(_numbers, (answer_values[0], box_values[0])))
    # SymPy takes √(1/n) and 1/√n as different, because n may be negative, so roots are split for a second comparison.
    split = [[_with_split_roots(value) for value in values] for values in (answer_values, box_values)]
    return split != [answer_values, box_values] and are_equal(split[0], split[1])


def _differ_below(bound: float, answer: list[Any], box: list[Any]) -> bool:
    """Returns whether a number below `bound` differs in its first six digits. math-verify only compares decimals."""
    pairs = zip(answer, box, strict=True) if len(answer) == len(box) else ()
    return any(max(abs(a), abs(b)) < bound and abs(a - b) > 5e-6 * max(abs(a), abs(b)) for a, b in pairs)


def _numbers(value: Any) -> list[Any]:
    """Returns the real and imaginary parts of all numbers of an answer, sorted for a set; [] if it has no numbers."""
    from sympy import And, Expr, FiniteSet, Interval, MatrixBase, Tuple
    from sympy.core.relational import Relational

    if isinstance(value, And):
        # The last term of a chain such as x = 1/2 = 0.5 counts, as for math-verify.
        return _numbers(getattr(value, "_unsorted_args", value.args)[-1])
    if isinstance(value, Relational):
        return _numbers(value.rhs)
    if isinstance(value, (FiniteSet, Interval, MatrixBase, Tuple)):
        parts = value.flat() if isinstance(value, MatrixBase) else value.args
        numbers = [number for part in parts for number in _numbers(part)]
        return sorted(numbers) if isinstance(value, FiniteSet) else numbers
    if not isinstance(value, Expr) or value.free_symbols:
        return []
    # SymPy raises many exceptions where it cannot compute a value.
    with suppress(Exception):
        both = value.doit().evalf(20).as_real_imag()
        if all(x.is_comparable for x in both):
            # A sum whose terms cancel is 0; `evalf` knows only one bit of it.
            return [0 if getattr(x, "_prec", 2) == 1 else x for x in both]
    return []


def _with_split_roots(value: Any) -> Any:
    """Returns a value with √a/√b for each √(a/b) that has a variable."""
    from sympy import Basic, Pow, S, fraction, sqrt

    if not isinstance(value, Basic) or not value.free_symbols:
        return value
    with suppress(Exception):
        return value.replace(
            lambda node: isinstance(node, Pow) and node.exp == S.Half and fraction(node.base)[1].free_symbols,
            lambda node: sqrt(fraction(node.base)[0]) / sqrt(fraction(node.base)[1]),
        )
    return value


def _read_imaginary(*parsed: list[Any]) -> None:
    """Makes i the imaginary unit if only one of two answers has it, as in √-4 = 2i.

    math-verify reads i as a variable, and i next to a decimal as yet another variable.
    """
    from sympy import Expr, FiniteSet, I

    with_i = [
        (values, variables)
        for values in parsed
        if values and isinstance(values[0], (Expr, FiniteSet))
        if (variables := {x: I for x in values[0].free_symbols if str(x) == "i"})
    ]
    if len(with_i) == 1 or len({variable for _, variables in with_i for variable in variables}) > 1:
        for values, variables in with_i:
            values[0] = values[0].subs(variables)


def _computes_with_infinity(value: Any) -> bool:
    """Returns whether an expression has a sum, product or power of infinity. SymPy simplifies 5 - pi 10^oo to 0."""
    from sympy import Add, Basic, Mul, Pow, S, preorder_traversal

    infinite = (S.Infinity, S.NegativeInfinity, S.ComplexInfinity, S.NaN)
    return isinstance(value, Basic) and any(
        isinstance(node, (Add, Mul, Pow))
        and any(x in infinite for x in node.args)
        and set(node.args) != {S.NegativeOne, S.Infinity}
        for node in preorder_traversal(value)
    )
