"""Reads the keys of config.json that all model families share; the module of a family reads its further keys."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import rope
from jaxrl_llm.models.blocks import ACTIVATIONS
from jaxrl_llm.models.config import DecoderConfig, Mixture

# Keys of config.json whose values must be numbers.
NUMBER_KEYS = (
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
LAYER_TYPES = {"full_attention", "sliding_attention"}  # known values in layer_types


class ConfigJson(dict):
    """The settings of a config.json as a dict. Raises: UserError, naming the key, if a key that is read is missing."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json lacks {key!r}, which this model family needs: restore the file")


def read_settings(hf: dict[str, Any], **defaults: Any) -> ConfigJson:
    """Returns the settings of a config.json, without keys whose value is null.

    defaults: values of the family for keys that may be missing. Raises: UserError, naming a key that must be a number.
    """
    settings = ConfigJson(defaults | {name: value for name, value in hf.items() if value is not None})
    # Check types here, because a wrong one would fail later in a shape computation, without the key's name.
    for name in NUMBER_KEYS:
        get_number(settings, name, missing=0)
    return settings


def get_number(settings: dict[str, Any], name: str, missing: float) -> Any:
    """Returns the number under a key, or `missing` without the key. Raises: UserError, if the value is no number."""
    setting = settings.get(name, missing)
    if not isinstance(setting, (int, float)):
        raise UserError(f"config.json: {name} is {setting!r}, but must be a number: restore the file")
    return setting


def make_decoder_config(settings: ConfigJson, **family_fields: Any) -> DecoderConfig:
    """Makes a DecoderConfig from the result of `read_settings`.

    family_fields: fields of DecoderConfig that the family sets itself; they override the common ones. Raises:
    UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if "local_rope" not in family_fields and "sliding_attention" in (settings.get("rope_parameters") or ()):
        raise UserError(
            "config.json: rope_parameters must be the same for all layers, because models of this family have one "
            "rotary embedding: restore the file"
        )
    rope_config, max_positions = rope.rope_settings(settings), settings["max_position_embeddings"]
    # Older files have no head_dim: the heads divide the width.
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    common_fields = {
        "family": settings["model_type"],
        "vocab_size": settings["vocab_size"],
        "width": settings["hidden_size"],
        "layers": settings["num_hidden_layers"],
        "heads": settings["num_attention_heads"],
        # If num_key_value_heads is missing, every query head has its own keys, as in Llama 1.
        "kv_heads": settings.get("num_key_value_heads") or settings["num_attention_heads"],
        "head_dim": head_dim,
        "mlp_width": settings["intermediate_size"],
        "rope": rope.make_rope(rope_config, head_dim, max_positions),
        "max_positions": rope.extended_positions(rope_config, max_positions),
        "norm_eps": settings["rms_norm_eps"],
        "tied_head": settings.get("tie_word_embeddings", False),
        "qkv_bias": settings.get("attention_bias", False),
        "output_bias": settings.get("attention_bias", False),
        "qk_norm": False,
        "activation": get_activation(settings, "hidden_act"),
    }
    return DecoderConfig(**common_fields | family_fields)


def get_count(settings: ConfigJson, key: str) -> int:
    """Returns the positive integer under a key. Raises: UserError, if it is missing, no integer, or below 1."""
    if not isinstance(count := settings[key], int) or count < 1:
        raise UserError(f"config.json: {key} is {count!r}, but must be an integer of at least 1: restore the file")
    return count


def make_mixture(settings: ConfigJson, experts: str, *, normalized: bool) -> Mixture:
    """Returns the mixture of experts of each layer.

    experts: key that holds the number of experts. normalized: whether the router weights of the chosen experts are
    normalized. Raises: UserError, naming a key that is missing or does not fit.
    """
    mixture = Mixture(get_count(settings, experts), get_count(settings, "num_experts_per_tok"), normalized)
    if mixture.chosen > mixture.experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {mixture.chosen}, but must be at most {experts}, which is "
            f"{mixture.experts}: restore the file"
        )
    return mixture


def get_activation(settings: ConfigJson, key: str) -> str:
    """Returns the name of the activation under a key, "silu" without the key. Raises: UserError, if unsupported."""
    name = settings.get(key, "silu")
    if name not in ACTIVATIONS:
        raise UserError(
            f"config.json: {key} is {name!r}, but only {', '.join(map(repr, ACTIVATIONS))} are supported: use "
            "another checkpoint"
        )
    return name


def window_fields(settings: ConfigJson, default_local: list[bool]) -> dict[str, Any]:
    """Returns the fields `local` and `window` of DecoderConfig; {} if no layer has a sliding window.

    default_local: for each layer, whether it has a window if the file has no layer_types. Raises: UserError, if
    layer_types has an unknown type or not one entry per layer.
    """
    local = tuple(default_local)
    if layer_types := settings.get("layer_types"):
        if unknown_types := set(layer_types) - LAYER_TYPES:
            raise UserError(
                f"config.json: layer_types has {', '.join(sorted(unknown_types))}, but only "
                f"{' and '.join(sorted(LAYER_TYPES))} are supported: use another checkpoint"
            )
        local = tuple(layer_type == "sliding_attention" for layer_type in layer_types)
    if not any(local):
        return {}
    if len(local) != settings["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types has {len(local)} entries, but must have one for each of the "
            f"{settings['num_hidden_layers']} layers (num_hidden_layers): restore the file"
        )
    if settings["sliding_window"] < 1:
        raise UserError(
            f"config.json: sliding_window is {settings['sliding_window']}, but must be at least 1: restore the file"
        )
    return {"local": local, "window": settings["sliding_window"]}
