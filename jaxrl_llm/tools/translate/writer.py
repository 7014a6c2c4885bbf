"""Writes a translation as a config file of ours: a delta on one complete config, with what changed as comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import configs
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import printable
from jaxrl_llm.tools.translate.outcome import KINDS, Outcome, Translation

WIDTH = 119
CALLS = ("adapters", "advantage", "env", "loss", "turns")  # sections that are written as one line, if they are new
# Sections that are always written as one line.
WHOLE = ("reward_model", "kl.refresh", "kl.adaptive", "entropy", "entropy.adaptive")
ALGORITHM = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "search_grpo": "GRPO with a search tool",
    "search_ppo": "PPO with a search tool",
    "dpo": "DPO",
    "simpo": "SimPO",
}
PAIRS = ("dpo", "simpo")  # configs of `jaxrl sft`
# Their order of fields is that of a translation.
EXPLAINED = ("grpo.py", "ppo.py", "search_grpo.py", "sft.py", "dpo.py", "simpo.py")


def source(translation: Translation, file: Path, to: Path, lost: Sequence[str] = ()) -> str:
    """Returns the text of a config file.

    file: what is translated; to: the new file; lost: lines of the file that belong to no key.
    """
    base = translation.base
    fields = _written(translation, flatten(load(base)))
    body: list[str] = []
    before = ""
    for name in fields:
        section = name.rpartition(".")[0].split(".")[0]
        lines = _lines(translation, name, fields)
        if lines and body and section != before:
            body.append("")
        before = section if lines else before
        body += lines
    counts = ", ".join(f"{len(translation.with_kind(kind))} {kind}" for kind in KINDS)
    whose = f"{translation.system.name} ({translation.system.version})"
    notice = (
        f"Not measured. Keys of the file: {counts}. A comment names the key that a field is from, and what differs; "
        f'"default" is a default of {translation.system.name} that the file leaves as it is.'
    )
    return "\n".join(
        [
            f'"""{ALGORITHM[base]}, translated from {_name(file.name)} of {whose}.',
            "",
            f"jaxrl {'sft' if base in PAIRS else 'train'} --config {_name(to.as_posix())}",
            "",
            *textwrap.wrap(notice, WIDTH),
            '"""',
            "",
            "from ml_collections import ConfigDict",
            "",
            f"from jaxrl_llm.configs import {base}  # it explains the fields, or names the config that does",
            "",
            "",
            "def get_config() -> ConfigDict:",
            f"    c = {base}.get_config()",
            *(f"    {line}".rstrip() for line in body),
            "    return c",
            *_remaining_comments(translation, lost, fields),
            "",
        ]
    )


def _name(path: str) -> str:
    """Returns a path that can stand in a docstring."""
    return re.sub(r"[^\w./+ -]", "_", path)


def literal(value: Any) -> str:
    """Returns a value as Python, in the style of the configs: 1e-6, "text", (1.0,), dict(a=1)."""
    if isinstance(value, str):
        # The escapes of JSON are those of Python too.
        return printable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        # 15 digits drop the noise of a product such as 3 * 1e-7, and keep all that a person has written.
        text = repr(value) if abs(value) >= 1e-3 or not value else f"{value:.14e}"
        return re.sub(r"\.?0*e([+-])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", text)
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(x)}" for key, x in value.items()) + "}"
    return repr(value)


def _written(translation: Translation, base_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields to write, in the order of the complete configs. Defaults that the base has are left out."""
    text = "\n".join((configs.FOLDER / name).read_text(encoding="utf-8") for name in EXPLAINED)
    # Read from the text: a ConfigDict does not keep the order in which a config sets its fields.
    order = list(dict.fromkeys(re.findall(r"\bc\.([a-z_]+(?:\.[a-z_0-9]+)*)", text)))
    fields = translation.fields()
    explicit = {name for outcome in translation.outcomes.values() for name in outcome.fields}
    new_section = {
        name.split(".")[0] for name in fields if name.endswith(".name") and base_fields.get(name) != fields[name]
    }
    explained = {
        name for outcome in translation.defaults.values() for name in outcome.fields if outcome.kind == "changed"
    }
    shown = {
        name: value
        for name, value in fields.items()
        if name in explicit | explained
        or name in translation.yours()
        or name not in base_fields
        or value != base_fields[name]
        or name.split(".")[0] in new_section
    }
    # A section is the arguments of one function. Another name makes the fields of the base wrong, so all are written.
    whole = {_section_in_a_line(name) for name in shown} - {""}
    shown = {name: value for name, value in fields.items() if name in shown or _section_in_a_line(name) in whole}

    def place(name: str) -> int:
        """The place of the field, or of the longest part of its name that the configs mention.

        A section that is not there comes after all fields that it may have.
        """
        parts = name.split(".")
        known = [".".join(parts[: i + 1]) for i in range(len(parts)) if ".".join(parts[: i + 1]) in order]
        if fields[name] is None:
            known += [other for other in order if other.startswith(f"{name}.")]
        return order.index(known[-1]) if known else len(order)

    return {name: shown[name] for name in sorted(shown, key=lambda name: (place(name), shown[name] is None))}


def _section_in_a_line(name: str) -> str:
    """Returns the section of a field, if it is written as one line; "": it is not."""
    section = name.rpartition(".")[0]
    return section if section in (*CALLS, *WHOLE) else ""


def _lines(translation: Translation, name: str, fields: dict[str, Any]) -> list[str]:
    """Returns the line of a field with its comments. The first field of a section in a line has the whole section."""
    section = _section_in_a_line(name)
    # A section `turns` with its threads comes with an environment that the base does not have.
    if section in WHOLE or not {f"{section}.name", f"{section}.workers"}.isdisjoint(fields):
        names = [other for other in fields if _section_in_a_line(other) == section]
        if name != names[0]:
            return []
        # The name of the function comes first, as in our configs. The sort is stable.
        names.sort(key=lambda other: not other.endswith(".name"))
        lines = _section(section, {other.rpartition(".")[2]: fields[other] for other in names})
    elif name == "data.mixture":
        comments, _ = _comments(translation, [name])
        return [
            *comments,
            *(line for part, settings in fields[name].items() for line in _section(f"data.mixture.{part}", settings)),
        ]
    else:
        names = [name]
        lines = [f"c.{name} = {literal(fields[name])}"]
    comments, explained = _comments(translation, names)
    origins = [
        key for key in dict.fromkeys(_origin(translation, other) for other in names) if key and key not in explained
    ]
    beside = f"{lines[0]}  # {', '.join(origins)}"
    if not origins:
        return [*comments, *lines]
    if len(lines) == 1 and len(beside) + 4 <= WIDTH:
        return [*comments, beside]
    return [*comments, *_wrapped(", ".join(origins)), *lines]


def _section(name: str, fields: dict[str, Any]) -> list[str]:
    """Returns the lines of a section that is written as one expression, as the formatter breaks them."""
    parts = [f"{field}={literal(value)}" for field, value in fields.items()]
    # By hand: the formatter is no dependency of the package.
    begin, inside = f"c.{name} = ConfigDict(", f"dict({', '.join(parts)})"
    if len(begin + inside) + 5 <= WIDTH + 1:
        return [f"{begin}{inside})"]
    if len(inside) + 8 <= WIDTH + 1:
        return [begin, f"    {inside}", ")"]
    return [begin, "    dict(", *(f"        {part}," for part in parts), "    )", ")"]


def _origin(translation: Translation, name: str) -> str:
    """Returns the key that a field is from: of several, the one that sets the fewest fields."""
    explicit = [key for key, outcome in translation.outcomes.items() if name in outcome.fields]
    if explicit:
        # A key that sets many fields, such as the batch size, explains none of them best.
        return min(explicit, key=lambda key: len(translation.outcomes[key].fields))
    # Its value is no default, but a placeholder.
    if name in translation.yours():
        return ""
    return "default" if any(name in outcome.fields for outcome in translation.defaults.values()) else ""


def _comments(translation: Translation, names: Iterable[str]) -> tuple[list[str], set[str]]:
    """Returns what is said of the keys whose first field is one of these, and these keys."""
    explained = {
        key: outcome.reason
        for key, outcome in translation.outcomes.items()
        if outcome.reason and outcome.kind in ("mapped", "changed") and _first(outcome) in names
    }
    lines: list[str] = []
    for reason, keys in grouped(explained).items():
        lines += _wrapped(f"{', '.join(keys)}: {reason}.")
    explicit = {name for outcome in translation.outcomes.values() for name in outcome.fields}
    for key, outcome in translation.defaults.items():
        if (
            outcome.reason
            and outcome.kind == "changed"
            and _first(outcome) in names
            and _first(outcome) not in explicit
        ):
            lines += _wrapped(
                f"{key} has its default: {outcome.reason}." if "(" not in key else f"{outcome.reason.capitalize()}."
            )
    yours = translation.yours()
    for name in names:
        if name in yours:
            lines += _wrapped(f"Yours to set: {yours[name]}.")
    if "eval" in names:
        others = f", and name the problems in eval.source: those of {translation.base}.py are others"
        lines += _wrapped(f"To evaluate, set eval.every instead{others * ('eval.source' not in translation.fields())}.")
    return lines, set(explained)


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


def _remaining_comments(translation: Translation, lost: Sequence[str], written: Mapping[str, Any]) -> list[str]:
    """Returns the comment blocks at the end: lines of no key, keys that changed without a field, and all other keys.

    written: the fields that stand in the config.
    """
    blocks = {
        "Changed in meaning": {
            key: outcome for key, outcome in translation.with_kind("changed").items() if not outcome.fields
        },
        "Not supported here": translation.with_kind("unsupported"),
        "No effect on training here": translation.with_kind("no effect"),
    }
    lines: list[str] = [""]
    if lost:
        lines += ["", "# Belong to no key of the training command:"]
        lines += [line for outcome in lost for line in _wrapped(" ".join(outcome.split()), "# - ", "#   ", WIDTH)]
    unset = {name: why for name, why in translation.unknown().items() if name not in {*written, *translation.outcomes}}
    if unset:
        lines += ["", f"# Yours to set; until then they are those of {translation.base}.py:"]
    for why, names in grouped(unset).items():
        lines += _wrapped(f"{', '.join(names)}: {why}", "# - ", "#   ", WIDTH)
    for title, outcomes in blocks.items():
        if outcomes:
            lines += ["", f"# {title}:"]
        for reason, keys in grouped({key: outcome.reason for key, outcome in outcomes.items()}).items():
            lines += _wrapped(f"{', '.join(keys)}: {reason}", "# - ", "#   ", WIDTH)
    return lines if len(lines) > 1 else []


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns {reason: names} of {name: reason}."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return groups
