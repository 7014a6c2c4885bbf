"""Prompts with images on a real vLLM server. launch/vllm_cpu.sh leaves out torchvision, which this needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_image_rows import pillow, read, write_folder
from test_vllm import PYTHON, connected, gap, serving

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.image_format import read_format
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.rollout.vllm.images import server_arguments
from jaxrl_llm.structs import ImageLimits

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TOWER = {
    "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
    "in_channels": 3, "hidden_act": "silu",
}  # fmt: skip


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> None:
    if subprocess.run([PYTHON, "-c", "import torchvision.transforms.v2"], capture_output=True).returncode:
        pytest.skip("no torchvision in .vllm, without which no processor of Qwen's is made")


def as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Qwen2.5-VL as a Qwen3-VL has it."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    names = (*SIZES, "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    text = {name: config[name] for name in names if name in config} | {"model_type": "qwen3_vl_text", "head_dim": 32}
    tower = {
        name: x for name, x in config["vision_config"].items() if name not in ("window_size", "fullatt_block_indexes")
    }
    tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh"}
    whole = {name: x for name, x in config.items() if name not in names and name != "rope_scaling"}
    whole |= {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    return whole | {"text_config": text | {"rope_parameters": rope}, "vision_config": tower}


def model_folder(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Writes a small model of a family with random weights."""
    write_folder(folder)
    config = json.loads((folder / "config.json").read_text()) | SIZES | {"intermediate_size": 96}
    config |= {"vision_config": TOWER, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    tokenizer = hf.load_tokenizer(folder)
    for name, token in (("vision_start", "<|vision_start|>"), ("vision_end", "<|vision_end|>")):
        config[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token)
    config = as_qwen3(config) if family == "qwen3_vl" else config
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    settings |= {"temporal_patch_size": 2, "image_mean": hf.CLIP_MEAN, "image_std": hf.CLIP_STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    model = hf.load_model(folder)
    # Three times as large, so that neither the softmax nor the images say little.
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(0)))
    hf_export.save(folder / "whole", params, folder)
    return folder / "whole"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_are_sampled_as_scored_also_after_a_push_of_the_tower(family, tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "model", family)
    mesh, tokenizer, form = meshes.make_mesh(data=1, fsdp=2, tensor=2), hf.load_tokenizer(folder), read_format(folder)
    assert form
    model = hf.load_model(folder, mesh)
    params = hf.load_params(folder, model, mesh)
    rows = [
        {
            "problem": f"{'<image>' * count}Which {i}?",
            "images": [pillow(28 * (2 + i), 90, seed=i + k) for k in range(count)],
        }
        for i, count in enumerate([0, 1, 2, 1])
    ]
    dataset = read(rows, tokenizer, form, monkeypatch)
    prompts = data.make_prompts(dataset, range(len(rows)), tokenizer.pad_token_id)
    limits = ImageLimits(2, form.min_pixels, form.max_pixels)
    with (
        serving(tmp_path / "vllm.log", *server_arguments(limits), folder=folder, most=256) as live,
        connected(live, tmp_path=tmp_path, model=model.cfg, max_prompt_tokens=dataset.width) as engine,
    ):
        engine.update_weights(params, 1)
        sample = lambda: engine.sample(prompts, jax.random.key(0), group_size=4, sampling=Sampling())  # noqa: E731
        first = sample()
        assert not np.isin(first.completions, model.cfg.hidden_tokens).any()
        assert gap(params, prompts, first, model=model) < 1e-3
        tower = jax.tree.map(lambda x: x * 1.5, params["visual"])
        changed = {**params, "visual": tower}
        engine.update_weights(changed, 2)
        second = sample()
        assert gap(changed, prompts, second, model=model) < 1e-3
        # The features of the tower before the push are not in use.
        moved = np.abs(first.logprobs[:, :, 0] - second.logprobs[:, :, 0]).max(axis=1)
        assert moved[0] < 1e-4 and (moved[1:] > 1e-3).all()
