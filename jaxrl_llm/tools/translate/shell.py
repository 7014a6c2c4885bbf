"""Follows a shell script: its variables, arrays, sums, blocks and functions. Nothing is run.

The script gets no arguments, and nothing from its environment. A value that it does not say stays as it is written,
with its $. Where a condition is not known, the commands of all branches count, and a variable that they leave different
is not known afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import shell_test
from jaxrl_llm.tools.translate.arguments import Value
from jaxrl_llm.tools.translate.shell_grammar import (
    Case,
    Chain,
    Compound,
    Function,
    If,
    Node,
    Repeat,
    ShellParser,
    Simple,
    Word,
)
from jaxrl_llm.tools.translate.shell_values import Values

DOTTED = re.compile(r"[+~]*[A-Za-z_][\w-]*(?:\.[\w-]+)+=.*", re.DOTALL)
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
ROUNDS, DEPTH, STEPS = 32, 16, 20_000  # rounds of a loop, calls of functions inside each other, commands of all


@dataclass(frozen=True)
class Command:
    """The words of a command, expanded; place: of its first word."""

    values: tuple[Value, ...]
    place: int

    @property
    def words(self) -> list[str]:
        return [value.text for value in self.values]

    @property
    def places(self) -> frozenset[int]:
        return frozenset().union(*(value.places for value in self.values))


@dataclass
class Script:
    """What a script does: its commands, the files that it writes by heredocs, and all its words as they are written."""

    commands: list[Command]
    files: dict[str, str]
    words: list[Word]
    heredocs: list[tuple[int, str]]  # number and text of the lines of those that are in no file


def follow(text: str) -> Script:
    """Follows a script. Raises: UserError, if it cannot be parsed."""
    parser = ShellParser(text)
    nodes = parser.script()
    run = Walk()
    run.block(nodes)
    # Lines of a file that the script writes are read with that file.
    written = {line for text in run.files.values() for line in text.splitlines()}
    heredocs = [(number, line) for number, line in parser.heredoc_lines if line not in written]
    return Script(run.commands, run.files, parser.words, heredocs)


@dataclass
class Walk(Values):
    """A script that is followed: its commands and blocks."""

    functions: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    local: list[dict[str, Value | None]] = field(default_factory=list)  # of each function: what its names were before
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
            case Case():
                return self.case(node)
            case Function():
                self.functions[node.name] = node.body
            case Compound():
                variables, arrays = dict(self.variables), dict(self.arrays)
                status = self.block(node.body)
                # A subshell gets copies: what it sets is gone at its end.
                if node.subshell:
                    self.variables, self.arrays = variables, arrays
                return status if status is None or not node.negated else not status
        return True

    def chain(self, node: Chain) -> bool | None:
        status = self.node(node.first)
        for sign, following in node.rest:
            if sign == "|":
                status = self.node(following)
            # Whether `a || b` runs b depends on a, which is not known. After `a && b` a script means b to run.
            elif status is None and sign == "||":
                self.in_doubt([(following,), ()])
            elif status is not False if sign == "&&" else status is False:
                status = self.node(following)
        return status

    def branches(self, branches: Sequence[tuple[tuple[Node, ...], tuple[Node, ...]]]) -> bool | None:
        for i, (condition, body) in enumerate(branches):
            status = self.block(condition) if condition else True
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
        variables_before, arrays_before = self.variables, self.arrays
        ends: list[tuple[dict[str, Value], dict[str, list[Value]]]] = []
        for body in bodies:
            self.variables, self.arrays = dict(variables_before), dict(arrays_before)
            self.block(body)
            # An `exit` in a branch that may not run does not end the script here.
            self.jump = ""
            ends.append((self.variables, self.arrays))
        self.variables, self.arrays = dict(variables_before), dict(arrays_before)
        for name in {name for variables, _ in ends for name in variables}:
            texts = {variables[name].text if name in variables else None for variables, _ in ends}
            if len(texts) > 1:
                self.variables[name] = Value(f"${{{name}: a branch decides}}")
            else:
                self.variables[name] = ends[0][0][name]
        for name in {name for _, arrays in ends for name in arrays}:
            if len({tuple(arrays.get(name, [])) for _, arrays in ends}) == 1:
                self.arrays[name] = ends[0][1][name]

    def loop(self, node: Repeat) -> bool | None:
        if node.name:
            # All words are expanded before the first round, as bash does.
            for value in [value for word in node.words for value in self.fields(word)][:ROUNDS]:
                self.variables[node.name] = value
                if self.round(node.body):
                    break
            return True
        for _ in range(ROUNDS):
            status = self.block(node.condition) if node.condition else None
            if status is None:
                self.in_doubt([node.body, ()])
            if not status or self.round(node.body):
                break
        return None

    def round(self, body: tuple[Node, ...]) -> bool:
        """Follows one round of a loop. Returns whether it was the last one."""
        self.block(body)
        last = self.jump in ("break", "return", "exit")
        # break and continue have done their work; the others go on to what is around the loop.
        self.jump = self.jump if self.jump in ("return", "exit") else ""
        return last

    def case(self, node: Case) -> bool | None:
        subject = self.text(node.subject).text
        # Not known: one of the blocks may run, or none.
        if "$" in subject:
            self.in_doubt([*(body for _, body in node.choices), ()])
            return None
        for patterns, body in node.choices:
            if any(fnmatchcase(subject, self.text(pattern).text) for pattern in patterns):
                return self.block(body)
        return True

    # Commands

    def simple(self, node: Simple) -> bool | None:
        words = list(node.words)
        # NAME=value before a command is set for this command alone, and without one for the script.
        while words and (match := self.assigned(words[0])):
            if len(words) == 1 or all(self.assigned(word) for word in words):
                self.assign(match, words[0])
            words = words[1:]
        if not words:
            return True
        if words[0].plain == "((":
            return self.sum_of(words[1].parts[0].text)
        if words[0].plain in ("[[", "[", "test"):
            return shell_test.status([self.text(word).text for word in words[1:]], is_pattern=words[0].plain == "[[")
        if words[0].plain in DECLARATIONS:
            for word in words[1:]:
                match = self.assigned(word)
                name = match[1] if match else word.plain
                if self.local and words[0].plain in ("local", "declare", "typeset"):
                    # The value before, which `call` puts back.
                    self.local[-1].setdefault(name, self.variables.get(name))
                if match:
                    self.assign(match, word)
            return True
        values = tuple(value for word in words for value in self.fields(word))
        return self.command(Command(values, words[0].at), node) if values else True

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
        if name == "shift" and self.arguments:
            self.arguments = self.arguments[int(rest[0]) if rest and rest[0].isdigit() else 1 :]
        if name == "getopts" and not self.arguments:
            return False  # without options its loop does not begin
        if name == "unset":
            self.variables = {key: value for key, value in self.variables.items() if key not in rest}
        if name == "read":
            self.variables |= {key: Value(f"${{{key}: it is read}}") for key in rest if re.fullmatch(r"\w+", key)}
        if name in self.functions and self.depth < DEPTH:
            return self.call(self.functions[name], list(command.values[1:]))
        if name == "eval":
            return self.text_as_script(" ".join(rest), command.places)
        if inside := self.script_of(command):
            return self.text_as_script(*inside)
        if name == "cat" and node.heredoc and node.target:
            self.files[self.text(node.target).text] = self.heredoc("\n".join(node.heredoc[0]))
        # Its status is not known: no command is run.
        self.commands.append(command)
        return None

    def call(self, body: tuple[Node, ...], arguments: list[Value]) -> bool | None:
        before, self.arguments = self.arguments, arguments
        self.depth += 1
        self.local.append({})
        status = self.block(body)
        for name, value in self.local.pop().items():
            self.variables.pop(name, None)
            self.variables |= {name: value} if value is not None else {}
        # A return has ended the function alone.
        self.jump = self.jump if self.jump == "exit" else ""
        self.depth -= 1
        self.arguments = before
        return status

    def script_of(self, command: Command) -> tuple[str, frozenset[int]] | None:
        """Returns the text of `bash -c TEXT`, also behind ssh, srun or docker exec, and the places of the command."""
        words = command.words
        for i, word in enumerate(words[:-2]):
            if word.rpartition("/")[2] in ("bash", "sh", "zsh"):
                option = next((j for j in range(i + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[j])), 0)
                return (words[option + 1], command.places) if option else None
        return None

    def text_as_script(self, text: str, places: frozenset[int]) -> bool | None:
        if self.depth >= DEPTH:
            return None
        before, self.inside = self.inside, places
        self.depth += 1
        try:
            status = self.block(ShellParser(text).script())
        except UserError:
            status = None  # it is no script, or too long
        self.depth -= 1
        self.inside = before
        return status

    def heredoc(self, text: str) -> str:
        # A heredoc expands as a text between double quotation marks, in which such a mark is a character.
        parts = ShellParser('"' + text.replace('"', '\\"') + '"').double_quoted()
        return "".join(self.expanded(part)[0].text if part.kind != "text" else part.text for part in parts)

    def sum_of(self, text: str) -> bool | None:
        """Follows (( … )): a comparison, or what sets a variable."""
        if match := re.fullmatch(r"\s*(\w+)\s*([-+*]?)=(?!=)(.*)", text, re.DOTALL):
            name, sign, value = match.groups()
            self.variables[name] = self.summed(f"{name} {sign} ({value})" if sign else value)
            return True
        if match := re.fullmatch(r"\s*(\w+)(\+\+|--)\s*", text):
            self.variables[match[1]] = self.summed(f"{match[1]} {match[2][0]} 1")
            return True
        if match := re.fullmatch(r"(.*?)(<=|>=|==|!=|<|>)(.*)", text, re.DOTALL):
            first, second = (self.summed(side).text for side in (match[1], match[3]))
            return shell_test.compared(first, match[2], second)
        value = self.summed(text).text
        return None if "$" in value else value != "0"
