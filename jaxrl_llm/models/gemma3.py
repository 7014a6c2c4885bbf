"""The Gemma 3 family of vision-language models: an image is scaled to one square, whose tokens see each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json, gemma3_text, names, vision_json
from jaxrl_llm.models.config import DecoderConfig, VisionConfig

MODULES = {**names.module_names(names.GEMMA), **names.SIGLIP}
VISION_MODEL_PREFIX = {"model.vision_tower.": "model.vision_tower.vision_model."}
# {prefix in modules of transformers 5: prefix in files on the hub, which have the classes of transformers 4}.
HUB_PREFIXES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
NAMES = names.replace_prefixes(names.replace_prefixes(MODULES, VISION_MODEL_PREFIX), HUB_PREFIXES)
OTHERS = (names.replace_prefixes(MODULES, HUB_PREFIXES), names.replace_prefixes(MODULES, VISION_MODEL_PREFIX))
PLACEHOLDER = "image_token_index"
# Defaults of keys that the published files leave out.
TEXT_DEFAULTS = {
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
TOWER_DEFAULTS = {"patch_size": 14, "image_size": 896, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config is {text!r}, but must be a JSON object: restore the file")
    text_settings = {name: value for name, value in text.items() if value is not None}
    tied = text_settings.get("tie_word_embeddings", hf.get("tie_word_embeddings", True))
    decoder = gemma3_text.decoder_config(
        TEXT_DEFAULTS | text_settings | {"model_type": "gemma3", "tie_word_embeddings": tied}
    )
    outer_settings = config_json.ConfigJson({name: value for name, value in hf.items() if value is not None})
    return replace(decoder, vision=make_tower_config(outer_settings))


def make_tower_config(outer_settings: config_json.ConfigJson) -> VisionConfig:
    """Returns the VisionConfig of a config.json. Raises: UserError, naming a key that does not fit."""
    count, settings = config_json.get_count, vision_json.tower_settings(outer_settings, **TOWER_DEFAULTS)
    patch, tokens = (
        count(settings, "patch_size"),
        int(config_json.get_number(outer_settings, "mm_tokens_per_image", 256)),
    )
    patches_of_side, tokens_of_side = count(settings, "image_size") // patch, math.isqrt(tokens)
    if (
        tokens_of_side**2 != tokens
        or not tokens
        or patches_of_side % tokens_of_side
        or patches_of_side < tokens_of_side
    ):
        raise UserError(
            f"config.json: mm_tokens_per_image is {tokens}, but must be a square number whose root divides "
            f"{patches_of_side}, the patches along a side of an image: restore the file"
        )
    config = VisionConfig(
        depth=count(settings, "num_hidden_layers"),
        width=count(settings, "hidden_size"),
        heads=count(settings, "num_attention_heads"),
        mlp_width=count(settings, "intermediate_size"),
        patch_size=patch,
        merge_size=patches_of_side // tokens_of_side,
        patch_frames=0,
        activation=settings["hidden_act"],
        gated_mlp=False,
        layer_norm=True,
        position_grid=patches_of_side,
        patch_bias=True,
        siglip=True,
        bidirectional_tokens=tokens,
        norm_eps=float(config_json.get_number(settings, "layer_norm_eps", 1e-6)),
        hidden_tokens=(count(outer_settings, PLACEHOLDER),),
    )
    vision_json.check_tower(config, settings, "hidden_size")
    return config
