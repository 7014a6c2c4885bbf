"""The Qwen2-VL family: Qwen2 with a vision tower, in which each patch sees its whole image in all layers."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json, names, qwen2, vision_json
from jaxrl_llm.models.config import DecoderConfig

NAMES = (
    names.DENSE
    | names.TOWER
    | {
        "visual/layers/mlp/up/kernel": "visual.blocks.{}.mlp.fc1.weight",
        "visual/layers/mlp/up/bias": "visual.blocks.{}.mlp.fc1.bias",
        "visual/layers/mlp/down/kernel": "visual.blocks.{}.mlp.fc2.weight",
        "visual/layers/mlp/down/bias": "visual.blocks.{}.mlp.fc2.bias",
    }
)
MODULES = names.module_names(NAMES)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = vision_json.tower_settings(hf, hidden_act="quick_gelu", mlp_ratio=4)
    mlp_width = int(config_json.get_count(settings, "embed_dim") * config_json.get_number(settings, "mlp_ratio", 4))
    text = text_settings(hf)
    tower = vision_json.make_tower_config(
        settings, "embed_dim", "hidden_size", text["hidden_size"], mlp_width=mlp_width, gated_mlp=False, layer_norm=True
    )
    return vision_json.make_decoder_config(text, tower, qkv_bias=True, output_bias=False, **qwen2.window_fields(text))


def text_settings(hf: dict[str, Any]) -> config_json.ConfigJson:
    """Returns the settings of the text model. Raises: UserError, naming a key that must be a number."""
    return vision_json.text_settings(hf, rope_theta=1_000_000.0)
