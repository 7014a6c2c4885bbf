"""The Mistral family: all layers have a sliding window, if config.json has one; layer_types may exclude some."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig

WINDOW = 4096  # window of a config.json without the key sliding_window; a null there means no window


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read_settings({"sliding_window": WINDOW} | hf)
    default_local = ["sliding_window" in settings] * settings["num_hidden_layers"]
    fields = {"qkv_bias": False, "output_bias": False} | config_json.window_fields(settings, default_local)
    return config_json.make_decoder_config(settings, **fields)
