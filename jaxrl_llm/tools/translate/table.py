"""Reads the translation table of a trainer, such as verl.tsv: tab-separated values, with a row for each key.

The columns of such a file are:

key: name of a key of the trainer, or several with blanks between them, or a pattern with *. Exact names come first,
    then patterns in the order of the file.
fields: fields of a jaxrl_llm config that the key decides, the most important one first. FIELD=VALUE has this value if
    the key decides the others.
rule: effect of a value. `int`, `float`, `bool`, `text`, `dict` and `any` make it the fields, with the same
    meaning; `number` makes None 0.0, and `natural` makes a negative number 0. `count` does so if the value is above 0;
    `count 25` makes the fields 25 for any other value, and `count` makes none. With values after the word, any
    other value means something else (`why`). `choose` makes the fields the word B for the value A, of the words A=B
    after it; the word *=B is for all other values. `idle` has no effect on the numbers of a run, whatever its value is.
    `off` has no counterpart, and needs none with None, False and the values after it; `only` needs none with the values
    after it. `none` has no counterpart, and `differs` none that is a field. `aside` is `off` for a key that changes
    nothing of the training. Fields of these rows are not what the file says.
    `of KEY` makes the fields what they are by the rule of KEY, which reads this key too.
    `absent` takes a row of another table out. `old KEY` is an earlier name of KEY; the words A=B after it say how its
    values are spelled now. Any other word is a function of the trainer's module, which is the rule.
    With a ? behind the word, None, False, 0 and an empty value have no effect.
    `if CONDITION` after all of these, once or several times: the key has an effect only with that condition. KEY is
    a key that is set, KEY=A,B one with a value of these, KEY!=A,B one with another value, and a word in capitals is a
    condition of the module with its reason.
default: the trainer's default, as YAML; empty if the key has none, or needs none because it changes no field.
was: older defaults with their last releases, the oldest first, as in "0.9 until 0.15; 0.6 until 0.20".
versions: "0.3-" for a key since release 0.3, "-0.2" for a key until release 0.2, or "0.3-0.6" for both. A file with a
    key that has a last release is for an older release.
why: difference, or reason why no field has this effect; a word in capitals is one of sentences.tsv.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.translate.documents import parse_scalar
from jaxrl_llm.tools.translate.outcome import Conditional, Keys, Outcome, Rule, TrainerTable, Unread
from jaxrl_llm.tools.translate.releases import Release, Releases, parse_release

FOLDER = Path(__file__).parent


def read_columns(name: str) -> list[list[str]]:
    """Returns the columns of each row of the file `name`.tsv."""
    lines = (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


# {name of a sentence: sentence}, which rows name as their reason
SENTENCES = dict(read_columns("sentences"))
# {name of a list: words of this list}, such as {"quiet_calls": ["print", …]}; the modules of this folder use them
WORDS = {name: words.split(" ") for name, words in read_columns("words")}
# Reason of a key whose value is None, False, 0 or empty.
NOT_IN_USE = "not in use"
NOT_SET = Outcome("no effect", reason=NOT_IN_USE)
# {rule in a table: conversion of the value into the value of the fields}
CONVERTERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "text": str}
CONVERTERS |= {"dict": dict, "any": lambda value: value, "natural": lambda value: max(int(value or 0), 0)}
CONVERTERS |= {"count": int, "number": lambda value: float(value or 0)}


@dataclass(frozen=True)
class Row:
    """A row of a translation table, with the texts of its columns (see the top of this file)."""

    key: str
    fields: str
    rule: str
    default: str
    was: str
    versions: str
    why: str

    @property
    def section(self) -> str:
        """The key without its last part, with the dot at its end."""
        return self.key.removesuffix(self.name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def field_names(self) -> list[str]:
        """Names of the fields of jaxrl_llm's config whose values the key decides."""
        return [field for field in self.fields.split() if "=" not in field]

    def fields_with(self, value: Any) -> dict[str, Any]:
        """Returns {field: value}, with the values that the row gives to fields."""
        pairs = [field.partition("=") for field in self.fields.split()]
        values = {name: parse_scalar(text) if sign else value for name, sign, text in pairs}
        # A list of a config is a tuple.
        return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}

    @property
    def field(self) -> str:
        """The first field of jaxrl_llm's config that the key decides."""
        return self.fields.split(" ")[0]

    @property
    def field_section(self) -> str:
        """The section of jaxrl_llm's config that has the first field, such as "optim"; "" if it has none."""
        return self.field.rpartition(".")[0]


def read_rows(name: str) -> dict[str, Row]:
    """Returns {key: row} of the file `name`.tsv. A row with several keys is returned for each of them."""
    rows = [Row(*columns) for columns in read_columns(name)]
    return {key: replace(row, key=key) for row in rows for key in row.key.split(" ")}


def read_names(section: str) -> dict[str, Any]:
    """Returns {name: its name in jaxrl_llm} of a section of names.tsv; of several columns a list."""
    rows = [columns for start, *columns in read_columns("names") if start == section]
    parsed = {name: [x if " " in x else parse_scalar(x) for x in columns] for name, *columns in rows}
    return {name: columns[0] if len(columns) == 1 else columns for name, columns in parsed.items()}


def trainer_table(
    name: str, version: str, rows: dict[str, Row], module: dict[str, Any], base: Callable[..., str], as_of: Release = ()
) -> TrainerTable:
    """Makes the translation table of a trainer from its rows, with the rules that they name.

    module: {name: function or condition} that rows may name.
    base: config of jaxrl_llm that a translation changes; as_of: release of a trainer without later keys, () for the
    newest one.
    """
    rows = {key: row for key, row in rows.items() if row.rule != "absent"}
    current_rows = {key: row for key, row in rows.items() if not row.rule.startswith("old ")}
    former_names = {key: row.rule.split(" ")[1:] for key, row in rows.items() if key not in current_rows}
    spans = {key: row.versions.partition("-") for key, row in rows.items()}
    since = {key: parse_release(first) for key, (first, _, _) in spans.items() if first}
    until = {key: parse_release(last) for key, (_, _, last) in spans.items() if last}
    defaults = {key: parse_scalar(row.default) for key, row in current_rows.items() if row.default}
    history = {key: older_defaults(row.was) for key, row in current_rows.items() if row.was}
    releases = Releases(name.lower().partition("'")[0], history, since, until)
    rules: dict[str, Rule] = {}
    rules |= {key: _rule(row, module, rules) for key, row in current_rows.items()}
    return TrainerTable(
        name,
        version,
        rules,
        defaults | (releases.defaults_at(as_of) if as_of else {}),
        base,
        decides={key: tuple(row.field_names) for key, row in current_rows.items()},
        renamed={key: words[0] for key, words in former_names.items()},
        respelled={key: dict(word.split("=") for word in words[1:]) for key, words in former_names.items()},
        releases=Releases(releases.package) if as_of else releases,
        absent=tuple(key for key, first in since.items() if as_of and first > as_of),
    )


def older_defaults(text: str) -> list[tuple[Any, Release]]:
    """Returns older defaults, each with its last release, of a text such as "50 until 0.17; 40 until 0.20".

    A default that begins with ? is a description of one that depends on other settings.
    """
    pairs = [part.rsplit(" until ", 1) for part in text.split("; ")]
    return [(Unread(x[1:]) if x.startswith("?") else parse_scalar(x), parse_release(last)) for x, last in pairs]


def _rule(row: Row, module: Mapping[str, Any], rules: dict[str, Rule]) -> Rule:
    """Returns the rule of a row: a function that makes the outcome of a value.

    module: argument of `trainer_table`; rules: rules of all keys, which are complete when the rule is called.
    """
    text, *conditions = row.rule.split(" if ")
    word, *arguments = text.split(" ")
    word, optional, _ = word.partition("?")
    row = replace(row, why=SENTENCES.get(row.why, row.why))
    if word == "idle":
        rule = Conditional(lambda keys: False, lambda value, keys: Outcome("no effect"), row.why)
    elif word in CONVERTERS:
        rule = partial(_same_meaning, row, word, [*map(parse_scalar, arguments)])
    elif word == "choose":
        rule = partial(_chosen, row, dict(pair.split("=") for pair in arguments))
    elif word == "of":
        rule = partial(_part_of, row, rules, arguments[0])
    elif word in ("off", "only", "none", "differs", "aside"):
        nothing = [None, False] if word in ("off", "aside") else []
        rule = partial(_no_counterpart, row, word, [*nothing, *map(parse_scalar, arguments)])
    else:
        function = _named(word, module)
        parameters = inspect.signature(function).parameters
        # A rule may take its row as an argument.
        rule = partial(function, row) if "row" in parameters else function
    if optional:
        rule = partial(_if_set, rule)
    # The first condition is asked first, so that a key which decides nothing makes no field unknown.
    for condition in reversed(conditions):
        is_name = condition.rpartition(".")[2].isupper()
        applies, why_not = _named(condition, module) if is_name else _condition(condition, row.key)
        rule = Conditional(applies, rule, why_not)
    return rule


def _named(word: str, module: Mapping[str, Any]) -> Any:
    """Returns what a word such as images.HAS_IMAGES is in a module."""
    name, *attributes = word.split(".")
    return reduce(getattr, attributes, module[name])


def _condition(text: str, own_key: str) -> tuple[Callable[[Keys], Any], str]:
    """Returns whether a condition on a key holds, such as KEY=A,B, and the reason if it does not hold."""
    key, sign, words = re.split(r"(!?=|$)", text, maxsplit=1)
    reason = NOT_IN_USE if key == own_key else f"it is read only if {text}"
    reason = f"{key} is set" if text.startswith(f"{key}=None") else reason

    def holds(keys: Keys) -> Any:
        """Whether the key has one of the values, or any other value after !=."""
        value = keys.get(key, keys.defaults.get(key))
        return (str(value) in words.split(",")) == (sign == "=") if sign else value

    return holds, reason


def _if_set(rule: Rule, value: Any, keys: Keys) -> Outcome:
    """Translates a key by its rule, if it has a value."""
    return rule(value, keys) if value else NOT_SET


def _part_of(row: Row, rules: dict[str, Rule], whole: str, value: Any, keys: Keys) -> Outcome:
    """Translates a key whose fields are a part of those of the key `whole`, whose rule reads this key too."""
    outcome = rules[whole](keys[whole], keys)
    fields = {name: outcome.fields[name] for name in row.field_names if name in outcome.fields}
    unknown = {name: outcome.unknown[name] for name in row.field_names if name in outcome.unknown}
    return Outcome("changed" if row.why else "mapped", fields, row.why, unknown=unknown)


def _chosen(row: Row, words: Mapping[str, str], value: Any, keys: Keys) -> Outcome:
    """Translates a key whose values have other names in jaxrl_llm. words: {value: its name in jaxrl_llm}."""
    jaxrl_llm_name = words.get(str(value)) or words.get("*")
    if not jaxrl_llm_name:
        reason = f"it is one of {', '.join(words)}, not {value}"
        return Outcome("unsupported", reason=reason, unknown=dict.fromkeys(row.field_names, reason))
    return Outcome("changed" if row.why else "mapped", row.fields_with(jaxrl_llm_name), row.why)


def _same_meaning(row: Row, word: str, neutral: list[Any], value: Any, keys: Keys) -> Outcome:
    """Translates a key whose value has the same meaning in jaxrl_llm, or if `neutral` is not empty, its values alone.

    word: key of CONVERTERS.
    """
    if word == "count" and not (value and value > 0):
        return Outcome("changed", row.fields_with(*neutral), row.why) if neutral else NOT_SET
    if value is None and row.default in ("", "null"):
        return NOT_SET
    converted = CONVERTERS[word](value)
    differs = bool(neutral) and word != "count" and converted not in neutral
    reason = row.why if differs or not neutral else ""
    return Outcome("changed" if differs else "mapped", row.fields_with(converted), reason)


def _no_counterpart(row: Row, word: str, neutral: list[Any], value: Any, keys: Keys) -> Outcome:
    """Translates a key without a counterpart in jaxrl_llm. Its fields are unknown unless its value is in `neutral`."""
    if value in neutral:
        reason = f"{value} needs no field in jaxrl_llm" if value else NOT_IN_USE
        return Outcome("no effect", reason=reason) if word in ("off", "aside") else Outcome("mapped")
    kind = "changed" if word == "differs" else "unsupported"
    # A key without a field makes another run too, unless it is beside the training.
    names = row.field_names or [row.key] * (word not in ("differs", "aside"))
    return Outcome(kind, reason=row.why, unknown=dict.fromkeys(names, row.why))
