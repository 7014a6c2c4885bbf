"""The Gemma 3 family of text models: five layers have a sliding window and a rotary base of their own, the sixth not.

A model that reads images (`gemma3`) holds such a decoder under other names.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, gemma2, rope
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import GEMMA

NAMES = GEMMA

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # of a config.json that does not mention them


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if hf.get("attn_logit_softcapping"):
        raise UserError("config.json: attn_logit_softcapping is set: Gemma 3 has norms on query and key instead")
    settings = gemma2.read({"rope_theta": THETA} | hf)
    every = settings.get("sliding_window_pattern", 6)
    fields = gemma2.shared(settings) | {
        "qk_norm": True,
        "final_soft_cap": gemma2.cap(hf, "final_logit_softcapping", 0.0),
        "local_rope": local_rope(settings),
    }
    fields |= config_json.windows(settings, [(i + 1) % every > 0 for i in range(settings["num_hidden_layers"])])
    return config_json.decoder(settings, **fields)


def local_rope(settings: config_json.ConfigJson) -> rope.Rope:
    """Returns the rotary embedding of the local layers: rope scaling of an old config.json is not for them."""
    by_kind = settings.get("rope_parameters") or {}
    parameters = by_kind.get("sliding_attention") if isinstance(by_kind, dict) else None
    theta = settings.get("rope_local_base_freq", LOCAL_THETA)
    local = rope.settings({"rope_theta": theta, "rope_parameters": parameters})
    return rope.read(local, settings["head_dim"], settings["max_position_embeddings"])
