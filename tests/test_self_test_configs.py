"""The self-test passes on every config of the package, with the chat templates of published models."""

from __future__ import annotations

import json
import shutil
from itertools import cycle
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict
from test_doctor import ROOT
from test_recipes import write_geometry3k, write_vision
from test_templates import of

from jaxrl_llm.build import build
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.config.names import resolve
from jaxrl_llm.data.rows import is_task
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.selftest import self_test
from jaxrl_llm.tasks import SOURCES

# template: folder of tests/references with config.json of a model of its family
FAMILIES = {
    "qwen2_5": "qwen2_tied", "qwen3": "qwen3_tied", "llama3_1": "llama", "llama3_2": "llama",
    "gemma3": "gemma3_text", "mistral": "mistral",
}  # fmt: skip
STOPS = 40  # tokens that end a turn of a random model, so that it is short
SMALL = {
    "prompts_per_step": 4, "prompts_per_update": 4, "microbatch": 0, "eval": None, "checkpoint.keep_best": 0,
    "checkpoint.keep": 1, "log.to": (), "mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "num_steps": 2,
    "optim.warmup_steps": 0, "optim.warmup_ratio": 0.0, "rollout.max_completion_tokens": 16, "reward.timeout": 0.0,
    "data.max_prompt_tokens": 2000, "data.min_pixels": 0, "data.max_pixels": 0, "model.remat": "none",
    "model.row_parts": 1,
}  # fmt: skip


def write_model(folder: Path, template: str, reference: str) -> Path:
    """A random model of one layer: a published family and chat template, with a byte-level tokenizer."""
    tokenizer = of(template)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    bare = folder / f"{template}_{reference}_bare"
    tokenizer.save_pretrained(str(bare))
    config = json.loads((ROOT / "tests" / "references" / reference / "config.json").read_text())
    ends = [tokenizer.eos_token_id, *range(100, 100 + STOPS)]
    config |= {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "eos_token_id": ends}
    config |= {"num_hidden_layers": 1, "layer_types": config.get("layer_types", ["full_attention"])[:1]}
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    hf_export.save(bare.with_name(template + reference), hf.load_model(bare).init(jax.random.key(0)), bare)
    return bare.with_name(template + reference)


def rows_of(config: ConfigDict) -> list[dict]:
    """The first rows of a task, or some with the columns that the recipes read."""
    if is_task(config.data.source):
        return resolve(config.data.source, SOURCES)()[:40]
    sums = [(f"{i}+{i}=", str(2 * i)) for i in range(40)]
    if config.data.convert == "search_r1.convert":
        truth = [{"style": "rule", "ground_truth": {"target": [answer]}} for _, answer in sums]
        chats = [[{"role": "user", "content": question}] for question, _ in sums]
        return [
            {"prompt": x, "reward_model": y, "data_source": "nq", "id": "1"} for x, y in zip(chats, truth, strict=True)
        ]
    if "tldr" in config.data.source:
        return [{"prompt": question, "completion": answer} for question, answer in sums]
    numbers = [{"nums": [i, i, 1], "target": 2 * i + 1} for i in range(40)]
    return [{"question": x, "problem": x, "answer": f"#### {y}"} | z for (x, y), z in zip(sums, numbers, strict=True)]


def write_rows(config: ConfigDict, folder: Path) -> Path:
    """Few rows with the columns that a config reads, and the file they are in."""
    if config.data.image_column:
        return write_geometry3k(folder)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(config)))
    return rows


def small(file: Path, model: Path, folder: Path) -> ConfigDict:
    """A config with a random model and few rows, which it writes to `folder`, in few and short sequences."""
    c = load(file)
    c.unlock()
    c.update_from_flattened_dict(SMALL | {"group_size": min(c.group_size, 4)})
    c.engine = ConfigDict(dict(name="jax", max_sequences=0))
    if "critic" in c:
        c.critic.warmup_steps = c.critic.optim.warmup_steps = 0
        c.critic.optim.warmup_ratio = 0.0
    if "env" in c:
        c.env.url, c.env.corpus, c.rollout.max_completion_tokens = "", "encyclopedia.documents", 96
    if file.stem not in KEEP_THEIR_MODEL:
        c.model.path, c.data.source = str(model), str(write_rows(c, folder))
        c.update_from_flattened_dict({"turns.tokens": 16, "turns.observation_tokens": 48} if "env" in c else {})
    for section in (*c.get("teachers", {}).values(), *([c.reward_model] if "reward_model" in c else ())):
        section.path = str(model)
    return c


# Search is learned: only with the model of this config an environment answers what was asked. Pictures need a tower.
KEEP_THEIR_MODEL = ("search_grpo", "pictures")
# Of `jaxrl sft`, and one whose rewards need the server of a judge: tests/test_recipes.py has that.
OTHERS = ("dpo", "simpo", "gemma3_1b_simpo", "gemma3_1b_rubric_grpo")
FILES = [
    file
    for file in sorted((ROOT / "configs").rglob("*.py"))
    if not file.stem.endswith("sft") and file.stem not in OTHERS
]
# Configs with the same of these sections have the same update, which the full self-test compiles twice.
OF_UPDATE = (
    "loss",
    "kl",
    "entropy",
    "importance",
    "mask",
    "critic",
    "adapters",
    "env",
    "model.dtype",
    "optim.gradient_dtype",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {template: write_model(folder, template, reference) for template, reference in FAMILIES.items()}
    with_tower = {family: write_vision(folder / family, family) for family in ("qwen2_5_vl", "qwen3_vl")}
    return made | with_tower | {"experts": write_model(folder, "qwen3", "qwen3_moe")}


def template_of(recipe: str) -> str:
    """The key in `models` of the model that a recipe runs with here."""
    if "_vl_" in recipe:
        return recipe.partition("_vl_")[0] + "_vl"
    return "experts" if "a3b" in recipe else "qwen2_5"


@pytest.fixture(scope="module")
def updates() -> set[str]:
    """The updates that a full self-test has looked at."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize(("file", "template"), zip(FILES, cycle(FAMILIES)), ids=lambda x: getattr(x, "stem", x))
def test_it_is_silent_on(file, template, models, updates, tmp_path):
    if "recipes" in file.parts:
        template = template_of(file.stem)
    config = small(file, models[template], tmp_path)
    flat = flatten(config) | {"template": template if template not in FAMILIES else ""}
    update = str({name: x for name, x in flat.items() if name.startswith((*OF_UPDATE, "template"))})
    full = update not in updates
    updates.add(update)
    with build(config, tmp_path / "run") as (session, parts):
        session.restore()
        checked = [x for x in self_test.check(parts, session.at.states, full=full) if x.id]
        parts.rest()
    shutil.rmtree(tmp_path / "run")  # checkpoints are large
    assert [finding.line() for x in checked for finding in x.findings] == []
    assert not full or sum(x.applicable for x in checked) >= 6
