"""The Qwen2 and Qwen2.5 families: biases on query, key and value; some models have layers with a sliding window."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read(hf)
    fields = {"qkv_bias": True, "output_bias": False} | windows(settings)
    return config_json.decoder(settings, **fields)


def windows(settings: config_json.ConfigJson) -> dict[str, Any]:
    """Returns the fields on sliding windows: if switched on, layers from max_window_layers on have one."""
    if not settings.get("use_sliding_window"):
        settings = config_json.ConfigJson(settings)
        # Files have one also where it is switched off.
        settings.pop("sliding_window", None)
        return config_json.windows(settings, [False] * settings["num_hidden_layers"])
    usual = [i >= settings["max_window_layers"] for i in range(settings["num_hidden_layers"])]
    return config_json.windows(settings, usual)
