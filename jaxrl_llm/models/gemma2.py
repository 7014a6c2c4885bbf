"""The Gemma 2 family: bounded scores and logits, and a sliding window in every other layer."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config_json
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import GEMMA

NAMES = GEMMA


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Converts a Hugging Face config.json of this family to a DecoderConfig.

    Raises: UserError, naming a key that is missing or asks for an unsupported feature.
    """
    settings = read_settings(hf)
    fields = shared_fields(settings) | {
        "soft_cap": get_soft_cap(hf, "attn_logit_softcapping", 50.0),
        "final_soft_cap": get_soft_cap(hf, "final_logit_softcapping", 30.0),
    }
    # Older versions of transformers wrote files without layer_types, in which the even layers are local.
    fields |= config_json.window_fields(settings, [i % 2 == 0 for i in range(settings["num_hidden_layers"])])
    return config_json.make_decoder_config(settings, **fields)


def read_settings(hf: dict[str, Any]) -> config_json.ConfigJson:
    """Returns the settings with the defaults of the Gemma families. Raises: UserError, for bidirectional attention."""
    if hf.get("use_bidirectional_attention"):
        raise UserError(
            "config.json: use_bidirectional_attention is true, but only causal models are supported: use another "
            "checkpoint"
        )
    return config_json.read_settings(hf, tie_word_embeddings=True, head_dim=256, hidden_activation="gelu_pytorch_tanh")


def shared_fields(settings: config_json.ConfigJson) -> dict[str, Any]:
    """Returns the fields of DecoderConfig that all Gemma families set."""
    return {
        "activation": config_json.get_activation(settings, "hidden_activation"),
        "score_size": config_json.get_number(settings, "query_pre_attn_scalar", 256),
        "scaled_embedding": True,
        "unit_offset_norm": True,
        "post_norms": True,
    }


def get_soft_cap(hf: dict[str, Any], name: str, missing: float) -> float:
    """Returns the soft cap under a key; 0 if the key holds null. Raises: UserError, if the value is not a number.

    missing: soft cap of a file without the key.
    """
    return 0.0 if hf.get(name, missing) is None else float(config_json.get_number(hf, name, missing))
