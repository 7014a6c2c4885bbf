"""Finds the training command of a shell script, with the values of its variables, without running the script.

Published recipes of veRL, EasyR1, Search-R1 and TRL are shell scripts: variables, branches, loops and functions decide
the hyperparameters that the training command gets. So the translator follows the tokens of the script, and collects its
commands with expanded words; readers.py makes keys of them. The script gets no arguments, and no variables from its
environment. An unknown value keeps its text, with its $. If a condition is unknown, the commands of all branches count,
and a variable whose value depends on the branch is unknown afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from typing import Any, NoReturn, TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.shell_values import ShellVariables, Variables, merged, negated, status_of_test
from jaxrl_llm.tools.translate.shell_words import Heredoc, Lexer, Redirection, Token, Word

# Keywords that end a block.
CLOSING = ("then", "do", "done", "fi", "esac", "else", "elif", "}")
# Commands that declare variables.
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
# Commands that set variables to values that the translator does not compute.
VARIABLE_SETTERS = ("read", "mapfile", "readarray", "printf", "let", "unset")
# A command that runs a text as a script, such as bash -c "…".
NESTED_SHELL = re.compile(r"eval |(?:.* )?(?:\S*/)?(?:ba|z)?sh -[a-z]*c ", re.DOTALL)
NAME = r"[A-Za-z_]\w*"  # name of a variable
# Rounds of a loop whose number is unknown. The second one sees variables that the first one has made unknown.
UNKNOWN_ROUNDS: list[Variables] = [{}, {}]
MAX_DEPTH = 16  # functions that call each other
MAX_COMMANDS = 20_000  # commands of a script with all rounds of its loops
# Whether a command or block succeeds; None if that is unknown, as for each program, because no program is run.
Status: TypeAlias = bool | None


@dataclass(frozen=True)
class ShellCommand:
    """A command of the script with its expanded words.

    positions: positions of its words in the script.
    environment: exported variables, and those of NAME=value before its first word.
    """

    words: list[str]
    positions: tuple[int, ...]
    environment: Variables


def follow(text: str) -> ShellRun:
    """Follows a shell script, and returns its commands and files. Raises: UserError, if it cannot be parsed."""
    # A \r in a file from Windows would be a part of the last word of each line.
    lexer = Lexer(text.replace("\r\n", "\n"))
    run = ShellRun(lexer=lexer, tokens=lexer.tokens())
    run.block()
    if run.peek():
        run.refuse(f"{run.keyword() or run.peek()!r} closes no block")
    return run


@dataclass(kw_only=True)
class ShellRun(ShellVariables):
    """Follows the tokens of a shell script, and collects what the translation needs.

    index: position of the next token.
    skip_reason: why the commands at this position do not run: "the branch is not taken", or the word exit, return,
        break or continue that stands before them; "" if they run.
    functions: {name: index of its body}.
    commands: all commands that may run.
    files: {name: text} of files that the script writes, and of other heredocs.
    notes: sentences about files that the script sources.
    nested_scripts: texts that the script runs as scripts, as in `bash -c "…"`. They are not followed.
    explained_positions: positions of heredocs whose text becomes a file or the value of a variable, and of the patterns
        of `case`. Words that look like keys are no loss at these positions.
    local_names: local variables of the function that is followed.
    exported_names: variables that commands get in their environment.
    exports_all: whether each variable that is set is exported, after `set -a`.
    uncertain_blocks: number of blocks around the index that may not run.
    departures: variables at each `break`, `continue` or `return` in such a block. They are one possible state of the
        variables after the loop or function.
    call_depth: number of functions around the index.
    command_count: number of commands so far.
    """

    lexer: Lexer
    tokens: list[Token]
    index: int = 0
    skip_reason: str = ""
    functions: dict[str, int] = field(default_factory=dict)
    commands: list[ShellCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    nested_scripts: list[str] = field(default_factory=list)
    explained_positions: set[int] = field(default_factory=set)
    local_names: set[str] = field(default_factory=set)
    exported_names: set[str] = field(default_factory=set)
    exports_all: bool = False
    uncertain_blocks: int = 0
    departures: list[Variables] = field(default_factory=list)
    call_depth: int = 0
    command_count: int = 0

    # Tokens

    def peek(self) -> Token:
        """Returns the next token; "" at the end."""
        return self.tokens[self.index] if self.index < len(self.tokens) else ""

    def keyword(self) -> str:
        """Returns the plain text of the next token; "" if that is no word."""
        token = self.peek()
        return token.plain if isinstance(token, Word) else ""

    def take_word(self) -> Word:
        """Returns the next token, which must be a word, and moves behind it."""
        token = self.peek()
        self.index += 1
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

    # Blocks, each of which moves behind its tokens and returns its status

    def block(self) -> Status:
        """Follows commands up to a keyword or an operator that ends a block. Returns the status of the last one."""
        status: Status = True
        while True:
            self.skip(";", "\n", "&")
            if self.peek() in ("", ")", ";;", ";&", ";;&") or self.keyword() in CLOSING:
                return status
            status = self.chain()

    def block_until(self, end: str) -> Status:
        """Follows commands between a keyword, which is next, and the keyword that ends them."""
        self.index += 1
        status = self.block()
        self.expect(end)
        return status

    def chain(self) -> Status:
        """Follows pipelines that are joined by && and ||. A chain before & is a process of its own."""
        state_before = dict(self.variables), self.skip_reason
        status = self.pipeline()
        while (sign := self.peek()) in ("&&", "||"):
            self.skip("&&", "||", "\n")
            holds = status if sign == "&&" else negated(status)
            status = self.follow_branches(holds, self.pipeline, lambda kept=status: kept)
        if self.peek() == "&":  # a process in the background changes no variable of the script
            self.variables, self.skip_reason = state_before
        return status

    def pipeline(self) -> Status:
        """Follows commands that are joined by |, each of which is a process of its own."""
        state_before = dict(self.variables), self.skip_reason
        status = self.command()
        while self.peek() in ("|", "|&"):
            self.variables, self.skip_reason = state_before
            self.skip("|", "|&", "\n")
            status, _ = self.follow_in_subshell(self.command)
        return status

    @contextmanager
    def temporary_fields(self, **values: Any) -> Iterator[None]:
        """Sets fields of the run for a block, and then gives them their former values again."""
        outer_values = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        yield
        vars(self).update(outer_values)

    def follow_in_subshell(self, follow: Callable[[], Status]) -> tuple[Status, Variables]:
        """Follows a block whose changes of variables end with it. Returns its status, and its variables after it.

        follow: function that moves behind the block, such as `self.block`.
        """
        with self.temporary_fields(variables=dict(self.variables), skip_reason=self.skip_reason):
            return follow(), self.variables

    def skip_block(self, follow: Callable[[], Status]) -> None:
        """Moves behind a block that does not run. follow: function that moves behind it, such as `self.block`."""
        with self.temporary_fields(skip_reason=self.skip_reason or "the branch is not taken"):
            follow()

    def follow_branches(self, holds: Status, follow: Callable[[], Status], otherwise: Callable[[], Status]) -> Status:
        """Follows a block if its condition holds, or else the block behind it. If that is unknown, both may run.

        Returns the status of the block that runs. A variable becomes unknown if its value depends on the block.
        """
        if self.skip_reason or holds is False:
            self.skip_block(follow)
            return otherwise()
        if holds:
            status = follow()
            self.skip_block(otherwise)
            return status
        # An `exit` in a block that may not run ends the block alone, and not the script.
        with self.temporary_fields(uncertain_blocks=self.uncertain_blocks + 1):
            self.variables = merged([self.follow_in_subshell(block)[1] for block in (follow, otherwise)])
        return None

    def join_departures(self) -> None:
        """Joins the variables at the end of a loop or function with those where a block that may run has left it."""
        self.variables = merged([self.variables, *self.departures])
        # A `return` in a loop of a function also leaves the commands after the loop.
        self.departures = self.departures if self.call_depth else []

    def command(self) -> Status:
        """Follows one command: a block such as `if`, the definition of a function, or a simple command."""
        self.command_count += 1
        # Loops in loops multiply their rounds, so the number of commands needs a limit.
        if self.command_count > MAX_COMMANDS:
            raise UserError(f"it does not end within {MAX_COMMANDS} commands: name a script that starts a training")
        name = self.keyword()
        if name == "function" or (name and self.tokens[self.index + 1 : self.index + 3] == ["(", ")"]):
            return self.function_definition()
        match name or self.peek():
            case "if":
                return self.conditional()
            case "for":
                return self.for_loop()
            case "while" | "until":
                status = self.block_until("do")
                is_left = (status if name == "while" else negated(status)) is False
                return self.rounds(UNKNOWN_ROUNDS, False if is_left else None)
            case "case":
                return self.case()
            case "[[":
                return self.bracket_test()
            case "{":
                return self.block_until("}")
            case "(":
                return self.follow_in_subshell(lambda: self.block_until(")"))[0]
            case "!":
                self.index += 1
                return negated(self.command())
        return self.simple_command()

    def function_definition(self) -> Status:
        """Moves behind the definition of a function, whose body is followed where it is called."""
        self.index += self.keyword() == "function"
        name = self.take_word().plain
        self.skip("(", ")", "\n")
        # A definition in a branch that is not taken does not count.
        if not self.skip_reason:
            self.functions[name] = self.index
        self.skip_block(self.command)
        return True

    def conditional(self) -> Status:
        """Follows `if … then …` or `elif … then …`, and the branches behind it up to `fi`."""
        return self.follow_branches(self.block_until("then"), self.block, self.alternative)

    def alternative(self) -> Status:
        """Follows the branches of a condition that does not hold: elif, else or none."""
        if self.keyword() == "elif":
            return self.conditional()
        if self.keyword() == "else":
            return self.block_until("fi")
        self.expect("fi")
        return True

    def for_loop(self) -> Status:
        """Follows a `for` loop once for each word. The number of rounds of `for ((…))` is unknown."""
        self.index += 1
        variable, values = self.take_word(), list(self.variables["@"])
        self.skip("\n")
        if self.keyword() == "in":
            self.index += 1
            values.clear()
            while isinstance(word := self.peek(), Word):
                self.index += 1
                values += [] if self.skip_reason else self.fields(word)
        self.skip(";", "\n")
        self.expect("do")
        if variable.plain:
            return self.rounds([{variable.plain: [value]} for value in values], True)
        self.forget(re.findall(NAME, variable.parts[0].text) if not self.skip_reason else ())
        return self.rounds(UNKNOWN_ROUNDS, None)

    def rounds(self, rounds: Sequence[Variables], runs: Status) -> Status:
        """Follows the body of a loop once for each round.

        rounds: variables that the loop sets for each round. runs: whether the body runs; None if that is unknown, as in
        `while read line; do …; done < file`.
        """
        body = self.index
        # The index moves behind the body first, because a loop without a round must move behind it too.
        self.skip_block(self.block)
        rounds = [] if self.skip_reason else rounds
        for variables in rounds:
            self.index = body
            self.variables |= variables
            self.follow_branches(runs, self.block, lambda: None)
            # A `continue` ends this round alone. A `break`, `return` or `exit` ends the loop.
            self.skip_reason = "" if self.skip_reason == "continue" else self.skip_reason
            if self.skip_reason:
                break
        if rounds:
            self.skip_reason = "" if self.skip_reason == "break" else self.skip_reason
            self.join_departures()
        self.expect("done")
        return None

    def case(self) -> Status:
        """Follows `case subject in pattern) block;; esac`."""
        self.index += 1
        subject = self.take_word()
        self.skip("\n")
        self.expect("in")
        return self.clauses(subject)

    def clauses(self, subject: Word) -> Status:
        """Follows the clauses `pattern) block;;` of `case` up to `esac`."""
        self.skip("\n", "(", ";;")
        if self.keyword() == "esac" or not self.peek():
            self.expect("esac")
            return True
        patterns = [self.take_word()]
        while self.peek() == "|":
            self.index += 1
            patterns.append(self.take_word())
        self.expect(")")
        # A pattern is no word of a command, although --rate) looks like a flag.
        self.explained_positions |= {pattern.position for pattern in patterns}
        # The block runs if the subject matches one of its patterns, as in the test [[ subject == pattern ]].
        tests = [["[[", self.text(subject), "==", self.text(pattern)] for pattern in patterns if not self.skip_reason]
        statuses = [status_of_test(test) for test in tests]
        holds = True if True in statuses else None if None in statuses else False
        return self.follow_branches(holds, self.block, partial(self.clauses, subject))

    # Single commands

    def bracket_test(self) -> Status:
        """Follows [[ … ]]. The status of a test with operators such as && is not computed."""
        start = self.index
        while self.peek() and self.keyword() != "]]":
            self.index += 1
        words = self.tokens[start : self.index]
        self.expect("]]")
        texts = [self.text(word) for word in words if isinstance(word, Word) and not self.skip_reason]
        return status_of_test(texts) if len(texts) == len(words) else None

    def simple_command(self) -> Status:
        """Follows the words, heredocs and redirections of a command: variables, a test or a program."""
        # First the tokens of the command are collected: its words, its heredoc and the file of its output.
        words: list[Word] = []
        heredoc, output, start = None, "", self.index
        while isinstance(token := self.peek(), Word | Heredoc | Redirection):
            self.index += 1
            if isinstance(token, Word):
                words.append(token)
            elif isinstance(token, Heredoc):
                heredoc = token
            else:
                file = self.take_word()
                # A number before the sign means another output, such as 2> for errors.
                output = f"{token}{self.text(file)}" if token in (">", ">>", ">|") and not self.skip_reason else output
        if self.index == start:
            self.refuse(f"a command is missing before {self.peek()!r}")
        if self.skip_reason:
            return None
        # NAME=value before a command is set for this command alone, and without a command for the script.
        program = list(dropwhile(lambda word: word.assignment, words))
        if not program:
            return self.declare(words)
        if program[0].parts[:1] and program[0].parts[0].kind == "((":
            # The variables of ((…)) are unknown afterwards, because it is not computed.
            self.forget(re.findall(NAME, program[0].parts[0].text))
            return None
        name = program[0].plain
        if name in ("[", "test"):
            return status_of_test([name, *map(self.text, program[1:])])
        if name in DECLARATIONS:
            exports = name == "export" or any(re.match("-[a-zA-Z]*x", word.plain) for word in program[1:])
            return self.declare(program[1:], is_local=name in ("local", "declare", "typeset"), exports=exports)
        texts = [text for word in program for text in self.fields(word)]
        if not texts:
            return True
        # Any other command is run with the exported variables and those before its first word.
        own_variables = words[: len(words) - len(program)]
        _, variables = self.follow_in_subshell(lambda: self.declare(own_variables))
        names = self.exported_names | {word.assignment[1] for word in own_variables if word.assignment}
        environment = {name: variables[name] for name in names if name in variables}
        status = self.run_command(ShellCommand(texts, tuple(word.position for word in program), environment))
        self.keep_output(texts, heredoc, output)
        return status

    def declare(self, words: Sequence[Word], *, is_local: bool = False, exports: bool = False) -> Status:
        """Sets the variables of words name=value, such as those of `export LR=1e-6`.

        is_local: the variables belong to the function that is followed. exports: commands get the variables in their
        environment.
        """
        for word in words:
            name = word.assignment[1] if word.assignment else word.plain
            self.local_names |= {name} if is_local else set()
            self.exported_names |= {name} if exports or self.exports_all else set()
            self.assign(word)
        return True

    def keep_output(self, words: list[str], heredoc: Heredoc | None, output: str) -> None:
        """Keeps the text of a heredoc, and of a file that `cat` or `echo` writes: it may be the config of the training.

        words: words of the command; output: its redirection, > or >> with the name of the file; "" if it has none.
        """
        printed_words = [word for word in words[1:] if not re.fullmatch(r"-[neE]+|%s(\\n)?", word)]
        text = self.heredoc_text(heredoc) if heredoc else " ".join(printed_words) + "\n"
        writes = bool(output) and words[0] in (("cat",) if heredoc else ("echo", "printf"))
        # `read -d ''` reads all lines, and `read` without it the first one.
        reads = heredoc is not None and words[0] == "read" and any(re.fullmatch("-r?d", word) for word in words)
        if reads:
            self.variables[words[-1]] = [text.strip()]
        if writes or (heredoc and not reads):
            name = output.lstrip(">|").strip() if writes else f"heredoc {len(self.files)}"
            self.files[name] = self.files.get(name, "") * output.startswith(">>") + text
        self.explained_positions |= {heredoc.position} if heredoc and (reads or writes) else set()

    def run_command(self, command: ShellCommand) -> Status:
        """Follows the builtins of the shell and functions of the script, and records any other command."""
        name, *rest = command.words
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions and self.call_depth < MAX_DEPTH:
            return self.call_function(self.functions[name], rest)
        if NESTED_SHELL.match(text := " ".join(command.words)):
            self.nested_scripts.append(text)
            return None
        # `exit 1` does not end the script, because it mostly stands in a check of arguments, which are not known.
        if name in ("return", "break", "continue") or (name == "exit" and rest[:1] in ([], ["0"])):
            self.skip_reason = name
            # `return 1` is a failure, after which the training does not matter.
            if self.uncertain_blocks and name != "exit" and rest[:1] in ([], ["0"]):
                self.departures.append(dict(self.variables))
        elif name == "set" and {"-a", "+a"} & {*rest}:
            self.exports_all = "-a" in rest
        elif name == "set" and "--" in rest:
            self.variables["@"] = rest[rest.index("--") + 1 :]
        elif name == "shift":
            self.variables["@"] = self.variables["@"][int(rest[0]) if rest and rest[0].isdigit() else 1 :]
        elif name == "getopts" and not self.variables["@"]:
            return False  # without options its loop does not begin
        elif name in VARIABLE_SETTERS:
            self.forget(match[0] for text in rest if (match := re.match(NAME, text)))
        elif name in ("source", "."):
            self.notes.append(f"{' '.join(command.words)}: this file is not read, but it may set variables")
        self.commands.append(command)
        return None

    def call_function(self, body: int, arguments: list[str]) -> Status:
        """Follows the body of a function, which has arguments and local variables of its own."""
        outer_variables = self.variables
        function_state = dict(variables=outer_variables | {"@": arguments}, local_names={"@"}, departures=[])
        with self.temporary_fields(index=body, call_depth=self.call_depth + 1, **function_state):
            status = self.command()
            self.join_departures()
            variables, local_names = self.variables, self.local_names
        self.skip_reason = "" if self.skip_reason == "return" else self.skip_reason
        # Variables that are local to the function have their former values again after the call, or none.
        self.variables = {name: x for name, x in variables.items() if name not in local_names}
        self.variables |= {name: x for name, x in outer_variables.items() if name in local_names}
        return status
