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
    settings = config_json.read(hf, norm_topk_prob=False)
    fields = experts(settings, normalized=settings["norm_topk_prob"])
    if settings.get("use_sliding_window"):  # in all layers
        fields |= config_json.windows(settings, [True] * settings["num_hidden_layers"])
    return config_json.decoder(settings, qk_norm=True, **fields)


def experts(settings: config_json.ConfigJson, *, normalized: bool, fused: bool = False) -> dict[str, Any]:
    """Returns the fields of DecoderConfig on experts. Raises: UserError, naming a key, if some layers have none."""
    settings = config_json.ConfigJson({"decoder_sparse_step": 1, "mlp_only_layers": []} | settings)
    if settings["mlp_only_layers"] or settings["decoder_sparse_step"] != 1:
        key = "mlp_only_layers" if settings["mlp_only_layers"] else "decoder_sparse_step"
        raise UserError(
            f"config.json: {key} is {settings[key]!r}: only models with experts in all layers are supported"
        )
    # The hub's files have the first key; transformers 5 writes the second one.
    number = "num_experts" if "num_experts" in settings else "num_local_experts"
    return {
        "mlp_width": config_json.count(settings, "moe_intermediate_size"),
        "mixture": replace(config_json.mixture(settings, number, normalized=normalized), fused=fused),
    }
