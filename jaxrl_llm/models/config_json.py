"""What the families share in reading config.json: a module of a family adds what is its own."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import rope
from jaxrl_llm.models.blocks import ACTIVATIONS, DecoderConfig
from jaxrl_llm.models.experts import Mixture

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


class Settings(dict):
    """The settings of a config.json. Raises: UserError, naming a key that is missing."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json has no {key!r}, which a decoder needs: restore the file")


def read(hf: dict[str, Any], **defaults: Any) -> Settings:
    """Returns the settings without nulls, which mean missing; defaults: of the family, for keys that may be missing.

    Raises: UserError, naming a setting that is no number.
    """
    settings = Settings(defaults | {name: value for name, value in hf.items() if value is not None})
    for name in NUMBERS:
        number(settings, name, missing=0)
    return settings


def number(settings: dict[str, Any], name: str, missing: float) -> Any:
    """Returns a number. Raises: UserError, if it is none."""
    found = settings.get(name, missing)
    if not isinstance(found, (int, float)):
        raise UserError(f"config.json: {name} is {found!r}, which is no number: restore the file")
    return found


def decoder(settings: Settings, dtype: str, remat: str, **own: Any) -> DecoderConfig:
    """Makes a DecoderConfig of what all families have; own: fields that only this family sets.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if "local_rope" not in own and "sliding_attention" in (settings.get("rope_parameters") or ()):
        raise UserError("config.json: rope_parameters differ between layers: this family has one rotary embedding")
    full, positions = rope.settings(settings), settings["max_position_embeddings"]
    size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    usual = {
        "mlp_width": settings["intermediate_size"],
        "rope": rope.read(full, size, positions),
        "qkv_bias": settings.get("attention_bias", False),
        "output_bias": settings.get("attention_bias", False),
        "qk_norm": False,
        "activation": activation(settings, "hidden_act"),
    }
    return DecoderConfig(
        family=settings["model_type"],
        vocab_size=settings["vocab_size"],
        width=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        heads=settings["num_attention_heads"],
        kv_heads=settings.get("num_key_value_heads") or settings["num_attention_heads"],
        head_dim=size,
        max_positions=rope.longest(full, positions),
        norm_eps=settings["rms_norm_eps"],
        tied_head=settings.get("tie_word_embeddings", False),
        dtype=dtype,
        remat=remat,
        **usual | own,
    )


def count(settings: Settings, name: str) -> int:
    """Returns a number of at least 1. Raises: UserError, if it is missing or something else."""
    if not isinstance(found := settings[name], int) or found < 1:
        raise UserError(f"config.json: {name} is {found!r}, and must be a number of at least 1: restore the file")
    return found


def mixture(settings: Settings, experts: str, *, normalized: bool) -> Mixture:
    """Returns the experts of each layer, whose number is in the key `experts`.

    Raises: UserError, naming a key that is missing or does not fit.
    """
    made = Mixture(count(settings, experts), count(settings, "num_experts_per_tok"), normalized)
    if made.chosen > made.experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {made.chosen}, {experts} {made.experts}: restore the file"
        )
    return made


def activation(settings: Settings, name: str) -> str:
    """Returns the activation that a key names. Raises: UserError, if it is not supported."""
    found = settings.get(name, "silu")
    if found not in ACTIVATIONS:
        raise UserError(f"config.json: {name} is {found!r}: only {', '.join(map(repr, ACTIVATIONS))} are supported")
    return found


def windows(settings: Settings, usual: list[bool]) -> dict[str, Any]:
    """Returns the fields of DecoderConfig on sliding windows; usual: the layers with one if layer_types is missing.

    Raises: UserError, if layer_types has another kind or number of layers.
    """
    local = tuple(usual)
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
