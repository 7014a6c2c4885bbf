"""The Gemma 3 family that also reads images: each is one square, whose tokens see each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, gemma3_text, names, vision_json
from jaxrl_llm.models.config import DecoderConfig, VisionConfig

MODULES = {**names.modules(names.GEMMA), **names.SIGLIP}
VISION_MODEL = {"model.vision_tower.": "model.vision_tower.vision_model."}
# Prefixes of files on the hub: names outside of modules, and names of the classes of transformers 4.
OUTSIDE = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
NAMES = names.renamed(names.renamed(MODULES, VISION_MODEL), OUTSIDE)
OTHERS = (names.renamed(MODULES, OUTSIDE), names.renamed(MODULES, VISION_MODEL))
PLACEHOLDER = "image_token_index"
# What the published files leave out.
TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
TOWER = {"patch_size": 14, "image_size": 896, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config is {text!r}: restore the file")
    stated = {name: value for name, value in text.items() if value is not None}
    tied = stated.get("tie_word_embeddings", hf.get("tie_word_embeddings", True))
    decoder = gemma3_text.decoder_config(TEXT | stated | {"model_type": "gemma3", "tie_word_embeddings": tied})
    whole = config_json.ConfigJson({name: value for name, value in hf.items() if value is not None})
    return replace(decoder, vision=tower(whole))


def tower(whole: config_json.ConfigJson) -> VisionConfig:
    """Returns the tower of a config.json. Raises: UserError, naming a key that does not fit."""
    count, settings = config_json.count, vision_json.tower_settings(whole, **TOWER)
    patch, tokens = count(settings, "patch_size"), int(config_json.number(whole, "mm_tokens_per_image", 256))
    table, side = count(settings, "image_size") // patch, math.isqrt(tokens)
    if side**2 != tokens or not tokens or table % side or table < side:
        raise UserError(
            f"config.json: mm_tokens_per_image is {tokens}, no square that divides images of {table} x {table} "
            "patches: restore the file"
        )
    config = VisionConfig(
        depth=count(settings, "num_hidden_layers"),
        width=count(settings, "hidden_size"),
        heads=count(settings, "num_attention_heads"),
        mlp_width=count(settings, "intermediate_size"),
        patch=patch,
        merge=table // side,
        frames=0,
        activation=settings["hidden_act"],
        gated=False,
        centered=True,
        table=table,
        patch_bias=True,
        siglip=True,
        two_way=tokens,
        norm_eps=float(config_json.number(settings, "layer_norm_eps", 1e-6)),
        never=(count(whole, PLACEHOLDER),),
    )
    vision_json.check_tower(config, settings, "hidden_size")
    return config
