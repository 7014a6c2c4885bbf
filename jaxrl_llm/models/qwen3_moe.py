"""The Qwen3 family with a mixture of experts: Qwen3's attention, and experts instead of an MLP in each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import EXPERTS

NAMES = EXPERTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = config_json.read_settings(hf, norm_topk_prob=False)
    fields = expert_fields(settings, normalized=settings["norm_topk_prob"])
    if settings.get("use_sliding_window"):  # It holds for all layers.
        fields |= config_json.window_fields(settings, [True] * settings["num_hidden_layers"])
    return config_json.make_decoder_config(settings, qk_norm=True, **fields)


def expert_fields(settings: config_json.ConfigJson, *, normalized: bool, fused: bool = False) -> dict[str, Any]:
    """Returns the fields of DecoderConfig for experts. Raises: UserError, if some layers have no experts.

    normalized, fused: fields of `Mixture`.
    """
    settings = config_json.ConfigJson({"decoder_sparse_step": 1, "mlp_only_layers": []} | settings)
    if settings["mlp_only_layers"] or settings["decoder_sparse_step"] != 1:
        key = "mlp_only_layers" if settings["mlp_only_layers"] else "decoder_sparse_step"
        raise UserError(
            f"config.json: {key} is {settings[key]!r}, but only models with experts in all layers are supported: use "
            "another checkpoint"
        )
    # Files on the hub have num_experts. transformers 5 writes num_local_experts.
    count_key = "num_experts" if "num_experts" in settings else "num_local_experts"
    return {
        "mlp_width": config_json.get_count(settings, "moe_intermediate_size"),
        "mixture": replace(config_json.make_mixture(settings, count_key, normalized=normalized), fused=fused),
    }
