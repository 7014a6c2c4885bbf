"""Recognizes configs of other trainers that train on images, and translates their keys of images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate.documents import flatten_sections
from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import SENTENCES, WORDS, Row, read_names

MODEL_KEYS, DATA_KEYS = WORDS["model_keys"], WORDS["data_keys"]
FAMILIES = read_names("image_families")  # {module in models/: pattern of the names of its models}
READABLE = ", ".join(sorted(FAMILIES))
# {kind of models or rows: pattern of their names}
PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in read_names("image_patterns").items()}
PATTERNS["image_model"] = re.compile("|".join([*FAMILIES.values(), PATTERNS["other_model"].pattern]), re.IGNORECASE)
PIXELS = read_names("pixels")  # {argument of an image processor: field}


def family_of(model: str) -> str:
    """Returns the family in the name of a model that reads images; "other" if unknown, "" for a model of text."""
    matching = [family for family, pattern in FAMILIES.items() if re.search(pattern, model, re.IGNORECASE)]
    return matching[0] if matching else "other" if PATTERNS["other_model"].search(model) else ""


def evidence(values: Mapping[str, Any], media: str) -> str:
    """Returns the key and value that show that a run has images, or video or audio; "" if it has none.

    media: "image", or "sound" for video and audio.
    """
    # The keys of models come first, because the name of a model is the stronger evidence.
    patterns = dict.fromkeys(MODEL_KEYS, PATTERNS[f"{media}_model"])
    patterns |= dict.fromkeys(DATA_KEYS, PATTERNS[f"{media}_rows"])
    shown_by = [key for key, pattern in patterns.items() if key in values and pattern.search(str(values[key]))]
    switches = [key for key in values if any(name in key for name in WORDS[f"{media}_switches"])]
    shown_by += [key for key in switches if values[key] not in (None, False, 0, "", "null")]
    return f"{shown_by[0]} = {values[shown_by[0]]}" if shown_by else ""


def refusal(values: Mapping[str, Any]) -> str:
    """Returns why jaxrl_llm has no model for the run; "" if it has one."""
    for key in MODEL_KEYS:
        if family_of(str(values.get(key, ""))) == "other":
            return f"{key} = {values[key]} reads images, but jaxrl_llm only has {READABLE}"
    reason = evidence(values, "sound")
    return f"this run has video or audio ({reason}), which no model of jaxrl_llm reads" if reason else ""


def note(values: Mapping[str, Any]) -> str:
    """Returns a note for a run with images whose model is not known to read images; "" for other runs."""
    reason = evidence(values, "image")
    if not reason or any(family_of(str(values[key])) for key in MODEL_KEYS if key in values):
        return ""
    return f"this run has images ({reason}): model.path must be a model of {READABLE}"


def has_images(keys: Keys) -> bool:
    """Whether the settings of a run show that it has images.

    Another name of the model could show it too. So reading its key marks the answer as one that depends on the model.
    """
    if evidence(keys.values, "image"):
        return True
    for key in MODEL_KEYS:
        keys.get(key)
    return False


# Conditions of keys that have an effect only in some runs, each with the reason why they have none in other runs.
HAS_IMAGES = (has_images, "the key is for images, and this run has none")
HAS_SOUND = (lambda keys: evidence(keys.values, "sound"), "the key is for video or audio, and this run has none")


def processor(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates arguments of the image processor, such as its sizes, to `data.min_pixels` and `data.max_pixels`."""
    arguments = flatten_sections({"size": value} if row.name == "size" else value or {})
    fields = {PIXELS[name]: int(x) for name, x in arguments.items() if name in PIXELS}
    unknown_names = [name for name in arguments if name not in PIXELS]
    if unknown_names:
        return Outcome("unsupported", fields, f"{', '.join(unknown_names)}: {SENTENCES['PROCESSOR']}")
    return Outcome("mapped", fields) if fields else Outcome("no effect", reason="not set")


def tower(is_frozen: Any, has_adapters: bool, ignored_reason: str = "") -> Outcome:
    """Translates the value of a key that freezes the vision tower to `model.vision`.

    has_adapters: whether the translated run trains only adapters. ignored_reason: reason why the other trainer ignores
    the key, "" if it obeys the key.
    """
    if has_adapters:
        return Outcome("mapped", {"model.vision": "frozen"}, "only adapters learn, and they are on layers for text")
    reason = ignored_reason if is_frozen else ""
    return Outcome("changed" if reason else "mapped", {"model.vision": "frozen" if is_frozen else "learns"}, reason)


def adapters_beside_tower(outcome: Outcome, targets: Any, excluded: Any, keys: Keys) -> Outcome:
    """Returns the outcome of a key of adapters; "changed" if the other trainer puts adapters on the vision tower too.

    targets: modules with adapters. excluded: modules without adapters.
    """
    are_everywhere = targets in ("all-linear", ["all-linear"])
    if not are_everywhere or "visual" in str(excluded) or not has_images(keys):
        return outcome
    reason = "; ".join(filter(None, [outcome.reason, "also on the vision tower; in jaxrl_llm only on layers for text"]))
    return replace(outcome, kind="changed", reason=reason)


def excludes(value: Any, keys: Keys) -> Outcome:
    """Translates a list of modules without adapters: jaxrl_llm has adapters on layers for text alone."""
    names = [value] if isinstance(value, str) else list(value)
    if all(re.search(r"visual|vision_tower|vision_model", str(name)) for name in names):
        return Outcome("mapped", reason="adapters are on layers for text")
    return Outcome("unsupported", reason="adapters.targets names the kernels that have one")
