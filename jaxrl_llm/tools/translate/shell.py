"""Follows a shell script without running it: its variables, blocks and functions.

The script gets no arguments, and no variables from its environment. A value that the script does not say stays as it is
written, with its $. If a condition is not known, the commands of all branches count, and a variable that the branches
leave different is not known afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import shell_test
from jaxrl_llm.tools.translate.arguments import Value
from jaxrl_llm.tools.translate.shell_grammar import Chain, Compound, Function, If, Loop, Node, ShellParser, Simple
from jaxrl_llm.tools.translate.shell_values import ShellVariables, joined
from jaxrl_llm.tools.translate.shell_words import Heredoc, Lexer, Part, Word

DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
READERS = ("read", "mapfile", "readarray", "printf", "let")  # commands that set variables
NESTED_SHELL = re.compile(r"eval |(?:.* )?(?:\S*/)?(?:ba|z)?sh -[a-z]*c ", re.DOTALL)
DEPTH, STEPS = 16, 20_000  # calls of functions inside each other, commands of all


class Jump(Exception):
    """The script runs exit, return, break or continue, which is the text of the exception.

    It ends the loop, the function, the subshell or the branch in doubt that it is in, or else the script.
    """


@dataclass(frozen=True)
class Command:
    """A command with its expanded words. place: position of its first word in the script."""

    values: tuple[Value, ...]
    place: int

    @property
    def words(self) -> list[str]:
        return [value.text for value in self.values]

    @property
    def places(self) -> frozenset[int]:
        return joined(self.values).places


def follow(text: str) -> ShellRun:
    """Follows a script. Raises: UserError, if it cannot be parsed."""
    # A \r in a file from Windows would be a part of the last word of each line.
    parser = ShellParser(text.replace("\r\n", "\n"))
    run = ShellRun(lexer=parser.lexer)
    nodes = parser.script()
    with suppress(Jump):
        run.block(nodes)
    return run


@dataclass(kw_only=True)
class ShellRun(ShellVariables):
    """A script that is followed. files: {name: text} that it writes by heredocs; notes: files that it sources."""

    lexer: Lexer
    functions: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    file_heredocs: list[Heredoc] = field(default_factory=list)
    local_names: set[str] = field(default_factory=set)  # local variables of the function that is followed
    depth: int = 0
    steps: int = 0

    # Blocks. Each method returns whether the block succeeds; None if that is not known.

    def block(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            status = self.node(node)
        return status

    def node(self, node: Node) -> bool | None:
        self.steps += 1
        # Loops in loops multiply their rounds, so the depth alone bounds nothing.
        if self.steps > STEPS:
            raise UserError(f"it does not end within {STEPS} commands: give a script that starts a training")
        match node:
            case Simple():
                return self.simple(node)
            case Chain():
                return self.chain(node)
            case If():
                return self.branches(node.branches)
            case Loop():
                return self.loop(node)
            case Function():
                self.functions[node.name] = node.body
                return True
            case Compound():
                return self.group(node)

    def group(self, node: Compound) -> bool | None:
        if not node.is_subshell:
            status = self.block(node.body)
            return shell_test.negated(status) if node.is_negated else status
        status, variables = None, dict(self.variables)
        with suppress(Jump):
            status = self.block(node.body)
        self.variables = variables
        return status

    def chain(self, node: Chain) -> bool | None:
        (_, first), *links = node.links
        status = self.node(first)
        for sign, following in links:
            # Whether `a || b` runs b depends on a, which is not known. After `a && b` a script means b to run.
            if status is None and sign == "||":
                self.in_doubt([(following,), ()])
            elif status is None or status == (sign == "&&"):
                status = self.node(following)
        return status

    def branches(self, branches: Sequence[tuple[tuple[Node, ...], tuple[Node, ...]]]) -> bool | None:
        for i, (condition, body) in enumerate(branches):
            status = self.block(condition)
            if status:
                return self.block(body)
            if status is None:
                bodies = [body for _, body in branches[i:]]
                self.in_doubt([*bodies, ()] if branches[-1][0] else bodies)
                return None
        return True

    def in_doubt(self, bodies: Sequence[tuple[Node, ...]]) -> None:
        """Follows blocks of which one or none runs. What they leave different is not known afterwards."""
        # Each branch begins with the variables before all of them, as only one of them runs.
        variables_before, ends = self.variables, list[dict[str, list[Value]]]()
        for body in bodies:
            self.variables = dict(variables_before)
            # An `exit` in a branch that may not run does not end the script here.
            with suppress(Jump):
                self.block(body)
            ends.append(self.variables)
        self.variables = dict(variables_before)
        for name in sorted({name for variables in ends for name in variables}):
            several = [variables.get(name, []) for variables in ends]
            # The first elements that the array has after each branch are known, and all later ones are not.
            alike = [len({value.text for value in values}) == 1 for values in zip(*several, strict=False)]
            shared = [*alike, False].index(False)
            is_same = all(len(end_values) == shared for end_values in several)
            doubt = [Value(f"${{{name}: a branch decides}}")]
            self.variables[name] = [*several[0][:shared], *([] if is_same else doubt)]

    def loop(self, node: Loop) -> bool | None:
        if node.name:
            # All words are expanded before the first round, as bash does.
            for value in [value for word in node.words for value in self.fields(word)]:
                self.variables[node.name] = [value]
                try:
                    self.block(node.body)
                except Jump as jump:
                    if str(jump) == "break":
                        break
                    if str(jump) != "continue":
                        raise
        elif self.block(node.condition) is not False:
            # The second round begins with what the first one may have changed.
            self.in_doubt([node.body, ()])
            self.in_doubt([node.body, ()])
        return None

    # Commands

    def simple(self, node: Simple) -> bool | None:
        # NAME=value before a command is set for this command alone, and without a command for the script.
        words = list(dropwhile(lambda word: word.assignment, node.words))
        if not words:
            return self.declare(node.words)
        if words[0].parts[:1] and words[0].parts[0].kind == "((":
            self.forget(re.findall(r"[A-Za-z_]\w*", words[0].parts[0].text))
            return None
        name = words[0].plain
        if name in ("[[", "[", "test"):
            return shell_test.status([name, *(self.text(word).text for word in words[1:])])
        if name in DECLARATIONS:
            return self.declare(words[1:], is_local=name in ("local", "declare", "typeset"))
        values = tuple(value for word in words for value in self.fields(word))
        return self.command(Command(values, words[0].position), node) if values else True

    def declare(self, words: Sequence[Word], *, is_local: bool = False) -> bool:
        for word in words:
            if is_local:
                self.local_names.add(word.assignment[1] if word.assignment else word.plain)
            self.assign(word)
        return True

    def command(self, command: Command, node: Simple) -> bool | None:
        name, *rest = command.words
        if name in ("true", ":", "false"):
            return name != "false"
        # `exit 1` does not end the script here, because it stands where arguments are wrong.
        if name in ("return", "break", "continue") or (name == "exit" and rest[:1] in ([], ["0"])):
            raise Jump(name)
        if name == "set" and "--" in rest:
            self.variables["@"] = list(command.values[rest.index("--") + 2 :])
        if name == "shift":
            self.variables["@"] = self.variables["@"][int(rest[0]) if rest and rest[0].isdigit() else 1 :]
        if name == "getopts" and not self.variables["@"]:
            return False  # without options its loop does not begin
        if name == "unset":
            self.variables = {key: value for key, value in self.variables.items() if key not in rest}
        if name in READERS:
            self.forget(key for text in rest for key in re.findall(r"^[A-Za-z_]\w*", text))
        if name in self.functions and self.depth < DEPTH:
            return self.call(self.functions[name], list(command.values[1:]))
        if name in ("source", "."):
            self.notes.append(f"{' '.join(command.words)}: the file is not read, and may set variables")
        if NESTED_SHELL.match(" ".join(command.words)):
            return None  # The text is a script of its own, which is not followed, so its keys belong to no command.
        if name == "cat" and node.heredoc and node.target:
            # A double quotation mark has no meaning in a heredoc.
            text = re.sub(r'(\\?)"', r'\1\1\\"', node.heredoc.text)
            expanded = self.text_of(text, Part("text", text, is_quoted=True)).text
            self.files[self.text(node.target).text] = node.heredoc.text if node.heredoc.is_literal else expanded
            self.file_heredocs.append(node.heredoc)
        # Its status is not known, because no command is run.
        self.commands.append(command)
        return None

    def call(self, body: tuple[Node, ...], arguments: list[Value]) -> bool | None:
        """Follows the body of a function, which has arguments and local variables of its own."""
        status, outer_variables, local_names = None, self.variables, self.local_names
        self.variables, self.local_names, self.depth = outer_variables | {"@": arguments}, {"@"}, self.depth + 1
        with suppress(Jump):
            status = self.block(body)
        global_variables = {name: value for name, value in self.variables.items() if name not in self.local_names}
        shadowed = {name: outer_variables[name] for name in self.local_names & outer_variables.keys()}
        self.variables = global_variables | shadowed
        self.local_names, self.depth = local_names, self.depth - 1
        return status
