"""Reads the fields of config.json that vision-language models of the Qwen2 kind add to those of a text model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig, VisionConfig
from jaxrl_llm.models.vision import CHANNELS, TOWER_ACTIVATIONS

SECTIONS = ("type", "rope_type", "mrope_section", "mrope_interleaved")  # settings of the rotary embedding of images
PLACEHOLDERS = ("image_token_id", "video_token_id")


def decoder(
    settings: config_json.ConfigJson, tower: VisionConfig, *, interleaved: bool = False, **fields: Any
) -> DecoderConfig:
    """Makes the DecoderConfig of a text model with a tower, from `text_settings`.

    interleaved: whether neighbouring frequencies turn with other axes. fields: fields of the text model's family.
    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    plain, sections = without_sections(settings)
    cfg = config_json.decoder(plain, **fields)
    if len(sections) != 3 or 2 * sum(sections) != cfg.head_dim:
        raise UserError(
            f"config.json: mrope_section is {sections}, and must be three numbers whose sum is half of a head's size, "
            f"{cfg.head_dim // 2}: restore the file"
        )
    axes = np.repeat(np.arange(3), sections)
    if interleaved:
        # Time, row, column, time ... until an axis has its number of frequencies; the rest is time.
        axes = np.arange(len(axes))
        axes = np.where(axes < 3 * np.array(sections)[axes % 3], axes % 3, 0)
    never = tuple(settings[name] for name in PLACEHOLDERS if name in settings)
    return replace(cfg, rope=replace(cfg.rope, axes=tuple(axes.tolist())), vision=replace(tower, never=never))


def text_settings(hf: dict[str, Any], **defaults: Any) -> config_json.ConfigJson:
    """Returns the settings of the text model: newer files hold them in text_config.

    defaults: the family's, for keys that may be missing. Raises: UserError, as `config_json.read`.
    """
    nested = hf.get("text_config")
    text = nested if isinstance(nested, dict) else {name: hf[name] for name in hf.keys() - {"vision_config"}}
    # Older files may have it inside; there, outside is the default of transformers.
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False
    whole = {name: hf.get(name) for name in ("model_type", *PLACEHOLDERS)}
    settings = config_json.read(text | whole | {"tie_word_embeddings": tied}, **defaults)
    config_json.count(settings, PLACEHOLDERS[0])
    return settings


def without_sections(settings: config_json.ConfigJson) -> tuple[config_json.ConfigJson, list[int]]:
    """Returns the settings with the plain rotary embedding, and mrope_section: the frequencies of each axis.

    Raises: UserError, if the rope settings have no such list or ask for more.
    """
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(key)
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not isinstance(sections, list) or not all(type(x) is int and x >= 0 for x in sections):
        raise UserError(f"config.json: mrope_section is {sections!r}, and must be a list of numbers: restore the file")
    assert isinstance(rope, dict)
    kinds = {rope.get("type"), rope.get("rope_type")} - {None, "default", "mrope"}
    if kinds:
        raise UserError(
            f"config.json: rope type {kinds.pop()!r} is not supported with images: set it to 'default', keep "
            "mrope_section, and stay within the positions that the model was first trained with"
        )
    plain = {name: value for name, value in rope.items() if name not in SECTIONS}
    changed = config_json.ConfigJson(settings)
    changed[key] = plain | {"rope_type": "default"}
    return changed, sections


def tower_settings(hf: dict[str, Any], **defaults: Any) -> config_json.ConfigJson:
    """Returns vision_config; defaults: for keys that may be missing. Raises: UserError, if it is no JSON object."""
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise UserError(f"config.json: vision_config is {vision!r}: restore the file")
    usual = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2} | defaults
    return config_json.ConfigJson(usual | {name: value for name, value in vision.items() if value is not None})


def layers_of(settings: config_json.ConfigJson, key: str) -> tuple[int, ...]:
    """Returns numbers of layers in their order. Raises: UserError, if the key holds no list of them."""
    layers = settings[key]
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise UserError(f"config.json: {key} is {layers!r}, and must be a list of layers: restore the file")
    return tuple(layers)


def tower(settings: config_json.ConfigJson, width: str, output: str, decoder_width: Any, **fields: Any) -> VisionConfig:
    """Makes a VisionConfig from `tower_settings`. width, output: keys of the widths of its layers and its result.

    Raises: UserError, naming a key that does not fit.
    """
    count = config_json.count
    config = VisionConfig(
        depth=count(settings, "depth"),
        width=count(settings, width),
        heads=count(settings, "num_heads"),
        patch=count(settings, "patch_size"),
        merge=count(settings, "spatial_merge_size"),
        frames=count(settings, "temporal_patch_size"),
        activation=settings["hidden_act"],
        **fields,
    )
    rope = settings.get("rope_parameters") or {}
    config = replace(config, rope_theta=float(config_json.number(rope, "rope_theta", config.rope_theta)))
    check_tower(config, settings, width)
    if settings[output] != decoder_width:
        raise UserError(
            f"config.json: {output} of vision_config is {settings[output]}, and hidden_size of the text model "
            f"{decoder_width}: restore the file"
        )
    return config


def check_tower(config: VisionConfig, settings: config_json.ConfigJson, width: str) -> None:
    """Raises: UserError, naming a key of vision_config that does not fit. width: the key of the tower's width."""
    if config.activation not in TOWER_ACTIVATIONS:
        raise UserError(
            f"config.json: hidden_act of vision_config is {config.activation!r}: only "
            f"{', '.join(map(repr, TOWER_ACTIVATIONS))} are supported"
        )
    # Rows and columns each turn half of a head's pairs, if they do.
    if config.width % config.heads or (config.head_dim % 4 and not config.siglip):
        raise UserError(
            f"config.json: {width} of vision_config is {config.width}, which {config.heads} heads cannot divide"
            f"{'' if config.siglip else ' into multiples of 4'}: restore the file"
        )
    for key in ("in_channels", "in_chans", "num_channels"):
        if (channels := settings.get(key, CHANNELS)) != CHANNELS:
            raise UserError(f"config.json: {key} of vision_config is {channels}: only {CHANNELS} are supported")
