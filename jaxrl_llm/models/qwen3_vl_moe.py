"""The Qwen3-VL family with a mixture of experts: the tower of Qwen3-VL, and experts instead of an MLP in each layer."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import names, qwen3_moe, qwen3_vl, vision_json
from jaxrl_llm.models.config import DecoderConfig

# The experts of a layer are one tensor, as the parameter has them.
FUSED = {
    "layers/experts/router/kernel": "model.layers.{}.mlp.gate.weight",
    "layers/experts/gate_up/kernel": "model.layers.{}.mlp.experts.gate_up_proj",
    "layers/experts/down/kernel": "model.layers.{}.mlp.experts.down_proj",
}
NAMES = names.modules(names.DENSE | names.DEEP_TOWER | FUSED)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = vision_json.text_settings(hf, rope_theta=500_000.0)
    # Inside, newer versions of transformers write their default.
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings"))
    # The weights of the chosen experts add up to 1, whatever norm_topk_prob says.
    experts = qwen3_moe.experts(text, normalized=True, fused=True)
    return qwen3_vl.decoder(hf, text, qk_norm=True, **experts)
