"""The Qwen2-VL family: Qwen2 that also reads images. Each patch sees its whole image in all layers of the tower."""

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
MODULES = names.modules(NAMES)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = vision_json.tower_settings(hf, hidden_act="quick_gelu", mlp_ratio=4)
    mlp_width = int(config_json.count(settings, "embed_dim") * config_json.number(settings, "mlp_ratio", 4))
    text = text_settings(hf)
    tower = vision_json.tower(
        settings, "embed_dim", "hidden_size", text["hidden_size"], mlp_width=mlp_width, gated=False, centered=True
    )
    return vision_json.decoder(text, tower, qkv_bias=True, output_bias=False, **qwen2.windows(text))


def text_settings(hf: dict[str, Any]) -> config_json.ConfigJson:
    """Returns the settings of the text model, with the default of transformers. Raises: UserError, as `read`."""
    return vision_json.text_settings(hf, rope_theta=1_000_000.0)
