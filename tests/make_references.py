"""Tiny random checkpoints of every family, and what `transformers` computes with them.

Made, from the root of the repository, by

    pip install -e .[parity] && python tests/make_references.py [NAMES]

tests/references/<name>/ then holds what `save_pretrained` writes and reference.npz:

    tokens_left, mask_left, tokens_right, mask_right   [B, P], the same rows padded on either side
    logits_left, logits_right                          [real tokens, V], rows of mask in order
    greedy_left                                        [B, 12], `generate` after tokens_left, 0 after a stop
    prompts, greedy_prompts                            [B, P] and [B, 12], the same without padding

tests/models/test_hf.py compares our models with these, and (with -m parity) with fresh ones.

A model that reads images (extra `vision`) has a preprocessor_config.json, and other arrays, for
tests/models/test_vision.py:

    tokens, mask                   [B, P], prompts padded on the left, with a token for each merged token of an image
    completions, completion_mask   [B, C], that go on after the prompts
    greedy                         [B, 8], what `generate` writes after the prompts
    picture_0, picture_1 ...       [height, width, 3] uint8, of all prompts in order; counts [B]: how many each has
    positions                      [B, 3, P + C], by get_rope_index, 0 on padding
    logits                         [real tokens of prompts and completions, V], rows of the mask in order
    logprobs                       [real completion tokens], without the tokens that stand for images
    norm/..., part/...             of the gradient of the mean of `logprobs`: its norm and some of its numbers, for each
                                   parameter of the tower, by its name in the file
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # tokens: two that stand for an image and a film, and two around them
PATCH, MERGE, FRAMES = 4, 2, 2
SQUARE = 3  # rows, and columns, of merged tokens of all images of Gemma 3
TEXT = SHARED | {
    "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
TOWER = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES}
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
    "tie_word_embeddings": True,
}  # fmt: skip
# A window has 2 x 2 merged tokens, fewer than most images below.
VISION_MODELS: dict[str, tuple[int, type, Any]] = {
    "qwen2_vl": (3, Qwen2VLForConditionalGeneration, Qwen2VLConfig(
        text_config=TEXT, vision_config=TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 3}, **TOKENS,
    )),
    "qwen2_5_vl": (5, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
        text_config=TEXT, **TOKENS, vision_config=TOWER | {
            "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 40, "window_size": 2 * MERGE * PATCH,
            "fullatt_block_indexes": [1],
        },
    )),
    # Two layers of the tower give vectors to the first two of three layers.
    "qwen3_vl": (3, Qwen3VLForConditionalGeneration, Qwen3VLConfig(
        text_config=TEXT | {
            "num_hidden_layers": 3, "intermediate_size": 16, "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        vision_config=TOWER | {
            "hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 20, "num_heads": 1,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        },
        **TOKENS,
    )),
    # The head is not tied, and experts are fused tensors.
    "qwen3_vl_moe": (3, Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(
        text_config=TEXT | {
            "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        vision_config=TOWER | {
            "depth": 2, "hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 20, "num_heads": 1,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        **TOKENS | {"tie_word_embeddings": False},
    )),
    # A window of 5 tokens, fewer than the 9 of an image, which see each other also in the local layers.
    "gemma3": (0, Gemma3ForConditionalGeneration, Gemma3Config(
        text_config=SHARED | GEMMA | {
            "intermediate_size": 16, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
        vision_config={
            "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
            "image_size": SQUARE * MERGE * PATCH, "patch_size": PATCH, "layer_norm_eps": 1e-3, "vision_use_head": False,
        },
        mm_tokens_per_image=SQUARE**2, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
        bos_token_id=None, eos_token_id=None,
    )),
}  # fmt: skip
# Rows and columns of merged tokens of the images of each prompt: between texts, none, at both ends, several.
GRIDS = (((3, 5),), (), ((2, 2), (4, 3)), ((1, 3), (5, 1), (3, 3)))
COMPLETION, IMAGE_NEW_TOKENS = 6, 8


def build(name: str, seed: int) -> Any:
    """A float32 model with every weight, bias and norm drawn, and two stop ids that its greedy text meets."""
    _, kind, config, _ = MODELS[name]
    model, inputs = drawn(kind, config, seed), inputs_of(config.vocab_size, seed)
    free = generate(model, inputs["tokens_left"], inputs["mask_left"])
    # Two of the tokens that it writes stop it, of which config.json knows one only: as in published checkpoints.
    first = int(free[0, 5])
    second = next((int(token) for token in free[1, 6:] if token != first), None)
    if second is None:
        raise ValueError("two rows go on with the same token for ever: choose another seed")
    model.config.eos_token_id = first
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=[first, second])
    return model


def drawn(kind: type, config: Any, seed: int) -> Any:
    """A float32 model with every weight, bias and norm drawn, and without stop ids."""
    generator = torch.Generator().manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif "norm" in name or "ln_q" in name:
                centered = kind.__name__.startswith("Gemma") and "vision_tower" not in name
                parameter.copy_((0 if centered else 1) + 0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def other_rope(name: str, seed: int, **rope: Any) -> Any:
    """A model of MODELS with other rope settings, and without stop ids."""
    _, kind, config, _ = MODELS[name]
    return drawn(kind, type(config)(**config.to_dict() | ({"rope_parameters": rope} if rope else {})), seed)


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


def generate(
    model: Any, tokens: np.ndarray, mask: np.ndarray, new_tokens: int = NEW_TOKENS, **images: Any
) -> np.ndarray:
    """Greedy continuations [B, 12], 0 after a stop id. Fails where the choice is too close to call."""
    out = model.generate(
        _ids(tokens), attention_mask=_ids(mask), max_new_tokens=new_tokens, do_sample=False,
        output_scores=True, return_dict_in_generate=True, **images,
    )  # fmt: skip
    lead = np.stack([-np.diff(torch.topk(scores, 2).values.numpy())[:, 0] for scores in out.scores], axis=1)
    written = out.sequences.numpy()[:, tokens.shape[1] :]
    stops = np.isin(written, model.generation_config.eos_token_id or [])
    alive = np.cumsum(stops, axis=1) - stops == 0
    if (np.any(stops) or images) and np.min(lead[alive]) < CLEAR:
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


def image_inputs(seed: int, squares: bool) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Prompts padded on the left, with completions of several lengths, and the images of each prompt."""
    all_grids = [[(SQUARE, SQUARE)] * len(grids) for grids in GRIDS] if squares else GRIDS
    rng = np.random.default_rng(seed)
    text = lambda most: rng.integers(1, IMAGE, rng.integers(1, most)).tolist()  # noqa: E731
    prompts, images = [], []
    for row, grids in enumerate(all_grids):
        # The third prompt begins and ends with an image.
        tokens = [] if row == 2 else text(5)
        for i, (height, width) in enumerate(grids):
            tokens += [START, *[IMAGE] * (height * width), END]
            tokens += [] if row == 2 and i == len(grids) - 1 else text(4)
        prompts.append(tokens or text(5))
        sides = [(height * MERGE * PATCH, width * MERGE * PATCH, 3) for height, width in grids]
        images.append([rng.integers(0, 256, shape).astype(np.uint8) for shape in sides])
    prompts[1] += text(9)
    width = max(map(len, prompts))
    arrays = {"tokens": np.zeros((len(prompts), width), np.int32), "mask": np.zeros((len(prompts), width), bool)}
    for row, tokens in enumerate(prompts):
        arrays["tokens"][row, width - len(tokens) :], arrays["mask"][row, width - len(tokens) :] = tokens, True
    lengths = np.array([COMPLETION, 2, 4, 5])
    arrays["completion_mask"] = np.arange(COMPLETION)[None] < lengths[:, None]
    drawn_tokens = rng.integers(1, IMAGE, arrays["completion_mask"].shape)
    arrays["completions"] = np.where(arrays["completion_mask"], drawn_tokens, 0).astype(np.int32)
    arrays |= {f"picture_{i}": image for i, image in enumerate(x for row in images for x in row)}
    return arrays | {"counts": np.array([len(row) for row in images])}, images


def vision_reference(model: Any, processor: Any, seed: int) -> dict[str, np.ndarray]:
    """The arrays of reference.npz of a model that reads images."""
    squares = model.config.model_type == "gemma3"
    never = [IMAGE] if squares else [IMAGE, VIDEO]
    arrays, images = image_inputs(seed, squares)
    processed = processor([x for row in images for x in row], return_tensors="pt")
    tokens = np.concatenate([arrays["tokens"], arrays["completions"]], axis=1)
    mask = np.concatenate([arrays["mask"], arrays["completion_mask"]], axis=1)
    inputs = {
        "input_ids": _ids(tokens), "attention_mask": _ids(mask), "pixel_values": processed["pixel_values"],
        "token_type_ids" if squares else "mm_token_type_ids": _ids(tokens == IMAGE).int(),
    }  # fmt: skip
    if squares:
        positions = torch.from_numpy(np.maximum(np.cumsum(mask, axis=1) - 1, 0))
        in_three = np.broadcast_to(positions.numpy(), (3, *mask.shape))
    else:
        inputs["image_grid_thw"] = processed["image_grid_thw"]
        expected = [(1, MERGE * height, MERGE * width) for grids in GRIDS for height, width in grids]
        assert processed["image_grid_thw"].tolist() == [list(grid) for grid in expected]
        grid, kinds = inputs["image_grid_thw"], inputs["mm_token_type_ids"]
        positions, _ = model.model.get_rope_index(
            inputs["input_ids"], kinds, grid, attention_mask=inputs["attention_mask"]
        )
        in_three = positions.numpy()
    arrays["positions"] = np.where(mask[:, None], in_three.transpose(1, 0, 2), 0).astype(np.int32)
    logits = model(**inputs, position_ids=positions).logits
    arrays["logits"] = logits.detach().numpy()[mask]
    before = logits[:, arrays["tokens"].shape[1] - 1 : -1].clone()
    before[..., never] = -torch.inf
    logprobs = torch.log_softmax(before, -1).gather(-1, _ids(arrays["completions"])[..., None])[..., 0]
    logprobs = logprobs[torch.from_numpy(arrays["completion_mask"])]
    arrays["logprobs"] = logprobs.detach().numpy()
    logprobs.mean().backward()
    for name, parameter in model.model.named_parameters():
        if not name.startswith("language_model."):
            gradient = parameter.grad.numpy()
            arrays[f"norm/{name}"] = np.linalg.norm(gradient.astype(np.float64))
            arrays[f"part/{name}"] = part_of(gradient)
    width = arrays["tokens"].shape[1]
    with_images = {name: x for name, x in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    with_images |= {name: x[:, :width] for name, x in inputs.items() if "token_type_ids" in name}
    greedy = generate(model, arrays["tokens"], arrays["mask"], IMAGE_NEW_TOKENS, suppress_tokens=never, **with_images)
    return arrays | {"greedy": greedy}


def part_of(gradient: np.ndarray) -> np.ndarray:
    """At most 24 numbers of a gradient, as the file has it, at even distances."""
    flat = gradient.reshape(-1)
    return flat[:: -(-len(flat) // 24)]


def save_vision(name: str) -> None:
    """Writes the folder of a model that reads images."""
    seed, kind, config = VISION_MODELS[name]
    model, folder = drawn(kind, config, seed), FOLDER / name
    size = {"shortest_edge": (MERGE * PATCH) ** 2, "longest_edge": 64 * (MERGE * PATCH) ** 2}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=FRAMES, size=size)
    if name == "gemma3":
        side = SQUARE * MERGE * PATCH
        processor = Gemma3ImageProcessorPil(size={"height": side, "width": side}, image_seq_length=SQUARE**2)
    arrays = vision_reference(model, processor, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        # As on the hub: a new model is saved with the experts as its modules have them.
        tensors = load_file(folder / "model.safetensors")
        turned = {key: x.swapaxes(1, 2).copy() if ".experts." in key else x for key, x in tensors.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    processor.save_pretrained(folder)
    np.savez_compressed(folder / "reference.npz", **arrays)


def load(folder: Path) -> Any:
    """The model of a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def _ids(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def save(name: str) -> None:
    """Writes the folder of a text model."""
    seed, _, _, shard = MODELS[name]
    model = build(name, seed)
    arrays = reference(model, seed)
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    model.save_pretrained(FOLDER / name, max_shard_size=shard)
    np.savez_compressed(FOLDER / name / "reference.npz", **arrays)


def main() -> None:
    for name in sys.argv[1:] or (*MODELS, *VISION_MODELS):
        if name in VISION_MODELS:
            save_vision(name)
        else:
            save(name)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size / 1024:.0f} KiB in {len(list((FOLDER / name).iterdir()))} files")


if __name__ == "__main__":
    main()
