"""Splits a shell script into words, operators and heredocs, which shell.py follows.

A first step to the training command of a recipe of another trainer, whose keys `jaxrl translate` translates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NoReturn, TypeAlias

from jaxrl_llm.errors import UserError

# Characters that end a word outside quotation marks.
BREAKS = " \t\n;&|<>()"
# Blanks, continued lines and comments between words.
BLANKS = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)*")
OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
REDIRECTION = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|<&|<>|<|>>|>\||>&|>)(?!\()")
# name=, name[index]= and name+= at the beginning of a word.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
# Arithmetic has at most two levels of parentheses inside its own.
ARITHMETIC = re.compile(r"\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
EXPANSION = r"`(?P<command>(?:\\.|[^`\\])*)`|\$(?P<parameter>\d|\w+|[@*#?$!-])|\\\n"  # $10 is $1 and a 0
# The next part of a word outside quotation marks, and of a text between double quotation marks.
PIECE = re.compile(
    rf"{EXPANSION}|\\(?P<escaped>.)|\$?'(?P<single>[^']*)'|(?P<text>[^{BREAKS}}}'\"`$\\]+|[^'`\\])", re.DOTALL
)
QUOTED_PIECE = re.compile(rf"{EXPANSION}|\\(?P<escaped>[$`\"\\])|(?P<text>[^\"\\$`}}]+|[^`])", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A part of a word.

    kind: "text", "parameter" of $name, "command" of $(…), "arithmetic" of $((…)), or "((" of a command ((…)).
    text: the text itself, or what is between the marks of the other kinds.
    """

    kind: str
    text: str
    is_quoted: bool = False


@dataclass(frozen=True)
class Word:
    """A word of a script. array: words between the parentheses of name=(…); None if the word is no array."""

    parts: tuple[Part, ...]
    position: int
    array: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str:
        """Text of a word without quotations and expansions; "" for any other word."""
        return "".join(part.text for part in self.parts) if _unquoted(self.parts) == self.parts else ""

    @property
    def assignment(self) -> re.Match[str] | None:
        """Match of name= at the beginning of the word, if that is not quoted."""
        return ASSIGNMENT.match("".join(part.text for part in _unquoted(self.parts)))


@dataclass
class Heredoc:
    """Lines of a script that are the input of a command.

    mark: line that ends them; cuts_tabs: the sign is <<-; is_literal: the mark is quoted, so that $ has no meaning.
    """

    mark: str
    cuts_tabs: bool
    is_literal: bool
    position: int = 0
    text: str = ""


class Redirection(str):
    """Sign of a redirection, such as 2> or <. The next token is its file."""


Token: TypeAlias = "Word | Heredoc | str"


def _unquoted(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns the parts before the first quotation or expansion."""
    return tuple(takewhile(lambda part: part.kind == "text" and not part.is_quoted, parts))


@dataclass
class Lexer:
    """Reads the text of a script from its beginning to its end. words: all words that were read, in their order."""

    text: str
    position: int = 0
    words: list[Word] = field(default_factory=list)
    heredocs: list[Heredoc] = field(default_factory=list)

    def tokens(self, closing: str = "") -> list[Token]:
        """Returns the tokens up to a parenthesis that closes an opened one, or up to the end of the script.

        Raises: UserError, if a quotation or a parenthesis has no end.
        """
        tokens: list[Token] = []
        start, depth = self.position, 0
        while self.read(BLANKS) and self.position < len(self.text):
            if match := self.read(REDIRECTION):
                tokens.append(self.heredoc(match[1]) if match[1] in ("<<", "<<-") else Redirection(match[0]))
            elif match := self.read(ARITHMETIC):
                tokens.append(Word((Part("((", match[1]),), match.start()))
            elif match := self.read(OPERATOR):
                depth += (match[0] == "(") - (match[0] == ")")
                if closing and depth < 0:
                    return tokens
                if match[0] == "\n":
                    self.finish_heredocs()
                tokens.append(match[0])
            else:
                tokens.append(self.word())
        if closing:
            self.refuse("a parenthesis has no end", start)
        return tokens

    def word(self) -> Word:
        """Reads a word, which may be an array name=(…)."""
        start = self.position
        parts = [Part("command", self.nested())] if self.text.startswith(("<(", ">("), start) else []
        word = Word((*parts, *self.parts(BREAKS)), start)
        # A parenthesis directly behind name= begins an array.
        if ASSIGNMENT.fullmatch(word.plain) and self.text.startswith("(", self.position):
            self.position += 1
            word = Word(word.parts, start, tuple(token for token in self.tokens(")") if isinstance(token, Word)))
        self.words.append(word)
        return word

    def parts(self, stop: str, *, is_quoted: bool = False) -> list[Part]:
        """Reads up to a character of `stop`. is_quoted: the text is between double quotation marks."""
        parts: list[Part] = []
        quote = re.compile('"' if is_quoted else r'\$?"')
        while self.position < len(self.text) and self.text[self.position] not in stop:
            start = self.position
            if match := self.read(re.compile(rf"\${ARITHMETIC.pattern}")):
                parts.append(Part("arithmetic", match[1], is_quoted))
            elif self.text.startswith("$(", start):
                parts.append(Part("command", self.nested(), is_quoted))
            elif self.text.startswith("${", start):
                self.position += 2
                self.parts("}", is_quoted=is_quoted)
                self.close("}", start)
                parts.append(Part("parameter", self.text[start + 2 : self.position - 1], is_quoted))
            elif self.read(quote):
                # An empty quotation is a word too.
                parts += self.parts('"', is_quoted=True) or [Part("text", "", is_quoted=True)]
                self.close('"', start)
            else:
                parts += self.piece(is_quoted)
        return parts

    def piece(self, is_quoted: bool) -> list[Part]:
        """Reads `…`, $name, '…', an escaped character or text; the end of a line behind a backslash is no part."""
        if not (match := self.read(QUOTED_PIECE if is_quoted else PIECE)):
            self.refuse("a quotation has no end", self.position)
        kind, text = match.lastgroup, match[match.lastgroup or 0]
        if kind in ("command", "parameter"):
            return [Part(kind, re.sub(r"\\([$`\\])", r"\1", text), is_quoted)]
        return [Part("text", text, is_quoted or kind != "text")] if kind else []

    def nested(self) -> str:
        """Reads $(…), <(…) or >(…), and returns what is between the parentheses."""
        inside = Lexer(self.text, self.position + 2)
        inside.tokens(")")
        text, self.position = self.text[self.position + 2 : inside.position - 1], inside.position
        return text

    def heredoc(self, sign: str) -> Heredoc:
        """Reads the mark of a heredoc, whose lines begin after this line. sign: << or <<-."""
        self.read(BLANKS)
        parts = self.parts(BREAKS)
        mark, is_literal = "".join(part.text for part in parts), any(part.is_quoted for part in parts)
        self.heredocs.append(Heredoc(mark, cuts_tabs=sign == "<<-", is_literal=is_literal))
        return self.heredocs[-1]

    def finish_heredocs(self) -> None:
        """Reads the lines of the heredocs that began in the line before."""
        for heredoc in [heredoc for heredoc in self.heredocs if not heredoc.position]:
            tabs = "\t*" * heredoc.cuts_tabs
            match = re.compile(f"^{tabs}{re.escape(heredoc.mark)}$", re.MULTILINE).search(self.text, self.position)
            heredoc.position, text = self.position, self.text[self.position : match.start() if match else None]
            heredoc.text = re.sub(r"(?m)^\t+", "", text) if heredoc.cuts_tabs else text
            self.position = min(match.end() + 1, len(self.text)) if match else len(self.text)

    def read(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Moves behind a match of the pattern at the current position, and returns it; None if it does not match."""
        if match := pattern.match(self.text, self.position):
            self.position = match.end()
        return match

    def close(self, mark: str, start: int) -> None:
        """Moves behind a closing mark. Raises: UserError, if it is missing."""
        if not self.text.startswith(mark, self.position):
            self.refuse(f"a quotation or expansion has no {mark}", start)
        self.position += len(mark)

    def line(self, position: int) -> int:
        """Returns the number of the line that has a position of the text."""
        return self.text.count("\n", 0, position) + 1

    def refuse(self, problem: str, position: int) -> NoReturn:
        """Raises a UserError with the line of the script that bash could not read either."""
        raise UserError(f"line {self.line(position)}: {problem}: name a shell script that bash can run")
