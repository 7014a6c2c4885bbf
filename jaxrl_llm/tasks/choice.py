"""Rewards for multiple choice: the letter that a completion chooses."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral
from typing import Any

from jaxrl_llm.tasks import each_judged, last_tagged, reads, text_of
from jaxrl_llm.tasks.math import last_box

MARKUP = re.compile(r"\\(?:text|math)[a-z]*|\\[()\[\],;:! ]|[*$`~{}]")
# A single capital letter. In "A whale" and "I think" it is a word, but in "A because" a choice.
WORD = r"[AI][ -](?!(?:because|since|as|for|which|is|was|and|or|but|not|with|by|due|given)\b)[a-z]"
LETTER = rf"[(\[\"'“]?(?!{WORD})([A-Z])(?![\w'’])"
FILLED = r"(?i:(?:the|option|choice|letter|clearly|therefore|thus|hence|likely|probably|definitely) )*"
NAME = r"(?i:answer|(?:correct|right|best) (?:option|choice))"
RIGHT = r"(?:is|must be) (?:the )?(?:only )?(?:correct|right|best|answer)\b(?! (?:about|to|in|if))"
DENIED = r"(?![)\]\"'”]* (?:is|isn|are|was|does|doesn|would|can|cannot|could|has|fails)\b)"  # "option C is wrong"
# Forms in which a completion states its choice. The last occurrence of the first form that occurs counts.
FORMS = [
    re.compile(pattern)
    for pattern in (
        rf"\b{NAME}(?i: choice)?(?i: ?[:=]| is| was| must be| should be| would be)+ ?{FILLED}{LETTER}",
        rf"(?<![\w'’]){LETTER}[)\]\"'”]* {RIGHT}",
        rf"\b(?i:answer|option|choice)(?: ?[:=])? ?{LETTER}{DENIED}",
        rf"(?<![\w'’]){LETTER}[)\]\"'”]*[.:!]?$",
    )
]
# A letter is hypothetical if these words stand before it, as in "suppose the answer is B".
HYPOTHETICAL = re.compile(
    r"(?i)\b(?:if|suppose|supposing|assume|assuming|whether|thought|believed|assumed|guessed|tempting to (?:say|think)"
    r"|(?:may|might|could|would) (?:also )?(?:be|have been|think|say|believe|argue|guess)|first|initial|previous|wrong"
    r"|(?:people|some|many|students|others|they) (?:\w+ )?(?:think|say|believe|claim|assume))"
    r"(?: that| it is| it was| is)?(?: the| my| your)?(?: correct| right| final| best| option| choice| answer)*"
    r"[ (\[\"'“]*$"
)
# "The answer would be B" is hypothetical if its sentence contains one of these words.
WOULD = re.compile(r"(?i)\b(?:if|unless|otherwise|in that case)\b|^\W*(?:had|were)\b")
# A statement that these words follow, as in "the answer is B only if", counts less than an earlier one without them.
CONDITION = re.compile(r"[)\]\"'”]*,? (?:only )?(?:if|unless|assuming|provided)\b")
QUESTION = re.compile(r"[)\]\"'”]*\?")
MAX_MATCHES = 100  # last matches of a form that are examined, so that the time is linear
# Characters before and after a letter in which other letters and hypothetical words are searched.
BETWEEN_LETTERS, WORDS_BEFORE, WORDS_AFTER = 10, 120, 60
BEGINNING = re.compile(rf"{LETTER}[)\]]*[.):,]")
LINES = re.compile(r"^[ \t*(]*([A-Z])[.):]", re.MULTILINE)
BRACKETS = re.compile(r"\(([A-Z])\)")
# Another letter before or after the chosen one, as in "A or B", "A, B" and "A/B", but not in "B, A is wrong".
LETTER_BEFORE = re.compile(r"(?<![\w'’])[A-Z]\)?(?:,? (?:or|and|nor) |, | ?/ ?)\(?$")
LETTER_AFTER = re.compile(rf"[)\]\"'”.]*(?: ?[,;/|&] ?(?:(?:and|or) )?| (?:and|or) )\(?[A-Z](?![\w'’]){DENIED}")
# The content of a box or a tag may be "B", "(B)", "b)", "Option B", "B. 5" or "B the sun", but not several letters.
SEVERAL = re.compile(r"\W*[A-Z]\b(?:\W+(?:(?:and|or) )?[A-Z]\b)+\W*")
CONTENT = re.compile(rf"{FILLED}(?:{LETTER}|\(?([a-z])(?:[).:]|$))")


@reads(answer=lambda value: _expected_letter(value))
def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """Returns 1 if the completion chooses the letter of the row, else 0.

    The chosen letter is the first of these that the completion has: the content of the last \\boxed{}; of the last
    <answer> tag; the letter after the last "answer is" or "answer:"; in the last "B is correct"; in "option B" or
    "choice B"; a "B" at the end or at the beginning; "(B)". Two letters, as in "A or B", are no choice. Thoughts, up to
    </think>, do not count. A hypothetical letter, as in "the answer would be C if …", counts if no other is stated.
    The answer of a row is a letter, such as "B" or "(B)", or a number that counts from 0 (MMLU).
    Raises: ValueError, for another answer.
    """
    return each_judged(lambda text, right: _chosen(text) == _expected_letter(right), completions, answer)


def is_given(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion chooses a letter, else 0."""
    return [float(bool(_chosen(text_of(c)))) for c in completions]


def _chosen(text: str) -> str:
    """Returns the letter that a text chooses, in upper case; "" if it chooses none."""
    text = text.rpartition("</think>")[2]
    box = last_box(text)
    content = last_tagged(text, "answer") if box is None else box
    if content is not None:
        return _letter_in(_plain(content))
    plain = _plain(text)
    letter = "" if SEVERAL.fullmatch(plain) else _stated(plain, FORMS)
    if letter is not None:
        return letter
    beginning = BEGINNING.match(plain)
    # The first letter of a text that lists several options line by line is no choice.
    if beginning and len(set(LINES.findall(text))) < 2:
        return beginning[1]
    hypothetical_letter = _stated(plain, FORMS, supposed=True)
    if hypothetical_letter is not None:
        return hypothetical_letter
    brackets = BRACKETS.findall(plain)
    return brackets[-1] if brackets else ""


def _letter_in(content: str) -> str:
    """Returns the letter in the content of a box or a tag; "" if it has none, or several."""
    letter = CONTENT.match(content)
    if SEVERAL.fullmatch(content) or (letter and LETTER_AFTER.match(content, letter.end())):
        return ""
    if letter:
        return (letter[1] or letter[2]).upper()
    return _stated(content, FORMS[:3]) or _stated(content, FORMS[:3], supposed=True) or ""


def _stated(plain: str, forms: list[re.Pattern[str]], *, supposed: bool = False) -> str | None:
    """Returns the letter in the first of `forms` that a text has; "" if it has a second letter; None without a form.

    supposed: whether hypothetical letters count too.
    """
    for form in forms:
        matches = list(form.finditer(plain))[-MAX_MATCHES:]
        matches = [match for match in matches if supposed or not _is_supposed(plain, match)]
        if matches:
            # A statement without a condition has precedence over "The answer is C if …".
            chosen = next(
                (match for match in reversed(matches) if not CONDITION.match(plain, match.end(1))), matches[-1]
            )
            start, end = chosen.span(1)
            letter_before = LETTER_BEFORE.search(plain, max(start - BETWEEN_LETTERS, 0), start)
            has_second_letter = letter_before or LETTER_AFTER.match(plain, end)
            return "" if has_second_letter else chosen[1]
    return None


def _is_supposed(plain: str, match: re.Match[str]) -> bool:
    """Returns whether a letter is hypothetical, as in "the answer would be C if …" and "is the answer C?"."""
    text_before = plain[max(match.start() - WORDS_BEFORE, 0) : match.start()]
    text_before = text_before[max(text_before.rfind(mark) for mark in (". ", "! ", "? ")) + 1 :]
    if QUESTION.match(plain, match.end(1)) or HYPOTHETICAL.search(text_before):
        return True
    text_after = re.split(r"[.!?]", plain[match.end(1) : match.end(1) + WORDS_AFTER])[0]
    return "would be" in match[0] and bool(WOULD.search(text_before) or WOULD.search(text_after))


def _plain(text: str) -> str:
    """Returns a text without markup and with single spaces, so that patterns take linear time."""
    return " ".join(MARKUP.sub("", text).split())


def _expected_letter(answer: Any) -> str:
    """Returns the letter of a row's answer. Raises: ValueError, if it is no letter and no number from 0 to 25."""
    is_number = isinstance(answer, (Integral, float, Decimal)) and not isinstance(answer, bool)
    number = float(answer) if is_number else -1.0
    # A whole float counts too, because pandas writes 2.0 to Parquet if another row has null.
    if 0 <= number < 26 and number.is_integer():
        return chr(ord("A") + int(number))
    letter = re.fullmatch(r"\s*\(?([A-Za-z])[.)]?\s*", str(answer))
    if not letter:
        raise ValueError(f"column 'answer' is {answer!r}, but must be a letter, or a number that counts from 0")
    return letter[1].upper()
