"""The Qwen2 and Qwen2.5 families: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.blocks import DecoderConfig

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
)


def decoder_config(hf: dict[str, Any], dtype: str, remat: str) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    hf = {name: value for name, value in hf.items() if value is not None}  # null means missing
    for name in NUMBERS:
        if not isinstance(hf.get(name, 0), (int, float)):
            raise UserError(f"config.json: {name} is {hf[name]!r}, which is no number: restore the file")
    if hf.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window is true: sliding-window attention is not supported")
    if other := set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"config.json: layer_types has {', '.join(sorted(other))}: only full_attention is supported")
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act is {hf['hidden_act']!r}: only 'silu' is supported")
    try:
        return DecoderConfig(
            vocab_size=hf["vocab_size"],
            width=hf["hidden_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            mlp_width=hf["intermediate_size"],
            max_positions=hf["max_position_embeddings"],
            rope_theta=rope_theta(hf),
            norm_eps=hf["rms_norm_eps"],
            tied_head=hf.get("tie_word_embeddings", False),
            qkv_bias=True,
            qk_norm=False,
            dtype=dtype,
            remat=remat,
        )
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]!r}, which a decoder needs: restore the file") from None


def rope_theta(hf: dict[str, Any]) -> float:
    """Rotary base. Old and new config.json store it in different keys. Raises: UserError, for rope scaling."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: the rope settings are {rope!r}: restore the file")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(
            f"config.json: rope type {kind!r} is not supported, only 'default' is: take the rope scaling out, and stay "
            "within the positions that the model was first trained with"
        )
    return float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))
