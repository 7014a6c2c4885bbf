"""Reads the fields that vision-language models add to the config.json of a text model (Qwen-VL, in part Gemma 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig, VisionConfig
from jaxrl_llm.models.vision import CHANNELS, TOWER_ACTIVATIONS

# Keys of the rope settings in config.json that describe the rotary embedding with three axes: time, row and column.
MROPE_KEYS = ("type", "rope_type", "mrope_section", "mrope_interleaved")
# Keys of config.json with the ids of the tokens that stand for images and videos in a prompt.
PLACEHOLDERS = ("image_token_id", "video_token_id")


def make_decoder_config(
    settings: config_json.ConfigJson, tower: VisionConfig, *, interleaved: bool = False, **fields: Any
) -> DecoderConfig:
    """Makes the DecoderConfig of a text model with a vision tower.

    settings: result of `text_settings`. interleaved: whether neighbouring frequencies belong to different axes (time,
    row, column) of a position. fields: fields of DecoderConfig that the family sets. Raises: UserError, naming a key
    that is missing or asks for an unsupported feature.
    """
    plain_settings, axis_sections = split_axis_sections(settings)
    cfg = config_json.make_decoder_config(plain_settings, **fields)
    if len(axis_sections) != 3 or 2 * sum(axis_sections) != cfg.head_dim:
        raise UserError(
            f"config.json: mrope_section is {axis_sections}, but must be three numbers whose sum is half of the head "
            f"size, {cfg.head_dim // 2}: restore the file"
        )
    # Choose the axis of a position by which each frequency rotates: 0 = time, 1 = row, 2 = column.
    axes = np.repeat(np.arange(3), axis_sections)
    if interleaved:
        # The axes alternate (time, row, column, time ...) until an axis has all its frequencies. The rest is time.
        frequency_index = np.arange(len(axes))
        axis = frequency_index % 3
        axes = np.where(frequency_index < 3 * np.array(axis_sections)[axis], axis, 0)
    rope = replace(cfg.rope, axes=tuple(axes.tolist()))
    placeholder_ids = tuple(settings[name] for name in PLACEHOLDERS if name in settings)
    return replace(cfg, rope=rope, vision=replace(tower, hidden_tokens=placeholder_ids))


def text_settings(hf: dict[str, Any], **defaults: Any) -> config_json.ConfigJson:
    """Returns the settings of the text model of a vision-language config.json; newer files nest them in text_config.

    defaults: values of the family for keys that may be missing. Raises: UserError, naming a key that must be a number.
    """
    text = hf.get("text_config")
    if not isinstance(text, dict):
        text = {name: hf[name] for name in hf.keys() - {"vision_config"}}
    # Older files may hold tie_word_embeddings in text_config alone. The outer key then has transformers' default.
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False
    outer_settings = {name: hf.get(name) for name in ("model_type", *PLACEHOLDERS)}
    settings = config_json.read_settings(text | outer_settings | {"tie_word_embeddings": tied}, **defaults)
    config_json.get_count(settings, PLACEHOLDERS[0])
    return settings


def split_axis_sections(settings: config_json.ConfigJson) -> tuple[config_json.ConfigJson, list[int]]:
    """Returns the settings with an ordinary rotary embedding, and mrope_section: the number of frequencies per axis.

    The axes of an image's positions are time, row and column.
    Raises: UserError, if the rope settings have no mrope_section, or a rope type that is not supported with images.
    """
    rope_key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(rope_key)
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not isinstance(sections, list) or not all(type(x) is int and x >= 0 for x in sections):
        raise UserError(
            f"config.json: mrope_section is {sections!r}, but must be a list of integers of at least 0: restore the "
            "file"
        )
    assert isinstance(rope, dict)
    unknown_types = {rope.get("type"), rope.get("rope_type")} - {None, "default", "mrope"}
    if unknown_types:
        raise UserError(
            f"config.json: rope type {unknown_types.pop()!r} is not supported for models that read images: set it to "
            "'default', leave mrope_section, and keep texts within the number of positions that the model was "
            "pre-trained with"
        )
    plain_rope = {name: value for name, value in rope.items() if name not in MROPE_KEYS}
    plain_settings = config_json.ConfigJson(settings)
    plain_settings[rope_key] = plain_rope | {"rope_type": "default"}
    return plain_settings, sections


def tower_settings(hf: dict[str, Any], **defaults: Any) -> config_json.ConfigJson:
    """Returns the settings in vision_config. Raises: UserError, if it is no JSON object.

    defaults: values of the family for keys that may be missing.
    """
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise UserError(f"config.json: vision_config is {vision!r}, but must be a JSON object: restore the file")
    all_defaults = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2} | defaults
    return config_json.ConfigJson(all_defaults | {name: value for name, value in vision.items() if value is not None})


def get_layers(settings: config_json.ConfigJson, key: str) -> tuple[int, ...]:
    """Returns the layer numbers under a key, in their order. Raises: UserError, if it holds no list of integers."""
    layers = settings[key]
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise UserError(f"config.json: {key} is {layers!r}, but must be a list of layer numbers: restore the file")
    return tuple(layers)


def make_tower_config(
    settings: config_json.ConfigJson, width_key: str, output_width_key: str, decoder_width: Any, **fields: Any
) -> VisionConfig:
    """Makes a VisionConfig from the result of `tower_settings`.

    width_key: key of the width of the tower's layers. output_width_key: key of the width of its output vectors.
    decoder_width: width of the text model, which the output must have. fields: further fields of VisionConfig. Raises:
    UserError, naming a key that does not fit.
    """
    count = config_json.get_count
    config = VisionConfig(
        depth=count(settings, "depth"),
        width=count(settings, width_key),
        heads=count(settings, "num_heads"),
        patch_size=count(settings, "patch_size"),
        merge_size=count(settings, "spatial_merge_size"),
        patch_frames=count(settings, "temporal_patch_size"),
        activation=settings["hidden_act"],
        **fields,
    )
    rope = settings.get("rope_parameters") or {}
    config = replace(config, rope_theta=float(config_json.get_number(rope, "rope_theta", config.rope_theta)))
    check_tower(config, settings, width_key)
    if settings[output_width_key] != decoder_width:
        raise UserError(
            f"config.json: {output_width_key} in vision_config is {settings[output_width_key]}, but must equal "
            f"hidden_size of the text model, {decoder_width}: restore the file"
        )
    return config


def check_tower(config: VisionConfig, settings: config_json.ConfigJson, width_key: str) -> None:
    """Checks the sizes of a vision tower. Raises: UserError, naming a key of vision_config that does not fit.

    config: the tower's config. settings: content of vision_config. width_key: key of the tower's width.
    """
    if config.activation not in TOWER_ACTIVATIONS:
        raise UserError(
            f"config.json: hidden_act in vision_config is {config.activation!r}, but only "
            f"{', '.join(map(repr, TOWER_ACTIVATIONS))} are supported: use another checkpoint"
        )
    # A rotary embedding rotates half of a head's pairs by row and half by column, so the head size is a multiple of 4.
    if config.width % config.heads or (config.head_dim % 4 and not config.siglip):
        raise UserError(
            f"config.json: {width_key} in vision_config is {config.width}, but must be {config.heads} heads times "
            f"{'a whole number' if config.siglip else 'a multiple of 4'}: restore the file"
        )
    for key in ("in_channels", "in_chans", "num_channels"):
        if (channels := settings.get(key, CHANNELS)) != CHANNELS:
            raise UserError(
                f"config.json: {key} in vision_config is {channels}, but must be {CHANNELS}: use another checkpoint"
            )
