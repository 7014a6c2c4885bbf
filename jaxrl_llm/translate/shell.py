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
from jaxrl_llm.translate import shell_test
from jaxrl_llm.translate.arguments import Value, calculated
from jaxrl_llm.translate.shell_grammar import (
    ASSIGNS,
    Case,
    Chain,
    Function,
    Group,
    If,
    Loop,
    Node,
    Parser,
    Part,
    Simple,
    Word,
)
from jaxrl_llm.translate.shell_parameters import transformed

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
DOTTED = re.compile(r"[+~]*[A-Za-z_][\w-]*(?:\.[\w-]+)+=.*", re.DOTALL)
PARAMETER = re.compile(r"(!|#)?(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
OF_NAMES = ("export", "declare", "local", "readonly", "typeset")
KNOWN = {"HOME": "~", "PWD": "."}
ROUNDS, DEPTH = 32, 16  # rounds of a loop, and calls of functions inside each other


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
    parser = Parser(text)
    nodes = parser.script()
    run = Run()
    run.block(nodes)
    written = {line for text in run.files.values() for line in text.splitlines()}
    heredocs = [(number, line) for number, line in parser.heredoc_lines if line not in written]
    return Script(run.commands, run.files, parser.words, heredocs)


@dataclass
class Run:
    """The state of a script that is followed."""

    variables: dict[str, Value] = field(default_factory=lambda: {name: Value(text) for name, text in KNOWN.items()})
    arrays: dict[str, list[Value]] = field(default_factory=dict)
    functions: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    arguments: list[Value] | None = None  # of a function; None: those of the script
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    inside: frozenset[int] | None = None  # the places of a text that is a script itself: of eval, or bash -c
    depth: int = 0
    ended: bool = False

    # Blocks. Each returns whether it succeeds; None: that is not known.

    def block(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if self.ended:
                return status
            status = self.node(node)
        return status

    def node(self, node: Node) -> bool | None:
        match node:
            case Simple():
                return self.simple(node)
            case Chain():
                return self.chain(node)
            case If():
                return self.branches(node.branches)
            case Loop():
                return self.loop(node)
            case Case():
                return self.case(node)
            case Function():
                self.functions[node.name] = node.body
            case Group():
                status = self.block(node.body)
                return status if status is None or not node.negated else not status
        return True

    def chain(self, node: Chain) -> bool | None:
        status = self.node(node.first)
        for sign, following in node.rest:
            if sign == "|":
                status = self.node(following)
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
        variables_before, arrays_before = self.variables, self.arrays
        ends: list[tuple[dict[str, Value], dict[str, list[Value]]]] = []
        for body in bodies:
            self.variables, self.arrays = dict(variables_before), dict(arrays_before)
            self.block(body)
            self.ended = False
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

    def loop(self, node: Loop) -> bool | None:
        if not node.name:
            status = None if not node.condition else self.block(node.condition)
            if status is None:
                self.in_doubt([node.body, ()])
            elif status:
                self.block(node.body)
            return None
        values = [value for word in node.words for value in self.fields(word)]
        for value in values[:ROUNDS]:
            self.variables[node.name] = value
            self.block(node.body)
        return True

    def case(self, node: Case) -> bool | None:
        subject = self.text(node.subject).text
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
        if words[0].plain in OF_NAMES:
            for word in words[1:]:
                if match := self.assigned(word):
                    self.assign(match, word)
            return True
        values = tuple(value for word in words for value in self.fields(word))
        return self.command(Command(values, words[0].at), node) if values else True

    def command(self, command: Command, node: Simple) -> bool | None:
        name, *rest = command.words
        if name in ("true", ":", "false"):
            return name != "false"
        if name == "exit" and rest[:1] in ([], ["0"]):
            self.ended = True
        if name == "set" and "--" in rest:
            self.arguments = list(command.values[rest.index("--") + 2 :])
        if name == "shift" and self.arguments:
            self.arguments = self.arguments[int(rest[0]) if rest and rest[0].isdigit() else 1 :]
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
            self.files[self.text(node.target).text] = self.heredoc(node.heredoc)
        self.commands.append(command)
        return None

    def call(self, body: tuple[Node, ...], arguments: list[Value]) -> bool | None:
        before, self.arguments = self.arguments, arguments
        self.depth += 1
        status = self.block(body)
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
            status = self.block(Parser(text).script())
        except UserError:
            status = None
        self.depth -= 1
        self.inside = before
        return status

    def heredoc(self, text: str) -> str:
        parts = Parser('"' + text.replace('"', '\\"') + '"').double_quoted()
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
            left, right = (self.summed(side).text for side in (match[1], match[3]))
            return shell_test.compared(left, match[2], right)
        value = self.summed(text).text
        return None if "$" in value else value != "0"

    # Values

    def assigned(self, word: Word) -> re.Match[str] | None:
        """Returns the match of name= at the beginning of a word that is not quoted there."""
        text = ""
        for part in word.parts:
            if part.kind != "text" or part.quoted:
                break
            text += part.text
        return ASSIGNMENT.match(text) if ASSIGNS.match(text) else None

    def assign(self, match: re.Match[str], word: Word) -> None:
        name, index, more = match.groups()
        if word.array is not None:
            values = [value for one in word.array for value in self.fields(one)]
            self.arrays[name] = self.arrays.get(name, []) * bool(more) + values
            return
        whole = self.text(word)
        value = Value(whole.text[match.end() :], whole.places)
        if index:
            return
        if more and name in self.arrays:
            self.arrays[name] = [*self.arrays[name], value]
        else:
            self.variables[name] = (self.variables.get(name, Value("")) + value) if more else value

    def places(self, word: Word) -> frozenset[int]:
        return self.inside if self.inside is not None else frozenset({word.at})

    def text(self, word: Word) -> Value:
        """Returns a word as one text, which is not split."""
        value = Value("", self.places(word))
        for part in word.parts:
            value += Value(part.text) if part.kind == "text" else _joined(self.expanded(part))
        return value

    def fields(self, word: Word) -> list[Value]:
        """Returns the words that a word becomes: of an array, or of a variable without quotations, several or none."""
        done: list[Value] = []
        value, begun, here = Value("", self.places(word)), False, self.places(word)
        for part in word.parts:
            if part.kind == "text":
                value, begun = value + Value(part.text), begun or part.quoted or bool(part.text)
                continue
            found = self.expanded(part)
            if not part.quoted:
                found = [Value(text, one.places) for one in found for text in _split(one.text)]
            for i, one in enumerate(found):
                if i:
                    done.append(value)
                    value = Value("", here)
                value, begun = value + one, True
        return [*done, value] if begun else done

    def expanded(self, part: Part) -> list[Value]:
        if part.kind == "sum":
            return [self.summed(part.text)]
        if part.kind == "command":
            return self.printed(part.text)
        return self.parameter(part.text)

    def printed(self, text: str) -> list[Value]:
        """What `$(…)` prints, where the text says it: a comment, a folder of the script, or an echo of values."""
        if text.lstrip().startswith("#") or not text.strip():
            return []
        if text.strip() == "pwd" or ("dirname" in text and re.search(r"\$\{?0|BASH_SOURCE", text)):
            return [Value(".")]
        if match := re.fullmatch(r"\s*echo\s+([^|;&<>`]*)", text):
            inner = Parser(match[1]).script()
            if len(inner) == 1 and isinstance(inner[0], Simple):
                return [Value(" ".join(self.text(word).text for word in inner[0].words))]
        return [Value(f"$({' '.join(text.split())})")]

    def parameter(self, text: str) -> list[Value]:
        """Returns what ${text} is."""
        as_written = [Value(f"${text}" if re.fullmatch(r"\w+", text) else f"${{{text}}}")]
        match = PARAMETER.fullmatch(text)
        if not match or match[4].startswith("."):  # ${a.b} is Hydra's
            return as_written
        before, name, index, rest = match.groups()
        if name in ("@", "*") and not before:
            first = int(rest[1:]) if re.fullmatch(r":\d+", rest) else 1
            return (self.arguments or [])[max(first, 1) - 1 :]
        if before == "#" or (name == "#" and not rest):
            items = self.arrays.get(name) if index else None
            if name == "#":
                return [Value(str(len(self.arguments or [])))]
            if items is not None:
                return [Value(str(len(items)))]
            return [Value(str(len(self.variables[name].text)))] if name in self.variables else as_written
        if index in ("@", "*") or (index is None and name in self.arrays and name not in self.variables):
            items = self.arrays.get(name)
            if items is None and rest[:1] in ("", ":", "+"):
                return as_written if not rest else []
            return list(items or []) if index else list(items or [])[:1]
        value = self.variable(name, index)
        if before == "!":
            value = self.variable(value.text, None) if value else None
        return self.with_rest(name, value, rest, as_written)

    def variable(self, name: str, index: str | None) -> Value | None:
        if index is not None:
            items = self.arrays.get(name, [])
            return items[int(index)] if index.isdigit() and int(index) < len(items) else None
        if name.isdigit():
            items = self.arguments or []
            return items[int(name) - 1] if 0 < int(name) <= len(items) else None
        return self.variables.get(name)

    def with_rest(self, name: str, value: Value | None, rest: str, as_written: list[Value]) -> list[Value]:
        """Applies what is behind a name: a default, or what is cut from its value."""
        if not rest:
            return [value] if value is not None else as_written
        sign = re.match(r":?[-=+?]", rest)
        if sign and not re.match(r":-?\d", rest.replace(":-", ":x", 1)):
            is_set = value is not None and (value.text != "" or not sign[0].startswith(":"))
            other = self.text_of(rest[sign.end() :])
            if sign[0][-1] == "+":
                return [other] if is_set else []
            if sign[0][-1] == "?":
                return [value] if is_set and value else as_written
            if sign[0][-1] == "=" and not is_set:
                self.variables[name] = other
            return [value] if is_set and value else [other]
        if value is None or "$" in value.text:
            return as_written
        made = transformed(value.text, rest[0] + self.text_of(rest[1:]).text)
        return as_written if made is None else [Value(made, value.places)]

    def text_of(self, text: str) -> Value:
        """Expands the text behind a parameter's name."""
        parser, value = Parser(text), Value("")
        while parser.at < len(text):
            for part in parser.part(""):
                value += Value(part.text) if part.kind == "text" else _joined(self.expanded(part))
        return value

    def summed(self, text: str) -> Value:
        names = {name: value.text for name, value in self.variables.items()}
        places = [value.places for name, value in self.variables.items() if re.search(rf"\b{name}\b", text)]
        inside = self.text_of(text).text
        try:
            made = calculated(re.sub(r"(?<!/)/(?!/)", "//", inside), names)  # a shell has whole numbers only
        except (ValueError, KeyError, SyntaxError, ZeroDivisionError, OverflowError):
            return Value(f"$(({inside.replace(' ', '')}))")
        return Value(str(made), frozenset().union(*places))


def _joined(values: list[Value]) -> Value:
    places = frozenset().union(*(value.places for value in values)) if values else frozenset()
    return Value(" ".join(value.text for value in values), places)


def _split(text: str) -> list[str]:
    """Splits a value at blanks, but not what is left to expand, as $(date +%s)."""
    return [text] if re.search(r"\$[({]", text) and " " in text else text.split()
