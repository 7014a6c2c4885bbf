"""The Qwen3-VL family with a mixture of experts: the tower of Qwen3-VL, and experts instead of an MLP in each layer."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import names, qwen3_moe, qwen3_vl, vision_json
from jaxrl_llm.models.config import DecoderConfig

# All experts of a layer are one tensor, with the axes of the parameter.
FUSED = {
    "layers/experts/router/kernel": "model.layers.{}.mlp.gate.weight",
    "layers/experts/gate_up/kernel": "model.layers.{}.mlp.experts.gate_up_proj",
    "layers/experts/down/kernel": "model.layers.{}.mlp.experts.down_proj",
}
NAMES = names.module_names(names.DENSE | names.DEEP_TOWER | FUSED)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    text = vision_json.text_settings(hf, rope_theta=500_000.0)
    # The outer key counts, because newer versions of transformers write their default into text_config.
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings"))
    # Transformers ignores norm_topk_prob for this family: the weights of the chosen experts always sum to 1.
    experts = qwen3_moe.expert_fields(text, normalized=True, fused=True)
    return qwen3_vl.make_decoder_config(hf, text, qk_norm=True, **experts)
