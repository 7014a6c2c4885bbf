"""The Qwen2.5-VL family: Qwen2 with a vision tower, in which a patch sees only its window in most layers."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, names, qwen2, qwen2_vl, vision_json
from jaxrl_llm.models.config import DecoderConfig

NAMES = names.DENSE | names.TOWER
MODULES = names.module_names(NAMES)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    # Files may leave these keys out. The values are transformers' defaults.
    settings = vision_json.tower_settings(hf, hidden_act="silu", window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
    window = config_json.get_count(settings, "window_size")
    side = config_json.get_count(settings, "patch_size") * config_json.get_count(settings, "spatial_merge_size")
    if window < side:
        raise UserError(
            f"config.json: window_size is {window}, but must be at least the side of a merged token, {side} pixels: "
            "restore the file"
        )
    fields = {
        "gated_mlp": True,
        "layer_norm": False,
        "window": window // side,
        "full_layers": vision_json.get_layers(settings, "fullatt_block_indexes"),
        "mlp_width": config_json.get_count(settings, "intermediate_size"),
    }
    text = qwen2_vl.text_settings(hf)
    tower = vision_json.make_tower_config(settings, "hidden_size", "out_hidden_size", text["hidden_size"], **fields)
    return vision_json.make_decoder_config(text, tower, qkv_bias=True, output_bias=False, **qwen2.window_fields(text))
