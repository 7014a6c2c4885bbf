"""The Gemma 3 family of text models: of six layers, five have a sliding window and their own rotary embedding.

The vision-language models (`gemma3`) have the same decoder under other tensor names.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, gemma2, rope
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import GEMMA

NAMES = GEMMA

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # bases of a config.json that lacks them


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if hf.get("attn_logit_softcapping"):
        raise UserError(
            "config.json: attn_logit_softcapping must be null, because Gemma 3 normalizes query and key instead: "
            "restore the file"
        )
    settings = gemma2.read_settings({"rope_theta": THETA} | hf)
    pattern_length = settings.get("sliding_window_pattern", 6)
    fields = gemma2.shared_fields(settings) | {
        "qk_norm": True,
        "final_soft_cap": gemma2.get_soft_cap(hf, "final_logit_softcapping", 0.0),
        "local_rope": make_local_rope(settings),
    }
    fields |= config_json.window_fields(
        settings, [(i + 1) % pattern_length > 0 for i in range(settings["num_hidden_layers"])]
    )
    return config_json.make_decoder_config(settings, **fields)


def make_local_rope(settings: config_json.ConfigJson) -> rope.Rope:
    """Returns the rotary embedding of the local layers, to which rope_scaling of an old config.json does not apply."""
    rope_by_type = settings.get("rope_parameters") or {}
    parameters = rope_by_type.get("sliding_attention") if isinstance(rope_by_type, dict) else None
    theta = settings.get("rope_local_base_freq", LOCAL_THETA)
    local_settings = rope.rope_settings({"rope_theta": theta, "rope_parameters": parameters})
    return rope.make_rope(local_settings, settings["head_dim"], settings["max_position_embeddings"])
