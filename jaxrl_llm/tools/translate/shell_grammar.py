"""Parses a shell script into a tree of commands and blocks, as far as scripts that start a training use them.

`jaxrl translate` needs the tree to find the training command of a recipe of another trainer: shell.py interprets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from jaxrl_llm.tools.translate.shell_words import Heredoc, Lexer, Part, Redirection, Token, Word

# Keywords that end a block.
CLOSING = ("then", "do", "done", "fi", "esac", "else", "elif", "}")


@dataclass(frozen=True)
class Simple:
    """A command of one program. heredoc: lines that it reads, or None; target: file that it writes, or None."""

    words: tuple[Word, ...]
    heredoc: Heredoc | None = None
    target: Word | None = None


@dataclass(frozen=True)
class Chain:
    """Commands that are joined by && and ||. The sign of the first one has no meaning."""

    links: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class If:
    """Pairs of a condition and a block. The condition of `else` is empty."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Loop:
    """A loop. name: variable of `for`, "" for a loop with a condition; words: values of the variable."""

    body: tuple[Node, ...]
    name: str = ""
    words: tuple[Word, ...] = ()
    condition: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Function:
    """Definition of a function, whose body runs where it is called."""

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Compound:
    """Commands whose status is that of the last one. A subshell leaves no variables behind."""

    body: tuple[Node, ...]
    is_negated: bool = False
    is_subshell: bool = False


Node: TypeAlias = Simple | Chain | If | Loop | Function | Compound


class ShellParser:
    """Parses the tokens of a shell script into nodes. index: position of the next token."""

    def __init__(self, text: str):
        self.lexer = Lexer(text)
        self.tokens = self.lexer.tokens()
        self.index = 0

    def script(self) -> tuple[Node, ...]:
        """Returns the commands of the script. Raises: UserError, if a block has no beginning or no end."""
        nodes = self.block()
        if self.index < len(self.tokens):
            self.refuse(f"{self.keyword() or self.peek()!r} closes no block")
        return nodes

    # Tokens

    def peek(self) -> Token:
        """Returns the next token; "" at the end."""
        return self.tokens[self.index] if self.index < len(self.tokens) else ""

    def keyword(self) -> str:
        """Returns the plain text of the next token; "" if that is no word."""
        token = self.peek()
        return token.plain if isinstance(token, Word) else ""

    def take(self) -> Token:
        """Returns the next token, and moves behind it."""
        self.index += 1
        return self.tokens[self.index - 1] if self.index <= len(self.tokens) else ""

    def take_word(self) -> Word:
        """Returns the next token, which must be a word, and moves behind it."""
        token = self.take()
        return token if isinstance(token, Word) else self.refuse("a word is missing")

    def skip(self, *operators: str) -> None:
        """Moves behind operators such as line breaks."""
        while self.peek() in operators:
            self.index += 1

    def expect(self, name: str) -> None:
        """Moves behind the keyword or operator `name`, which must be next."""
        if name not in (self.keyword(), self.peek()):
            self.refuse(f"{name!r} is missing")
        self.index += 1

    def refuse(self, problem: str) -> NoReturn:
        """Raises a UserError with the line of the script that cannot be parsed."""
        words = [token.position for token in self.tokens[: self.index + 1] if isinstance(token, Word)]
        self.lexer.refuse(problem, words[-1] if words else 0)

    # Blocks

    def block(self) -> tuple[Node, ...]:
        """Parses commands up to a keyword or an operator that ends a block."""
        nodes: list[Node] = []
        while True:
            self.skip(";", "\n", "&")
            if self.peek() in ("", ")", ";;", ";&", ";;&") or self.keyword() in CLOSING:
                return tuple(nodes)
            nodes.append(self.chain())

    def body(self, end: str) -> tuple[Node, ...]:
        """Parses commands up to the keyword that ends them, and this keyword."""
        nodes = self.block()
        self.expect(end)
        return nodes

    def chain(self) -> Node:
        """Parses pipelines that are joined by && and ||. A chain before & is a process of its own."""
        links = [("&&", self.pipeline())]
        while (sign := self.peek()) in ("&&", "||"):
            self.index += 1
            self.skip("\n")
            links.append((str(sign), self.pipeline()))
        node = Chain(tuple(links)) if links[1:] else links[0][1]
        return Compound((node,), is_subshell=True) if self.peek() == "&" else node

    def pipeline(self) -> Node:
        """Parses commands that are joined by |."""
        members = [self.command()]
        while self.peek() in ("|", "|&"):
            self.index += 1
            self.skip("\n")
            members.append(self.command())
        # Each command of a pipe is a process of its own.
        processes = tuple(Compound((member,), is_subshell=True) for member in members)
        return Compound(processes) if members[1:] else members[0]

    def command(self) -> Node:
        """Parses one command: a block such as `if`, the definition of a function, or a simple command."""
        name = self.keyword()
        if self.peek() == "(":
            self.index += 1
            return Compound(self.body(")"), is_subshell=True)
        if name == "function" or (name and self.tokens[self.index + 1 : self.index + 3] == ["(", ")"]):
            return self.function()
        match name:
            case "if":
                return self.conditional()
            case "for" | "while" | "until":
                return self.loop()
            case "case":
                return self.case()
            case "[[":
                return self.test()
            case "{":
                self.index += 1
                return Compound(self.body("}"))
            case "!":
                self.index += 1
                return Compound((self.command(),), is_negated=True)
        return self.simple()

    def function(self) -> Node:
        """Parses the definition of a function."""
        self.index += self.keyword() == "function"
        name = self.take_word().plain
        self.skip("(", ")", "\n")
        return Function(name, (self.command(),))

    def conditional(self) -> Node:
        """Parses if … then … elif … else … fi."""
        branches = []
        while self.keyword() in ("if", "elif"):
            self.index += 1
            condition = self.body("then")
            branches.append((condition, self.block()))
        if self.keyword() == "else":
            self.index += 1
            branches.append(((), self.block()))
        self.expect("fi")
        return If(tuple(branches))

    def loop(self) -> Node:
        """Parses for, while and until."""
        kind = self.take_word().plain
        name, words, condition = "", [], ()
        if kind != "for":
            condition = (Compound(self.block(), is_negated=kind == "until"),)
        else:
            variable = self.take_word()
            # for ((…)) has no variable, and its number of rounds is not computed.
            name, condition = variable.plain, (Simple((variable,)),)
            self.skip("\n")
            if self.keyword() == "in":
                self.index += 1
                while isinstance(self.peek(), Word):
                    words.append(self.take_word())
            else:
                words.append(Word((Part("parameter", "@", is_quoted=True),), 0))
        self.skip(";", "\n")
        self.expect("do")
        return Loop(self.body("done"), name, tuple(words), condition)

    def case(self) -> Node:
        """Parses `case subject in pattern) block;; esac` as `if [[ subject == pattern ]]; then block; fi`."""
        self.index += 1
        subject, branches = self.take_word(), []
        test, equals = (Word((Part("text", sign),), subject.position) for sign in ("[[", "=="))
        self.skip("\n")
        self.expect("in")
        while True:
            self.skip("\n", "(", ";;")
            if self.keyword() == "esac" or not self.peek():
                self.expect("esac")
                return If(tuple(branches))
            patterns = [self.take_word()]
            while self.peek() == "|":
                self.index += 1
                patterns.append(self.take_word())
            self.expect(")")
            for pattern in patterns:
                # A pattern is no word of a command, although --rate) looks like a flag.
                self.lexer.words.remove(pattern)
            links = tuple(("||", Simple((test, subject, equals, pattern))) for pattern in patterns)
            branches.append(((Chain(links),), self.block()))

    def test(self) -> Node:
        """Parses [[ … ]]. A test with operators such as && keeps no words, because its status is not computed."""
        tokens = [self.take()]
        while not (isinstance(tokens[-1], Word) and tokens[-1].plain == "]]"):
            if self.index >= len(self.tokens):
                self.refuse("']]' is missing")
            tokens.append(self.take())
        words = [token for token in tokens if isinstance(token, Word)]
        return Simple(tuple(words if len(words) == len(tokens) else words[:1]))

    def simple(self) -> Node:
        """Parses the words, heredocs and redirections of a simple command."""
        words: list[Word] = []
        heredoc, target, start = None, None, self.index
        while isinstance(token := self.peek(), Word | Heredoc | Redirection):
            self.index += 1
            if isinstance(token, Word):
                words.append(token)
            elif isinstance(token, Heredoc):
                heredoc = token
            else:
                file = self.take_word()
                # A number before the sign means another output, such as 2> for errors.
                target = file if token in (">", ">>", ">|") else target
        if self.index == start:
            self.refuse(f"a command is missing before {self.peek()!r}")
        return Simple(tuple(words), heredoc, target)
