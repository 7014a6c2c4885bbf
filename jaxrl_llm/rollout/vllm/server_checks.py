"""Checks that a vLLM server samples and scores as the run expects: its settings, and the model that it serves."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.config import DecoderConfig

# Required settings of a server -> (value, reason). With other values its samples would mean something else.
REQUIRED_SETTINGS = {
    "logprobs_mode": ("processed_logprobs", "its log-probabilities would not be those of the sampled distribution"),
    "generation_config": ("vllm", "the model folder's generation_config.json would change the sampling"),
}
# Fields of a model's config that may differ between server and trainer, because both read the same prompts and weights.
TRAINER_FIELDS = ("max_positions", "dtype", "remat", "transposed", "row_parts")


def check_settings(
    server: str, server_config: dict[str, Any], dtype: str, max_prompt_tokens: int, max_completion_tokens: int
) -> None:
    """Checks a server's settings. server_config: its "vllm_config"; dtype: dtype of the run's model.

    Raises: UserError, if the settings would change the samples or do not fit the run.
    """
    model, backend = server_config["model_config"], (server_config["weight_transfer_config"] or {}).get("backend")
    for name, (required, reason) in REQUIRED_SETTINGS.items():
        if model[name] != required:
            raise UserError(
                f"vLLM at {server} has {name} = {model[name]!r}, with which {reason}: start it with {required!r}"
            )
    if backend != "pull":  # the backend of `vllm.receive`
        raise UserError(
            f"vLLM at {server} has the weight-transfer backend {backend!r} instead of 'pull': start it with jaxrl "
            "serve-vllm"
        )
    if max_prompt_tokens + max_completion_tokens > model["max_model_len"]:
        raise UserError(
            f"vLLM at {server} accepts {model['max_model_len']} tokens, but a prompt may have {max_prompt_tokens} and "
            f"a completion {max_completion_tokens}: start it with a larger --max-model-len"
        )
    if model["dtype"] != f"torch.{dtype}":
        raise UserError(
            f"config.model.dtype = {dtype!r}: vLLM at {server} computes in {model['dtype']}; use the same dtype for "
            "both"
        )


def check_model(server: str, config_json: dict[str, Any], model: DecoderConfig) -> None:
    """Compares the config.json of a server's model with the run's model, because models of equal shapes may differ.

    Raises: UserError, if a field that the trainer reads is different.
    """
    try:
        server_model = hf.read_decoder_config(model.family, config_json)
        server_model = replace(server_model, **{name: getattr(model, name) for name in TRAINER_FIELDS})
    except UserError as error:
        raise UserError(f"vLLM at {server} serves another model ({error}): serve the run's model") from None
    if server_model.vision and model.vision:
        # These fields come from preprocessor_config.json, which a server does not report.
        vision = replace(server_model.vision, pixel_mean=model.vision.pixel_mean, pixel_std=model.vision.pixel_std)
        server_model = replace(server_model, vision=vision)
    pairs = {field.name: (getattr(server_model, field.name), getattr(model, field.name)) for field in fields(model)}

    def describe(name: str, server_value: Any, run_value: Any) -> str:
        # Only numbers and texts are shown. A rotary embedding, for example, is a long list of frequencies.
        is_short = isinstance(server_value, int | float | str)
        return f"{name} = {server_value}, not {run_value}" if is_short else name

    if differences := [describe(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]:
        raise UserError(f"vLLM at {server} serves another model ({'; '.join(differences)}): serve the run's model")
