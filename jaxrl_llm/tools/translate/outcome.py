"""What a key of another trainer becomes. A table of a system maps each key to a rule, and a rule returns an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from jaxrl_llm.config.names import closest
from jaxrl_llm.errors import UserError

Kind: TypeAlias = Literal["mapped", "changed", "unsupported", "no effect"]
KINDS: tuple[Kind, ...] = ("mapped", "changed", "unsupported", "no effect")


@dataclass(frozen=True)
class Outcome:
    """What a key becomes.

    reason: for "changed", what differs; for "unsupported" and "no effect", why. yours: {field: why} of fields whose
    value a person must complete, because the file does not say it or it is code.
    """

    kind: Kind
    fields: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    yours: dict[str, str] = field(default_factory=dict)


REFERRED = Outcome("no effect", reason="other keys have its value")


class Unread(str):
    """A value that the file does not say: an expression of a script, or a variable that is not set."""

    __slots__ = ()


class Keys:
    """The values of all keys: the explicit ones of the file, and the defaults of the trainer for all others."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, rows: int, processes: int):
        """rows: of the training data, 0 if not known; processes: of the launcher, 0 if not known."""
        # A key that is not known counts as not set: a rule that depends on it uses the default, and the key itself is
        # reported as not read.
        self.values = values  # also those that are not known
        self.explicit = {key: value for key, value in values.items() if not isinstance(value, Unread)}
        self.unread = values.keys() - self.explicit.keys()
        self.defaults, self.rows, self.processes = defaults, rows, processes

    def __getitem__(self, key: str) -> Any:
        return self.explicit[key] if key in self.explicit else self.defaults[key]

    def __contains__(self, key: str) -> bool:
        return key in self.explicit


Rule: TypeAlias = Callable[[Any, Keys], Outcome]
Convert: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class System:
    """A trainer: its keys, and what they become."""

    name: str
    version: str  # whose meaning the table follows
    rules: dict[str, Rule]  # exact keys first, then patterns, the first match wins
    defaults: dict[str, Any]  # of the keys that have an effect on training, where a file does not say them
    base: Callable[[Keys], str]  # the config file of ours that the translation changes

    def knows(self, key: str) -> bool:
        return key in self.rules or any("*" in pattern and fnmatchcase(key, pattern) for pattern in self.rules)

    def rule(self, key: str) -> Rule:
        """Returns the rule of a key. The rule of an unknown key says so."""
        if key in self.rules:
            return self.rules[key]
        # In the order of the table: a pattern of few keys must stand before one of many.
        for pattern, rule in self.rules.items():
            if "*" in pattern and fnmatchcase(key, pattern):
                return rule
        close = closest(key, self.rules)
        hint = f"; did you mean {close[0]}?" if close else ""
        return unsupported(f"{self.name} {self.version} has no such key, or this table does not know it{hint}")


@dataclass(frozen=True)
class Translation:
    """A translated file: {key: outcome} of its keys, and of the defaults that it leaves as they are."""

    system: System
    base: str
    outcomes: dict[str, Outcome]
    defaults: dict[str, Outcome]

    def fields(self) -> dict[str, Any]:
        """Returns the fields of our config that the translation sets. A key of the file wins over a default.

        None is a section that is not there, also if it has fields: these are for who sets it later.
        """
        fields: dict[str, Any] = {}
        # The file comes last, so that its keys win.
        for outcome in [*self.defaults.values(), *self.outcomes.values()]:
            fields |= outcome.fields
        return fields

    def yours(self) -> dict[str, str]:
        """Returns the fields that a person must complete, with the reason: without evaluations, none of theirs."""
        incomplete: dict[str, str] = {}
        for outcomes in (self.defaults, self.outcomes):
            # A field that a key of the file says is complete, whatever a default wanted.
            complete = {name for outcome in outcomes.values() for name in outcome.fields if name not in outcome.yours}
            incomplete = {name: why for name, why in incomplete.items() if name not in complete}
            for outcome in outcomes.values():
                incomplete |= outcome.yours
        used = self.fields()
        absent = {name for name, value in used.items() if value is None}
        return {name: why for name, why in incomplete.items() if name in used and name.split(".")[0] not in absent}

    def with_kind(self, kind: Kind) -> dict[str, Outcome]:
        """Returns the keys of the file with this kind of outcome."""
        return {key: outcome for key, outcome in self.outcomes.items() if outcome.kind == kind}


def translate(
    system: System, values: Mapping[str, Any], *, rows: int = 0, processes: int = 0, referred: Set[str] = frozenset()
) -> Translation:
    """Translates the keys of a file.

    rows: of the training data, 0 if not known; processes: of the launcher, 0 if not known; referred: keys whose values
    other keys of the file take.
    Raises: UserError, for a value of a wrong type.
    """
    keys = Keys(values, system.defaults, rows=rows, processes=processes)
    outcomes = {key: _outcome(key, value, system, keys) for key, value in values.items()}
    # A key of the user's own that only others refer to has done its work once their values are there.
    outcomes |= {key: REFERRED for key in referred & outcomes.keys() if not system.knows(key)}
    defaults = {key: _outcome(key, value, system, keys) for key, value in system.defaults.items() if key not in values}
    return Translation(system, system.base(keys), outcomes, defaults)


def _outcome(key: str, value: Any, system: System, keys: Keys) -> Outcome:
    """Applies the rule of a key. Raises: UserError, if a value is not of the key's type."""
    if isinstance(value, Unread):
        return _unread(key, value, system, keys)
    try:
        return system.rule(key)(value, keys)
    # What a rule raises for a value that is no number or no list. The user sees the key, not a traceback.
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise UserError(
            f"{key} = {value!r} cannot be translated ({error}): give it, and what it depends on, a value "
            f"that {system.name} takes"
        ) from error


def _unread(key: str, value: Unread, system: System, keys: Keys) -> Outcome:
    """Returns the outcome of a key whose value the file does not say: the user must set its fields."""
    rule = system.rule(key)
    # Whatever the value is, nothing depends on it.
    if isinstance(rule, Idle):
        return rule(value, keys)
    fields = rule(system.defaults[key], keys).fields if key in system.defaults else {}
    return Outcome(
        "unsupported", fields, f"its value is not in the file: {value}", dict.fromkeys(fields, f"{key} = {value}")
    )


def to(name: str, convert: Convert = lambda value: value) -> Rule:
    """The value becomes the field `name`, with the same meaning."""
    return lambda value, keys: Outcome("mapped", {name: convert(value)})


def changed(name: str, reason: str, convert: Convert = lambda value: value) -> Rule:
    """The value becomes the field `name`, whose meaning differs."""
    return lambda value, keys: Outcome("changed", {name: convert(value)}, reason)


def unsupported(reason: str) -> Rule:
    """The key has no counterpart."""
    return lambda value, keys: Outcome("unsupported", reason=reason)


@dataclass(frozen=True)
class Idle:
    """The rule of a key that has no effect on the numbers of a run here, whatever its value is."""

    reason: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return Outcome("no effect", reason=self.reason)


def off(reason: str, *neutral: Any) -> Rule:
    """The key has no counterpart, and needs none at its neutral values (None, False and these)."""
    # A trainer that can switch something off has it off with None or False.
    nothing = (None, False, *neutral)

    def rule(value: Any, keys: Keys) -> Outcome:
        return Outcome("no effect", reason="not in use") if value in nothing else Outcome("unsupported", reason=reason)

    return rule


def same_rule(rule: Rule, keys: str, prefix: str = "") -> dict[str, Rule]:
    """Returns {key: rule} with one rule for several keys. keys: names with spaces between them."""
    return {f"{prefix}{key}": rule for key in keys.split()}


def only_if(applies: Callable[[Keys], bool], rule: Rule, why_not: str) -> Rule:
    """Applies a rule if other keys give the key an effect; else it has none, because `why_not`."""
    return lambda value, keys: rule(value, keys) if applies(keys) else Outcome("no effect", reason=why_not)
