"""Every model family learns: GRPO on the embedded prompts, from random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from test_hf import REFERENCES

from jaxrl_llm.config.load import load
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.train import steps

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "num_steps": 40, "prompts_per_step": 16, "prompts_per_update": 16, "group_size": 8, "optim.learning_rate": 3e-3,
    "optim.warmup_steps": 5, "optim.decay": "constant", "eval": None, "checkpoint.every": 40,
    "rollout.max_completion_tokens": 6, "reward.weights": (1.0,),
    "reward.functions": ("tests.models.test_families.right",),
    "reward.timeout": 0.0, "log.to": (), "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "microbatch": 8,
}  # fmt: skip


def right(completions: list, answer: list, **_: object) -> list[float]:
    """The share of the answer's characters that stand in their place, less what is written behind them."""
    texts = [one[-1]["content"] if isinstance(one, list) else one for one in completions]
    scores = []
    for text, wanted in zip(texts, map(str, answer), strict=True):
        hits = sum(a == b for a, b in zip(text, wanted, strict=False))
        scores.append((hits - 0.1 * abs(len(text) - len(wanted))) / len(wanted))
    return scores


def random_model(folder: Path, name: str, sizes: dict[str, int]) -> Path:
    """A folder with random weights of a family's reference, `sizes` apart, and the embedded tokenizer."""
    embedded = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    of_family, of_task = (json.loads((where / "config.json").read_text()) for where in (REFERENCES / name, embedded))
    tokens = {key: of_task[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(of_family | tokens | sizes))
    made = folder.with_name("model")
    hf_export.save(made, hf.load_model(folder).init(jax.random.key(0)), folder)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe"])
def test_a_run_improves_a_model_with_every_kind_of_layer(name, tmp_path):
    model = random_model(tmp_path / "source", name, {})
    config = load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict(SETTINGS | {"model.path": str(model)})
    with_experts = hf.load_model(model).cfg.mixture is not None
    if with_experts:
        config.router = ConfigDict(dict(balance_coef=1e-3))
    records = list(steps(config, tmp_path / "run"))
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    before, after = np.mean(rewards[:4]), np.mean(rewards[-4:])
    print(f"{name}: reward {before:.2f} -> {after:.2f}")
    assert after > before + 0.1
    assert ("router/busiest" in records[-1]) == with_experts
    assert max(record.get("sampler/gap_max", 0.0) for record in records) < 1e-4
