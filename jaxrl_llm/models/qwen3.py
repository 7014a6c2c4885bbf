"""The dense Qwen3 family: norms on query and key instead of Qwen2's biases."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.blocks import DecoderConfig


def decoder_config(hf: dict[str, Any], dtype: str, remat: str) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    if hf.get("attention_bias"):
        raise UserError("config.json: attention_bias is true: only Qwen3 without attention biases is supported")
    shared = qwen2.decoder_config(hf, dtype, remat)
    head_dim = hf.get("head_dim") or 128  # the default of the family, not width / heads
    return dataclasses.replace(shared, head_dim=head_dim, qkv_bias=False, qk_norm=True)
