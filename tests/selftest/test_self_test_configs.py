"""The self-test passes on every config of the package, with the chat templates of published models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pyarrow.parquet
import pytest
from ml_collections import ConfigDict
from test_doctor import ROOT
from test_recipes import write_geometry3k, write_vision
from test_templates import of

from jaxrl_llm.build import build
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.config.names import resolve, split_call
from jaxrl_llm.data.rows import is_task
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import make_trial
from jaxrl_llm.tasks import SOURCES

# template: folder of tests/references with config.json of a model. Most have the same model, whose programs of the
# sampler are traced once: test_families.py trains other families, and the sampler's tests sample from them.
FAMILIES = {
    "qwen2_5": "qwen2_tied", "qwen3": "qwen2_tied", "llama3_1": "qwen2_tied", "llama3_2": "qwen2_tied",
    "gemma3": "gemma3_text", "mistral": "qwen2_tied",
}  # fmt: skip
VOCABULARY = 320  # tokens, at least as many as any of the tokenizers has
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
    assert len(tokenizer) <= VOCABULARY
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "eos_token_id": ends}
    config |= {"num_hidden_layers": 1, "layer_types": config.get("layer_types", ["full_attention"])[:1]}
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    # One program is compiled in less time than an operation for each shape.
    weights = jax.jit(hf.load_model(bare).init)(jax.random.key(0))
    hf_export.save(bare.with_name(template + reference), weights, bare)
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
    numbers = [{"nums": [i, 2, 3], "target": i + 5} for i in range(40)]  # tinyzero holds out some of them
    return [{"question": x, "problem": x, "answer": f"#### {y}"} | z for (x, y), z in zip(sums, numbers, strict=True)]


def write_rows(config: ConfigDict, folder: Path) -> Path:
    """Few rows with the columns that a config reads, and the file they are in."""
    if config.data.image_column:
        file = write_geometry3k(folder)
        # A program is traced for each size of an image, so two rows are left: one with two images, one with one.
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(1, 2), file)
        return file
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
    if "turns" in c:
        c.env.url, c.env.corpus, c.rollout.max_completion_tokens = "", "encyclopedia.documents", 96
    if file.stem not in KEEP_THEIR_MODEL:
        c.model.path, c.data.source = str(model), str(write_rows(c, folder))
        c.update_from_flattened_dict({"turns.tokens": 16, "turns.observation_tokens": 48} if "turns" in c else {})
    if "recipes" in file.parts:
        c.eval = load(file).eval
        c.eval.problems = 4
        c.eval.source = c.eval.source if is_task(c.eval.source) else c.data.source
    for section in (*c.get("teachers", {}).values(), *([c.reward_model] if "reward_model" in c else ())):
        section.path = str(model)
    return c


# Search is learned: only with the model of this config an environment answers what was asked. Images need a tower.
KEEP_THEIR_MODEL = ("search_grpo", "pictures")
# Of `jaxrl sft`, and one whose rewards need the server of a judge: tests/programs/test_recipes.py has that.
OTHERS = ("dpo", "simpo", "gemma3_1b_simpo", "gemma3_1b_rubric_grpo")
FILES = [
    file
    for file in sorted((ROOT / "configs").rglob("*.py"), key=lambda file: ("recipes" in file.parts, file))
    if not file.stem.endswith("sft") and file.stem not in OTHERS
]
# Configs with the same of these sections have the same update but for the loss. test_objective.py shows that no loss
# changes with packed rows and micro-batches, for which S7 compiles the update twice again: see `traits_of_layouts`.
OF_UPDATE = ("kl", "entropy", "importance", "mask", "critic", "adapters", "env", "model.dtype", "optim.gradient_dtype")


def is_structure(name: str, value: object) -> bool:
    """Whether a field is more of an update than its loss or a coefficient."""
    return not name.startswith("loss") and (name.startswith("mask") or type(value) not in (int, float))


def traits_of_layouts(own_model: str, structure: dict[str, object]) -> set[str]:
    """What S7 may depend on: the terms of an update, its dtype with and without a critic, and episodes."""
    terms = {name: x for name, x in structure.items() if name != "model.dtype" and not name.startswith("env.")}
    model = "" if own_model == "search_grpo" else own_model  # a model of text like the random ones
    dtype, has_critic = structure["model.dtype"], "critic.path" in structure
    return {f"{model} {terms}", f"{dtype}, critic {has_critic}", f"episodes {'env.name' in structure}"}


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
def seen() -> SimpleNamespace:
    """What has been checked: kinds of updates, each with the model of its first one, updates, runs, traits of S7."""
    return SimpleNamespace(kinds={}, updates=set(), runs=set(), traits=set())


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_silent_on(file, models, seen, tmp_path):
    of_recipe = template_of(file.stem) if "recipes" in file.parts else ""
    own_model = file.stem if file.stem in KEEP_THEIR_MODEL else of_recipe if of_recipe not in FAMILIES else ""
    fields = {name: x for name, x in flatten(load(file)).items() if name.startswith((*OF_UPDATE, "loss"))}
    update = f"{own_model} {fields}"
    structure = {name: x for name, x in fields.items() if is_structure(name, x)}
    kind, traits = f"{own_model} {structure}", traits_of_layouts(own_model, structure)
    # Each kind has a template of its own: other updates of the kind find compiled programs.
    family = [*FAMILIES][len(seen.kinds) % len(FAMILIES)]
    template = of_recipe or seen.kinds.get(kind, family)
    config = small(file, models[template], tmp_path)
    run = str(flatten(config)).replace(str(tmp_path), "")
    if run in seen.runs:
        return  # another config is the same one, when it is small
    full, checks = update not in seen.updates, dict(self_test.CHECKS)
    if traits <= seen.traits:
        checks.pop("S7")
    seen.traits |= traits
    seen.kinds.setdefault(kind, template)
    seen.updates.add(update)
    seen.runs.add(run)
    with build(config, tmp_path / "run") as (session, parts):
        session.restore()
        trial = make_trial(parts, session.run_state.states, full=full)
        checked = [check(trial) for check in checks.values()]
        if of_recipe:
            assert 0 <= parts.evaluate(session.run_state.states)["eval/accuracy"] <= 1
            graded = parts.actor.next().rewards()
            assert graded.channels.keys() == {split_call(name)[0] for name in config.reward.functions}
        parts.wait_until_idle()
    shutil.rmtree(tmp_path / "run")  # checkpoints are large
    assert [finding.line() for x in checked for finding in x.findings] == []
    assert not full or sum(x.applicable for x in checked) >= len(checks) - 4
