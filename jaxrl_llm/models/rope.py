"""Rotary position embedding (arXiv 2104.09864), with the frequencies that config.json asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Array

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # supported values of rope_type in config.json


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: for each pair of dimensions of a head, how far a position rotates it."""

    frequencies: tuple[float, ...]  # [h / 2] float32, radians per position
    scale: float = 1.0  # factor of cosine and sine
    # [h / 2]: for each frequency, the axis (time, row or column) of an image's positions; () = the first axis for all.
    axes: tuple[int, ...] = ()


def default_rope(theta: float, size: int) -> Rope:
    """Returns the unscaled rotary embedding of heads of this size, with frequencies theta^(-2 i / size)."""
    return Rope(_as_tuple(_default_frequencies(theta, size)))


def rotary_angles(positions: Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [B, N, T, h / 2] for positions [B, N, T], or [B, N, T, 3] for time, row and column."""
    # Positions are float32 whatever the model's dtype, because bfloat16 cannot represent all integers above 256.
    coordinates = positions.astype(jnp.float32)
    if coordinates.ndim == 4:
        # Take the position's time, row or column for each frequency.
        axis_of_frequency = rope.axes or (0,) * len(rope.frequencies)
        coordinates = coordinates[..., np.array(axis_of_frequency)]
    else:
        coordinates = coordinates[..., None]
    angles = coordinates * jnp.asarray(rope.frequencies, jnp.float32)[None, None, None]
    # A scale of 1 is skipped, because the product would be one more operation in each program.
    if rope.scale == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale


def rotate(x: Array, angles: tuple[Array, Array]) -> jax.Array:
    """Rotates queries or keys x [B, N, T, heads, h] in float32. angles: cosine and sine from `rotary_angles`."""
    cos, sin = (part[..., None, :] for part in angles)  # [B, N, T, 1, h / 2]
    # Dimension i is paired with dimension i + h / 2, as in checkpoints of transformers. The paper pairs neighbouring
    # dimensions.
    first_half, second_half = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first_half * cos - second_half * sin, second_half * cos + first_half * sin], axis=-1)


def rope_settings(hf: dict[str, Any], layers: str = "full_attention") -> dict[str, Any]:
    """Returns the rope settings of one kind of layers from a config.json, as transformers reads them.

    hf: content of config.json. layers: "full_attention" or "sliding_attention". Raises: UserError, if the settings are
    no JSON object or have an unsupported type.
    """
    # Old files have rope_scaling. transformers 5 writes rope_parameters, once or for each kind of layers.
    settings = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if isinstance(settings, dict) and isinstance(settings.get(layers), dict):
        settings = settings[layers]
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise UserError(
            f"config.json: rope_scaling or rope_parameters is {settings!r}, but must be a JSON object: restore the file"
        )
    settings = {name: value for name, value in settings.items() if value is not None}
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        explanation = ""
        if rope_type == "dynamic":
            explanation = ", because it changes the positions of cached tokens with the length of the text"
        raise UserError(
            f"config.json: rope type {rope_type!r} is not supported{explanation}, "
            f"only {', '.join(ROPE_TYPES)} are: remove the rope scaling from config.json, and keep texts within the "
            "number of positions that the model was pre-trained with"
        )
    if settings.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(
            "config.json: partial_rotary_factor must be 1, because models that rotate only a part of each head are not "
            "supported: use another checkpoint"
        )
    # A rope_theta in the rope settings overrides rope_theta at the top level, as in transformers.
    return {"rope_theta": hf.get("rope_theta", 10_000.0)} | settings | {"rope_type": rope_type}


def make_rope(rope: dict[str, Any], size: int, max_positions: int) -> Rope:
    """Makes the rotary embedding of heads of this size from rope settings of a config.json.

    rope: result of `rope_settings`. max_positions: value of max_position_embeddings. Raises: UserError, naming a
    setting that is missing or no number.
    """
    original_positions = rope.get("original_max_position_embeddings", max_positions)
    settings = {"original_max_position_embeddings": original_positions} | rope
    for name, value in settings.items():
        if name not in ("rope_type", "type", "truncate") and not isinstance(value, (int, float)):
            raise UserError(
                f"config.json: {name} in the rope settings is {value!r}, but must be a number: restore the file"
            )
    # All rope types but "default" change the frequencies, so that a model reads longer texts than in pre-training.
    frequencies = _default_frequencies(rope["rope_theta"], size)
    try:
        if rope["rope_type"] == "linear":
            return Rope(_as_tuple(frequencies / np.float32(settings["factor"])))
        if rope["rope_type"] == "llama3":
            return Rope(_as_tuple(_llama3_frequencies(frequencies, settings)))
        if rope["rope_type"] == "yarn":
            return Rope(_as_tuple(_yarn_frequencies(frequencies, settings)), _yarn_scale(settings))
    except KeyError as error:
        raise UserError(
            f"config.json: the rope settings lack {error.args[0]!r}, which rope type {rope['rope_type']!r} needs: "
            "restore the file"
        ) from None
    return Rope(_as_tuple(frequencies))


def _default_frequencies(theta: float, size: int) -> np.ndarray:
    """Returns the unscaled frequencies [size / 2] of a head: theta^(-2 i / size)."""
    # All operations are float32, as in transformers and vLLM, because float64 would give other angles at large
    # positions.
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.float32(1) / np.float32(theta) ** exponents


def _as_tuple(frequencies: np.ndarray) -> tuple[float, ...]:
    """Returns frequencies in a form that can be hashed, because a `Rope` is a part of the model's config."""
    return tuple(frequencies.astype(np.float32).tolist())


def _llama3_frequencies(frequencies: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Returns Llama 3.1's frequencies: it divides low frequencies by `factor`, and keeps high frequencies.

    Frequencies in between are mixed. frequencies: unscaled frequencies. rope: rope settings of config.json.
    """
    # Number of times that each pair of dimensions turns around within the length of pre-training.
    rotations = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low_factor, high_factor = rope["low_freq_factor"], rope["high_freq_factor"]
    kept_share = np.clip((rotations - low_factor) / (high_factor - low_factor), 0, 1)
    return (1 - kept_share) * frequencies / rope["factor"] + kept_share * frequencies


def _yarn_frequencies(frequencies: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Returns YaRN's frequencies (arXiv 2309.00071, section 3.2), from unscaled ones and the settings of config.json.

    Frequencies with more than beta_fast rotations within the length of pre-training are kept. Frequencies with fewer
    than beta_slow rotations are divided by `factor`, and frequencies in between are interpolated.
    """
    half_size, original_positions = len(frequencies), rope["original_max_position_embeddings"]

    def find_index(rotations: float) -> float:
        """Returns the index, as a fraction, of the frequency with this number of rotations."""
        return half_size * math.log(original_positions / (rotations * 2 * math.pi)) / math.log(rope["rope_theta"])

    first_index, last_index = find_index(rope.get("beta_fast") or 32), find_index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        # The bounds are rounded outwards, as in the paper's code. Some models, such as gpt-oss, switch it off.
        first_index, last_index = math.floor(first_index), math.ceil(last_index)
    first_index, last_index = max(first_index, 0), min(last_index, 2 * half_size - 1)
    # If both bounds round to one index, 0.001 avoids a division by 0, as in YaRN's code.
    index_range = (last_index - first_index) or 0.001
    divided_share = np.clip((np.arange(half_size) - first_index) / index_range, 0, 1)
    return divided_share * frequencies / rope["factor"] + (1 - divided_share) * frequencies


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Returns YaRN's factor of cosine and sine, which sets the temperature of the softmax (section 3.4)."""
    if "attention_factor" in rope:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def extended_positions(rope: dict[str, Any], max_positions: int) -> int:
    """Returns the number of positions of a model. With YaRN it is `factor` times the pre-training length."""
    if rope["rope_type"] != "yarn":
        return max_positions
    return max(max_positions, int(rope["factor"] * rope.get("original_max_position_embeddings", max_positions)))
