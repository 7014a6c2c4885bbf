"""Translates the keys of another trainer. The table of a trainer has a rule for each key, which returns an outcome.

The origin of a field is a key of the file, a default of the trainer, or unknown. A rule asks `Keys` for the values that
it needs. If the file has such a value and it cannot be read, `Keys` records that, and all fields of the outcome become
unknown. So no rule can forget to say it.
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
# Fields that change no number of a run, so that the run is the same without their values.
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


NO_KEYS = frozenset[str]()
REFERRED = Outcome("no effect", reason="other keys have its value")


class Unread(str):
    """A value that cannot be read from the file, such as an expression of a script or a variable that is not set."""

    __slots__ = ()


class FileValues(dict[str, Any]):
    """The readable values of a file. It records each key that a rule asks for, even if the key cannot be read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__((key, value) for key, value in values.items() if not isinstance(value, Unread))
        self.requested: dict[Any, None] = {}  # keys that rules have asked for, in order

    def record_request(self, key: Any) -> None:
        self.requested[key] = None

    def __contains__(self, key: object) -> bool:
        self.record_request(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.record_request(key)
        return super().get(key, default)


class Keys:
    """Values of all keys: values in the file, and defaults of the trainer for all other keys."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, rows: int, processes: int):
        """rows: number of training rows, 0 if unknown; processes: number of the launcher's processes, 0 if unknown."""
        self.values = values  # with the values that cannot be read
        self.explicit = FileValues(values)
        self.unread = values.keys() - self.explicit.keys()
        self.defaults, self.rows, self.processes = defaults, rows, processes

    def __getitem__(self, key: str) -> Any:
        return self.explicit[key] if key in self.explicit else self.defaults[key]

    def __contains__(self, key: str) -> bool:
        return key in self.explicit

    def prefixed(self, prefix: str) -> dict[str, Any]:
        """Returns {rest of the key: value} of the keys that begin with the prefix."""
        # `key in self` records that a rule asks for the key, even if the key cannot be read.
        return {key.removeprefix(prefix): self[key] for key in self.values if key.startswith(prefix) and key in self}

    def with_unread_keys(self, compute: Callable[[], T]) -> tuple[T, list[str]]:
        """Returns a computed value, and the keys that the computation asked for and that cannot be read."""
        self.explicit.requested = {}
        return compute(), [key for key in self.explicit.requested if key in self.unread]


Rule: TypeAlias = Callable[[Any, Keys], Outcome]


def matches(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a key has one of these names or matches one of these patterns."""
    return key in patterns or any("*" in pattern and fnmatchcase(key, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Version:
    """Older versions of a trainer that had other defaults. A key that only these versions have proves them."""

    name: str
    proofs: tuple[str, ...]  # names or patterns of keys that only these versions have
    defaults: dict[str, Any]  # defaults that differ from the table
    newer: tuple[str, ...] = ()  # names or patterns of keys that these versions do not have


def first_key(patterns: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Returns the first key of a file with a value that matches one of the patterns; "" if no key does."""
    # A generated file lists all keys, and those of other versions are null.
    return next((key for key, value in values.items() if value is not None and matches(key, patterns)), "")


@dataclass(frozen=True)
class TrainerTable:
    """A trainer: its keys with their rules and defaults."""

    name: str
    version: str  # version that the table describes
    rules: dict[str, Rule]  # rules of exact keys first, then of patterns; the first match wins
    defaults: dict[str, Any]  # defaults of the keys that have an effect on training
    base: Callable[[Keys], str]  # name of the config of jaxrl_llm that a translation changes
    decides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # {key: fields that it decides}
    renamed: Mapping[str, str] = field(default_factory=dict)  # {old name of a key: new name}
    respelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {old name: {old value: new value}}
    older: tuple[Version, ...] = ()  # the first version that a key of the file proves counts
    absent: tuple[str, ...] = ()  # names or patterns of keys that only later versions can set

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
        """Returns the rule of a key. A key that the table does not have is unsupported."""
        pattern = self._pattern(key)
        if pattern is not None:
            return self.rules[pattern]
        close = closest(key, self.rules)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = f"{self.name} {self.version} has no such key, or this table does not know it{hint}"
        return lambda value, keys: Outcome("unsupported", reason=reason, unknown={key: reason})

    def default_fields(self, key: str, keys: Keys) -> dict[str, Any]:
        """Returns the fields that a key sets if it has its default."""
        # Another key of the file may have a value that the rule refuses.
        with suppress(TypeError, ValueError, ArithmeticError, AttributeError, IndexError, KeyError):
            return self.rule(key)(self.defaults[key], keys).fields
        return {}

    def decided_fields(self, key: str, keys: Keys) -> list[str]:
        """Returns the fields that a key can decide, whatever its value is."""
        default_fields = self.default_fields(key, keys)
        # A section that is None by default exists with another value of the key.
        sections = [name for name, value in default_fields.items() if value is None]
        return list(dict.fromkeys([*sections, *(self.decides.get(self._pattern(key) or "") or default_fields)]))


@dataclass(frozen=True)
class Translation:
    """A translated file: {key: outcome} of its keys, and of the defaults that it leaves as they are."""

    table: TrainerTable
    base: str
    outcomes: dict[str, Outcome]
    defaults: dict[str, Outcome]
    notes: tuple[str, ...] = ()  # sentences about the version that the file is for

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the config that the translation sets. A key of the file wins over a default.

        None means a config without this section. Its fields are kept for a user who adds the section later.
        """
        fields: dict[str, Any] = {}
        # The file comes last, so that its keys win.
        for outcome in [*self.defaults.values(), *self.outcomes.values()]:
            fields |= outcome.fields
        return fields

    def yours(self) -> dict[str, str]:
        """Returns the fields that a person must complete, with the reason."""
        fields = self.fields()
        tasks = {name: reason for name, reason in self._unfinished("yours").items() if name in fields}
        return tasks | self._unfinished("unknown")

    def unknown(self) -> dict[str, str]:
        """Returns the fields whose value is a placeholder, and the keys without a field that may change the run."""
        return {name: reason for name, reason in self._unfinished("unknown").items() if name not in QUIET_FIELDS}

    def _unfinished(self, attribute: str) -> dict[str, str]:
        """Returns {field: reason} of one attribute of the outcomes, for sections that the config has."""
        unfinished: dict[str, str] = {}
        for outcomes in (self.defaults, self.outcomes):
            # A field that a key of the file sets is complete, even if a default left it to the user.
            complete = {name for x in outcomes.values() for name in x.fields.keys() - x.yours.keys() - x.unknown.keys()}
            unfinished = {name: reason for name, reason in unfinished.items() if name not in complete}
            for outcome in outcomes.values():
                unfinished |= getattr(outcome, attribute)
        absent = {f"{name}." for name, value in self.fields().items() if value is None and name not in unfinished}
        return {name: reason for name, reason in unfinished.items() if not name.startswith(tuple(absent))}

    def with_kind(self, kind: Kind) -> dict[str, Outcome]:
        """Returns the keys of the file with this kind of outcome."""
        return {key: outcome for key, outcome in self.outcomes.items() if outcome.kind == kind}


def translate(
    table: TrainerTable, values: Mapping[str, Any], *, rows: int = 0, processes: int = 0, referred: Set[str] = NO_KEYS
) -> Translation:
    """Translates the keys of a file.

    rows: number of training rows, 0 if unknown; processes: number of the launcher's processes, 0 if unknown; referred:
    keys whose values other keys of the file take.
    Raises: UserError, for a value of a wrong type.
    """
    names = {key: table.renamed.get(key, key) for key in values}
    current: dict[str, Any] = {}
    origins: dict[str, str] = {}
    # An old and a new name are one key. If a file has both names, the trainers read the new one.
    for key in sorted(values, key=lambda key: names[key] == key):
        if values[key] is not None or names[key] not in current:
            current[names[key]] = table.respelled.get(key, {}).get(str(values[key]), values[key])
            origins[names[key]] = key
    table, current, notes = with_its_version(table, values, current)
    keys = Keys(current, table.defaults, rows=rows, processes=processes)
    outcomes = {
        key: _outcome(names[key], current[names[key]], table, keys)
        if origins[names[key]] == key
        else Outcome("no effect", reason=f"{origins[names[key]]}, another name of it, is set")
        for key in values
    }
    # A key that the user invented has no effect of its own, because other keys have taken its value.
    outcomes |= {key: REFERRED for key in referred & outcomes.keys() if not table.knows(key)}
    with_defaults = replace(table, absent=())
    defaults = {
        key: _outcome(key, current.get(key, value), with_defaults, keys)
        for key, value in table.defaults.items()
        if key not in origins
    }
    return Translation(table, table.base(keys), outcomes, defaults, notes)


def with_its_version(
    table: TrainerTable, values: Mapping[str, Any], current: dict[str, Any]
) -> tuple[TrainerTable, dict[str, Any], tuple[str, ...]]:
    """Returns the table with the defaults of the version that keys of the file prove, the values, and a note.

    current: {newest name of a key: value} of the file. A default is unknown if the file has keys of older and of later
    versions.
    """
    for version in table.older:
        proof, newer = first_key(version.proofs, values), first_key(version.newer, values)
        if not proof:
            continue
        differing = {key: value for key, value in version.defaults.items() if key not in current}
        defaults = ", ".join(f"{key} = {value}" for key, value in differing.items()) or "none that matters"
        note = f"{proof} is a key of {table.name} {version.name}"
        if not newer:
            dated = replace(table, version=version.name, defaults=table.defaults | version.defaults)
            return dated, current, (f"{note}. Its defaults apply: {defaults}",)
        note += f", and {newer} one of later versions. It is not known which defaults apply: {defaults}"
        unread = {key: Unread(f"{x} {version.name}, then {table.defaults[key]}") for key, x in differing.items()}
        return table, current | unread, (note,)
    return table, current, ()


def _outcome(key: str, value: Any, table: TrainerTable, keys: Keys) -> Outcome:
    """Returns the outcome of a key. Raises: UserError, if a value is not of the key's type."""
    if isinstance(value, Unread):
        return _unread(key, value, table, keys)
    try:
        outcome, unread_keys = keys.with_unread_keys(lambda: table.rule(key)(value, keys))
    # A rule raises these errors for a value of a wrong type, and the user must see the key instead of a traceback.
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        requested = [name for name in keys.explicit.requested if name != key and name in keys.values]
        other_values = ", ".join(f"{name} = {keys.values[name]!r}" for name in requested)
        depends = f", and what it depends on ({other_values})," if other_values else ""
        raise UserError(
            f"{key} = {value!r} cannot be translated ({error}): give it{depends} a value that {table.name} takes"
        ) from error
    return _depending(key, outcome, unread_keys, table, keys) if unread_keys else outcome


def _depending(key: str, outcome: Outcome, unread_keys: list[str], table: TrainerTable, keys: Keys) -> Outcome:
    """Returns the outcome of a key that depends on keys which cannot be read, so that its fields are unknown."""
    causes = ", ".join(f"{unread_key} = {keys.values[unread_key]}" for unread_key in unread_keys)
    depends = f"it depends on {', '.join(unread_keys)}, which the file does not say"
    reason = "; ".join(filter(None, [outcome.reason, depends]))
    decided_fields = list(outcome.fields) or table.decided_fields(key, keys)
    kind = "unsupported" if outcome.kind == "no effect" and decided_fields else outcome.kind
    return replace(outcome, kind=kind, reason=reason, unknown=outcome.unknown | dict.fromkeys(decided_fields, causes))


def _unread(key: str, value: Unread, table: TrainerTable, keys: Keys) -> Outcome:
    """Returns the outcome of a key that cannot be read, so that its fields are unknown."""
    rule = table.rule(key)
    # A key without an effect is not unknown, whatever its value is.
    if isinstance(rule, NoEffect):
        return rule(value, keys)
    if isinstance(rule, Conditional):
        applies, unread_keys = keys.with_unread_keys(lambda: rule.applies(keys))
        if not applies and not unread_keys:
            return Outcome("no effect", reason=rule.why_not)
    unknown = dict.fromkeys(table.decided_fields(key, keys) or [key], f"{key} = {value}")
    reason = f"its value is not in the file: {value}"
    return Outcome("unsupported", table.default_fields(key, keys), reason, unknown=unknown)


@dataclass(frozen=True)
class NoEffect:
    """The rule of a key that changes no number of a run in jaxrl_llm, whatever its value is."""

    reason: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return Outcome("no effect", reason=self.reason)


@dataclass(frozen=True)
class Conditional:
    """The rule of a key that has an effect only if `applies`. why_not: reason if the key has no effect."""

    applies: Callable[[Keys], Any]
    rule: Rule
    why_not: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return self.rule(value, keys) if self.applies(keys) else Outcome("no effect", reason=self.why_not)


def not_here(name: str, reason: str) -> Outcome:
    """Returns the outcome of a value that jaxrl_llm does not have, so that the field `name` is unknown."""
    return Outcome("unsupported", reason=reason, unknown={name: reason})
