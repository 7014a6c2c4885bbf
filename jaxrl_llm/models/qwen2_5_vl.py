"""The Qwen2.5-VL family: Qwen2 that also reads images. In most layers of the tower a patch sees its window only."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, names, qwen2, qwen2_vl, vision_json
from jaxrl_llm.models.config import DecoderConfig

NAMES = names.DENSE | names.TOWER
MODULES = names.modules(NAMES)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    # The defaults of transformers, for files that leave these out.
    settings = vision_json.tower_settings(hf, hidden_act="silu", window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
    window = config_json.count(settings, "window_size")
    side = config_json.count(settings, "patch_size") * config_json.count(settings, "spatial_merge_size")
    if window < side:
        raise UserError(f"config.json: window_size is {window}, less than a token of {side} pixels: restore the file")
    fields = {
        "gated": True,
        "centered": False,
        "window": window // side,
        "full": vision_json.layers_of(settings, "fullatt_block_indexes"),
        "mlp_width": config_json.count(settings, "intermediate_size"),
    }
    text = qwen2_vl.text_settings(hf)
    tower = vision_json.tower(settings, "hidden_size", "out_hidden_size", text["hidden_size"], **fields)
    return vision_json.decoder(text, tower, qkv_bias=True, output_bias=False, **qwen2.windows(text))
