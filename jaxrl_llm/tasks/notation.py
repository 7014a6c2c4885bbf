"""Rewrites answers from the notation of people and models to that of math-verify."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

__all__: tuple[str, ...] = ()  # a config may name no function of this file

Rewriting: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str]]

SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "÷": "\\div ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "°": "^\\circ",
        "∪": "\\cup ",
        "±": "\\pm ",
        "∅": "\\emptyset ",
        "θ": "\\theta ",
        "\u2044": "/",
    }
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Unicode's √ is followed by a number, a letter, a fraction or brackets. In 2³√8, ³ may be a power of 2.
ROOT = re.compile(r"((?<!\w)[³⁴-⁹])?(\\sqrt(?=\s*(?:\\left\s*)?\()|[√∛∜])\s*(?:\\left\s*(?=\())?([-−–]?)")
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
RADICAND = re.compile(rf"{THOUSANDS.pattern}(?!\d)|\d+(?:\.\d+)?|[^\W\d_]|\\[A-Za-z]+(?![A-Za-z\s]*[\[{{])")
FRACTION = re.compile(r"\\[dt]?frac\s*")
BRACKETS = re.compile(r"\\.|[(){}]", re.DOTALL)
# Characters of Unicode that need braces in LaTeX.
UNICODE: dict[str, Rewriting] = {
    "x²": (r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(RAISED)}}}"),
    "52₈": (r"[₀-₉]+", lambda m: f"_{{{m[0].translate(LOWERED)}}}"),
    "½": (r"[¼½¾⅐-⅞]", lambda m: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("\u2044"))),
}

TEXT = r"\\(?:text|textbf|textit|textrm|textsf|texttt|emph|mathrm|mathbf|mbox)\s*\{"
MAYBE_TEXT = r"(?:" + TEXT + r")?\s*"
# Words after a number that are no unit, such as a second answer, a range, a factor, a doubt or a time of day.
NO_UNIT = (
    r"(?!(?:[^{}]{0,60}\W)?(?:or|and|to|by|not|no|is|plus|minus|times|over|if|pi|tau|theta|infinity|squared|cubed|half"
    r"|halves|thirds?|factorial|[AaPp]\.?[Mm]|choose|mod|base|sin|cos|tan|log|ln|sqrt)(?![a-z]))"
)
WORDS = r"[A-Za-z]{2,}\.?(?: ?/ ?[A-Za-z]+|(?: [A-Za-z]{2,}\.?){0,4})"
# Units that may follow a number without a space, as in 5cm.
ATTACHED_UNIT = r"(?:[cdkm]m|k?g|mg|m?[lL]|km/h|mph|ft|lbs?|oz|hrs?|mins?|secs?|dollars?|euros?|cents?|USD|EUR|GBP)"
POWER = r"(?:\^\{?-?\d\}?)?"
RELATION = r"\s*(<|>|\\[lg]e)(?:q|qslant)?(?![a-z])\s*"
BOUND = r"((?:(?!\\[lg]e)[^<>=])+?)"
FACTORS = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}"}
# {example: (pattern, replacement)} of text that does not change an answer, and of notation that math-verify cannot
# read. The rewritings are applied in this order.
NOTATION: dict[str, Rewriting] = {
    # spaces, brackets of another size, marks around a formula or bold text
    "1\\,234": (r"(?<!\\)\\[!,;:]|(?<!\\)\\q?quad(?![a-z])", ""),
    "1{,}234": (r"\{,\}(?=\d)", ","),
    "1\\ 234": (r"(?<!\\)\\ |~", " "),
    "\\left(": (r"\\(?:left|right|displaystyle)(?![a-z])\s*", ""),
    "\\boldsymbol{72}": (r"\\(?:boldsymbol|bm|underline)\s*\{([^{}]*)\}", r"\1"),
    "\\color{red}": (r"\\(?:text)?color\s*\{[a-z]+\}", ""),
    "\\langle": (r"\\langle(?![a-z])\s*(.*)\\rangle(?![a-z])", r"(\1)"),
    "$72$": (
        r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$|^[$`]+([^$`]*)[$`]+$|^\*\*(.*)\*\*$",
        lambda m: next(filter(None, m.groups()), ""),
    ),
    "\\nicefrac{1}{2}": (r"\\(?:nice|s)frac(?=\s*\{)", r"\\frac"),
    "\\frac\\pi4": (r"\\[dt]?frac\s*(\\pi|\d)\s*(\\pi(?![a-z])|\d|[a-z])", r"\\frac{\1}{\2}"),
    # signs of programs
    "2**10": (r"(?<=[\w)}])(\s?)\*\*\1(?=[\w({-])", "^"),
    "10^-3": (r"\^\s*-\s*(\d{1,9}(?:\.\d{1,9})?|[a-z])", r"^{-\1}"),
    "14 + -2i": (r"(?<=[\w)}])\s?\+\s?-", "-"),
    "exp(2)": (r"(?<![\\A-Za-z])(exp|ln|log|(?:arc)?(?:sin|cos|tan))(?=\s*\()", r"\\\1"),
    # words before and after the answer
    "= 72": (r"^(?:=|\\approx(?![a-z])|≈|\\sim(?![a-z]))\s*", ""),
    "about 72": ("^" + MAYBE_TEXT + r"(?:about|approximately|approx\.?|roughly|around|nearly|exactly)\b\s*\}?\s*", ""),
    "72.": (r"(?<!\.)(?:\\\\|[,;:\s]|\.(?!\.))+$", ""),
    "72 \\text{ because ...}": (
        r"(?<=[\w})])\s*" + TEXT + r"\s*(?:\(|because\b|since\b)" + NO_UNIT + r"[^{}]*\}.*$",
        "",
    ),
    "72 (apples)": (r"(?<=[\d}])\s*\(" + NO_UNIT + r"[A-Za-z]{3,}[A-Za-z ]*\)$", ""),
    # money, magnitudes, percent, ordinals
    "$-5": (r"^(-?)\\?[€£¥$]\s*(?=[-\d.])", r"\1"),
    "5 €": (r"(?<=\d)\s*(?:[€£¥¢]|\\[$])$", ""),
    "5 million": (
        r"(?<=\d)\s*(" + TEXT + r")?\s*(dozen|hundred|thousand|million|billion)\b\s*(\}?)",
        lambda m: f"\\times {FACTORS[m[2]]} " + (m[1] if m[1] and not m[3] else ""),
    ),
    "50 percent": (r"(?<=[\d}])\s*" + MAYBE_TEXT + r"(?:percent|per cent|pct)\b\s*\}?$", r"\\%"),
    "5^{th}": (r"(?<=\d)(?:\^\{?)?" + MAYBE_TEXT + r"(?:st|nd|rd|th)\b\}{0,2}", ""),
    # units; a letter next to a number is a variable, as in 2t
    "90° C": (r"(?<=\d)\s*\^\{?\s*\\circ\s*\}?\s*(?:\\(?:text|mathrm)\{\s*[CF]\s*\}|[CF])$", ""),
    "7\\text{ apples}": (
        r"(?<=[\w})])(?:\s*(?:(?:\\cdot|/)\s*)?" + TEXT + NO_UNIT + r"[^{}\d()]*(?:\^\d)?\}" + POWER + r"){1,4}$",
        "",
    ),
    "25 cm^2": (r"(?<=[\d})])(?:\s+|(?=" + ATTACHED_UNIT + r"\b))" + NO_UNIT + WORDS + POWER + "$", ""),
    "5 m/s": (r"(?<=[\d}])\s+[mgshLlNJWV](?:/[A-Za-z]{1,3})?" + POWER + "$", ""),
    # numbers
    "1 234": (r"^(-?\d{1,3}(?: \d{3})+)(?=$|\.)", lambda m: m[1].replace(" ", "")),
    "1 1/2": (r"^(-?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    "2 pi": (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    "3 x 10^8": (r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r"\\times "),
    "3e8": (r"^(-?\d+(?:\.\d*)?|-?\.\d+)[eE]\+?(-?\d+)$", r"\1\\times 10^{\2}"),
    "0.\\dot12\\dot3": (r"\\dot\s*\{?(\d)\}?(\d{0,99})\\dot\s*\{?(\d)\}?$", r"\\overline{\1\2\3}"),
    "0.1\\bar6": (
        r"(\.\d{0,99})\\(?:overline|bar|dot)\s*(?:\{(\d{1,99})\}|(\d))$",
        lambda m: f"{m[1]}({m[2] or m[3]})",
    ),
    "0.1666...": (r"(\.\d{0,9}?)(?:(\d)\2\2+|(\d{3,9})\3+)(?:\.{3}|\\[lc]?dots)$", lambda m: f"{m[1]}({m[2] or m[3]})"),
    "0.1(6)": (r"^(-?)(\d{0,99})\.(\d{0,99})\((\d{1,99})\)$", lambda m: _repeating(*m.groups())),
    # binomials, lists, the empty set
    "\\binom52": (r"\\[dt]?binom\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})", r"\\binom{\1}{\2}"),
    "C(5,2)": (r"^C\s*\((\d{1,4}),\s*(\d{1,4})\)$", r"\\binom{\1}{\2}"),
    "C_5^2": (r"^C_\{?(\d{1,4})\}?\^\{?(\d{1,4})\}?$", r"\\binom{\1}{\2}"),
    "{}_5C_2": (r"^(?:\{\})?[_^]\{?(\d{1,4})\}?\s*C_\{?(\d{1,4})\}?$", r"\\binom{\1}{\2}"),
    "\\text{A and C}": (TEXT + r"([^{}]*\b(?:and|or)\b[^{}]*)\}", r"\1"),
    "\\varnothing": (
        r"^(?:\\varnothing|\\\{\s*\\\}|" + MAYBE_TEXT + r"(?i:the empty set|empty set|no solutions?)\}?)$",
        r"\\emptyset",
    ),
    "x<2 or x>3": (
        rf"^([A-Za-z]){RELATION}{BOUND}\s*(\bor\b|\band\b|\\lor|\\land|\\vee|\\wedge)\s*\1{RELATION}{BOUND}$",
        lambda m: _intervals(*m.groups()),
    ),
}
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
DEGREES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*\^\{?\s*\\circ\s*\}?")
RULES = [(re.compile(pattern, re.DOTALL), by) for pattern, by in NOTATION.values()]
UNICODE_RULES = [(re.compile(pattern), by) for pattern, by in UNICODE.values()]


def rewritten(text: str) -> str:
    """Returns an answer in the notation that math-verify reads."""
    # Roots are rewritten first, because the braces that other rules add would not end a root.
    text = _with_roots(text)
    for pattern, by in UNICODE_RULES:
        text = pattern.sub(by, text)
    # NFKC replaces wide, narrow and mathematical letters, digits and spaces by plain ones. Single spaces keep the time
    # of the patterns linear.
    text = " ".join(unicodedata.normalize("NFKC", text).translate(SIGNS).split())
    for pattern, by in RULES:
        text = pattern.sub(by, text).strip()
    if TRIGONOMETRIC.search(text):
        text = DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    return text


def unwrapped(text: str) -> str:
    """Returns a text without commands such as \\text{}, \\textbf{} and \\mathrm{}, but with their content."""
    return re.sub(TEXT + r"([^{}]*)\}", r"\1", text).strip()


def _with_roots(text: str) -> str:
    """Returns a text with \\sqrt{12} for √12. In LaTeX, \\sqrt 12 is √1 · 2."""
    closing = _closing_brackets(text)
    edits: list[tuple[int, int, str]] = []  # (start, end, replacement) of parts of the text
    for root in ROOT.finditer(text):
        start, end = root.end(), _radicand_end(text, root.end(), closing)
        if end is None:
            continue
        # Braces replace the brackets around the whole radicand.
        bracket_width = int(not root[3] and text[start] in "({")
        if THOUSANDS.fullmatch(text, start + bracket_width, end - bracket_width):
            edits += [(i, i + 1, "") for i in range(start, end) if text[i] == ","]
        edits.append((root.start(), start + bracket_width, f"\\sqrt{_root_index(root[1] or root[2])}{{{root[3]}"))
        edits.append((end - bracket_width, end, "}"))
    pieces, copied_end = [], 0
    for start, end, replacement in sorted(edits):
        pieces += [text[copied_end:start], replacement]
        copied_end = end
    return "".join((*pieces, text[copied_end:]))


def _radicand_end(text: str, start: int, closing: dict[int, int]) -> int | None:
    """Returns the end of the number, letter, fraction or brackets at `start`; None if the text has none there."""
    fraction = FRACTION.match(text, start)
    end = fraction.end() if fraction else start
    for _ in range(2 if fraction else 1):
        if text[end : end + 1] in ("(", "{"):
            if end not in closing:
                return None
            end = closing[end] + 1
        elif fraction and text[end : end + 1].isalnum():  # a fraction without braces, as in \frac14
            end += 1
        elif fraction or not (radicand := RADICAND.match(text, end)):
            return None
        else:
            end = radicand.end()
    return end


def _closing_brackets(text: str) -> dict[int, int]:
    """Returns {index of an opening bracket in a text: index of its closing bracket}."""
    open_brackets, closing = [], {}
    for bracket in BRACKETS.finditer(text):
        if bracket[0] in ("(", "{"):
            open_brackets.append(bracket.start())
        elif open_brackets and text[open_brackets[-1]] + bracket[0] in ("()", "{}"):
            closing[open_brackets.pop()] = bracket.start()
    return closing


def _root_index(sign: str) -> str:
    """Returns the index of a root in LaTeX: [3] for ³ before it and for ∛; "" for √."""
    number = {"√": "", "\\sqrt": "", "∛": "3", "∜": "4"}.get(sign, sign.translate(RAISED))
    return f"[{number}]" if number else ""


def _intervals(variable: str, first: str, bound: str, word: str, second: str, other_bound: str) -> str:
    """Returns two inequalities of a variable as intervals: x<2 or x>3 becomes (-\\infty,2)\\cup(3,\\infty)."""
    sides = [(first, bound), (second, other_bound)]
    if word in ("or", "\\lor", "\\vee"):
        return "\\cup ".join(_interval(*(side, None) if side[0] in (">", "\\ge") else (None, side)) for side in sides)
    below, above = sorted(sides, key=lambda side: side[0] in ("<", "\\le"))
    one_each = (below[0] in (">", "\\ge")) and above[0] in ("<", "\\le")
    return _interval(below, above) if one_each else f"{variable}{first} {bound} {word} {variable}{second} {other_bound}"


def _interval(below: tuple[str, str] | None, above: tuple[str, str] | None) -> str:
    """Returns an interval in LaTeX. below, above: relation and value of its bounds; None = unbounded."""
    start = ("[" if below[0] == "\\ge" else "(") + below[1] if below else "(-\\infty"
    end = above[1] + ("]" if above[0] == "\\le" else ")") if above else "\\infty)"
    return f"{start},{end}"


def _repeating(sign: str, whole: str, fixed: str, repeated: str) -> str:
    """Returns a repeating decimal as a fraction: 0.1\\overline{6} becomes \\frac{1}{6}."""
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed or 0), nines)
    return f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
