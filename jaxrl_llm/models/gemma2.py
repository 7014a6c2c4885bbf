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
    settings = read(hf)
    fields = shared(settings) | {
        "soft_cap": cap(hf, "attn_logit_softcapping", 50.0),
        "final_soft_cap": cap(hf, "final_logit_softcapping", 30.0),
    }
    # Older files have no layer_types: there the even layers are local.
    fields |= config_json.windows(settings, [i % 2 == 0 for i in range(settings["num_hidden_layers"])])
    return config_json.decoder(settings, **fields)


def read(hf: dict[str, Any]) -> config_json.ConfigJson:
    """Returns the settings, with the defaults of the Gemma families. Raises: UserError, if tokens see later ones."""
    if hf.get("use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention is true: only models that write text are supported")
    return config_json.read(hf, tie_word_embeddings=True, head_dim=256, hidden_activation="gelu_pytorch_tanh")


def shared(settings: config_json.ConfigJson) -> dict[str, Any]:
    """Returns the fields of DecoderConfig that the Gemma families set alike."""
    return {
        "activation": config_json.activation(settings, "hidden_activation"),
        "score_size": config_json.number(settings, "query_pre_attn_scalar", 256),
        "gemma": True,
        "post_norms": True,
    }


def cap(hf: dict[str, Any], name: str, missing: float) -> float:
    """Returns the bound that a key asks for; null: none. Raises: UserError, if it is no number."""
    return 0.0 if hf.get(name, missing) is None else float(config_json.number(hf, name, missing))
