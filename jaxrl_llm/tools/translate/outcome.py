"""What a key of another trainer becomes. A table of a system maps each key to a rule, and a rule returns an outcome.

Each field of a translation has an origin: a key that was read, a default of the trainer, or it is unknown. A rule asks
`Keys` for the values that it needs. If one of them stands in the file and cannot be read, `Keys` remembers it, and all
fields of the outcome are unknown: no rule can forget to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, TypeVar

from jaxrl_llm.config.names import closest
from jaxrl_llm.errors import UserError

Kind: TypeAlias = Literal["mapped", "changed", "unsupported", "no effect"]
T = TypeVar("T")
KINDS: tuple[Kind, ...] = ("mapped", "changed", "unsupported", "no effect")
# No number depends on these: without their value the run is the same one.
QUIET_FIELDS = {"microbatch", "model.remat", "log.name"}


@dataclass(frozen=True)
class Outcome:
    """What a key becomes.

    reason: for "changed", what differs; for "unsupported" and "no effect", why. yours: {field: why} of fields whose
    value is known, but needs something of a person first, such as a function that must be moved: `train` refuses the
    config until then. unknown: {field: why} of fields whose value the file does not say, so that the config holds a
    placeholder: it would train as another run.
    """

    kind: Kind
    fields: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    yours: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


REFERRED = Outcome("no effect", reason="other keys have its value")


class Unread(str):
    """A value that the file does not say: an expression of a script, or a variable that is not set."""

    __slots__ = ()


class Explicit(dict[str, Any]):
    """The values of a file that can be read. Each key that a rule asks for is remembered, also if it cannot be read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__((key, value) for key, value in values.items() if not isinstance(value, Unread))
        self.requested: dict[Any, None] = {}  # in order

    def ask(self, key: Any) -> None:
        self.requested[key] = None

    def __contains__(self, key: object) -> bool:
        self.ask(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.ask(key)
        return super().get(key, default)


class Keys:
    """The values of all keys: the explicit ones of the file, and the defaults of the trainer for all others."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, rows: int, processes: int):
        """rows: number of training rows, 0 if unknown; processes: number of the launcher's processes, 0 if unknown."""
        self.values = values  # also those that cannot be read
        self.explicit = Explicit(values)
        self.unread = values.keys() - self.explicit.keys()
        self.defaults, self.rows, self.processes = defaults, rows, processes

    def __getitem__(self, key: str) -> Any:
        return self.explicit[key] if key in self.explicit else self.defaults[key]

    def __contains__(self, key: str) -> bool:
        return key in self.explicit

    def under(self, prefix: str) -> dict[str, Any]:
        """Returns the values of the keys that begin so, without it."""
        # `in` asks for a key, also for one that cannot be read.
        return {key.removeprefix(prefix): self[key] for key in self.values if key.startswith(prefix) and key in self}

    def asking(self, compute: Callable[[], T]) -> tuple[T, list[str]]:
        """Returns a value, and the keys that it asked for and that cannot be read."""
        self.explicit.requested = {}
        return compute(), [key for key in self.explicit.requested if key in self.unread]


Rule: TypeAlias = Callable[[Any, Keys], Outcome]


def matches(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a key has one of these names."""
    return key in patterns or any("*" in pattern and fnmatchcase(key, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Version:
    """Versions of a trainer whose defaults were others. Keys that only they have prove that a file is for them."""

    name: str
    proofs: tuple[str, ...]  # names or patterns of keys
    defaults: dict[str, Any]  # that differ from those of the table
    newer: tuple[str, ...] = ()  # names or patterns of keys that these versions do not have


def first_key(patterns: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Returns the first key with a value that has one of these names; "": there is none."""
    # A file that prints all keys has those of other versions too, as null.
    return next((key for key, value in values.items() if value is not None and matches(key, patterns)), "")


@dataclass(frozen=True)
class System:
    """A trainer: its keys, and what they become."""

    name: str
    version: str  # whose meaning the table follows
    rules: dict[str, Rule]  # exact keys first, then patterns, the first match wins
    defaults: dict[str, Any]  # of the keys that have an effect on training, where a file does not say them
    base: Callable[[Keys], str]  # the config file of ours that the translation changes
    decides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the fields that a key of the table decides
    renamed: Mapping[str, str] = field(default_factory=dict)  # {old name of a key: new name}
    respelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {old name: {its value: the one now}}
    older: tuple[Version, ...] = ()  # the first one that a key proves counts
    absent: tuple[str, ...] = ()  # names or patterns of keys whose defaults hold, but that a file cannot set

    def knows(self, key: str) -> bool:
        return self._pattern(self.renamed.get(key, key)) is not None

    def _pattern(self, key: str) -> str | None:
        if matches(key, self.absent):
            return None
        if key in self.rules:
            return key
        # Patterns are tried in the order of the table, so a pattern of few keys must stand before one of many keys.
        return next((pattern for pattern in self.rules if "*" in pattern and fnmatchcase(key, pattern)), None)

    def rule(self, key: str) -> Rule:
        """Returns the rule of a key. The rule of a key that the table does not know says so."""
        pattern = self._pattern(key)
        if pattern is not None:
            return self.rules[pattern]
        close = closest(key, self.rules)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = f"{self.name} {self.version} has no such key, or this table does not know it{hint}"
        return lambda value, keys: Outcome("unsupported", reason=reason, unknown={key: reason})

    def by_default(self, key: str, keys: Keys) -> dict[str, Any]:
        """Returns the fields that a key sets with its default."""
        # The value of another key may be none that the rule takes.
        with suppress(TypeError, ValueError, ArithmeticError, AttributeError, IndexError, KeyError):
            return self.rule(key)(self.defaults[key], keys).fields
        return {}

    def decided(self, key: str, keys: Keys) -> list[str]:
        """Returns the fields that a key can decide, whatever its value is."""
        by_default = self.by_default(key, keys)
        # A section that is not there by default is there with another value.
        sections = [name for name, value in by_default.items() if value is None]
        return list(dict.fromkeys([*sections, *(self.decides.get(self._pattern(key) or "") or by_default)]))


@dataclass(frozen=True)
class Translation:
    """A translated file: {key: outcome} of its keys, and of the defaults that it leaves as they are."""

    system: System
    base: str
    outcomes: dict[str, Outcome]
    defaults: dict[str, Outcome]
    notes: tuple[str, ...] = ()  # of the version that the file is for

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
        """Returns the fields that a person must complete, with the reason."""
        used = self.fields()
        tasks = {name: why for name, why in self._unfinished("yours").items() if name in used}
        return tasks | self._unfinished("unknown")

    def unknown(self) -> dict[str, str]:
        """Returns the fields whose value is a placeholder, and the keys without a field that may change the run."""
        return {name: why for name, why in self._unfinished("unknown").items() if name not in QUIET_FIELDS}

    def _unfinished(self, what: str) -> dict[str, str]:
        """Returns what is left to a person in the sections that are there: without evaluations, nothing of theirs."""
        unfinished: dict[str, str] = {}
        for outcomes in (self.defaults, self.outcomes):
            # A field that a key of the file says is complete, whatever a default wanted.
            complete = {name for x in outcomes.values() for name in x.fields.keys() - x.yours.keys() - x.unknown.keys()}
            unfinished = {name: why for name, why in unfinished.items() if name not in complete}
            for outcome in outcomes.values():
                unfinished |= getattr(outcome, what)
        absent = {f"{name}." for name, value in self.fields().items() if value is None and name not in unfinished}
        return {name: why for name, why in unfinished.items() if not name.startswith(tuple(absent))}

    def with_kind(self, kind: Kind) -> dict[str, Outcome]:
        """Returns the keys of the file with this kind of outcome."""
        return {key: outcome for key, outcome in self.outcomes.items() if outcome.kind == kind}


def translate(
    system: System, values: Mapping[str, Any], *, rows: int = 0, processes: int = 0, referred: Set[str] = frozenset()
) -> Translation:
    """Translates the keys of a file.

    rows: number of training rows, 0 if unknown; processes: number of the launcher's processes, 0 if unknown; referred:
    keys whose values other keys of the file take.
    Raises: UserError, for a value of a wrong type.
    """
    names = {key: system.renamed.get(key, key) for key in values}
    current: dict[str, Any] = {}
    origins: dict[str, str] = {}
    # An old name and a new one are one key. Where a file has both, the trainers read the new one.
    for key in sorted(values, key=lambda key: names[key] == key):
        if values[key] is not None or names[key] not in current:
            current[names[key]] = system.respelled.get(key, {}).get(str(values[key]), values[key])
            origins[names[key]] = key
    system, current, notes = with_its_version(system, values, current)
    keys = Keys(current, system.defaults, rows=rows, processes=processes)
    outcomes = {
        key: _outcome(names[key], current[names[key]], system, keys)
        if origins[names[key]] == key
        else Outcome("no effect", reason=f"{origins[names[key]]}, another name of it, is set")
        for key in values
    }
    # A key of the user's own that only others refer to has done its work once their values are there.
    outcomes |= {key: REFERRED for key in referred & outcomes.keys() if not system.knows(key)}
    with_defaults = replace(system, absent=())
    defaults = {
        key: _outcome(key, current.get(key, value), with_defaults, keys)
        for key, value in system.defaults.items()
        if key not in origins
    }
    return Translation(system, system.base(keys), outcomes, defaults, notes)


def with_its_version(
    system: System, values: Mapping[str, Any], current: dict[str, Any]
) -> tuple[System, dict[str, Any], tuple[str, ...]]:
    """Returns the system with the defaults of the version that keys of the file prove, its values, and a note of it.

    current: the values of the file by the newest names of their keys. A default is unknown if other keys of the file
    prove that it is for a later version.
    """
    for version in system.older:
        proof, newer = first_key(version.proofs, values), first_key(version.newer, values)
        if not proof:
            continue
        differing = {key: value for key, value in version.defaults.items() if key not in current}
        listed = ", ".join(f"{key} = {value}" for key, value in differing.items()) or "none that matters"
        note = f"{proof} is a key of {system.name} {version.name}"
        if not newer:
            dated = replace(system, version=version.name, defaults=system.defaults | version.defaults)
            return dated, current, (f"{note}. Its defaults apply: {listed}",)
        note += f", and {newer} one of later versions. It is not known which defaults apply: {listed}"
        unread = {key: Unread(f"{x} {version.name}, then {system.defaults[key]}") for key, x in differing.items()}
        return system, current | unread, (note,)
    return system, current, ()


def _outcome(key: str, value: Any, system: System, keys: Keys) -> Outcome:
    """Applies the rule of a key. Raises: UserError, if a value is not of the key's type."""
    if isinstance(value, Unread):
        return _unread(key, value, system, keys)
    try:
        outcome, unread_keys = keys.asking(lambda: system.rule(key)(value, keys))
    # What a rule raises for a value that is no number or no list. The user sees the key, not a traceback.
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        requested = [other for other in keys.explicit.requested if other != key and other in keys.values]
        others = ", ".join(f"{other} = {keys.values[other]!r}" for other in requested)
        depends = f", and what it depends on ({others})," if others else ""
        raise UserError(
            f"{key} = {value!r} cannot be translated ({error}): give it{depends} a value that {system.name} takes"
        ) from error
    return _depending(key, outcome, unread_keys, system, keys) if unread_keys else outcome


def _depending(key: str, outcome: Outcome, unread_keys: list[str], system: System, keys: Keys) -> Outcome:
    """Returns the outcome of a key that depends on others whose values are not in the file: its fields are unknown."""
    why = ", ".join(f"{other} = {keys.values[other]}" for other in unread_keys)
    reason = "; ".join(
        filter(None, [outcome.reason, f"it depends on {', '.join(unread_keys)}, which the file does not say"])
    )
    decided = list(outcome.fields) or system.decided(key, keys)
    kind = "unsupported" if outcome.kind == "no effect" and decided else outcome.kind
    return replace(outcome, kind=kind, reason=reason, unknown=outcome.unknown | dict.fromkeys(decided, why))


def _unread(key: str, value: Unread, system: System, keys: Keys) -> Outcome:
    """Returns the outcome of a key whose value the file does not say: its fields are unknown."""
    rule = system.rule(key)
    # Whatever the value is, nothing depends on it.
    if isinstance(rule, Idle):
        return rule(value, keys)
    if isinstance(rule, OnlyIf):
        applies, unread_keys = keys.asking(lambda: rule.applies(keys))
        if not applies and not unread_keys:
            return Outcome("no effect", reason=rule.why_not)
    unknown = dict.fromkeys(system.decided(key, keys) or [key], f"{key} = {value}")
    return Outcome(
        "unsupported", system.by_default(key, keys), f"its value is not in the file: {value}", unknown=unknown
    )


@dataclass(frozen=True)
class Idle:
    """The rule of a key that has no effect on the numbers of a run here, whatever its value is."""

    reason: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return Outcome("no effect", reason=self.reason)


@dataclass(frozen=True)
class OnlyIf:
    """Applies a rule if other keys give the key an effect; else it has none, because `why_not`."""

    applies: Callable[[Keys], Any]
    rule: Rule
    why_not: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return self.rule(value, keys) if self.applies(keys) else Outcome("no effect", reason=self.why_not)


def not_here(name: str, reason: str) -> Outcome:
    """Returns the outcome of a value that has no counterpart: the field `name` is not what the file says."""
    return Outcome("unsupported", reason=reason, unknown={name: reason})
