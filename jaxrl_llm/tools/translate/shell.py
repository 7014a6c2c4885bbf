"""Finds the training command of a shell script, with the values of its variables, without running the script.

Published recipes of veRL, EasyR1, Search-R1 and TRL are shell scripts: variables, branches, loops and functions decide
the hyperparameters that the training command gets. So the translator interprets the script, and collects its commands
with expanded words; readers.py makes keys of them. The script gets no arguments, and no variables from its environment.
An unknown value keeps its text, with its $. If a condition is unknown, the commands of all branches count, and a
variable whose value depends on the branch is unknown afterwards.
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

# Commands that declare variables.
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
# Commands that set variables to values that the translator does not compute.
VARIABLE_SETTERS = ("read", "mapfile", "readarray", "printf", "let")
# A command that runs a text as a script, such as bash -c "…".
NESTED_SHELL = re.compile(r"eval |(?:.* )?(?:\S*/)?(?:ba|z)?sh -[a-z]*c ", re.DOTALL)
MAX_DEPTH = 16  # functions that call each other
MAX_COMMANDS = 20_000  # commands of a script with all rounds of its loops


class Jump(Exception):
    """Raised where the script runs exit, return, break or continue, which is the text of the exception.

    The exception ends the loop, the function, the subshell or the branch in doubt that it is in, or else the script.
    """


@dataclass(frozen=True)
class Command:
    """A command of the script with its expanded words. place: position of its first word in the script."""

    values: tuple[Value, ...]
    place: int

    @property
    def words(self) -> list[str]:
        """Texts of the expanded words."""
        return [value.text for value in self.values]

    @property
    def places(self) -> frozenset[int]:
        """Positions of the words of the script that the command is made from."""
        return joined(self.values).places


def follow(text: str) -> ShellRun:
    """Interprets a shell script, and returns its commands and files. Raises: UserError, if it cannot be parsed."""
    # A \r in a file from Windows would be a part of the last word of each line.
    parser = ShellParser(text.replace("\r\n", "\n"))
    run = ShellRun(lexer=parser.lexer)
    nodes = parser.script()
    with suppress(Jump):
        run.block(nodes)
    return run


@dataclass(kw_only=True)
class ShellRun(ShellVariables):
    """Interprets the nodes of a shell script, and collects what the translation needs.

    commands: all commands that may run; files: {name: text} of files that the script writes by heredocs; notes: files
    that it sources; steps: number of commands so far.
    """

    lexer: Lexer
    functions: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    file_heredocs: list[Heredoc] = field(default_factory=list)
    local_names: set[str] = field(default_factory=set)  # local variables of the function that is followed
    depth: int = 0
    steps: int = 0

    # Methods for blocks. Each returns the status: whether the block succeeds; None if the status is unknown.

    def block(self, nodes: Iterable[Node]) -> bool | None:
        """Follows commands one after the other. Returns the status of the last one."""
        status: bool | None = True
        for node in nodes:
            status = self.node(node)
        return status

    def node(self, node: Node) -> bool | None:
        """Follows one command, block or function definition. Raises: UserError, if the script runs too many."""
        self.steps += 1
        # Loops in loops multiply their rounds, so the number of commands needs a limit.
        if self.steps > MAX_COMMANDS:
            raise UserError(f"it does not end within {MAX_COMMANDS} commands: name a script that starts a training")
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
        """Follows { … } or ( … ). A subshell ( … ) does not change the variables of the script."""
        if not node.is_subshell:
            status = self.block(node.body)
            return shell_test.negated(status) if node.is_negated else status
        status, variables = None, dict(self.variables)
        with suppress(Jump):
            status = self.block(node.body)
        self.variables = variables
        return status

    def chain(self, node: Chain) -> bool | None:
        """Follows commands that are joined by && and ||."""
        (_, first), *links = node.links
        status = self.node(first)
        for sign, following in links:
            # If the status of a is unknown, `a || b` may run b, and `a && b` counts as running b.
            if status is None and sign == "||":
                self.in_doubt([(following,), ()])
            elif status is None or status == (sign == "&&"):
                status = self.node(following)
        return status

    def branches(self, branches: Sequence[tuple[tuple[Node, ...], tuple[Node, ...]]]) -> bool | None:
        """Follows the branch of an `if` or `case` whose condition holds; all branches if a condition is unknown."""
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
        """Follows blocks of which only one runs, but it is unknown which one: the branches of an unknown condition.

        bodies: commands of each block; () if possibly no block runs. A variable is unknown afterwards if its value
        depends on the block.
        """
        # Each branch begins with the variables before all branches, because only one branch runs.
        variables_before = self.variables
        variables_after: list[dict[str, list[Value]]] = []  # variables at the end of each branch
        for body in bodies:
            self.variables = dict(variables_before)
            # An `exit` in a branch that may not run ends the branch alone, and not the script.
            with suppress(Jump):
                self.block(body)
            variables_after.append(self.variables)
        self.variables = dict(variables_before)
        for name in sorted({name for variables in variables_after for name in variables}):
            arrays = [variables.get(name, []) for variables in variables_after]
            # The first elements that the array has after each branch are known, and all later elements are unknown.
            equal_elements = [len({value.text for value in values}) == 1 for values in zip(*arrays, strict=False)]
            shared_count = [*equal_elements, False].index(False)
            is_same = all(len(array) == shared_count for array in arrays)
            unknown = [Value(f"${{{name}: a branch decides}}")]
            self.variables[name] = [*arrays[0][:shared_count], *([] if is_same else unknown)]

    def loop(self, node: Loop) -> bool | None:
        """Follows a `for` loop once for each word, and twice the body of a `while` loop, whose rounds are unknown."""
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
            # The body is followed twice, because a second round sees variables that the first round has made unknown.
            for _ in range(2):
                self.in_doubt([node.body, ()])
        return None

    # Methods for single commands.

    def simple(self, node: Simple) -> bool | None:
        """Follows a command with its words: a test, a declaration of variables, or a program that is recorded."""
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
        """Sets the variables of words name=value. is_local: they belong to the function that is followed."""
        for word in words:
            if is_local:
                self.local_names.add(word.assignment[1] if word.assignment else word.plain)
            self.assign(word)
        return True

    def command(self, command: Command, node: Simple) -> bool | None:
        """Follows the builtins of the shell and functions of the script, and records any other command.

        Returns the status; None if it is unknown, as for each program, because no program is run.
        """
        name, *rest = command.words
        if name in ("true", ":", "false"):
            return name != "false"
        # `exit 1` does not end the script, because it mostly stands in a check of arguments, which are not known.
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
        if name in VARIABLE_SETTERS:
            self.forget(key for text in rest for key in re.findall(r"^[A-Za-z_]\w*", text))
        if name in self.functions and self.depth < MAX_DEPTH:
            return self.call(self.functions[name], list(command.values[1:]))
        if name in ("source", "."):
            self.notes.append(f"{' '.join(command.words)}: this file is not read, but it may set variables")
        if NESTED_SHELL.match(" ".join(command.words)):
            return None  # The text is a script of its own, which is not followed, so its keys belong to no command.
        if name == "cat" and node.heredoc and node.target:
            # The text is a file that the script writes. A double quotation mark has no meaning in a heredoc.
            text = re.sub(r'(\\?)"', r'\1\1\\"', node.heredoc.text)
            expanded = self.text_of(text, Part("text", text, is_quoted=True)).text
            self.files[self.text(node.target).text] = node.heredoc.text if node.heredoc.is_literal else expanded
            self.file_heredocs.append(node.heredoc)
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
