"""Follows a shell script: its variables, arrays, sums, blocks and functions. Nothing is run.

The script gets no arguments, and nothing from its environment. A value that it does not say stays as it is written,
with its $. Where a condition is not known, the commands of all branches count, and a variable that they leave different
is not known afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import shell_test
from jaxrl_llm.tools.translate.arguments import Value
from jaxrl_llm.tools.translate.shell_grammar import (
    Chain,
    Compound,
    Function,
    Heredoc,
    If,
    Node,
    Repeat,
    ShellParser,
    Simple,
    Word,
    assignment,
)
from jaxrl_llm.tools.translate.shell_values import Values, Variable, items, joined

DOTTED = re.compile(r"[+~]*[A-Za-z_][\w-]*(?:\.[\w-]+)+=.*", re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SHELLS = re.compile(r"(?:.*/)?(?:bash|sh|zsh)")
ROUNDS, DEPTH, STEPS = 32, 16, 20_000  # rounds of a loop, calls of functions inside each other, commands of all


@dataclass(frozen=True)
class Command:
    """The words of a command, expanded; place: position of its first word."""

    values: tuple[Value, ...]
    place: int

    @property
    def words(self) -> list[str]:
        return [value.text for value in self.values]

    @property
    def places(self) -> frozenset[int]:
        return joined([*self.values]).places


def follow(text: str) -> Walk:
    """Follows a script. Raises: UserError, if it cannot be parsed."""
    # A \r in a file from Windows would be a part of the last word of each line.
    script = Walk(parser=ShellParser(text.replace("\r\n", "\n")))
    script.block(script.parser.script())
    return script


@dataclass(kw_only=True)
class Walk(Values):
    """A script that is followed, with its commands and blocks. files: {name: text} of what it writes by heredocs."""

    parser: ShellParser
    functions: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    written: list[Heredoc] = field(default_factory=list)  # those of the files
    local: dict[str, Variable | None] | None = None  # of the function that is followed: what its names were before
    depth: int = 0
    steps: int = 0
    jump: str = ""  # exit, return, break or continue, until what it leaves has ended

    # Blocks. Each returns whether it succeeds; None: that is not known.

    def block(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if self.jump:
                return status
            status = self.node(node)
        return status

    def node(self, node: Node) -> bool | None:
        self.steps += 1
        # Loops in loops have 32 rounds each, so the depth alone bounds nothing.
        if self.steps > STEPS:
            raise UserError(f"it does not end within {STEPS} commands: is this a script that starts a training?")
        match node:
            case Simple():
                return self.simple(node)
            case Chain():
                return self.chain(node)
            case If():
                return self.branches(node.branches)
            case Repeat():
                return self.loop(node)
            case Function():
                self.functions[node.name] = node.body
                return True
            case Compound():
                variables = dict(self.variables)
                status = self.block(node.body)
                # A subshell gets copies: what it sets is gone at its end, and an `exit` ends it alone.
                if node.subshell:
                    self.variables, self.jump = variables, ""
                return shell_test.agrees(status, not node.negated)

    def chain(self, node: Chain) -> bool | None:
        status: bool | None = True
        for sign, following in node.links:
            # Whether `a || b` runs b depends on a, which is not known. After `a && b` a script means b to run.
            if status is None and sign == "||":
                self.in_doubt([(following,), ()])
            elif sign == "|" or (status is not False if sign == "&&" else status is False):
                status = self.node(following)
        return status

    def branches(self, branches: Sequence[tuple[tuple[Node, ...], tuple[Node, ...]]]) -> bool | None:
        for i, (condition, body) in enumerate(branches):
            status = self.block(condition)
            if status:
                return self.block(body)
            if status is None:
                others = [body for _, body in branches[i:]]
                self.in_doubt([*others, ()] if branches[-1][0] else others)
                return None
        return True

    def in_doubt(self, bodies: Sequence[tuple[Node, ...]]) -> None:
        """Follows blocks of which one or none runs. What they leave different is not known afterwards."""
        # Each branch begins with the variables before all of them, as only one of them runs.
        before = self.variables
        ends: list[dict[str, Variable]] = []
        for body in bodies:
            self.variables = dict(before)
            self.block(body)
            # An `exit` in a branch that may not run does not end the script here.
            self.jump = ""
            ends.append(self.variables)
        self.variables = dict(before)
        for name in {name for variables in ends for name in variables}:
            values = [variables.get(name, []) for variables in ends]
            if len({tuple(value.text for value in items(value)) for value in values}) == 1:
                self.variables[name] = values[0]
            # An array stays as it was before, and the words that it may get belong to no command.
            elif not any(isinstance(value, list) and value for value in values):
                self.variables[name] = Value(f"${{{name}: a branch decides}}")

    def loop(self, node: Repeat) -> bool | None:
        if node.name:
            # All words are expanded before the first round, as bash does.
            for value in [value for word in node.words for value in self.fields(word)][:ROUNDS]:
                self.variables[node.name] = value
                if self.round(node.body):
                    break
            return True
        for _ in range(ROUNDS):
            status = self.block(node.condition)
            if status is None:
                self.in_doubt([node.body, ()])
            if not status or self.round(node.body):
                break
        return None

    def round(self, body: tuple[Node, ...]) -> bool:
        """Follows one round of a loop. Returns whether it was the last one."""
        self.block(body)
        last = self.jump not in ("", "continue")
        # break and continue have done their work; the others go on to what is around the loop.
        self.jump = self.jump if self.jump in ("return", "exit") else ""
        return last

    # Commands

    def simple(self, node: Simple) -> bool | None:
        words = list(node.words)
        matches = [assignment(word.parts) for word in words]
        # NAME=value before a command is set for this command alone, and without one for the script.
        if all(matches):
            return self.declare(words)
        words = words[next(i for i, match in enumerate(matches) if not match) :]
        name = words[0].plain
        if name == "((":
            return self.sum_of(words[1].parts[0].text)
        if name in ("[[", "[", "test"):
            return shell_test.status([self.text(word).text for word in words[1:]], is_pattern=name == "[[")
        if name in DECLARATIONS:
            return self.declare(words[1:], is_local=name in ("local", "declare", "typeset"))
        values = tuple(value for word in words for value in self.fields(word))
        return self.command(Command(values, words[0].at), node) if values else True

    def declare(self, words: Sequence[Word], *, is_local: bool = False) -> bool:
        for word in words:
            match = assignment(word.parts)
            name = match[1] if match else word.plain
            if is_local and self.local is not None:
                # The value before, which `call` puts back.
                self.local.setdefault(name, self.variables.get(name))
            if match:
                self.assign(match, word)
        return True

    def command(self, command: Command, node: Simple) -> bool | None:
        name, *rest = command.words
        if name in ("true", ":", "false"):
            return name != "false"
        # `exit 1` does not end it here: it stands where arguments are wrong, and a script that ends there trains
        # nothing.
        if name in ("return", "break", "continue") or (name == "exit" and rest[:1] in ([], ["0"])):
            self.jump = name
            return True
        if name == "let":
            return [self.sum_of(text) for text in rest][-1] if rest else True
        if name == "set" and "--" in rest:
            self.arguments = list(command.values[rest.index("--") + 2 :])
        if name == "shift":
            self.arguments = self.arguments[int(rest[0]) if rest and rest[0].isdigit() else 1 :]
        if name == "getopts" and not self.arguments:
            return False  # without options its loop does not begin
        if name == "unset":
            self.variables = {key: value for key, value in self.variables.items() if key not in rest}
        if name == "read":
            self.variables |= {key: Value(f"${{{key}: it is read}}") for key in rest if re.fullmatch(r"\w+", key)}
        if name in self.functions and self.depth < DEPTH:
            return self.call(self.functions[name], list(command.values[1:]))
        if (text := _script_of(command.words)) is not None:
            return self.text_as_script(text, command.places)
        if name == "cat" and node.heredoc and node.target:
            self.files[self.text(node.target).text] = self.text_of(node.heredoc.text, quoted=True).text
            self.written.append(node.heredoc)
        # Its status is not known: no command is run.
        self.commands.append(command)
        return None

    def nested(self, nodes: Iterable[Node], **state: Any) -> bool | None:
        """Follows the commands of a function or a text, during which some attributes are others."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state, depth=self.depth + 1)
        try:
            return self.block(nodes)
        finally:
            vars(self).update(before, depth=self.depth - 1)

    def call(self, body: tuple[Node, ...], arguments: list[Value]) -> bool | None:
        local: dict[str, Variable | None] = {}
        status = self.nested(body, arguments=arguments, local=local)
        self.variables = {name: value for name, value in (self.variables | local).items() if value is not None}
        # A return has ended the function alone.
        self.jump = self.jump if self.jump == "exit" else ""
        return status

    def text_as_script(self, text: str, places: frozenset[int]) -> bool | None:
        try:
            return self.nested(ShellParser(text).script(), inside=places) if self.depth < DEPTH else None
        except UserError:
            return None  # it is no script, or too long

    def sum_of(self, text: str) -> bool | None:
        """Follows (( … )): a comparison, or what sets a variable."""
        text = re.sub(r"([-+])\1\s*$", r"\1=1", text)  # ++ and --
        if match := re.fullmatch(r"\s*(\w+)\s*([-+*]?)=(?!=)(.*)", text, re.DOTALL):
            name, sign, value = match.groups()
            self.variables[name] = self.summed(f"{name} {sign} ({value})" if sign else value)
            return True
        if match := re.fullmatch(r"(.*?)(<=|>=|==|!=|<|>)(.*)", text, re.DOTALL):
            first, second = (self.summed(side).text for side in (match[1], match[3]))
            return shell_test.compared(first, match[2], second)
        value = self.summed(text).text
        return None if "$" in value else value != "0"


def _script_of(words: Sequence[str]) -> str | None:
    """Returns the text of eval, or of `bash -c TEXT`, also behind ssh, srun or docker exec; None: it has none."""
    if words[0] == "eval":
        return " ".join(words[1:])
    shell = next((i for i, word in enumerate(words) if SHELLS.fullmatch(word)), len(words))
    option = next((i for i in range(shell + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[i])), None)
    return None if option is None else words[option + 1]
