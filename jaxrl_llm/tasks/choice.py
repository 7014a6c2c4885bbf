"""Rewards for multiple choice: the letter that a completion chooses."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral
from typing import Any

from jaxrl_llm.tasks import each_judged, last_tagged, reads, text_of
from jaxrl_llm.tasks.math import last_box

MARKUP = re.compile(r"\\(?:text|math)[a-z]*|\\[()\[\],;:! ]|[*$`~{}]")
# A capital letter that stands alone. In "A whale" and "I think" it is a word, in "A because" a choice.
WORD = r"[AI][ -](?!(?:because|since|as|for|which|is|was|and|or|but|not|with|by|due|given)\b)[a-z]"
LETTER = rf"[(\[\"'“]?(?!{WORD})([A-Z])(?![\w'’])"
FILLED = r"(?i:(?:the|option|choice|letter|clearly|therefore|thus|hence|likely|probably|definitely) )*"
NAME = r"(?i:answer|(?:correct|right|best) (?:option|choice))"
RIGHT = r"(?:is|must be) (?:the )?(?:only )?(?:correct|right|best|answer)\b(?! (?:about|to|in|if))"
DENIED = r"(?![)\]\"'”]* (?:is|isn|are|was|does|doesn|would|can|cannot|could|has|fails)\b)"  # "option C is wrong"
# What a completion says in the first of these forms counts. Within a form, the last one does.
FORMS = [
    re.compile(pattern)
    for pattern in (
        rf"\b{NAME}(?i: choice)?(?i: ?[:=]| is| was| must be| should be| would be)+ ?{FILLED}{LETTER}",
        rf"(?<![\w'’]){LETTER}[)\]\"'”]* {RIGHT}",
        rf"\b(?i:answer|option|choice)(?: ?[:=])? ?{LETTER}{DENIED}",
        rf"(?<![\w'’]){LETTER}[)\]\"'”]*[.:!]?$",
    )
]
# What makes a letter hypothetical: the words before the form, or an "if" in the sentence of "would be", or a question.
BEFORE = re.compile(
    r"(?i)\b(?:if|suppose|supposing|assume|assuming|whether|thought|believed|assumed|guessed|tempting to (?:say|think)"
    r"|(?:may|might|could|would) (?:also )?(?:be|have been|think|say|believe|argue|guess)|first|initial|previous|wrong"
    r"|(?:people|some|many|students|others|they) (?:\w+ )?(?:think|say|believe|claim|assume))"
    r"(?: that| it is| it was| is)?(?: the| my| your)?(?: correct| right| final| best| option| choice| answer)*"
    r"[ (\[\"'“]*$"
)
WOULD = re.compile(r"(?i)\b(?:if|unless|otherwise|in that case)\b|^\W*(?:had|were)\b")
CONDITION = re.compile(r"[)\]\"'”]*,? (?:only )?(?:if|unless|assuming|provided)\b")
QUESTION = re.compile(r"[)\]\"'”]*\?")
# The last letters of a form, so that the time is linear.
LOOKED_AT = 100
BEGINNING = re.compile(rf"{LETTER}[)\]]*[.):,]")
LINES = re.compile(r"^[ \t*(]*([A-Z])[.):]", re.MULTILINE)
BRACKETS = re.compile(r"\(([A-Z])\)")
# Another letter before or behind the chosen one: "A or B", "A, B", "A/B". In "B, A is wrong" there is none.
FIRST = re.compile(r"(?<![\w'’])[A-Z]\)?(?:,? (?:or|and|nor) |, | ?/ ?)\(?$")
SECOND = re.compile(rf"[)\]\"'”.]*(?: ?[,;/|&] ?(?:(?:and|or) )?| (?:and|or) )\(?[A-Z](?![\w'’]){DENIED}")
# The content of a box or a tag: B, (B), b), Option B, B. 5, B the sun; but not several letters.
SEVERAL = re.compile(r"\W*[A-Z]\b(?:\W+(?:(?:and|or) )?[A-Z]\b)+\W*")
CONTENT = re.compile(rf"{FILLED}(?:{LETTER}|\(?([a-z])(?:[).:]|$))")


@reads(answer=lambda value: _expected_letter(value))
def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """1 where the completion chooses the letter of the row.

    The letter is the content of the last \\boxed{}; without a box, of the last <answer> tag; without a tag, what
    follows the last "answer is" or "answer:"; without these, the last "B is correct", then "option B" or "choice B",
    then a "B" at the end or at the beginning, then "(B)". Two letters, as in "A or B", are no choice. Thoughts, up to
    </think>, do not count. What is only supposed, as in "the answer would be C if …", counts where nothing else is
    stated. The answer of a row is a letter, as "B" or "(B)", or a number that counts from 0 (MMLU).
    Raises: ValueError, if it is neither.
    """
    return each_judged(lambda text, right: _chosen(text) == _expected_letter(right), completions, answer)


def is_given(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion chooses a letter."""
    return [float(bool(_chosen(text_of(c)))) for c in completions]


def _chosen(text: str) -> str:
    """Returns the letter that a text chooses, in upper case; "" if there is none."""
    text = text.rpartition("</think>")[2]
    box = last_box(text)
    content = last_tagged(text, "answer") if box is None else box
    if content is not None:
        return _contained(_plain(content))
    plain = _plain(text)
    letter = "" if SEVERAL.fullmatch(plain) else _stated(plain, FORMS)
    if letter is not None:
        return letter
    beginning = BEGINNING.match(plain)
    # A text that goes through its options line by line does not begin with its choice.
    if beginning and len(set(LINES.findall(text))) < 2:
        return beginning[1]
    supposed = _stated(plain, FORMS, supposed=True)
    if supposed is not None:
        return supposed
    brackets = BRACKETS.findall(plain)
    return brackets[-1] if brackets else ""


def _contained(content: str) -> str:
    """Returns the letter of a box or a tag."""
    letter = CONTENT.match(content)
    if SEVERAL.fullmatch(content) or (letter and SECOND.match(content, letter.end())):
        return ""
    if letter:
        return (letter[1] or letter[2]).upper()
    return _stated(content, FORMS[:3]) or _stated(content, FORMS[:3], supposed=True) or ""


def _stated(plain: str, forms: list[re.Pattern[str]], *, supposed: bool = False) -> str | None:
    """Returns the letter of the first form that is there; "" if there is a second letter; None without a form.

    supposed: letters that are only supposed count too.
    """
    for form in forms:
        matches = list(form.finditer(plain))[-LOOKED_AT:]
        matches = [match for match in matches if supposed or not _is_supposed(plain, match)]
        if matches:
            # "The answer is C if …" gives way to one without a condition.
            chosen = next(
                (match for match in reversed(matches) if not CONDITION.match(plain, match.end(1))), matches[-1]
            )
            start, end = chosen.span(1)
            second_letter = FIRST.search(plain, max(start - 10, 0), start) or SECOND.match(plain, end)
            return "" if second_letter else chosen[1]
    return None


def _is_supposed(plain: str, match: re.Match[str]) -> bool:
    """Returns whether a letter is only supposed, asked or denied: "the answer would be C if …", "is the answer C?"."""
    before = plain[max(match.start() - 120, 0) : match.start()]
    before = before[max(before.rfind(mark) for mark in (". ", "! ", "? ")) + 1 :]
    if QUESTION.match(plain, match.end(1)) or BEFORE.search(before):
        return True
    after = re.split(r"[.!?]", plain[match.end(1) : match.end(1) + 60])[0]
    return "would be" in match[0] and bool(WOULD.search(before) or WOULD.search(after))


def _plain(text: str) -> str:
    """Returns a text without markup, and with single spaces, in which the patterns take linear time."""
    return " ".join(MARKUP.sub("", text).split())


def _expected_letter(answer: Any) -> str:
    numeric = isinstance(answer, (Integral, float, Decimal)) and not isinstance(answer, bool)
    number = float(answer) if numeric else -1.0
    if 0 <= number < 26 and number.is_integer():
        # Parquet of pandas has 2.0, where another row has null.
        return chr(ord("A") + int(number))
    letter = re.fullmatch(r"\s*\(?([A-Za-z])[.)]?\s*", str(answer))
    if not letter:
        raise ValueError(f"column 'answer' is {answer!r}: make it a letter, or a number that counts from 0")
    return letter[1].upper()
