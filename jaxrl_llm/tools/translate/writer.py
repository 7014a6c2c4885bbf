"""Writes a translation as a jaxrl_llm config file, which changes one of jaxrl_llm/configs.

Comments name the key that each field is from, what differs from the other trainer, and what the user must complete.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxrl_llm import configs
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import printable
from jaxrl_llm.tools.translate.outcome import KINDS, Outcome, Translation
from jaxrl_llm.tools.translate.table import SENTENCES, WORDS

WIDTH = 119  # longest line of a written config, in characters
# Breaks a text into lines between words.
WRAP = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
# Text of a config file, with names in braces for what differs.
TEMPLATE = (Path(__file__).parent / "written_config.txt").read_text(encoding="utf-8")


def source(translation: Translation, file: Path, to: Path, lost: Sequence[str] = ()) -> str:
    """Returns the text of the jaxrl_llm config file of a translation.

    file: file of the other trainer; to: new config file; lost: lines of `file` that belong to no key.
    """
    # The fields of each section of the config become a block of lines, with an empty line between two blocks.
    base, table = translation.base, translation.table
    fields = _written_fields(translation, flatten(load(base)))
    body: list[str] = []
    for _, names in groupby(fields, lambda name: name.split(".")[0] if "." in name else ""):
        lines = [line for name in names for line in _lines(translation, name, fields)]
        body += [""] * bool(lines and body) + lines
    counts = ", ".join(f"{len(translation.with_kind(kind))} {kind}" for kind in KINDS)
    notice = SENTENCES["NOTICE"].format(counts, table.name)
    return TEMPLATE.format(
        file=_name(file.name),
        whose=f"{table.name} ({table.version})",
        program="sft" if base in WORDS["pair_configs"] else "train",
        to=_name(to.as_posix()),
        notice="\n".join(textwrap.wrap(notice, WIDTH)),
        base=base,
        body="".join(f"    {line}".rstrip() + "\n" for line in body),
        comments="".join(f"{line}\n" for line in _remaining_comments(translation, lost, fields)),
    )


def _name(path: str) -> str:
    """Returns a path without characters that would end a docstring."""
    return re.sub(r"[^\w./+ -]", "_", path)


def literal(value: Any) -> str:
    """Returns a value as Python, in the style of the configs: 1e-6, "text", (1.0,), dict(a=1)."""
    if isinstance(value, str):
        # Python reads all escapes of JSON.
        return printable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        # 15 digits drop the rounding error of a product such as 3 * 1e-7, and keep all digits of a file.
        text = repr(value) if abs(value) >= 1e-3 or not value else f"{value:.14e}"
        return re.sub(r"\.?0*e([+-])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", text)
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(x)}" for key, x in value.items()) + "}"
    return repr(value)


def _written_fields(translation: Translation, base_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields to write, with sections as in the complete configs, without defaults that the base has too."""
    text = "\n".join((configs.FOLDER / name).read_text(encoding="utf-8") for name in WORDS["explained"])
    # The order comes from the text, because a ConfigDict does not keep the order of its fields.
    order = list(dict.fromkeys(re.findall(r"\bc\.([a-z_]+)", text)))
    fields = translation.fields()
    changed = {key: outcome for key, outcome in translation.defaults.items() if outcome.kind == "changed"}
    shown_fields = {name for outcome in (translation.outcomes | changed).values() for name in outcome.fields}
    shown_fields |= translation.user_tasks().keys() & fields.keys()
    shown_fields |= {name for name, value in fields.items() if (name, value) not in base_fields.items()}
    # A section has the arguments of one function, so a section that is made anew needs all its fields.
    sections = {name.rpartition(".")[0] for name in shown_fields}
    new_sections = {section for section in sections if _is_new_section(section, fields)}
    shown_fields |= {name for name in fields if name.rpartition(".")[0] in new_sections}

    def position_of(name: str) -> tuple[int, bool, bool]:
        """Returns the place of a field: in its section the name of the function is first, and that it is None last."""
        section = name.split(".")[0]
        place = order.index(section) if section in order else len(order)
        return place, fields[name] is None, not name.endswith(".name")

    return {name: fields[name] for name in sorted(fields, key=position_of) if name in shown_fields}


def _is_new_section(section: str, fields: Mapping[str, Any]) -> bool:
    """Whether the file makes a section anew, because the base has none or that of another function."""
    # A section with `workers` is the section `turns` of an environment that the base does not have.
    has_function = not fields.keys().isdisjoint((f"{section}.name", f"{section}.workers"))
    return section in WORDS["whole"] or (section in WORDS["calls"] and has_function)


def _lines(translation: Translation, name: str, fields: dict[str, Any]) -> list[str]:
    """Returns the lines of a field with its comments, and of its section if that begins with the field."""
    section = name.rpartition(".")[0]
    is_first = name == next(x for x in fields if x.rpartition(".")[0] == section)
    section_lines = [f"c.{section} = ConfigDict()"] if is_first and _is_new_section(section, fields) else []
    comments, explained = _comments(translation, name)
    if name == "data.mixture":
        for part, inside in fields[name].items():
            section_lines += [f"c.{name}.{part} = ConfigDict()"]
            for key, value in inside.items():
                section_lines += _assignment(f"{name}.{part}.{key}", value)
        return [*comments, *section_lines]
    origin, lines = _origin(translation, name), _assignment(name, fields[name])
    if not origin or origin in explained:
        return [*section_lines, *comments, *lines]
    with_origin = f"{lines[0]}  # {origin}"
    fits = len(lines) == 1 and len(with_origin) + 4 <= WIDTH
    return [*section_lines, *comments, *([with_origin] if fits else [*_wrapped(origin), *lines])]


def _assignment(name: str, value: Any) -> list[str]:
    """Returns the lines that set a field. A text that does not fit beside its name gets lines of its own."""
    start, text = f"c.{name} = ", literal(value)
    # The lines are broken by hand as the formatter does, because it is no dependency of the package.
    fits_broken = max(len(start) + 5, len(text) + 8) <= WIDTH + 1 < len(start + text) + 4
    is_broken = isinstance(value, str) and fits_broken
    return [f"{start}(", f"    {text}", ")"] if is_broken else [start + text]


def _origin(translation: Translation, name: str) -> str:
    """Returns the key that sets a field; of several keys the one that sets the fewest fields."""
    explicit = [key for key, outcome in translation.outcomes.items() if name in outcome.fields]
    if explicit:
        # A key that sets many fields, such as the batch size, explains each of them less well.
        return min(explicit, key=lambda key: len(translation.outcomes[key].fields))
    # The value of a field that is the user's to set is a placeholder, and no default.
    has_default = any(name in outcome.fields for outcome in translation.defaults.values())
    return "default" if has_default and name not in translation.user_tasks() else ""


def _comments(translation: Translation, name: str) -> tuple[list[str], set[str]]:
    """Returns comments on the keys whose first field is `name`, and the keys that have one."""

    def reasons_of_first_fields(outcomes: Mapping[str, Outcome], *kinds: str) -> dict[str, str]:
        """Returns {key: reason} of outcomes of these kinds whose first field is `name`."""
        of_field = {key: outcome for key, outcome in outcomes.items() if next(iter(outcome.fields), "") == name}
        return {key: outcome.reason for key, outcome in of_field.items() if outcome.reason and outcome.kind in kinds}

    explained = reasons_of_first_fields(translation.outcomes, "mapped", "changed")
    comments = [f"{line}." for line in reason_lines(explained)]
    is_explicit = any(name in outcome.fields for outcome in translation.outcomes.values())
    for key, reason in reasons_of_first_fields({} if is_explicit else translation.defaults, "changed").items():
        comments.append(f"{key} has its default: {reason}." if "(" not in key else f"{reason.capitalize()}.")
    tasks = translation.user_tasks()
    comments += [f"Yours to set: {tasks[name]}."] if name in tasks else []
    if name == "eval":
        no_source = "eval.source" not in translation.fields()
        hint = f", and name the problems in eval.source: those of {translation.base}.py are others" * no_source
        comments.append(f"To evaluate, set eval.every instead{hint}.")
    return [line for text in comments for line in _wrapped(text)], set(explained)


def _wrapped(text: str, first: str = "# ", then: str = "# ", width: int = WIDTH - 4) -> list[str]:
    """Returns a comment as lines. first, then: beginning of its first line, and of its other lines."""
    return WRAP(printable(text), width, initial_indent=first, subsequent_indent=then)


def _remaining_comments(translation: Translation, lost: Sequence[str], written: Mapping[str, Any]) -> list[str]:
    """Returns the comments at the end: lines that belong to no key, and keys without a line of their own.

    written: fields of the config file.
    """
    reasons = {kind: {key: x.reason for key, x in translation.with_kind(kind).items()} for kind in KINDS}
    shown_names = {*written, *translation.outcomes}
    unset_reasons = {name: reason for name, reason in translation.unknown().items() if name not in shown_names}
    partly_set = {name for name in unset_reasons if any(field.startswith(f"{name}.") for field in written)}
    # Unknown keys that become no field; a key that the block of unsupported keys explains is not listed twice.
    keys = {name for name in unset_reasons.keys() - translation.fields().keys() if name in translation.table.rules}
    explained_keys = {name for name in keys if unset_reasons[name] in reasons["unsupported"].values()}
    unset_fields = unset_reasons.keys() - partly_set - keys
    without_field = {key: x for key, x in reasons["changed"].items() if not translation.outcomes[key].fields}
    blocks = {
        "Not read as settings": [" ".join(line.split()) for line in lost],
        f"Yours to set; until then they are those of {translation.base}.py": _named(unset_reasons, unset_fields),
        "Yours to check; this file has values for them": _named(unset_reasons, partly_set),
        "May change the run": _named(unset_reasons, keys - partly_set - explained_keys),
        "Changed in meaning": reason_lines(without_field),
        "Not supported in jaxrl_llm": reason_lines(reasons["unsupported"]),
        "No effect on training in jaxrl_llm": reason_lines(reasons["no effect"]),
    }
    lines = [""]
    for title, entries in blocks.items():
        lines += ["", f"# {title}:"] if entries else []
        lines += [line for entry in entries for line in _wrapped(entry, "# - ", "#   ", WIDTH)]
    return lines if len(lines) > 1 else []


def _named(reasons: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Returns the lines of some names of {name: reason}."""
    return reason_lines({name: reason for name, reason in reasons.items() if name in names})


def reason_lines(reasons: Mapping[str, str]) -> list[str]:
    """Returns "names: reason" for each reason of {name: reason}."""
    return [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason(reasons).items()]


def names_by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns {reason: names} of {name: reason}."""
    different = dict.fromkeys(reasons.values())
    return {reason: [name for name, own_reason in reasons.items() if own_reason == reason] for reason in different}
