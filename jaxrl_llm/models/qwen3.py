"""The dense Qwen3 family: norms on query and key instead of Qwen2's biases."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json, qwen2
from jaxrl_llm.models.config import DecoderConfig


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read_settings(hf, head_dim=128)  # The default is 128, and not width / heads.
    return config_json.make_decoder_config(settings, qk_norm=True, **qwen2.window_fields(settings))
