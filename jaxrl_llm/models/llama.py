"""The Llama 2 and 3 families, and models of their architecture: biases where config.json asks for them."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read_settings(hf)
    return config_json.make_decoder_config(settings, mlp_bias=settings.get("mlp_bias", False))
