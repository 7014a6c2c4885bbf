"""The Mixtral family: Mistral's attention, and experts instead of an MLP in each layer."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import DENSE

NAMES = DENSE | {
    "layers/experts/router/kernel": "model.layers.{}.block_sparse_moe.gate.weight",
    "layers/experts/gate/kernel": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "layers/experts/up/kernel": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "layers/experts/down/kernel": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    # layer_types is ignored, as in transformers.
    uniform = {name: value for name, value in hf.items() if name != "layer_types"}
    settings = config_json.read_settings(uniform, rope_theta=1_000_000.0)
    default_local = ["sliding_window" in settings] * settings["num_hidden_layers"]
    fields = {"qkv_bias": False, "output_bias": False} | config_json.window_fields(settings, default_local)
    fields["mixture"] = config_json.make_mixture(settings, "num_local_experts", normalized=True)
    return config_json.make_decoder_config(settings, **fields)
