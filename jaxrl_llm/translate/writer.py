"""Writes a translation as a config file of ours: a delta on one complete config, with what changed as comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import configs
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.structs import Config
from jaxrl_llm.terminal import printable
from jaxrl_llm.translate.outcome import KINDS, Outcome, Translation

WIDTH = 119
WHOLE = ("advantage", "loss", "lora", "reward_model")  # sections that are written as one line
ALGORITHM = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "search_grpo": "GRPO with a search tool",
    "search_ppo": "PPO with a search tool",
}
EXPLAINED = ("grpo.py", "ppo.py", "search_grpo.py")  # their order of fields is that of a translation


def source(made: Translation, file: Path, to: Path, lost: Sequence[str] = ()) -> str:
    """Returns the text of a config file.

    file: what is translated; to: the new file; lost: lines of the file that belong to no key.
    """
    fields = _written(made, load(made.base))
    body: list[str] = []
    before = ""
    for name in fields:
        section = name.rpartition(".")[0].split(".")[0]
        lines = _lines(made, name, fields)
        if lines and body and section != before:
            body.append("")
        before = section if lines else before
        body += lines
    counts = ", ".join(f"{len(made.of_kind(kind))} {kind}" for kind in KINDS)
    whose = f"{made.system.name} ({made.system.version})"
    notice = (
        f"Not measured. Keys of the file: {counts}. A comment names the key that a field is from, and what differs; "
        f'"default" is a default of {made.system.name} that the file leaves as it is.'
    )
    return "\n".join(
        [
            f'"""{ALGORITHM[made.base]}, translated from {_name(file.name)} of {whose}.',
            "",
            f"jaxrl train --config {_name(to.as_posix())}",
            "",
            *textwrap.wrap(notice, WIDTH),
            '"""',
            "",
            "from ml_collections import ConfigDict",
            "",
            f"from jaxrl_llm.configs import {made.base}  # it explains the fields, or names the config that does",
            "",
            "",
            "def get_config() -> ConfigDict:",
            f"    c = {made.base}.get_config()",
            *(f"    {line}".rstrip() for line in body),
            "    return c",
            *_left(made, lost),
            "",
        ]
    )


def _name(path: str) -> str:
    """Returns a path that can stand in a docstring."""
    return re.sub(r"[^\w./+ -]", "_", path)


def literal(value: Any) -> str:
    """Returns a value as Python, in the style of the configs: 1e-6, "text", (1.0,), dict(a=1)."""
    if isinstance(value, str):
        return printable(json.dumps(value, ensure_ascii=False))  # its escapes are those of Python too
    if isinstance(value, float):
        text = repr(value) if abs(value) >= 1e-3 or not value else f"{value:.14e}"
        return re.sub(r"\.?0*e([+-])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", text)
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(x)}" for key, x in value.items()) + "}"
    return repr(value)


def _written(made: Translation, base: Config) -> dict[str, Any]:
    """Returns the fields to write, in the order of the complete configs. Defaults that the base has are left out."""
    text = "\n".join((configs.FOLDER / name).read_text(encoding="utf-8") for name in EXPLAINED)
    order = list(dict.fromkeys(re.findall(r"\bc\.([a-z_]+(?:\.[a-z_0-9]+)*)", text)))
    there = flatten(base)
    fields = made.fields()
    given = {name for outcome in made.outcomes.values() for name in outcome.fields}
    new_section = {name.split(".")[0] for name in fields if name.endswith(".name") and there.get(name) != fields[name]}
    told = {name for outcome in made.defaults.values() for name in outcome.fields if outcome.kind == "changed"}
    kept = {
        name: value
        for name, value in fields.items()
        if name in given | told
        or name in made.yours()
        or name not in there
        or value != there[name]
        or name.split(".")[0] in new_section
    }
    # A section of a named function is written whole, or not at all.
    whole = {name.split(".")[0] for name in kept} & set(WHOLE)
    kept = {name: value for name, value in fields.items() if name in kept or name.split(".")[0] in whole}

    def place(name: str) -> int:
        """The place of the field, or of the longest part of its name that the configs mention."""
        parts = name.split(".")
        known = [".".join(parts[: i + 1]) for i in range(len(parts)) if ".".join(parts[: i + 1]) in order]
        return order.index(known[-1]) if known else len(order)

    return {name: kept[name] for name in sorted(kept, key=place)}


def _lines(made: Translation, name: str, fields: dict[str, Any]) -> list[str]:
    """Returns the line of a field with its comments. The first field of a section in WHOLE has the whole section."""
    section = name.split(".")[0]
    if section in WHOLE and (f"{section}.name" in fields or section in ("lora", "reward_model")):
        names = [other for other in fields if other.startswith(f"{section}.")]
        if name != names[0]:
            return []
        names.sort(key=lambda other: not other.endswith(".name"))
        said = ", ".join(f"{other.split('.')[1]}={literal(fields[other])}" for other in names)
        line = f"c.{section} = ConfigDict(dict({said}))"
    elif name == "data.mixture":
        comments, _ = _comments(made, [name])
        return [*comments, *(line for part, of in fields[name].items() for line in _source(part, of))]
    else:
        names = [name]
        line = f"c.{name} = {literal(fields[name])}"
    comments, told = _comments(made, names)
    origins = [key for key in dict.fromkeys(_origin(made, other) for other in names) if key and key not in told]
    beside = f"{line}  # {', '.join(origins)}"
    if not origins or len(beside) + 4 <= WIDTH:
        return [*comments, beside if origins else line]
    return [*comments, *_wrapped(", ".join(origins)), line]


def _source(name: str, fields: dict[str, Any]) -> list[str]:
    """Returns the lines of a source of a mixture, as the formatter breaks them."""
    parts = [f"{field}={literal(value)}" for field, value in fields.items()]
    begin, inside = f"c.data.mixture.{name} = ConfigDict(", f"dict({', '.join(parts)})"
    if len(begin + inside) + 5 <= WIDTH + 1:
        return [f"{begin}{inside})"]
    if len(inside) + 8 <= WIDTH + 1:
        return [begin, f"    {inside}", ")"]
    return [begin, "    dict(", *(f"        {part}," for part in parts), "    )", ")"]


def _origin(made: Translation, name: str) -> str:
    """Returns the key that a field is from: of several, the one that sets the fewest fields."""
    given = [key for key, outcome in made.outcomes.items() if name in outcome.fields]
    if given:
        return min(given, key=lambda key: len(made.outcomes[key].fields))
    if name in made.yours():  # its value is no default, but a placeholder
        return ""
    return "default" if any(name in outcome.fields for outcome in made.defaults.values()) else ""


def _comments(made: Translation, names: Iterable[str]) -> tuple[list[str], set[str]]:
    """Returns what is said of the keys whose first field is one of these, and these keys."""
    lines: list[str] = []
    told: dict[str, str] = {}
    for key, outcome in made.outcomes.items():
        if outcome.said and outcome.kind in ("mapped", "changed") and _first(outcome) in names:
            if outcome.said not in told.values():
                lines += _wrapped(f"{key}: {outcome.said}.")
            told[key] = outcome.said
    given = {name for outcome in made.outcomes.values() for name in outcome.fields}
    for key, outcome in made.defaults.items():
        if outcome.said and outcome.kind == "changed" and _first(outcome) in names and _first(outcome) not in given:
            lines += _wrapped(
                f"{key} has its default: {outcome.said}." if "(" not in key else f"{outcome.said.capitalize()}."
            )
    yours = made.yours()
    for name in names:
        if name in yours:
            lines += _wrapped(f"Yours to set: {yours[name]}.")
    if "eval.every" in names and "eval.source" not in (fields := made.fields()) and not fields["eval.every"]:
        lines += _wrapped(f"Before you set it, name the problems in eval.source: those of {made.base}.py are others.")
    return lines, set(told)


def _first(outcome: Outcome) -> str:
    return next(iter(outcome.fields), "")


def _wrapped(text: str, first: str = "# ", then: str = "# ", width: int = WIDTH - 4) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _left(made: Translation, lost: Sequence[str]) -> list[str]:
    """Returns the comment blocks at the end: lines of no key, keys that changed without a field, and all other keys."""
    blocks = {
        "Changed in meaning": {key: one for key, one in made.of_kind("changed").items() if not one.fields},
        "Not supported here": made.of_kind("unsupported"),
        "No effect on training here": made.of_kind("no effect"),
    }
    lines: list[str] = [""]
    if lost:
        lines += ["", "# Belong to no key of the training command:"]
        lines += [line for one in lost for line in _wrapped(" ".join(one.split()), "# - ", "#   ", WIDTH)]
    for title, outcomes in blocks.items():
        if outcomes:
            lines += ["", f"# {title}:"]
        for said, keys in by_reason(outcomes).items():
            lines += _wrapped(f"{', '.join(keys)}: {said}", "# - ", "#   ", WIDTH)
    return lines if len(lines) > 1 else []


def by_reason(outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    """Groups keys by what is said of them."""
    grouped: dict[str, list[str]] = {}
    for key, outcome in outcomes.items():
        grouped.setdefault(outcome.said, []).append(key)
    return grouped
