"""Translates the keys of another trainer's config into fields of a jaxrl_llm config.

The `TrainerTable` of a trainer, such as TRL's GRPO, has one rule for each key. A rule gets the value of its key and all
`Keys` of the file. It returns an `Outcome`: the fields that the key becomes, or the reason why it becomes none. For
example, the rule of TRL's `beta` makes `kl.coef = 0.04` of `beta: 0.04`, and `kl = None` of `beta: 0`.

The value of a field comes from a key of the file, or from a default of the trainer, or is unknown. A value of the file
is `Unread` if only running the script would tell it, such as `beta=args.beta`. All fields of such a key are unknown.
So are all fields of a rule that asks `Keys` for such a value: `Keys` records each request, and no rule has to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeAlias, TypeVar

from jaxrl_llm.config.names import closest
from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.releases import LATEST, MISSING, Release, Releases, first_key, matches, release_name

Kind: TypeAlias = Literal["mapped", "changed", "unsupported", "no effect"]
T = TypeVar("T")  # value that `Keys.with_unread_keys` computes
# All kinds of outcomes, in the order in which they are printed.
KINDS: tuple[Kind, ...] = ("mapped", "changed", "unsupported", "no effect")
# Fields about memory and speed. They change no number of a run, so the run is the same if their values are unknown.
QUIET_FIELDS = {"microbatch", "model.remat"}


@dataclass(frozen=True)
class Outcome:
    """What a key of another trainer becomes in jaxrl_llm.

    fields: {field of the jaxrl_llm config: value}.
    reason: difference between the trainers if the kind is "changed"; else why the key becomes no field.
    tasks: {field: task}. The value of such a field is known, but the user has work to do first, such as moving a
        function to another file. `train` refuses the config until then.
    unknown: {field: reason}. The file does not say the value of such a field, so the config holds a placeholder. With
        the placeholder, the config would train as another run.
    """

    kind: Kind
    fields: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tasks: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


# Outcome of a key that the user invented, such as `lr`, for other keys to refer to as ${lr}.
REFERENCE_ONLY = Outcome("no effect", reason="other keys have its value")


class Unread(str):
    """A value that cannot be read from the file, such as an expression of a script or a variable that is not set."""

    __slots__ = ()


class Keys:
    """Values of all keys of the other trainer: values in the user's file, and the trainer's defaults for other keys.

    `keys["beta"]` is the value in the file, or else the default. `keys.get("beta")` and `"beta" in keys` are about the
    file alone. All of them treat an `Unread` value as absent, and record that a rule has asked for the key.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, rows: int, processes: int):
        """rows: number of training rows, 0 if unknown; processes: number of the launcher's processes, 0 if unknown."""
        self.values = values  # values of the file, also those that cannot be read, which are `Unread`
        self.defaults, self.rows, self.processes = defaults, rows, processes
        self.requested: dict[str, None] = {}  # keys that rules have asked for, in order

    def __getitem__(self, key: str) -> Any:
        return self.get(key) if key in self else self.defaults[key]

    def __contains__(self, key: str) -> bool:
        self.requested[key] = None
        return key in self.values and not isinstance(self.values[key], Unread)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the readable value of a key in the file; `default` if it has none."""
        return self.values[key] if key in self else default

    def prefixed(self, prefix: str) -> dict[str, Any]:
        """Returns {key without the prefix: value} of the keys that begin with the prefix."""
        # `key in self` records that a rule asks for the key, even if the key cannot be read.
        return {key.removeprefix(prefix): self[key] for key in self.values if key.startswith(prefix) and key in self}

    def with_unread_keys(self, compute: Callable[[], T]) -> tuple[T, list[str]]:
        """Returns a computed value, and the keys that the computation asked for and that cannot be read."""
        self.requested = {}
        return compute(), [key for key in self.requested if isinstance(self.values.get(key), Unread)]


Rule: TypeAlias = Callable[[Any, Keys], Outcome]


@dataclass(frozen=True)
class Version:
    """Another edition of a trainer, such as Unsloth's, whose defaults apply to a file with a key of `only_keys`."""

    name: str  # words of a note, such as "with Unsloth"; "" if no note is needed
    only_keys: tuple[str, ...]  # names or patterns of keys
    defaults: dict[str, Any]  # defaults that differ from the table; `Unread` if the key does not say which one applies


@dataclass(frozen=True)
class TrainerTable:
    """The translation table of another trainer: the rules and defaults of its keys."""

    name: str
    version: str  # version that the table describes
    rules: dict[str, Rule]  # rules of exact keys first, then of patterns; the first match wins
    defaults: dict[str, Any]  # defaults of the keys that have an effect on training
    base: Callable[[Keys], str]  # name of the jaxrl_llm config from which a translation starts, such as "grpo"
    decides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # {key: fields that it decides}
    renamed: Mapping[str, str] = field(default_factory=dict)  # {old name of a key: new name}
    respelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {old name: {old value: new value}}
    releases: Releases = field(default_factory=lambda: Releases(""))
    patches: tuple[Version, ...] = ()  # each that shows in a key of the file applies, such as Unsloth's defaults
    absent: tuple[str, ...] = ()  # names or patterns of keys that only later versions can set

    def knows(self, key: str) -> bool:
        """Whether the table has a key of a file, by its name or by a pattern."""
        return self._pattern(self.renamed.get(key, key)) is not None

    def _pattern(self, key: str) -> str | None:
        """Returns the name or pattern with which the table has a key; None if it does not have the key."""
        if matches(key, self.absent):
            return None
        if key in self.rules:
            return key
        # Patterns are tried in the order of the table, so a pattern of few keys must stand before one of many keys.
        return next((pattern for pattern in self.rules if "*" in pattern and fnmatchcase(key, pattern)), None)

    def rule(self, key: str) -> Rule:
        """Returns the rule that translates a key. The rule of a key that the table does not have says "unsupported"."""
        if pattern := self._pattern(key):
            return self.rules[pattern]
        close = closest(key, self.rules)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = f"{self.name} {self.version} has no such key, or this table does not know it{hint}"
        return lambda value, keys: Outcome("unsupported", reason=reason, unknown={key: reason})

    def default_fields(self, key: str, keys: Keys) -> dict[str, Any]:
        """Returns the jaxrl_llm fields that a key sets if it has the default of the other trainer."""
        # Another key of the file may have a value that the rule refuses.
        with suppress(TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            return self.rule(key)(self.defaults[key], keys).fields
        return {}

    def decided_fields(self, key: str, keys: Keys) -> list[str]:
        """Returns the names of the jaxrl_llm fields that a key can set, whatever its value is."""
        default_fields = self.default_fields(key, keys)
        # A section that is None by default exists with another value of the key.
        sections = [name for name, value in default_fields.items() if value is None]
        return list(dict.fromkeys([*sections, *(self.decides.get(self._pattern(key) or "") or default_fields)]))


@dataclass(frozen=True)
class Translation:
    """A translated file. outcomes: {key of the file: outcome}; defaults: {key that the file does not have: outcome}."""

    table: TrainerTable
    base: str  # jaxrl_llm config from which the translation starts, such as "grpo"
    outcomes: dict[str, Outcome]
    defaults: dict[str, Outcome]
    notes: tuple[str, ...] = ()  # sentences about the version that the file is for
    differing: Mapping[str, str] = field(default_factory=dict)  # {field: its values in the possible releases}

    def fields(self) -> dict[str, Any]:
        """Returns the jaxrl_llm fields that the translation sets. A key of the file wins over a default.

        None means a config without this section. Its fields are kept for a user who adds the section later.
        """
        fields: dict[str, Any] = {}
        # The file comes last, so that its keys win.
        for outcome in [*self.defaults.values(), *self.outcomes.values()]:
            fields |= outcome.fields
        return fields

    def user_tasks(self) -> dict[str, str]:
        """Returns {field: task or reason} of the fields that the user must complete before the config can be run."""
        fields = self.fields()
        tasks = {name: reason for name, reason in self._unfinished("tasks").items() if name in fields}
        return tasks | self._unfinished("unknown")

    def unknown(self) -> dict[str, str]:
        """Returns {name: reason} of fields that hold placeholders, and of unknown keys that may change the run.

        A translation is complete if the result is empty. Tasks do not count, because their fields have values.
        """
        return {name: reason for name, reason in self._unfinished("unknown").items() if name not in QUIET_FIELDS}

    def _unfinished(self, attribute: Literal["tasks", "unknown"]) -> dict[str, str]:
        """Joins the tasks, or the unknown fields, of all outcomes into one {field: reason}.

        A key of the file may set a field that the outcome of a default left to the user: this field is left out. So
        are fields of a section that is None.
        """
        unfinished: dict[str, str] = dict(self.differing) if attribute == "unknown" else {}
        complete: set[str] = set()  # fields that a key of the file sets
        for outcome in self.outcomes.values():
            complete |= outcome.fields.keys() - outcome.tasks.keys() - outcome.unknown.keys()
        for outcome in self.defaults.values():
            unfinished |= {name: x for name, x in getattr(outcome, attribute).items() if name not in complete}
        for outcome in self.outcomes.values():
            unfinished |= getattr(outcome, attribute)
        sections = tuple(f"{name}." for name, x in self.fields().items() if x is None and name not in unfinished)
        return {name: reason for name, reason in unfinished.items() if not name.startswith(sections)}

    def with_kind(self, kind: Kind) -> dict[str, Outcome]:
        """Returns {key: outcome} of the keys of the file whose outcome is of this kind."""
        return {key: outcome for key, outcome in self.outcomes.items() if outcome.kind == kind}


def translate(
    table: TrainerTable,
    values: Mapping[str, Any],
    *,
    rows: int = 0,
    processes: int = 0,
    referred: Set[str] = frozenset(),
    pinned: str = "",
) -> Translation:
    """Translates the keys of another trainer's file, and the defaults of the keys that it does not have.

    table: table of the trainer; values: {key: value} of the file; rows: number of training rows, 0 if unknown;
    processes: number of the launcher's processes, 0 if unknown; referred: keys to which other keys of the file refer;
    pinned: version of the trainer that the file names, "" if it names none.
    Raises: UserError, for a value of a wrong type.
    """
    names = {key: table.renamed.get(key, key) for key in values}  # {key of the file: its name in the newest version}
    newest_values: dict[str, Any] = {}  # {newest name of a key: value}
    origins: dict[str, str] = {}  # {newest name of a key: key of the file that has the value}
    # An old and a new name are one key. If a file has both names, the trainers read the new one.
    for key in sorted(values, key=lambda key: names[key] == key):
        if values[key] is not None or names[key] not in newest_values:
            newest_values[names[key]] = table.respelled.get(key, {}).get(str(values[key]), values[key])
            origins[names[key]] = key
    possible, notes = table.releases.possible(values, pinned)

    def translated_at(release: Release) -> Translation:
        """Translates the file with the defaults of one release of the trainer."""
        release_table, release_values, release_notes = with_defaults_of(release, table, values, newest_values)
        keys = Keys(release_values, release_table.defaults, rows=rows, processes=processes)
        # An old name of a key has no effect if the file has the new one. Each other key has the outcome of its rule.
        reasons = {key: f"{origins[names[key]]}, another name of it, is set" for key in values}
        outcomes = {key: Outcome("no effect", reason=reason) for key, reason in reasons.items()}
        outcomes |= {key: _outcome(name, newest_values[name], release_table, keys) for name, key in origins.items()}
        # A key that the table does not have is no error if other keys refer to it, because its value is theirs.
        outcomes |= {key: REFERENCE_ONLY for key in referred & outcomes.keys() if not table.knows(key)}
        # Keys of later versions are refused in the file, but their defaults count.
        default_table = replace(release_table, absent=())
        unset = {key: value for key, value in (release_table.defaults | release_values).items() if key not in origins}
        defaults = {key: _outcome(key, value, default_table, keys) for key, value in unset.items()}
        return Translation(release_table, release_table.base(keys), outcomes, defaults, (*notes, *release_notes))

    translations = {release: translated_at(release) for release in possible}
    return replace(translations[possible[-1]], differing=differing_fields(translations))


def with_defaults_of(
    release: Release, table: TrainerTable, values: Mapping[str, Any], newest_values: dict[str, Any]
) -> tuple[TrainerTable, dict[str, Any], list[str]]:
    """Returns the table with the defaults that a file has, the values of the file, and notes on these defaults.

    release: release of the trainer; values: {key of the file: value}; newest_values: {newest name of a key: value}.
    A patch of the table, such as Unsloth's, applies if the file has one of its keys. A default that is not known
    becomes an `Unread` value, as if the file had the key in a form that cannot be read.
    """
    notes: list[str] = []
    # Editions of the trainer, such as Unsloth's, each with the key that shows it. The release has no such key.
    editions = [(patch, key) for patch in table.patches if (key := first_key(patch.only_keys, values))]
    if release != LATEST:
        editions.insert(0, (Version(release_name(release), (), table.releases.defaults_at(release)), ""))
    for edition, key in editions:
        # Defaults count for keys that the file does not set.
        unset = {name: x for name, x in edition.defaults.items() if name not in newest_values}
        other_defaults = {name: x for name, x in unset.items() if x != table.defaults.get(name)}
        known = {name: x for name, x in edition.defaults.items() if not isinstance(x, Unread)}
        # A name in parentheses is no key of the trainer, but says how a release behaves.
        shown = [f"{name} = {known[name]}" for name in other_defaults if name in known and name[0] != "("]
        listed = ", ".join(shown) or "none that matters"
        if known and isinstance(values.get(key), Unread):
            # The script has the key under a condition, as in `if args.fast: import unsloth`.
            sign = f"{key} shows {edition.name}, if {values[key]}"
            notes.append(f"{sign}. It is not known which defaults apply: {listed}")
            other_defaults = {
                name: Unread(f"{x} {edition.name}, else {table.defaults.get(name)}")
                for name, x in other_defaults.items()
            }
        elif edition.name:
            defaults = {name: x for name, x in (table.defaults | known).items() if x != MISSING}
            version = f"{table.version} {edition.name}" if key else edition.name
            table = replace(table, version=version, defaults=defaults)
            notes.append(f"the defaults {edition.name if key else f'of {edition.name}'} apply: {listed}")
        newest_values = newest_values | {name: x for name, x in other_defaults.items() if isinstance(x, Unread)}
    return table, newest_values, notes


def differing_fields(translations: Mapping[Release, Translation]) -> dict[str, str]:
    """Returns {field: its values} of the fields to which the possible releases of a file give different values.

    translations: {release: translation of the file with its defaults}, the oldest release first. A field that is 0.04
    until release 0.18 and 0.0 in later releases becomes "0.04 until 0.18, then 0.0".
    """
    fields_by_release = {release: translation.fields() for release, translation in translations.items()}
    # Fields of a section count only if each release has the section.
    off = {name for fields in fields_by_release.values() for name, value in fields.items() if value is None}
    differing: dict[str, str] = {}
    for name in dict.fromkeys(name for fields in fields_by_release.values() for name in fields):
        # A section that is not None has no value of its own.
        value_texts = {release: repr(fields[name]) for release, fields in fields_by_release.items() if name in fields}
        texts = {release: value_texts.get(release, "a section") for release in fields_by_release}
        # Values of the field, each with the last release that has it.
        spans = [(text, list(releases)[-1]) for text, releases in groupby(texts, texts.__getitem__)]
        if len(spans) > 1 and name.rpartition(".")[0] not in off:
            older = [f"{text} until {release_name(last)}" for text, last in spans[:-1]]
            differing[name] = f"{', '.join(older)}, then {spans[-1][0]}"
    return differing


def _outcome(key: str, value: Any, table: TrainerTable, keys: Keys) -> Outcome:
    """Returns the outcome of a key of the file or of a default. Raises: UserError, if its value has a wrong type."""
    if isinstance(value, Unread):
        return _unread_outcome(key, value, table, keys)
    try:
        outcome, unread_keys = keys.with_unread_keys(lambda: table.rule(key)(value, keys))
    # A rule raises these errors for a value of a wrong type, and the user must see the key instead of a traceback.
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        requested = [name for name in keys.requested if name != key and name in keys.values]
        other_values = ", ".join(f"{name} = {keys.values[name]!r}" for name in requested)
        depends = f", and what it depends on ({other_values})," if other_values else ""
        raise UserError(
            f"{key} = {value!r} cannot be translated ({error}): set it{depends} to a value that {table.name} accepts"
        ) from error
    # The fields of a rule that asked for keys whose values cannot be read are unknown.
    if not unread_keys:
        return outcome
    causes = ", ".join(f"{unread_key} = {keys.values[unread_key]}" for unread_key in unread_keys)
    depends = f"it depends on {', '.join(unread_keys)}, which the file does not say"
    reason = "; ".join(filter(None, [outcome.reason, depends]))
    decided_fields = list(outcome.fields) or table.decided_fields(key, keys)
    kind = "unsupported" if outcome.kind == "no effect" and decided_fields else outcome.kind
    return replace(outcome, kind=kind, reason=reason, unknown=outcome.unknown | dict.fromkeys(decided_fields, causes))


def _unread_outcome(key: str, value: Unread, table: TrainerTable, keys: Keys) -> Outcome:
    """Returns the outcome of a key whose own value cannot be read, so that its fields are unknown."""
    rule = table.rule(key)
    # A key without an effect is not unknown, whatever its value is.
    while isinstance(rule, Conditional):
        applies, unread_keys = keys.with_unread_keys(partial(rule.applies, keys))
        if not applies and not unread_keys:
            return Outcome("no effect", reason=rule.why_not)
        rule = rule.rule
    unknown = dict.fromkeys(table.decided_fields(key, keys) or [key], f"{key} = {value}")
    reason = f"its value is not in the file: {value}"
    return Outcome("unsupported", table.default_fields(key, keys), reason, unknown=unknown)


@dataclass(frozen=True)
class Conditional:
    """The rule of a key that has an effect only if `applies` says so. why_not: reason if the key has no effect."""

    applies: Callable[[Keys], Any]
    rule: Rule
    why_not: str

    def __call__(self, value: Any, keys: Keys) -> Outcome:
        return self.rule(value, keys) if self.applies(keys) else Outcome("no effect", reason=self.why_not)


def unsupported(name: str, reason: str, *other_names: str) -> Outcome:
    """Returns the outcome of a value that jaxrl_llm does not have, so that the named fields are unknown."""
    return Outcome("unsupported", reason=reason, unknown=dict.fromkeys((name, *other_names), reason))
