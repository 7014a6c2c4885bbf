"""Tiny random checkpoints of every family, and what `transformers` computes with them.

Made, from the root of the repository, by

    pip install -e .[parity] && python tests/make_references.py [NAMES]

tests/references/<name>/ then holds what `save_pretrained` writes and reference.npz:

    tokens_left, mask_left, tokens_right, mask_right   [B, P], the same rows padded on either side
    logits_left, logits_right                          [real tokens, V], rows of mask in order
    greedy_left                                        [B, 12], `generate` after tokens_left, 0 after a stop
    prompts, greedy_prompts                            [B, P] and [B, 12], the same without padding

tests/test_hf.py compares our models with these, and (with -m parity) with fresh ones.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FOLDER = Path(__file__).parent / "references"
NEW_TOKENS = 12
LENGTHS = (3, 9, 6, 12)  # of the rows of `tokens_*`
CLEAR = 1e-3  # the least lead of a greedy token over the next: far above rounding
SHARED = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # large enough to be seen in the logits
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# Bounds and window so small that they change the logits.
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
torch.set_num_threads(1)  # more are slower on matrices this small

# name: (seed, class, config, bytes of a shard). No value here is the family's default if it can differ.
MODELS: dict[str, tuple[int, type, Any, int | str]] = {
    "qwen2_tied": (1, Qwen2ForCausalLM, Qwen2Config(
        **SHARED, vocab_size=64, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    ), "1GB"),
    "qwen2_untied": (5, Qwen2ForCausalLM, Qwen2Config(
        **SHARED, vocab_size=61, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ), "1GB"),
    "qwen3_tied": (12, Qwen3ForCausalLM, Qwen3Config(
        **SHARED, vocab_size=64, head_dim=16, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ), "1GB"),
    "qwen3_untied": (12, Qwen3ForCausalLM, Qwen3Config(
        **SHARED, vocab_size=64, head_dim=24, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    ), "40KB"),
    "qwen2_window": (1, Qwen2ForCausalLM, Qwen2Config(
        **SHARED, vocab_size=64, tie_word_embeddings=True, rope_parameters=YARN, use_sliding_window=True,
        sliding_window=4, max_window_layers=1,
    ), "1GB"),
    "llama": (1, LlamaForCausalLM, LlamaConfig(
        **SHARED, vocab_size=64, tie_word_embeddings=False, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True,
    ), "1GB"),
    "mistral": (1, MistralForCausalLM, MistralConfig(
        **SHARED, vocab_size=64, tie_word_embeddings=False, sliding_window=5, head_dim=16,
        rope_parameters={"rope_type": "linear", "rope_theta": 1_000.0, "factor": 2.0},
    ), "1GB"),
    "gemma2": (0, Gemma2ForCausalLM, Gemma2Config(
        **SHARED | GEMMA, vocab_size=64, attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    ), "1GB"),
    "gemma3_text": (0, Gemma3ForCausalLM, Gemma3TextConfig(
        **SHARED | GEMMA, vocab_size=64, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ), "1GB"),
    "qwen3_moe": (0, Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SHARED, vocab_size=64, head_dim=16, tie_word_embeddings=True, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=16, norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    ), "1GB"),
    "mixtral": (0, MixtralForCausalLM, MixtralConfig(
        **SHARED | {"intermediate_size": 24}, vocab_size=64, tie_word_embeddings=False, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=6, rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    ), "1GB"),
}  # fmt: skip


def build(name: str, seed: int) -> Any:
    """A float32 model with every weight, bias and norm drawn, and two stop ids that its greedy text meets."""
    _, kind, config, _ = MODELS[name]
    return drawn(kind, config, seed)


def drawn(kind: type, config: Any, seed: int) -> Any:
    """`build` for a class and its config."""
    generator = torch.Generator().manual_seed(seed)
    model = kind(config).eval()
    center = 0 if kind.__name__.startswith("Gemma") else 1  # of a norm's weights
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.copy_(center + 0.3 * noise)
            else:
                parameter.copy_((0.5 if parameter_name.endswith("bias") else 0.2) * noise)
    inputs = inputs_of(config.vocab_size, seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    free = generate(model, inputs["tokens_left"], inputs["mask_left"])
    # Two of the tokens that it writes stop it, of which config.json knows one only: as in published checkpoints.
    first = int(free[0, 5])
    second = next((int(token) for token in free[1, 6:] if token != first), None)
    if second is None:
        raise ValueError("two rows go on with the same token for ever: choose another seed")
    model.config.eos_token_id = first
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=[first, second])
    return model


def other_rope(name: str, seed: int, **rope: Any) -> Any:
    """A model of MODELS with other rope settings, and without stop ids."""
    _, kind, config, _ = MODELS[name]
    model = drawn(kind, type(config)(**config.to_dict() | ({"rope_parameters": rope} if rope else {})), seed)
    model.config.eos_token_id, model.generation_config = None, GenerationConfig(pad_token_id=0)
    return model


def inputs_of(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Rows of random tokens of several lengths, padded on either side, and prompts without padding."""
    rng = np.random.default_rng(seed)
    width = max(LENGTHS)
    shape = (len(LENGTHS), width)
    inputs = {f"tokens_{side}": np.zeros(shape, np.int32) for side in ("left", "right")}
    inputs |= {f"mask_{side}": np.zeros(shape, bool) for side in ("left", "right")}
    for row, length in enumerate(LENGTHS):
        tokens = rng.integers(1, vocab_size, length)
        for side, span in (("left", slice(width - length, width)), ("right", slice(length))):
            inputs[f"tokens_{side}"][row, span] = tokens
            inputs[f"mask_{side}"][row, span] = True
    return inputs | {"prompts": rng.integers(1, vocab_size, shape).astype(np.int32)}


def logits(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits [real tokens, V]; positions count real tokens, as `generate` counts them."""
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        out = model(_ids(tokens), attention_mask=_ids(mask), position_ids=_ids(positions))
    return out.logits.numpy()[mask]


def generate(model: Any, tokens: np.ndarray, mask: np.ndarray, new_tokens: int = NEW_TOKENS) -> np.ndarray:
    """Greedy continuations [B, 12], 0 after a stop id. Fails where the choice is too close to call."""
    out = model.generate(
        _ids(tokens), attention_mask=_ids(mask), max_new_tokens=new_tokens, do_sample=False,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    lead = np.stack([-np.diff(torch.topk(scores, 2).values.numpy())[:, 0] for scores in out.scores], axis=1)
    written = out.sequences.numpy()[:, tokens.shape[1] :]
    stops = np.isin(written, model.generation_config.eos_token_id or [])
    alive = np.cumsum(stops, axis=1) - stops == 0
    if np.any(stops) and np.min(lead[alive]) < CLEAR:
        raise ValueError(f"a greedy token leads by {np.min(lead[alive]):.1e} only: choose another seed")
    padded = np.zeros((len(tokens), new_tokens), np.int32)
    padded[:, : written.shape[1]] = written
    return padded


def reference(model: Any, seed: int) -> dict[str, np.ndarray]:
    """The arrays of reference.npz."""
    arrays = inputs_of(model.config.vocab_size, seed)
    for side in ("left", "right"):
        arrays[f"logits_{side}"] = logits(model, arrays[f"tokens_{side}"], arrays[f"mask_{side}"])
    arrays["greedy_left"] = generate(model, arrays["tokens_left"], arrays["mask_left"])
    arrays["greedy_prompts"] = generate(model, arrays["prompts"], np.ones_like(arrays["prompts"], bool))
    return arrays


def load(folder: Path) -> Any:
    """The model of a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def _ids(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        seed, _, _, shard = MODELS[name]
        model = build(name, seed)
        arrays = reference(model, seed)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        model.save_pretrained(FOLDER / name, max_shard_size=shard)
        np.savez_compressed(FOLDER / name / "reference.npz", **arrays)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size / 1024:.0f} KiB in {len(list((FOLDER / name).iterdir()))} files")


if __name__ == "__main__":
    main()
