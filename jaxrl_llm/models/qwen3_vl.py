"""The dense Qwen3-VL family: Qwen3 with a vision tower, several layers of which feed the decoder (DeepStack)."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, names, vision_json
from jaxrl_llm.models.config import DecoderConfig

NAMES = names.module_names(names.DENSE | names.DEEP_TOWER)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = vision_json.text_settings(hf, head_dim=128, rope_theta=500_000.0)
    return make_decoder_config(hf, text, qk_norm=True)


def make_decoder_config(hf: dict[str, Any], text: config_json.ConfigJson, **fields: Any) -> DecoderConfig:
    """Makes the DecoderConfig of a text model with a Qwen3-VL tower.

    hf: content of config.json. text: settings of its text model. fields: fields of DecoderConfig that the family sets.
    Raises: UserError, naming a key that does not fit.
    """
    # Files may leave these keys out. The values are transformers' defaults.
    defaults = {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304}
    settings = vision_json.tower_settings(hf, **defaults, deepstack_visual_indexes=[8, 16, 24])
    table_rows = config_json.get_count(settings, "num_position_embeddings")
    tower_fields = {
        "gated_mlp": False,
        "layer_norm": True,
        "patch_bias": True,
        "position_grid": math.isqrt(table_rows),
        "deepstack_layers": deepstack_layers(settings, text),
        "mlp_width": config_json.get_count(settings, "intermediate_size"),
    }
    if tower_fields["position_grid"] ** 2 != table_rows:
        raise UserError(
            f"config.json: num_position_embeddings is {table_rows}, but must be a square number: restore the file"
        )
    tower = vision_json.make_tower_config(
        settings, "hidden_size", "out_hidden_size", text["hidden_size"], **tower_fields
    )
    return vision_json.make_decoder_config(text, tower, interleaved=True, **fields)


def deepstack_layers(settings: config_json.ConfigJson, text: config_json.ConfigJson) -> tuple[int, ...]:
    """Returns the numbers of the tower layers whose vectors the decoder adds (DeepStack).

    Raises: UserError, if they do not rise, or are more than the text model has layers.
    """
    layers = vision_json.get_layers(settings, "deepstack_visual_indexes")
    is_rising = all(a < b for a, b in zip(layers, (*layers[1:], config_json.get_count(settings, "depth")), strict=True))
    if not is_rising or len(layers) > config_json.get_count(text, "num_hidden_layers"):
        raise UserError(
            f"config.json: deepstack_visual_indexes is {list(layers)}, but must be rising layer numbers of the "
            "tower, and not more than the text model has layers: restore the file"
        )
    return layers
