"""The dense Qwen3-VL family: Qwen3 that also reads images, through several layers of its tower."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, names, vision_json
from jaxrl_llm.models.config import DecoderConfig

NAMES = names.modules(names.DENSE | names.DEEP_TOWER)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = vision_json.text_settings(hf, head_dim=128, rope_theta=500_000.0)
    return decoder(hf, text, qk_norm=True)


def decoder(hf: dict[str, Any], text: config_json.ConfigJson, **fields: Any) -> DecoderConfig:
    """Makes the DecoderConfig of a model with this tower. text, fields: arguments of `vision_json.decoder`.

    Raises: UserError, naming a key that does not fit.
    """
    # The defaults of transformers, for files that leave these out.
    usual = {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304}
    settings = vision_json.tower_settings(hf, **usual, deepstack_visual_indexes=[8, 16, 24])
    places = config_json.count(settings, "num_position_embeddings")
    own = {
        "gated": False,
        "centered": True,
        "patch_bias": True,
        "table": math.isqrt(places),
        "deep": deep_layers(settings, text),
        "mlp_width": config_json.count(settings, "intermediate_size"),
    }
    if own["table"] ** 2 != places:
        raise UserError(f"config.json: num_position_embeddings is {places}, which is no square: restore the file")
    tower = vision_json.tower(settings, "hidden_size", "out_hidden_size", text["hidden_size"], **own)
    return vision_json.decoder(text, tower, interleaved=True, **fields)


def deep_layers(settings: config_json.ConfigJson, text: config_json.ConfigJson) -> tuple[int, ...]:
    """Returns the layers of the tower whose vectors the decoder adds. Raises: UserError, if they do not fit."""
    deep = vision_json.layers_of(settings, "deepstack_visual_indexes")
    rising = all(a < b for a, b in zip(deep, (*deep[1:], config_json.count(settings, "depth")), strict=True))
    if not rising or len(deep) > config_json.count(text, "num_hidden_layers"):
        raise UserError(
            f"config.json: deepstack_visual_indexes is {list(deep)}, and must be rising numbers of layers of the "
            "tower, no more than the text model has layers: restore the file"
        )
    return deep
