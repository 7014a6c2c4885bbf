"""The grammar of a shell script: words, commands and blocks, as far as scripts that start a training use it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jaxrl_llm.errors import UserError

BLANK, BREAKS = " \t", " \t\n;&|<>()"
QUOTES = "'\"`"
ASSIGNS = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
REDIRECTS = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|<&|<>|<|>>|>\||>&|>)")
PARAMETER = re.compile(r"\$(\w+|[@*#?$!-])")
OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", ";", "&", "|", "(", ")", "\n")


@dataclass(frozen=True)
class Part:
    """A part of a word. text: of a "parameter", what is between the braces; of a "command" and a "sum", its inside."""

    kind: Literal["text", "parameter", "command", "sum"]
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    """A word: its parts, and where it begins. array: the words between the parentheses of name=(…)."""

    parts: tuple[Part, ...]
    at: int
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str:
        """The text of a word without quotations or anything to expand; "": it has some."""
        return "".join(part.text for part in self.parts if part.kind == "text" and not part.quoted) * (
            all(part.kind == "text" and not part.quoted for part in self.parts)
        )


@dataclass(frozen=True)
class Simple:
    """A command. heredoc: the lines that it reads, which come after its own; target: the file that it writes."""

    words: tuple[Word, ...]
    heredoc: tuple[list[str], ...] = ()
    target: Word | None = None


@dataclass(frozen=True)
class Chain:
    """Commands joined by "&&" and "||" (or "|", whose status is the last one's)."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


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
class Case:
    """case subject in pattern) block;; esac."""

    subject: Word
    choices: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]


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


Node: TypeAlias = Simple | Chain | If | Repeat | Case | Function | Compound


@dataclass
class ShellParser:
    """Reads a script once, from its beginning to its end. `words` are all words of the script, in their order."""

    text: str
    line: int = 1
    at: int = 0
    words: list[Word] = field(default_factory=list)
    heredocs: list[tuple[str, bool, list[str]]] = field(default_factory=list)  # of a line: end mark, tabs cut, lines
    heredoc_lines: list[tuple[int, str]] = field(default_factory=list)  # of all heredocs, with their numbers

    def script(self) -> tuple[Node, ...]:
        """Returns the commands of the script. Raises: UserError, if a quotation or a block has no end."""
        # Of a file from Windows: a \r would be a part of the last word of each line.
        self.text = self.text.replace("\r\n", "\n")
        nodes: list[Node] = []
        while self.at < len(self.text):
            nodes += self.block(())
            # A ")" or a "done" that nothing has opened.
            if self.at < len(self.text) and not self.operator():
                self.word()
        return tuple(nodes)

    # Blocks

    def block(self, ends: tuple[str, ...]) -> tuple[Node, ...]:
        """Reads commands up to a word of `ends` in the place of a command, which stays unread."""
        nodes: list[Node] = []
        while True:
            while self.peek() in (";", "&", "\n"):
                self.operator()
            if self.at >= len(self.text) or self.peek() in (")", ";;", ";&", ";;&") or self.keyword() in ends:
                return tuple(nodes)
            # A keyword that closes nothing ends the block; the caller passes over it.
            if not ends and self.keyword() in ("then", "do", "done", "fi", "esac", "else", "elif", "}"):
                return tuple(nodes)
            # A character that nothing reads would repeat this for ever.
            start = self.at
            node = self.chain()
            nodes += [node] if node else []
            if self.at == start:
                return tuple(nodes)

    def chain(self) -> Node | None:
        first, rest = self.command(), []
        while first and self.peek() in ("&&", "||", "|", "|&"):
            operator = self.operator()
            while self.peek() == "\n":
                self.operator()
            if (node := self.command()) is None:
                break
            rest.append((operator.rstrip("&") if operator == "|&" else operator, node))
        return Chain(first, tuple(rest)) if first and rest else first

    def command(self) -> Node | None:
        name = self.keyword()
        if self.peek() == "(":
            return self.parenthesis()
        if name == "if":
            return self.conditional()
        if name in ("for", "while", "until", "select"):
            return self.loop(name)
        if name == "case":
            return self.case()
        if name == "{":
            self.word()
            body = self.block(("}",))
            self.expect("}")
            return Compound(body)
        if name == "!":
            self.word()
            inside = self.command()
            return Compound((inside,), negated=True) if inside else None
        if name == "[[":
            return Simple(self.test())
        if name == "function":
            self.word()
        return self.simple(is_function=name == "function")

    def parenthesis(self) -> Node:
        # (( … )) is a sum of the shell, though ( ( … ) ) are two subshells.
        if self.text.startswith("((", self.at):
            start, line = self.at, self.line
            inside = Part("sum", self.balanced("((", "))"))
            return Simple((Word((Part("text", "(("),), start, line), Word((inside,), start, line)))
        self.operator()
        body = self.block(())
        if self.peek() != ")":
            raise UserError(f"line {self.line}: a ( has no end: is this a shell script?")
        self.operator()
        return Compound(body, subshell=True)

    def conditional(self) -> Node:
        branches = []
        name = "if"
        while name in ("if", "elif"):
            self.word()
            condition = self.block(("then",))
            self.expect("then")
            branches.append((condition, self.block(("elif", "else", "fi"))))
            name = self.keyword()
        if name == "else":
            self.word()
            branches.append(((), self.block(("fi",))))
        self.expect("fi")
        return If(tuple(branches))

    def loop(self, kind: str) -> Node:
        self.word()
        name, words, condition = "", [], ()
        if kind in ("for", "select") and self.peek() == "(":
            # for ((i = 0; …)): nothing here counts its rounds.
            condition = (self.parenthesis(),)
        elif kind in ("for", "select"):
            name = self.word().plain
            while self.peek() == "\n":
                self.operator()
            if self.keyword() == "in":
                self.word()
                while not self.peek() and self.at < len(self.text):
                    words.append(self.word())
        else:
            condition = self.block(("do",))
            condition = (Compound(condition, negated=True),) if kind == "until" else condition
        while self.peek() in (";", "\n"):
            self.operator()
        self.expect("do")
        body = self.block(("done",))
        self.expect("done")
        self.redirections()
        return Repeat(body, name, tuple(words), condition)

    def case(self) -> Node:
        self.word()
        subject, choices = self.word(), []
        while self.peek() == "\n":
            self.operator()
        self.expect("in")
        while True:
            while self.peek() in ("\n", "(", ";;", ";&", ";;&"):
                self.operator()
            if self.keyword() == "esac" or self.at >= len(self.text):
                self.expect("esac")
                return Case(subject, tuple(choices))
            known = len(self.words)
            patterns = [self.word()]
            while self.peek() == "|":
                self.operator()
                patterns.append(self.word())
            # A pattern is no word of a command, although --rate) looks like a flag.
            del self.words[known:]
            if self.peek() == ")":
                self.operator()
            choices.append((tuple(patterns), self.block(("esac",))))

    def test(self) -> tuple[Word, ...]:
        """Reads [[ … ]], in which &, |, ( and < are parts of words."""
        words = []
        while self.at < len(self.text):
            self.blanks(newlines=True)
            words.append(self.word(breaks=" \t\n;"))
            if words[-1].plain == "]]" or not words[-1].parts:
                break
        return tuple(words)

    def simple(self, *, is_function: bool) -> Node | None:
        words: list[Word] = []
        heredoc, target = (), None
        while self.at < len(self.text):
            if redirection := self.redirection():
                heredoc, target = redirection[0] or heredoc, redirection[1] or target
                continue
            if self.peek() == "(" and len(words) == 1 and words[0].plain:
                start = self.at
                self.operator()
                if self.peek() == ")":
                    self.operator()
                    is_function = True
                else:
                    self.at = start
            if is_function and len(words) == 1:
                while self.peek() == "\n":
                    self.operator()
                body = self.command()
                return Function(words[0].plain, body.body if isinstance(body, Compound) else (body,) if body else ())
            if self.peek() or self.at >= len(self.text):
                break
            words.append(self.word())
        return Simple(tuple(words), heredoc, target) if words or target else None

    # Words

    def word(self, breaks: str = BREAKS) -> Word:
        """Reads one word. It is empty only at an operator or at the end."""
        self.blanks()
        start, line, parts = self.at, self.line, []
        while self.at < len(self.text) and self.text[self.at] not in breaks:
            parts += self.part(breaks)
            joined = "".join(part.text for part in parts if part.kind == "text")
            if self.text.startswith("(", self.at) and breaks == BREAKS and ASSIGNS.fullmatch(joined):
                word = Word(tuple(parts), start, line, self.array())
                self.words.append(word)
                return word
        if breaks == BREAKS and self.text[self.at : self.at + 2] in ("<(", ">(") and start == self.at:
            self.at += 1
            parts.append(Part("command", self.balanced("(", ")")))
        word = Word(tuple(parts), start, line)
        self.words += [word] if parts else []
        return word

    def array(self) -> tuple[Word, ...]:
        self.at += 1
        words = []
        while True:
            self.blanks(newlines=True)
            if self.at >= len(self.text):
                raise UserError("a quotation or an array has no end: is this a shell script?")
            if self.text[self.at] == ")":
                self.at += 1
                return tuple(words)
            word = self.word()
            if not word.parts:  # an operator inside an array
                self.at += 1
            words += [word] if word.parts else []

    def part(self, breaks: str) -> list[Part]:
        character = self.text[self.at]
        if character == "\\":
            return self.escaped()
        if character == "'":
            return [Part("text", self.until("'"), quoted=True)]
        if character == '"':
            return self.double_quoted()
        if self.text.startswith("$'", self.at):
            self.at += 1
            return [Part("text", self.until("'"), quoted=True)]
        if self.text.startswith('$"', self.at):
            self.at += 1
            return self.double_quoted()
        if character in "$`" and (expansion := self.expansion(quoted=False)):
            return [expansion]
        end = self.at + 1
        while end < len(self.text) and self.text[end] not in breaks + QUOTES + "$\\(":
            end += 1
        text, self.at = self.text[self.at : end], end
        return [Part("text", text)]

    def escaped(self) -> list[Part]:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            self.line += 1
            return []
        return [Part("text", following, quoted=True)]

    def double_quoted(self) -> list[Part]:
        parts, text, begin = [], "", self.line
        self.at += 1
        while not self.text.startswith('"', self.at):
            if self.at >= len(self.text):
                raise UserError(f"line {begin}: a quotation or an array has no end: is this a shell script?")
            character, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if character == "\\" and following and following in '$`"\\\n':
                text += following if following != "\n" else ""
                self.line += following == "\n"
                self.at += 2
            elif character in "$`" and (expansion := self.expansion(quoted=True)):
                parts += [*([Part("text", text, quoted=True)] if text else []), expansion]
                text = ""
            else:
                text += character
                self.line += character == "\n"
                self.at += 1
        self.at += 1
        return [*parts, Part("text", text, quoted=True)] if text or not parts else parts

    def expansion(self, *, quoted: bool) -> Part | None:
        """Reads $name, ${…}, $(…), $((…)) or `…`; None: it is a $ alone."""
        if self.text.startswith("`", self.at):
            return Part("command", re.sub(r"\\([$`\\])", r"\1", self.until("`")), quoted)
        if self.text.startswith("$((", self.at):
            self.at += 1
            return Part("sum", self.balanced("((", "))"), quoted)
        if self.text.startswith("$(", self.at):
            self.at += 1
            return Part("command", self.balanced("(", ")"), quoted)
        if self.text.startswith("${", self.at):
            self.at += 1
            return Part("parameter", self.balanced("{", "}"), quoted)
        if match := PARAMETER.match(self.text, self.at):
            # $10 is $1 and a 0.
            name = match[1][0] if match[1][0].isdigit() else match[1]
            self.at += 1 + len(name)
            return Part("parameter", name, quoted)
        return None

    def until(self, mark: str) -> str:
        """Reads from one mark to the next. In `…`, a backslash keeps a mark."""
        begin, start = self.line, self.at + 1
        end = self.text.find(mark, start)
        while mark == "`" and end > 0 and self.text[end - 1] == "\\":
            end = self.text.find(mark, end + 1)
        if end < 0:
            raise UserError(f"line {begin}: a quotation or an array has no end: is this a shell script?")
        self.line += self.text.count("\n", start, end)
        self.at = end + 1
        return self.text[start:end]

    def balanced(self, opening: str, closing: str) -> str:
        """Reads what is between an opening and its closing mark, with those inside and quotations."""
        begin, start, depth = self.line, self.at + len(opening), 0
        open_mark, close_mark = opening[0], closing[0]
        at = self.at
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            # In ${x:-don't} an apostrophe opens no quotation, in ${x:-'a b'} it does.
            elif character in QUOTES and (
                character != "'" or open_mark != "{" or "'" in self.text[at + 1 :].split("}")[0]
            ):
                at = max(self.text.find(character, at + 1), at)
            depth += (character == open_mark) - (character == close_mark)
            at += 1
            if not depth:
                inside = self.text[start : at - len(closing)]
                self.line += inside.count("\n")
                self.at = at
                return inside
        raise UserError(f"line {begin}: a {opening} has no end: is this a shell script?")

    # Operators, blanks and redirections

    def blanks(self, *, newlines: bool = False) -> None:
        """Passes over blanks, joined lines and comments."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in BLANK or (newlines and character == "\n"):
                self.line += character == "\n"
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.line += 1
                self.at += 2
            elif character == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def peek(self) -> str:
        """Returns the operator that comes next; "": a word does, or nothing."""
        self.blanks()
        if REDIRECTS.match(self.text, self.at):
            return ""
        return next((name for name in OPERATORS if self.text.startswith(name, self.at)), "")

    def operator(self) -> str:
        name = self.peek()
        self.at += len(name)
        if name == "\n":
            self.line += 1
            self.read_heredocs()
        return name

    def keyword(self) -> str:
        """Returns the plain text that comes next, without reading it."""
        self.blanks()
        match = re.compile(r"[^\s;&|<>()'\"`$\\]+").match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, name: str) -> None:
        if self.keyword() != name:
            raise UserError(f"line {self.line}: {name!r} is missing: is this a shell script?")
        self.word()

    def redirections(self) -> None:
        while self.redirection():
            pass

    def redirection(self) -> tuple[tuple[list[str], ...], Word | None] | None:
        """Reads `>log`, `2>&1` or `<<EOF`. Returns the list for the lines of a heredoc, and the file written."""
        self.blanks()
        match = REDIRECTS.match(self.text, self.at)
        if not match or (match[1] in ("<", ">") and self.text.startswith("(", match.end())):
            return None
        self.at = match.end()
        word = self.word()
        if match[1] in ("<<", "<<-"):
            mark = "".join(part.text for part in word.parts)
            # The lines come after this one, whose rest is not read yet.
            self.heredocs.append((mark, match[1] == "<<-", []))
            return (self.heredocs[-1][2],), None
        # Not with a number before the sign: 2> writes errors.
        return (), word if match[1] in (">", ">>", ">|") and not match[0][0].isdigit() else None

    def read_heredocs(self) -> None:
        """Reads the heredocs of the line that has ended."""
        for mark, tabs, lines in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                line = self.text[self.at : end if end >= 0 else len(self.text)]
                self.at = end + 1 if end >= 0 else len(self.text)
                self.line += 1
                # <<- allows tabs before the mark too.
                line = line.lstrip("\t") if tabs else line
                if line == mark:
                    break
                lines.append(line)
                self.heredoc_lines.append((self.line - 1, line))
        self.heredocs = []
