"""Reads the fields of config.json that all families have. A family's module adds the fields of its own."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import rope
from jaxrl_llm.models.blocks import ACTIVATIONS
from jaxrl_llm.models.config import DecoderConfig, Mixture

NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "sliding_window",
)
KINDS = {"full_attention", "sliding_attention"}  # of layers


class ConfigJson(dict):
    """The settings of a config.json. Raises: UserError, naming a key that is missing."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json has no {key!r}, which a decoder needs: restore the file")


def read(hf: dict[str, Any], **defaults: Any) -> ConfigJson:
    """Returns the settings without nulls, which mean missing; defaults: the family's, for keys that may be missing.

    Raises: UserError, naming a setting that is no number.
    """
    settings = ConfigJson(defaults | {name: value for name, value in hf.items() if value is not None})
    # A wrong type would otherwise fail deep in a shape computation, without the key's name.
    for name in NUMBERS:
        number(settings, name, missing=0)
    return settings


def number(settings: dict[str, Any], name: str, missing: float) -> Any:
    """Returns the number under a key, or `missing` without the key. Raises: UserError, if it is no number."""
    setting = settings.get(name, missing)
    if not isinstance(setting, (int, float)):
        raise UserError(f"config.json: {name} is {setting!r}, which is no number: restore the file")
    return setting


def decoder(settings: ConfigJson, **family_fields: Any) -> DecoderConfig:
    """Makes a DecoderConfig from settings; family_fields: fields that this family sets otherwise than most.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if "local_rope" not in family_fields and "sliding_attention" in (settings.get("rope_parameters") or ()):
        raise UserError("config.json: rope_parameters differ between layers: this family has one rotary embedding")
    full, positions = rope.settings(settings), settings["max_position_embeddings"]
    # Older files have no head_dim: there the heads divide the width.
    size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    usual = {
        "family": settings["model_type"],
        "vocab_size": settings["vocab_size"],
        "width": settings["hidden_size"],
        "layers": settings["num_hidden_layers"],
        "heads": settings["num_attention_heads"],
        # A file without num_key_value_heads gives every query head its own keys, as in Llama 1.
        "kv_heads": settings.get("num_key_value_heads") or settings["num_attention_heads"],
        "head_dim": size,
        "mlp_width": settings["intermediate_size"],
        # It also finds what is missing.
        "rope": rope.read(full, size, positions),
        "max_positions": rope.longest(full, positions),
        "norm_eps": settings["rms_norm_eps"],
        "tied_head": settings.get("tie_word_embeddings", False),
        "qkv_bias": settings.get("attention_bias", False),
        "output_bias": settings.get("attention_bias", False),
        "qk_norm": False,
        "activation": activation(settings, "hidden_act"),
    }
    return DecoderConfig(**usual | family_fields)


def count(settings: ConfigJson, key: str) -> int:
    """Returns the number under a key. Raises: UserError, if it is missing, no whole number, or below 1."""
    if not isinstance(number := settings[key], int) or number < 1:
        raise UserError(f"config.json: {key} is {number!r}, and must be a number of at least 1: restore the file")
    return number


def mixture(settings: ConfigJson, experts: str, *, normalized: bool) -> Mixture:
    """Returns the experts of each layer, whose number is in the key `experts`.

    Raises: UserError, naming a key that is missing or does not fit.
    """
    layer_experts = Mixture(count(settings, experts), count(settings, "num_experts_per_tok"), normalized)
    if layer_experts.chosen > layer_experts.experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {layer_experts.chosen}, {experts} {layer_experts.experts}: "
            "restore the file"
        )
    return layer_experts


def activation(settings: ConfigJson, key: str) -> str:
    """Returns the activation that a key names. Raises: UserError, if it is not supported."""
    name = settings.get(key, "silu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: {key} is {name!r}: only {', '.join(map(repr, ACTIVATIONS))} are supported")
    return name


def windows(settings: ConfigJson, default_local: list[bool]) -> dict[str, Any]:
    """Returns the fields of DecoderConfig on sliding windows.

    default_local: whether each layer has a window, for a file without layer_types.

    Raises: UserError, if layer_types has another kind or number of layers.
    """
    local = tuple(default_local)
    if types := settings.get("layer_types"):
        if other := set(types) - KINDS:
            raise UserError(
                f"config.json: layer_types has {', '.join(sorted(other))}: only {' and '.join(sorted(KINDS))} are "
                "supported"
            )
        local = tuple(kind == "sliding_attention" for kind in types)
    if not any(local):
        return {}
    if len(local) != settings["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types names {len(local)} layers, num_hidden_layers is "
            f"{settings['num_hidden_layers']}: restore the file"
        )
    if settings["sliding_window"] < 1:
        raise UserError(f"config.json: sliding_window is {settings['sliding_window']}: restore the file")
    return {"local": local, "window": settings["sliding_window"]}
