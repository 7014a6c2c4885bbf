"""Finds out for which releases of another trainer a file may be, and which defaults these releases have.

A key that only some releases have is a sign, and so is a version that the file names. The tables say in their columns
`was` and `versions` which defaults and keys older releases have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

Release: TypeAlias = tuple[int, ...]  # first two numbers of a version, such as (0, 16)
LATEST: Release = (9999,)
MISSING = "(no such key)"  # default of a key that a release does not have


def parse_release(text: str) -> Release:
    """Returns the release of a version: the third number of a version changes no default."""
    return tuple(map(int, text.split(".")[:2]))


def release_name(release: Release) -> str:
    """Returns the text of a release, such as 0.16."""
    return "the newest" if release == LATEST else ".".join(map(str, release))


def matches(key: str, patterns: Collection[str]) -> bool:
    """Whether a key of a config is one of `patterns`, which are names or have a *."""
    return key in patterns or any("*" in pattern and fnmatchcase(key, pattern) for pattern in patterns)


def first_key(patterns: Collection[str], values: Mapping[str, Any]) -> str:
    """Returns the first key of a file that has a value and matches a pattern; "" if none does."""
    # A generated file lists all keys, and those of other versions are null.
    return next((key for key, value in values.items() if value is not None and matches(key, patterns)), "")


@dataclass(frozen=True)
class Releases:
    """The releases of a trainer: which keys they have, and which defaults of older ones were others.

    package: name of the trainer's package.
    history: {key: its older defaults, each with the last release that had it, the oldest first}.
    since: {name or pattern of a key: first release that has it}.
    until: {name or pattern of a key: last release that has it}.
    """

    package: str
    history: Mapping[str, list[tuple[Any, Release]]] = field(default_factory=dict)
    since: Mapping[str, Release] = field(default_factory=dict)
    until: Mapping[str, Release] = field(default_factory=dict)

    @property
    def is_numbered(self) -> bool:
        """Whether the releases are versions of the package. Those of EasyR1 are months, such as 2025.3."""
        return self.package in ("trl", "verl")

    @property
    def hint(self) -> str:
        """How a user names the release of a file."""
        return f"; a comment such as '# {self.package}==VERSION' in the file names its release" * self.is_numbered

    def defaults_at(self, release: Release) -> dict[str, Any]:
        """Returns {key: its default in a release} of the keys whose newest default is another one."""
        found = {key: [value for value, last in older if release <= last][:1] for key, older in self.history.items()}
        return {key: values[0] for key, values in found.items() if values}

    def possible(self, values: Mapping[str, Any], pinned: str) -> tuple[list[Release], list[str]]:
        """Returns a release for each set of defaults that a file may be for, the newest last, and notes for the user.

        For example, a file with a key of TRL since 0.15 and another one until 0.27 is for any release between them. If
        defaults have changed after 0.16 and 0.18, the result is 0.16, 0.18 and 0.27. Without a sign it is the newest.
        values: {key of the file: value}.
        pinned: version that the file names; "" if none. It counts more than the keys.
        """
        # {key of the file: first release that has it}, and {key of the file: last release that has it}
        first = {key: bound for pattern, bound in self.since.items() if (key := first_key((pattern,), values))}
        last = {key: bound for pattern, bound in self.until.items() if (key := first_key((pattern,), values))}
        # The key that the earliest releases have, and the key that only the latest releases have, say most.
        old_key = min(last, key=lambda key: last[key], default="")
        new_key = max(first, key=lambda key: first[key], default="")
        if not old_key and not pinned:
            return [LATEST], []
        # Keys of earlier and of later releases contradict each other, so any release between them is possible.
        low, high = sorted([first.get(new_key, ()), last.get(old_key, LATEST)])
        sign = ", ".join(dict.fromkeys(filter(None, [old_key, new_key])))
        if pinned:
            low = high = parse_release(pinned)
            sign = f"{self.package} {pinned}"
        ends = {end for older in self.history.values() for _, end in older if low <= end < high}
        span = "until " * (not low) + " to ".join(map(release_name, dict.fromkeys(filter(None, (low, high)))))
        notes = [f"{self.package} {span}, as the file has {sign}"]
        notes += [f"where these releases have several defaults, they are yours to set{self.hint}"] * bool(ends)
        return sorted({*ends, high}), notes
