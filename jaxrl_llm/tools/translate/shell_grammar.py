"""The grammar of a shell script: words, commands and blocks, as far as scripts that start a training use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NoReturn, TypeAlias

from jaxrl_llm.errors import UserError

BREAKS = " \t\n;&|<>()"
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
REDIRECTS = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|<&|<>|<|>>|>\||>&|>)(?!\()")
PARAMETER = re.compile(r"\$(\d|\w+|[@*#?$!-])")  # $10 is $1 and a 0
OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
KEYWORD = re.compile(r"[^\s;&|<>()'\"`$\\]+")
FUNCTION = re.compile(r"(?:function[ \t]+([^\s()]+)(?:[ \t]*\(\s*\))?|([^\s;&|<>()'\"`$\\=]+)[ \t]*\(\s*\))")
BLANKS = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)*")
BLANK_LINES = re.compile(r"(?:[ \t\n]|\\\n|#[^\n]*)*")
ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
SINGLE_QUOTED = re.compile(r"\$?'([^']*)('?)")
BACKTICKS = re.compile(r"`((?:\\.|[^`\\])*)(`?)", re.DOTALL)
DOUBLE_QUOTE = re.compile(r'\$?"')
# A piece inside "…" is a character that a backslash keeps, a text, or one character such as a lone $.
QUOTED = re.compile(r'\\[$`"\\\n]|[^"\\$`]+|.', re.DOTALL)
CLOSING = ("then", "do", "done", "fi", "esac", "else", "elif", "}")


@dataclass(frozen=True)
class Part:
    """A part of a word: a "text", "parameter", "command" or "sum". text: text inside the marks of the latter three."""

    kind: str
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    """A word: its parts, and where it begins. array: the words between the parentheses of name=(…)."""

    parts: tuple[Part, ...]
    at: int
    array: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str:
        """The text of a word without quotations or anything to expand; "": it has some."""
        is_plain = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if is_plain else ""


def assignment(parts: Sequence[Part], *, whole: bool = False) -> re.Match[str] | None:
    """Returns the match of name= at the beginning of a word that is not quoted there. whole: nothing is behind it."""
    plain = takewhile(lambda part: part.kind == "text" and not part.quoted, parts)
    text = "".join(part.text for part in plain)
    return ASSIGNMENT.fullmatch(text) if whole else ASSIGNMENT.match(text)


@dataclass
class Heredoc:
    """The lines up to the end mark, which are read at the end of the line that has the redirection."""

    mark: str
    cuts_tabs: bool
    at: int = 0
    text: str = ""


@dataclass(frozen=True)
class Simple:
    """A command. heredoc: the lines that it reads; target: the file that it writes."""

    words: tuple[Word, ...]
    heredoc: Heredoc | None = None
    target: Word | None = None


@dataclass(frozen=True)
class Chain:
    """Commands joined by "&&" and "||" (or "|", whose status is the last one's). The first sign is "|"."""

    links: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class If:
    """Pairs of a condition and a block. The last condition may be empty: the block of `else`."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Repeat:
    """for name in words; or while and until, with a condition."""

    body: tuple[Node, ...]
    name: str = ""
    words: tuple[Word, ...] = ()
    condition: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Function:
    """A function that is defined. It runs where it is called."""

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Compound:
    """{ …; }, ( … ), which leaves no variables behind, or ! command, whose status is the opposite."""

    body: tuple[Node, ...]
    negated: bool = False
    subshell: bool = False


Node: TypeAlias = Simple | Chain | If | Repeat | Function | Compound


@dataclass
class ShellParser:
    """Reads a script once, from its beginning to its end. `words` are all words of the script, in their order."""

    text: str
    at: int = 0
    words: list[Word] = field(default_factory=list)
    heredocs: list[Heredoc] = field(default_factory=list)

    def script(self) -> tuple[Node, ...]:
        """Returns the commands of the script. Raises: UserError, if a quotation or a block has no end."""
        nodes: list[Node] = []
        while self.at < len(self.text):
            nodes += self.block()
            # A ")" or a "done" that nothing has opened.
            if self.at < len(self.text) and not self.operator():
                self.word()
        return tuple(nodes)

    # Blocks

    def block(self, *ends: str) -> tuple[Node, ...]:
        """Reads commands up to a word of `ends` in the place of a command, which stays unread."""
        nodes: list[Node] = []
        while True:
            self.skip(";", "&", "\n")
            # A keyword that closes nothing ends the block; the caller passes over it.
            if self.peek() in (")", ";;", ";&", ";;&") or self.keyword() in (ends or CLOSING):
                return tuple(nodes)
            start = self.at
            if node := self.chain():
                nodes.append(node)
            # The end of the text, or a character that nothing reads and that would repeat this for ever.
            if self.at == start:
                return tuple(nodes)

    def body(self, end: str) -> tuple[Node, ...]:
        """Reads commands up to the word that ends them, and this word."""
        nodes = self.block(end)
        self.expect(end)
        return nodes

    def chain(self) -> Node | None:
        links: list[tuple[str, Node]] = []
        sign = "|"
        while node := self.command():
            links.append((sign, node))
            if self.peek() not in ("&&", "||", "|", "|&"):
                break
            sign = self.operator().replace("|&", "|")
            self.skip("\n")
        return Chain(tuple(links)) if links[1:] else links[0][1] if links else None

    def command(self) -> Node | None:
        name = self.keyword()
        if self.peek() == "(":
            return self.parenthesis()
        if match := self.read(FUNCTION):
            self.skip("\n")
            body = self.command()
            nodes = body.body if isinstance(body, Compound) else (body,) if body else ()
            return Function(match[1] or match[2], nodes)
        if name == "if":
            return self.conditional()
        if name in ("for", "while", "until", "select"):
            return self.loop()
        if name == "case":
            return self.case()
        if name == "{":
            self.word()
            return Compound(self.body("}"))
        if name == "!":
            self.word()
            inside = self.command()
            return Compound((inside,), negated=True) if inside else None
        return Simple(self.test()) if name == "[[" else self.simple()

    def parenthesis(self) -> Node:
        # (( … )) is a sum of the shell, though ( ( … ) ) are two subshells.
        if self.text.startswith("((", self.at):
            start = self.at
            inside = Part("sum", self.balanced("((", "))"))
            return Simple((Word((Part("text", "(("),), start), Word((inside,), start)))
        self.operator()
        nodes = self.block()
        if self.peek() != ")":
            self.refuse("a ( has no end")
        self.operator()
        return Compound(nodes, subshell=True)

    def conditional(self) -> Node:
        branches = []
        while self.keyword() in ("if", "elif"):
            self.word()
            condition = self.body("then")
            branches.append((condition, self.block("elif", "else", "fi")))
        if self.keyword() == "else":
            self.word()
            branches.append(((), self.block("fi")))
        self.expect("fi")
        return If(tuple(branches))

    def loop(self) -> Node:
        kind = self.word().plain
        name, words, condition = "", [], ()
        if kind in ("while", "until"):
            condition = self.block("do")
            condition = (Compound(condition, negated=True),) if kind == "until" else condition
        elif self.peek() == "(":
            # for ((i = 0; …)): nothing here counts its rounds.
            condition = (self.parenthesis(),)
        else:
            name = self.word().plain
            self.skip("\n")
            if self.keyword() == "in":
                self.word()
                while (word := self.word()).parts:
                    words.append(word)
        self.skip(";", "\n")
        self.expect("do")
        return Repeat(self.body("done"), name, tuple(words), condition)

    def case(self) -> Node:
        """Reads case subject in pattern) block;; esac, which is if [[ subject == pattern ]]; then block; fi."""
        self.word()
        subject, branches = self.word(), []
        test, equals = (Word((Part("text", sign),), subject.at) for sign in ("[[", "=="))
        self.skip("\n")
        self.expect("in")
        while True:
            self.skip("\n", "(", ";;", ";&", ";;&")
            if self.keyword() == "esac" or self.at >= len(self.text):
                self.expect("esac")
                return If(tuple(branches))
            known, links = len(self.words), []
            while not links or self.peek() == "|":
                self.skip("|")
                links.append(("||" if links else "|", Simple((test, subject, equals, self.word()))))
            # A pattern is no word of a command, although --rate) looks like a flag.
            del self.words[known:]
            if self.peek() == ")":
                self.operator()
            branches.append(((Chain(tuple(links)),), self.block("esac")))

    def test(self) -> tuple[Word, ...]:
        """Reads [[ … ]], in which &, |, ( and < are parts of words."""
        words = []
        while not words or (words[-1].parts and words[-1].plain != "]]"):
            self.read(BLANK_LINES)
            words.append(self.word(breaks=" \t\n;"))
        return tuple(words)

    def simple(self) -> Node | None:
        words: list[Word] = []
        heredoc, target = None, None
        while True:
            self.read(BLANKS)
            if match := self.read(REDIRECTS):
                word = self.word()
                if match[1] in ("<<", "<<-"):
                    heredoc = Heredoc("".join(part.text for part in word.parts), match[1] == "<<-")
                    self.heredocs.append(heredoc)
                # A sign with a number before it is left out, because 2> writes errors.
                elif match[0] in (">", ">>", ">|"):
                    target = word
            elif (word := self.word()).parts:
                words.append(word)
            else:
                return Simple(tuple(words), heredoc, target) if words or target else None

    # Words

    def word(self, breaks: str = BREAKS) -> Word:
        """Reads one word. It is empty only at an operator or at the end."""
        self.read(BLANKS)
        start, parts = self.at, []
        if breaks == BREAKS and self.text.startswith(("<(", ">("), start):
            self.at += 1
            parts.append(Part("command", self.balanced("(", ")")))
        parts += self.parts(breaks)
        is_array = self.text.startswith("(", self.at) and assignment(parts, whole=True)
        word = Word(tuple(parts), start, self.array() if is_array else None)
        self.words += [word] if parts else []
        return word

    def array(self) -> tuple[Word, ...]:
        self.at += 1
        words = []
        while True:
            self.read(BLANK_LINES)
            if self.at >= len(self.text):
                self.refuse("a quotation or an array has no end")
            if self.text[self.at] == ")":
                self.at += 1
                return tuple(words)
            word = self.word()
            self.at += not word.parts  # an operator inside an array
            words += [word] if word.parts else []

    def parts(self, breaks: str, *, quoted: bool = False) -> list[Part]:
        """Reads up to a character of `breaks`, or to the end. quoted: whether the text is between double quotes."""
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in breaks:
            if expansion := self.expansion(quoted=quoted):
                parts.append(expansion)
            elif quoted and (match := self.read(QUOTED)):
                # A backslash goes, and with it the end of a line.
                parts.append(Part("text", re.sub(r"^\\(\n|(?=.))", "", match[0], flags=re.DOTALL), quoted=True))
            elif match := self.read(ESCAPED):
                parts += [Part("text", match[1], quoted=True)] if match[1] != "\n" else []
            elif match := self.read(SINGLE_QUOTED):
                parts.append(Part("text", self.closed(match), quoted=True))
            elif match := self.read(DOUBLE_QUOTE):
                # An empty text is a word too.
                parts += self.parts('"', quoted=True) or [Part("text", "", quoted=True)]
                if not self.read(DOUBLE_QUOTE):
                    self.refuse("a quotation or an array has no end", match.start())
            elif match := self.read(re.compile(rf".[^{re.escape(breaks)}'\"`$\\(]*", re.DOTALL)):
                parts.append(Part("text", match[0]))
        return parts

    def expansion(self, *, quoted: bool) -> Part | None:
        """Reads $name, ${…}, $(…), $((…)) or `…`; None: nothing of these comes next."""
        if match := self.read(BACKTICKS):
            return Part("command", re.sub(r"\\([$`\\])", r"\1", self.closed(match)), quoted)
        for kind, opening, closing in (("sum", "((", "))"), ("command", "(", ")"), ("parameter", "{", "}")):
            if self.text.startswith(f"${opening}", self.at):
                self.at += 1
                return Part(kind, self.balanced(opening, closing), quoted)
        if match := self.read(PARAMETER):
            return Part("parameter", match[1], quoted)
        return None

    def closed(self, match: re.Match[str]) -> str:
        """Returns what is between two marks. Raises: UserError, if the text ends before the second one."""
        return match[1] if match[2] else self.refuse("a quotation or an array has no end", match.start())

    def balanced(self, opening: str, closing: str) -> str:
        """Reads what is between an opening and its closing mark, with those inside and quotations."""
        depth, at = 0, self.at
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            # An apostrophe opens no quotation in ${x:-don't}, but one in ${x:-'a b'}.
            elif character in '"`' or (
                character == "'" and (opening != "{" or "'" in self.text[at + 1 :].split("}")[0])
            ):
                at = max(self.text.find(character, at + 1), at)
            depth += (character == opening[0]) - (character == closing[0])
            at += 1
            if not depth:
                start, self.at = self.at + len(opening), at
                return self.text[start : at - len(closing)]
        self.refuse(f"a {opening} has no end")

    # Operators, blanks and heredocs

    def read(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Passes over a match that begins here, if one does."""
        if match := pattern.match(self.text, self.at):
            self.at = match.end()
        return match

    def peek(self) -> str:
        """Returns the operator that comes next; "": a word does, or nothing."""
        self.read(BLANKS)
        match = OPERATOR.match(self.text, self.at)
        return match[0] if match and not REDIRECTS.match(self.text, self.at) else ""

    def operator(self) -> str:
        name = self.peek()
        self.at += len(name)
        for heredoc in self.heredocs if name == "\n" else ():
            if not heredoc.at:
                self.read_heredoc(heredoc)
        return name

    def skip(self, *operators: str) -> None:
        while self.peek() in operators:
            self.operator()

    def keyword(self) -> str:
        """Returns the plain text that comes next, without reading it."""
        self.read(BLANKS)
        match = KEYWORD.match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, name: str) -> None:
        if self.keyword() != name:
            self.refuse(f"{name!r} is missing")
        self.word()

    def read_heredoc(self, heredoc: Heredoc) -> None:
        # <<- allows tabs before the mark too.
        tabs = "\t*" if heredoc.cuts_tabs else ""
        match = re.compile(f"^{tabs}{re.escape(heredoc.mark)}$", re.MULTILINE).search(self.text, self.at)
        heredoc.at, text = self.at, self.text[self.at : match.start() if match else None]
        heredoc.text = re.sub(r"(?m)^\t+", "", text) if heredoc.cuts_tabs else text
        self.at = match.end() + 1 if match else len(self.text)

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def refuse(self, problem: str, at: int | None = None) -> NoReturn:
        line = self.line(self.at if at is None else at)
        raise UserError(f"line {line}: {problem}: is this a shell script?")
