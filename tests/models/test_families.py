"""Every model family learns: GRPO on the embedded prompts, from random weights."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from test_hf import REFERENCES, check_logits

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.learner.learning import describe_models
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf, hf_export, names
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


# ---- a family in the user's own module


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module of docs/models.md, importable, and a folder of its family: a Qwen2 of another model_type."""
    (example,) = re.findall(r"```python\n(# my_families.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    prefixed = (
        'from jaxrl_llm.models import names\nNAMES = names.replace_prefixes(names.DENSE, {"model.": "transformer."})\n'
    )
    broken = "def raises(hf):\n    return 1 / 0\n\n\ndef returns(hf):\n    return hf\n"
    for name, text in {"my_families": example, "my_named": example + prefixed, "my_broken": broken}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(REFERENCES / "qwen2_untied", tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    head = written["hidden_size"] // written["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(written | {"model_type": "seed_oss", "head_dim": head}))
    return folder


@pytest.mark.parametrize("family", ["my_families.seed_oss", "my_named.seed_oss"])
def test_an_own_family_has_the_logits_of_transformers_and_its_tensor_names(own, tmp_path, family):
    tensors, mesh = load_file(own / "model.safetensors"), meshes.make_mesh(data=1, fsdp=1, tensor=1)
    if family.startswith("my_named"):
        tensors = {name.replace("model.", "transformer."): tensor for name, tensor in tensors.items()}
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
    model = hf.load_model(own, mesh, family=family)
    params = hf.load_params(own, model, mesh)
    check_logits(model, params, dict(np.load(own / "reference.npz")))
    hf_export.save(tmp_path / "saved", params, own, family=family)
    pushed = dict(hf_export.tensors(params, names.family_table(model.cfg.family), np.float32))
    for after in (load_file(tmp_path / "saved" / "model.safetensors"), pushed):
        assert after.keys() == tensors.keys()
        assert all((after[name] == tensor).all() for name, tensor in tensors.items())


def test_an_unknown_model_type_may_be_read_as_a_family_of_the_package(own):
    cfg = hf.load_model(own, family="qwen2.decoder_config").cfg
    assert (cfg.family, cfg.qkv_bias, cfg.output_bias) == ("qwen2.decoder_config", True, False)


@pytest.mark.parametrize("name", ["my_families.seed", "nowhere.seed_oss", "seed_oss", "llama.decoder_confi"])
def test_an_own_family_that_does_not_exist_is_refused_with_the_config(own, refused, name):
    config = load("grpo")
    config.model.family = name
    with refused("config.model.family", name):
        recipes.read(config)


@pytest.mark.parametrize("name", ["raises", "returns"])
def test_an_own_family_that_fails_is_refused(own, refused, name):
    with refused("config.model.family", f"my_broken.{name}"):
        hf.load_model(own, family=f"my_broken.{name}")


def test_an_own_family_beside_a_model_type_of_the_package_is_refused(own, refused):
    config = load("grpo")
    config.model.family = "my_families.seed_oss"
    recipe = recipes.read(config)
    with refused("config.model.family", "'qwen2'"):
        describe_models(recipe.model, None, {}, meshes.make_mesh(data=1, fsdp=1, tensor=1), Path(config.model.path))
