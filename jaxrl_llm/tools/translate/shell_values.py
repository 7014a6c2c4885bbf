"""The values of a shell script: what its words become, with variables, arrays, sums and defaults expanded as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.arguments import Value, calculated
from jaxrl_llm.tools.translate.shell_grammar import ASSIGNS, Part, ShellParser, Simple, Word
from jaxrl_llm.tools.translate.shell_parameters import replaced, transformed

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
PARAMETER = re.compile(r"(!|#)?(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
LONGEST = 100_000  # characters of a variable; a tenth of it: words of an array
BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
KNOWN = {"HOME": "~", "PWD": "."}


@dataclass
class Values:
    """The variables of a script that is followed. Those of an associative array are variables called name[key]."""

    variables: dict[str, Value] = field(default_factory=lambda: {name: Value(text) for name, text in KNOWN.items()})
    arrays: dict[str, list[Value]] = field(default_factory=dict)
    arguments: list[Value] | None = None  # of a function; None: those of the script
    inside: frozenset[int] | None = None  # the places of a text that is a script itself: of eval, or bash -c

    def assigned(self, word: Word) -> re.Match[str] | None:
        """Returns the match of name= at the beginning of a word that is not quoted there."""
        text = ""
        for part in word.parts:
            if part.kind != "text" or part.quoted:
                break
            text += part.text
        return ASSIGNMENT.match(text) if ASSIGNS.match(text) else None

    def assign(self, match: re.Match[str], word: Word) -> None:
        self.set(match, word)
        name = match[1]
        if len(self.variables.get(name, Value("")).text) > LONGEST or len(self.arrays.get(name, [])) > LONGEST / 10:
            raise UserError(f"{name} grows without an end: is this a script that starts a training?")

    def set(self, match: re.Match[str], word: Word) -> None:
        name, index, more = match.groups()
        if word.array is not None:
            pairs = [re.fullmatch(r"\[(.+?)\]=(.*)", self.text(element).text, re.DOTALL) for element in word.array]
            if pairs and all(pairs):  # declare -A name=([key]=value …)
                places = frozenset().union(*(self.places(element) for element in word.array))
                self.variables |= {f"{name}[{pair[1]}]": Value(pair[2], places) for pair in pairs if pair}
                return
            values = [value for element in word.array for value in self.fields(element)]
            self.arrays[name] = self.arrays.get(name, []) * bool(more) + values
            return
        whole = self.text(word)
        value = Value(whole.text[match.end() :], whole.places)
        if index and index[1:-1].isdigit() and int(index[1:-1]) < len(self.arrays.get(name, [])):
            self.arrays[name] = [value if i == int(index[1:-1]) else x for i, x in enumerate(self.arrays[name])]
        elif index:
            self.variables[name + self.text_of(index).text] = value
        elif more and name in self.arrays:
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
        if alternatives := _braces(word):
            return [value for alternative in alternatives for value in self.fields(alternative)]
        finished: list[Value] = []
        value, begun, places = Value("", self.places(word)), False, self.places(word)
        for part in word.parts:
            if part.kind == "text":
                value, begun = value + Value(part.text), begun or part.quoted or bool(part.text)
                continue
            expansion = self.expanded(part)
            if not part.quoted:
                expansion = [
                    Value(text, part_value.places) for part_value in expansion for text in _split(part_value.text)
                ]
            # As in bash, the first field joins the text before it, and only the last one the text after it.
            for i, piece in enumerate(expansion):
                if i:
                    finished.append(value)
                    value = Value("", places)
                value, begun = value + piece, True
        return [*finished, value] if begun else finished

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
        if index in ("@", "*"):
            return self.items(name, index, rest, as_written) if not before else as_written
        if index is None and name in self.arrays and name not in self.variables:
            return self.arrays[name][:1]
        value = self.variable(name, index)
        if before == "!":
            value = self.variable(value.text, None) if value else None
        return self.with_rest(name, value, rest, as_written)

    def items(self, name: str, index: str, rest: str, as_written: list[Value]) -> list[Value]:
        """Returns the elements of an array: all, a slice, or each of them transformed."""
        if name not in self.arrays:
            return [] if rest[:1] in (":", "+") else as_written
        items = self.arrays[name]
        if part := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
            items = items[int(part[1]) :][: int(part[2]) if part[2] else None]
        elif rest and not re.match(r":?[-=+?]", rest):
            # "$(" marks an element whose transformation is not known: then the whole array stays as it is written.
            expansion = [self.with_rest(name, item, rest, [Value("$(")])[0] for item in items]
            items = as_written if any(value.text == "$(" for value in expansion) else expansion
        return [_joined(items)] if index == "*" and items else list(items)

    def variable(self, name: str, index: str | None) -> Value | None:
        if index is not None:
            items, key = self.arrays.get(name, []), self.text_of(index).text
            if re.fullmatch(r"-?\d+", key) and -len(items) <= int(key) < len(items):
                return items[int(key)]
            return self.variables.get(f"{name}[{key}]")
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
            # With a colon an empty text counts as not set.
            is_set = value is not None and (value.text != "" or not sign[0].startswith(":"))
            other = self.text_of(rest[sign.end() :])
            if sign[0][-1] == "+":
                return [other] if is_set else []
            if sign[0][-1] == "?":
                return [value] if is_set and value else as_written
            # ${name:=default} also sets the variable.
            if sign[0][-1] == "=" and not is_set:
                self.variables[name] = other
            return [value] if is_set and value else [other]
        if value is None or "$" in value.text:
            return as_written
        # The first / that has no backslash is before what comes instead.
        if rest[0] == "/":
            every = rest.startswith("//")
            pattern, *other = re.split(r"(?<!\\)/", rest[1 + every :], maxsplit=1)
            by = self.text_of(other[0]).text if other else ""
            return [Value(replaced(value.text, self.text_of(pattern).text, by, every=every), value.places)]
        text = transformed(value.text, rest[0] + self.text_of(rest[1:]).text)
        return as_written if text is None else [Value(text, value.places)]

    def text_of(self, text: str) -> Value:
        """Expands the text behind a parameter's name."""
        parser, value = ShellParser(text), Value("")
        while parser.at < len(text):
            for part in parser.part(""):
                value += Value(part.text) if part.kind == "text" else _joined(self.expanded(part))
        return value

    def summed(self, text: str) -> Value:
        names = {name: value.text for name, value in self.variables.items()}
        # A sum is from all places that its variables are from: their words then belong to the command.
        places = [value.places for name, value in self.variables.items() if re.search(rf"\b{name}\b", text)]
        inside = self.text_of(text).text
        try:
            # A shell has whole numbers only: its / is //.
            total = calculated(re.sub(r"(?<!/)/(?!/)", "//", inside), names)
        except (ValueError, KeyError, SyntaxError, ZeroDivisionError, OverflowError):
            return Value(f"$(({inside.replace(' ', '')}))")
        return Value(str(total), frozenset().union(*places))


def _joined(values: list[Value]) -> Value:
    places = frozenset().union(*(value.places for value in values)) if values else frozenset()
    return Value(" ".join(value.text for value in values), places)


def _split(text: str) -> list[str]:
    """Splits a value at blanks, but not what is left to expand, as $(date +%s)."""
    return [text] if re.search(r"\$[({]", text) and " " in text else text.split()


def _braces(word: Word) -> list[Word]:
    """Returns the words that a{b,c}d becomes; []: there are no such braces."""
    for i, part in enumerate(word.parts):
        if part.kind != "text" or part.quoted:
            continue
        # Each pair multiplies the words.
        if (match := BRACES.search(part.text)) and len(BRACES.findall(part.text)) <= 4:
            ends = part.text[: match.start()], part.text[match.end() :]
            parts = [Part("text", f"{ends[0]}{choice}{ends[1]}") for choice in match[1].split(",")]
            return [replace(word, parts=(*word.parts[:i], choice, *word.parts[i + 1 :])) for choice in parts]
    return []
