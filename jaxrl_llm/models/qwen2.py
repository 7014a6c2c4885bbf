"""The Qwen2 and Qwen2.5 families: query, key and value have biases; some models have sliding-window layers."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read_settings(hf)
    fields = {"qkv_bias": True, "output_bias": False} | window_fields(settings)
    return config_json.make_decoder_config(settings, **fields)


def window_fields(settings: config_json.ConfigJson) -> dict[str, Any]:
    """Returns the fields of DecoderConfig for sliding windows, which layers from number max_window_layers on have."""
    if not settings.get("use_sliding_window"):
        settings = config_json.ConfigJson(settings)
        # Some files set sliding_window although use_sliding_window is false.
        settings.pop("sliding_window", None)
        return config_json.window_fields(settings, [False] * settings["num_hidden_layers"])
    default_local = [i >= settings["max_window_layers"] for i in range(settings["num_hidden_layers"])]
    return config_json.window_fields(settings, default_local)
