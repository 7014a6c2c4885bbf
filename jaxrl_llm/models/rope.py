"""Rotary position embedding (arXiv 2104.09864): its frequencies, by the settings of config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Array

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of layers."""

    frequencies: tuple[float, ...]  # [h / 2] float32, radians per position
    scale: float = 1.0  # of cosine and sine
    axes: tuple[int, ...] = ()  # [h / 2], for each frequency the axis of positions that have several; (): the first


def plain(theta: float, size: int) -> Rope:
    """Frequencies theta^(-2 i / size) of heads of this size."""
    return Rope(_tuple(_plain(theta, size)))


def rotary(positions: Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, N, T, h / 2] for positions [B, N, T], or [B, N, T, 3] along several axes."""
    # Positions are float32 whatever the model's dtype, because bfloat16 cannot count above 256.
    at = positions.astype(jnp.float32)
    at = at[..., np.array(rope.axes or (0,) * len(rope.frequencies))] if at.ndim == 4 else at[..., None]
    angles = at * jnp.asarray(rope.frequencies, jnp.float32)[None, None, None]
    # A product with 1 would be one more operation in each program.
    if rope.scale == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale


def rotate(x: Array, angles: tuple[Array, Array]) -> jax.Array:
    """Applies `rotary`'s cosine and sine to x [B, N, T, heads, h] -> float32. Pairs dimension i with i + h / 2."""
    cos, sin = (a[..., None, :] for a in angles)
    # Checkpoints of transformers have the dimensions in this order. The paper pairs neighbours.
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def settings(hf: dict[str, Any], layers: str = "full_attention") -> dict[str, Any]:
    """Returns the rope settings of one kind of layers, as transformers reads them from old and new config.json.

    Raises: UserError, if they are no JSON object or of a kind that is not supported.
    """
    # Old files have rope_scaling; transformers 5 writes rope_parameters, for one kind of layers or for each.
    settings = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if isinstance(settings, dict) and isinstance(settings.get(layers), dict):
        settings = settings[layers]
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise UserError(f"config.json: the rope settings are {settings!r}: restore the file")
    settings = {name: value for name, value in settings.items() if value is not None}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        why = " (it changes with the length of a text, so that tokens could not be computed once)"
        raise UserError(
            f"config.json: rope type {kind!r} is not supported{why if kind == 'dynamic' else ''}, only "
            f"{', '.join(KINDS)}: take the rope scaling out, and stay within the positions that the model was first "
            "trained with"
        )
    if settings.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError("config.json: partial_rotary_factor is not 1: only heads that rotate as a whole are supported")
    # A theta among the settings wins, as in rope_parameters.
    return {"rope_theta": hf.get("rope_theta", 10_000.0)} | settings | {"rope_type": kind}


def read(rope: dict[str, Any], size: int, max_positions: int) -> Rope:
    """Makes the rotary embedding of heads of this size; max_positions: value of max_position_embeddings.

    Raises: UserError, naming a setting that is missing or no number.
    """
    original = rope.get("original_max_position_embeddings", max_positions)
    numbers = {"original_max_position_embeddings": original} | rope
    for name, value in numbers.items():
        if name not in ("rope_type", "type", "truncate") and not isinstance(value, (int, float)):
            raise UserError(f"config.json: {name} of the rope settings is {value!r}, which is no number: restore it")
    base = _plain(rope["rope_theta"], size)
    try:
        if rope["rope_type"] == "linear":
            return Rope(_tuple(base / np.float32(numbers["factor"])))
        if rope["rope_type"] == "llama3":
            return Rope(_tuple(_llama3(base, numbers)))
        if rope["rope_type"] == "yarn":
            return Rope(_tuple(_yarn(base, numbers)), _yarn_scale(numbers))
    except KeyError as error:
        raise UserError(f"config.json: the rope settings have no {error.args[0]!r}: restore the file") from None
    return Rope(_tuple(base))


def _plain(theta: float, size: int) -> np.ndarray:
    # All steps are float32, as in transformers and vLLM: float64 would give other angles at large positions.
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.float32(1) / np.float32(theta) ** exponents


def _tuple(frequencies: np.ndarray) -> tuple[float, ...]:
    return tuple(frequencies.astype(np.float32).tolist())


def _llama3(base: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Llama 3.1: divides low frequencies by `factor`, leaves high ones, and interpolates in between."""
    turns = rope["original_max_position_embeddings"] * base / (2 * np.pi)  # within the positions of pre-training
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - unscaled) * base / rope["factor"] + unscaled * base


def _yarn(base: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """YaRN (arXiv 2309.00071), section 3.2: dimensions between beta_fast and beta_slow turns are interpolated."""
    half, length = len(base), rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        # Outwards, as the paper's own code. A file may switch it off, as that of gpt-oss does.
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # 0.001, as in YaRN's own code: both bounds may round to the same dimension.
    divided = np.clip((np.arange(half) - low) / ((high - low) or 0.001), 0, 1)
    return divided * base / rope["factor"] + (1 - divided) * base


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Factor of cosine and sine: YaRN's temperature of the softmax, section 3.4."""
    if "attention_factor" in rope:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def longest(rope: dict[str, Any], max_positions: int) -> int:
    """Returns the number of positions. With YaRN, config.json states those before it, and vLLM counts them so too."""
    if rope["rope_type"] != "yarn":
        return max_positions
    return max(max_positions, int(rope["factor"] * rope.get("original_max_position_embeddings", max_positions)))
