"""The values of a shell script, whose words expand variables, arrays, sums and defaults as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.arguments import Value, calculated
from jaxrl_llm.tools.translate.shell_grammar import Part, ShellParser, Simple, Word
from jaxrl_llm.tools.translate.shell_parameters import OPERATION, transformed

PARAMETER = re.compile(r"(!|#)?(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
LONGEST = 100_000  # characters of a variable, of which each word of an array counts ten more
BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
Variable: TypeAlias = Value | list[Value]


@dataclass
class Values:
    """The variables of a script that is followed. Those of an associative array are variables called name[key]."""

    variables: dict[str, Variable] = field(default_factory=lambda: {"HOME": Value("~"), "PWD": Value(".")})
    arguments: list[Value] = field(default_factory=list)  # of the function that is followed
    inside: frozenset[int] | None = None  # the places of a text that is a script itself: of eval, or bash -c

    def assign(self, match: re.Match[str], word: Word) -> None:
        """Sets a variable. match: name= at the beginning of the word."""
        name, index, more = match.groups()
        now = self.variables.get(name)
        if word.array is not None:
            texts = [self.text(element) for element in word.array]
            pairs = {text: re.fullmatch(r"\[(.+?)\]=(.*)", text.text, re.DOTALL) for text in texts}
            if pairs and all(pairs.values()):  # declare -A name=([key]=value …)
                self.variables |= {f"{name}[{x[1]}]": Value(x[2], text.places) for text, x in pairs.items() if x}
                return
            elements = [value for element in word.array for value in self.fields(element)]
            self.variables[name] = items(now) * bool(more) + elements
        else:
            whole = self.text(word)
            value = Value(whole.text[match.end() :], whole.places)
            if index and isinstance(now, list) and index[1:-1].isdigit() and int(index[1:-1]) < len(now):
                self.variables[name] = [value if i == int(index[1:-1]) else x for i, x in enumerate(now)]
            elif index:
                self.variables[name + self.text_of(index).text] = value
            elif more and isinstance(now, list):
                self.variables[name] = [*now, value]
            else:
                self.variables[name] = joined([*items(now) * bool(more), value], "")
        if sum(len(value.text) + 10 for value in items(self.variables.get(name))) > LONGEST:
            raise UserError(f"{name} grows without an end: is this a script that starts a training?")

    def places(self, word: Word) -> frozenset[int]:
        return self.inside if self.inside is not None else frozenset({word.at})

    def text(self, word: Word) -> Value:
        """Returns a word as one text, which is not split."""
        return joined([Value("", self.places(word)), *(joined(self.expanded(part)) for part in word.parts)], "")

    def fields(self, word: Word) -> list[Value]:
        """Returns the words that a word becomes. An array or an unquoted variable may become several words or none."""
        if alternatives := _braces(word):
            return [value for alternative in alternatives for value in self.fields(alternative)]
        finished: list[Value] = []
        empty = value = Value("", self.places(word))
        begun = False
        for part in word.parts:
            expansion = self.expanded(part)
            if not part.quoted:
                expansion = [Value(text, whole.places) for whole in expansion for text in _split(whole.text)]
            # The first field joins the text before it, and only the last field joins the text after it, as in bash.
            for i, piece in enumerate(expansion):
                finished += [value] if i else []
                value, begun = (empty if i else value) + piece, True
        return [*finished, value] if begun else finished

    def expanded(self, part: Part) -> list[Value]:
        if part.kind == "text":
            return [Value(part.text)]
        if part.kind == "sum":
            return [self.summed(part.text)]
        return self.printed(part.text) if part.kind == "command" else self.parameter(part.text)

    def printed(self, text: str) -> list[Value]:
        """What `$(…)` prints, where the text says it: a comment, a folder of the script, or an echo of values."""
        if text.lstrip().startswith("#") or not text.strip():
            return []
        # The folder of the script, which is where files are looked for.
        if text.strip() == "pwd" or ("dirname" in text and re.search(r"\$\{?0|BASH_SOURCE", text)):
            return [Value(".")]
        if match := re.fullmatch(r"\s*echo\s+([^-|;&<>`][^|;&<>`]*)", text):
            inner = ShellParser(match[1]).script()
            if len(inner) == 1 and isinstance(inner[0], Simple):
                return [Value(" ".join(self.text(word).text for word in inner[0].words))]
        return [Value(f"$({' '.join(text.split())})")]

    def parameter(self, text: str) -> list[Value]:
        """Returns what ${text} is."""
        as_written = [Value(f"${text}" if re.fullmatch(r"\w+", text) else f"${{{text}}}")]
        match = PARAMETER.fullmatch("#@" if text == "#" else text)
        if not match or match[4].startswith("."):  # ${a.b} is Hydra's
            return as_written
        before, name, index, rest = match.groups()
        if name in ("@", "*"):
            # The first one has the number 1.
            rest = re.sub(r"^:(\d+)", lambda match: f":{max(int(match[1]) - 1, 0)}", rest)
            return self.elements(self.arguments, name, before, rest, as_written)
        if index in ("@", "*"):
            return self.elements(self.variables.get(name), index, before, rest, as_written)
        value = self.variable(name, index)
        if before == "!":
            value = self.variable(value.text, None) if value else None
        if before == "#":
            return [Value(str(len(value.text)))] if value else as_written
        return self.with_rest(name, value, rest, as_written)

    def elements(
        self, array: Variable | None, index: str, before: str | None, rest: str, as_written: list[Value]
    ) -> list[Value]:
        """Returns the elements of an array: all, a slice, or each of them transformed; or their number."""
        if before or array is None:
            is_number = before == "#" and array is not None
            return [Value(str(len(items(array))))] if is_number else [] if rest[:1] in (":", "+") else as_written
        listed = items(array)
        if part := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
            listed = listed[int(part[1]) :][: int(part[2]) if part[2] else None]
        elif rest and not re.match(r":?[-=+?]", rest):
            # "$(" marks an element whose transformation is not known: then the whole array stays as it is written.
            expansion = [self.with_rest("", item, rest, [Value("$(")])[0] for item in listed]
            listed = as_written if any(value.text == "$(" for value in expansion) else expansion
        return [joined(listed)] if index == "*" and listed else listed

    def variable(self, name: str, index: str | None) -> Value | None:
        """Returns a variable or an element; of an array without an index, the first one."""
        array = self.arguments if name.isdigit() else items(self.variables.get(name))
        key = str(int(name) - 1) if name.isdigit() else self.text_of(index or "0").text
        if re.fullmatch(r"-?\d+", key) and -len(array) <= int(key) < len(array) and name != "0":
            return array[int(key)]
        return joined(named) if index and (named := items(self.variables.get(f"{name}[{key}]"))) else None

    def with_rest(self, name: str, value: Value | None, rest: str, as_written: list[Value]) -> list[Value]:
        """Applies what is behind a name: a default, or what is cut from its value."""
        match = OPERATION.fullmatch(rest)
        if not match:
            return as_written if value is None or rest else [value]
        sign, argument = match.groups()
        if sign[-1] in "-=+?":
            # A colon makes an empty text count as not set.
            is_set = value is not None and (value.text != "" or sign[0] != ":")
            other = self.text_of(argument)
            if sign[-1] == "+":
                return [other] * is_set
            if value is not None and is_set:
                return [value]
            # ${name:=default} also sets the variable.
            self.variables |= {name: other} if sign[-1] == "=" else {}
            return as_written if sign[-1] == "?" else [other]
        if value is None or "$" in value.text:
            return as_written
        # The first / that has no backslash is before what comes instead.
        arguments = re.split(r"(?<!\\)/", argument, maxsplit=1) if sign[0] == "/" else [argument]
        text = transformed(value.text, sign, *(self.text_of(argument).text for argument in arguments))
        return as_written if text is None else [Value(text, value.places)]

    def text_of(self, text: str, *, quoted: bool = False) -> Value:
        """Expands a text that is no word: behind a parameter's name, or as between double quotation marks."""
        return joined([joined(self.expanded(part)) for part in ShellParser(text).parts("", quoted=quoted)], "")

    def summed(self, text: str) -> Value:
        names = {name: value for name, value in self.variables.items() if isinstance(value, Value)}
        # A sum is from all places that its variables are from: their words then belong to the command.
        used = joined([value for name, value in names.items() if re.search(rf"\b{re.escape(name)}\b", text)])
        inside = self.text_of(text).text
        try:
            # A shell has whole numbers only: its / is //.
            total = calculated(re.sub(r"(?<!/)/(?!/)", "//", inside), {name: x.text for name, x in names.items()})
        except (ValueError, KeyError, SyntaxError, ZeroDivisionError, OverflowError):
            return Value(f"$(({inside.replace(' ', '')}))")
        return Value(str(total), used.places)


def items(variable: Variable | None) -> list[Value]:
    """Returns the elements of an array. A variable that is none has one, as in bash."""
    return [] if variable is None else [variable] if isinstance(variable, Value) else variable


def joined(values: list[Value], separator: str = " ") -> Value:
    places = frozenset[int]().union(*(value.places for value in values))
    return Value(separator.join(value.text for value in values), places)


def _split(text: str) -> list[str]:
    """Splits a value at blanks, but not what is left to expand, as $(date +%s)."""
    return [text] if re.search(r"\$[({]", text) and " " in text else re.findall(r"[^ \t\n]+", text)


def _braces(word: Word) -> list[Word]:
    """Returns the words that a{b,c}d becomes; []: there are no such braces."""
    for i, part in enumerate(word.parts):
        # Each pair multiplies the words.
        pairs = BRACES.findall(part.text) if part.kind == "text" and not part.quoted else []
        if 0 < len(pairs) <= 4 and (match := BRACES.search(part.text)):
            ends = part.text[: match.start()], part.text[match.end() :]
            parts = [Part("text", f"{ends[0]}{choice}{ends[1]}") for choice in match[1].split(",")]
            return [replace(word, parts=(*word.parts[:i], choice, *word.parts[i + 1 :])) for choice in parts]
    return []
