"""Models that read images, against what `transformers` computes with the same weights, and against themselves.

The arrays are those stored by tests/make_references.py.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from test_hf import REFERENCES

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import image_format, image_layout
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import attention_tpu, hf, hf_export, names, peft, vision
from jaxrl_llm.models.decoder import Decoder, PackedRows
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Batch, Images, Prompt, Prompts

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3")
TOLERANCE = 2e-4  # of a logit, in float32
# Of the largest prompt.
PATCHES = {"qwen2_vl": 84, "qwen2_5_vl": 160, "qwen3_vl": 84, "qwen3_vl_moe": 84, "gemma3": 108}
PADDED = {"qwen2_5_vl": 160 + 48, "gemma3": 108 + 64}  # patches of these in batches, with padding


class Loaded(NamedTuple):
    folder: Path
    model: Decoder
    params: Any
    stored: dict[str, np.ndarray]  # what `transformers` computed
    form: image_format.ImageFormat

    @property
    def images(self) -> list[list[np.ndarray]]:
        """The pixels of each prompt's images."""
        ends = np.cumsum(self.stored["counts"])
        return [
            [self.stored[f"picture_{i}"] for i in range(end - count, end)]
            for end, count in zip(ends, self.stored["counts"], strict=True)
        ]

    def prompt(self, side: str = "left", count: int = 0) -> Prompt:
        """The prompts padded on a side, with their images padded to `count` patches; 0: as few as fit."""
        tokens, mask = (self.stored[name] for name in ("tokens", "mask"))
        if side == "right":
            shift = [np.roll(x, -int((~real).sum())) for x, real in zip(tokens, mask, strict=True)]
            tokens, mask = np.stack(shift), mask[:, ::-1]
        count = count or PATCHES[self.folder.name]
        sizes = image_layout.image_sizes(count, self.form)
        return Prompt(tokens, mask, image_layout.stack(tokens, mask, self.images, self.form, sizes))

    def batch(self, side: str = "left") -> Batch:
        """The prompts, with their completions and what `transformers` writes, of which nothing is learned."""
        prompt, completions = self.prompt(side, PADDED.get(self.folder.name, 0)), self.stored["completions"]
        greedy = self.stored["greedy"][:, : completions.shape[1]]
        tokens, real = np.stack([completions, greedy], axis=1), self.stored["completion_mask"]
        mask, learned = (np.stack([real, np.full(greedy.shape, x)], axis=1) for x in (True, False))
        return Batch(prompt.tokens, prompt.mask, tokens, mask, learned, images=prompt.images)


towers = pytest.mark.parametrize("loaded", ["qwen2_5_vl", "gemma3"], indirect=True)


@pytest.fixture(autouse=True)
def few_queries(monkeypatch):
    """Splits the queries of the batches that are padded into three parts, of which the last one is padded."""
    monkeypatch.setattr(vision, "QUERIES_AT_A_TIME", 85)


@cache
def load(name: str) -> Loaded:
    folder = REFERENCES / name
    model, form = hf.load_model(folder), image_format.read_format(folder)
    assert form
    params = hf.load_params(folder, model, tiny.mesh_of((1, 1, 1)))
    return Loaded(folder, model, params, dict(np.load(folder / "reference.npz")), form)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request) -> Loaded:
    return load(request.param)


def rows(batch: Batch) -> tuple[np.ndarray, ...]:
    """Completions as rows: tokens, positions and segment ids [B, G, C]."""
    mask = batch.completion_mask
    return batch.completions, np.broadcast_to(np.arange(mask.shape[-1]), mask.shape), mask.astype(np.int32)


@cache
def all_logits(model: Decoder) -> Any:
    """(params, prompt, rows) -> logits of prompts [B, P, V] and rows, compiled once for a model."""

    def run(params: Any, prompt: Prompt, *rows: Any) -> tuple[jax.Array, jax.Array]:
        of_prompt, of_rows, _ = model.forward(params, prompt, PackedRows(*rows))
        return model.logits(params, of_prompt), model.logits(params, of_rows)

    return jax.jit(run)


@cache
def scored(model: Decoder) -> Any:
    """(params, batch) -> mean of the log-probabilities of learned tokens, all of them, and the gradient."""

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, Sampling())
        learned = jnp.where(batch.loss_mask, logprobs, 0.0)
        return jnp.sum(learned) / jnp.sum(batch.loss_mask), (logprobs, entropy)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def close(a: Any, b: Any, atol: float = 0.0) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


# ---- against transformers


def test_positions_of_prompts_and_completions_are_those_of_transformers(loaded):
    stored, length = loaded.stored, loaded.stored["tokens"].shape[1]
    assert loaded.model.cfg.hidden_tokens == (loaded.form.image_token, *loaded.form.others)
    for side in ("left", "right"):
        prompt = loaded.prompt(side)
        for b, real in enumerate(stored["mask"]):
            np.testing.assert_array_equal(
                prompt.images.positions[b][:, prompt.mask[b]], stored["positions"][b, :, :length][:, real]
            )
            after = stored["positions"][b, :, length:][:, stored["completion_mask"][b]]
            expected = np.broadcast_to(prompt.images.end[b] + np.arange(after.shape[1]), after.shape)
            np.testing.assert_array_equal(after, expected)


@towers
def test_logits_are_those_of_transformers_and_placeholders_have_none(loaded):
    batch, stored, never = loaded.batch(), loaded.stored, list(loaded.model.cfg.hidden_tokens)
    of_prompt, of_rows = map(np.asarray, all_logits(loaded.model)(loaded.params, batch.prompt, *rows(batch)))
    logits = []
    for b, mask in enumerate(stored["completion_mask"]):
        logits += [of_prompt[b][batch.prompt_mask[b]], of_rows[b, 0][mask]]
    logits = np.concatenate(logits)
    assert np.all(logits[:, never] == -np.inf)
    np.testing.assert_allclose(
        np.delete(logits, never, 1), np.delete(stored["logits"], never, 1), rtol=0, atol=TOLERANCE
    )
    greedy = batch.completions[:, 1]
    np.testing.assert_array_equal(np.argmax(of_prompt, -1)[:, -1], greedy[:, 0])
    np.testing.assert_array_equal(np.argmax(of_rows, -1)[:, 1, :-1], greedy[:, 1:])


# Qwen3-VL has the tower of the model with experts.
@pytest.mark.parametrize("loaded", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "gemma3"], indirect=True)
@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probabilities_and_gradients_are_those_of_transformers(loaded, side):
    stored, batch = loaded.stored, loaded.batch(side)
    (_, (logprobs, entropy)), gradient = scored(loaded.model)(loaded.params, batch)
    np.testing.assert_allclose(np.asarray(logprobs)[batch.loss_mask], stored["logprobs"], rtol=0, atol=TOLERANCE)
    assert np.all(np.isfinite(entropy))
    table = {path: name.removeprefix("model.") for path, name in names.module_table(loaded.folder.name).items()}
    of_tower = dict(hf_export.tensors({"visual": gradient["visual"]}, table, np.float32))
    assert of_tower.keys() == {name.removeprefix("norm/") for name in stored if name.startswith("norm/")}
    for name, tensor in of_tower.items():
        flat, norm = tensor.reshape(-1), stored[f"norm/{name}"]
        part = flat[:: -(-len(flat) // 24)]
        if name.endswith("k_proj.bias"):
            assert np.max(np.abs(flat)) < 1e-6 > norm
            continue
        if name.endswith("attn.qkv.bias"):
            # A key's bias adds the same to all scores of a query: its gradient is rounding.
            assert norm > 1e-6
        np.testing.assert_allclose(np.linalg.norm(flat.astype(np.float64)), norm, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(part, stored[f"part/{name}"], rtol=0, atol=1e-4 * norm, err_msg=name)


# ---- against themselves


# DeepStack, and images whose tokens see each other.
@pytest.mark.parametrize("loaded", ["qwen3_vl_moe", "gemma3"], indirect=True)
def test_a_text_row_is_that_of_the_text_decoder_and_runs_no_tower(loaded):
    batch = loaded.batch()
    (_, (beside, _)), _ = scored(loaded.model)(loaded.params, batch)
    texts = jax.tree.map(lambda x: np.repeat(x[1:2], len(x), axis=0), batch)
    assert not texts.images.segments.any()
    broken = loaded.params | {"visual": jax.tree.map(lambda x: x * np.nan, loaded.params["visual"])}
    assert not np.all(np.isfinite(scored(loaded.model)(broken, batch)[0][1][0]))
    (_, (alone, _)), gradient = scored(loaded.model)(broken, texts)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient["visual"]))

    text = Decoder(replace(loaded.model.cfg, vision=None, rope=replace(loaded.model.cfg.rope, axes=())))
    params = {name: leaf for name, leaf in loaded.params.items() if name != "visual"}
    row = replace(jax.tree.map(lambda x: x[1:2], batch), images=None)
    of_prompt, of_rows = map(np.array, all_logits(text)(params, row.prompt, *rows(row)))
    logits = np.concatenate([np.repeat(of_prompt[:, None, -1:], 2, axis=1), of_rows[:, :, :-1]], axis=2)[0]
    logits[..., list(loaded.model.cfg.hidden_tokens)] = -np.inf
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(logprobs, row.completions[0, ..., None], axis=-1)[..., 0]
    expected = np.where(row.completion_mask[0], expected, 0.0)
    close(beside[1], expected, 1e-5)
    close(alone[0], expected, 1e-5)


# Completions in two parts: `extend` after `prefill`. One of the models has experts over tensor.
@pytest.mark.parametrize("loaded", ["qwen2_5_vl", "qwen3_vl_moe", "gemma3"], indirect=True)
@pytest.mark.slow
def test_a_mesh_parts_of_rows_and_recomputing_change_no_number(loaded):
    (_, here), gradient = scored(loaded.model)(loaded.params, loaded.batch())
    mesh = tiny.mesh_of((1, 2, 2))
    params = jax.device_put(loaded.params, sharding.shardings(loaded.params, mesh))
    kernels = {sharding.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params["visual"])}
    split = {name for name, x in kernels.items() if not x.sharding.is_fully_replicated}
    assert split == {name for name in kernels if name.endswith("kernel")}
    model = Decoder(replace(loaded.model.cfg, row_parts=2, remat="full"), mesh)
    (_, there), other = scored(model)(params, transfers.shard_batch(loaded.batch(), mesh))
    close(there, here, 1e-5)
    close(other, gradient, 1e-5)


def test_half_precision_is_near():
    loaded = load("qwen2_vl")
    model = Decoder(replace(loaded.model.cfg, dtype="bfloat16"))
    (_, (exact, _)), _ = scored(loaded.model)(loaded.params, loaded.batch())
    used = model.cast_for_compute(loaded.params)
    assert used["visual"]["layers"]["qkv"]["kernel"].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(used["visual"]["layers"]["mlp_norm"])} == {jnp.dtype("float32")}
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
    near = score(loaded.params, loaded.batch())
    assert 0 < np.max(np.abs(np.asarray(near[0]) - np.asarray(exact))) < 0.5
    # What is stored as it is used gives the same numbers.
    close(score(used, loaded.batch()), near, 0.0)


# ---- tokens that are never sampled


def test_a_placeholder_is_never_sampled_nor_part_of_the_distribution():
    loaded = load("qwen2_5_vl")
    cfg = replace(loaded.model.cfg, final_soft_cap=5.0)
    model, batch = Decoder(cfg), replace(loaded.batch(), images=None)
    # A head that prefers these tokens.
    embedding = loaded.params["embed"]["embedding"]
    params = loaded.params | {"embed": {"embedding": embedding.at[jnp.array(cfg.hidden_tokens)].multiply(20.0)}}

    def loss(params: Any, batch: Batch, sampling: Sampling) -> tuple[jax.Array, Any]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, sampling)
        return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)):
        scores_and_gradient = jax.jit(partial(jax.value_and_grad(loss, has_aux=True), sampling=sampling))
        (_, scores), gradient = scores_and_gradient(params, batch)
        for leaf in jax.tree.leaves((scores, gradient)):
            assert np.all(np.isfinite(leaf))
        assert np.all(np.exp(scores[0]) <= 1 + 1e-5) and np.all(scores[1] >= -1e-5)
    free = replace(loaded.model.cfg, vision=replace(loaded.model.cfg.vision, hidden_tokens=()))
    for of, is_sampled in ((model, False), (Decoder(free), True)):
        _, of_rows = all_logits(of)(params, batch.prompt, *rows(batch))
        assert np.isin(np.argmax(of_rows, -1), cfg.hidden_tokens).any() == is_sampled


# ---- files


def renamed(loaded: Loaded, copy: Path, table: names.TensorNames) -> Path:
    """A copy of a folder with other names of its tensors."""
    shutil.copytree(loaded.folder, copy, ignore=shutil.ignore_patterns("*.npz"))
    tensors = load_file(copy / "model.safetensors")
    before, other = names.matching_table(loaded.folder.name, tensors), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded.model.shapes):
        name = sharding.path_name(path)
        pairs = zip(*(names.tensor_names(forms[name], leaf.shape) for forms in (before, table)), strict=True)
        other |= {new: tensors.pop(old) for old, new in pairs}
    assert not tensors
    save_file(other, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


SPELLINGS = [
    # Of the hub, and of the modules of transformers.
    *((name, prefixes) for name in ("qwen2_vl", "qwen2_5_vl") for prefixes in (
        ("visual.blocks.", "model.layers."), ("model.visual.blocks.", "model.language_model.layers."),
    )),
    # The hub has it under the names of modules only.
    *((name, ("model.visual.blocks.", "model.language_model.layers.")) for name in ("qwen3_vl", "qwen3_vl_moe")),
    # On the hub and in two versions of transformers.
    *(("gemma3", prefixes) for prefixes in (
        ("vision_tower.vision_model.encoder.", "language_model.model.layers."),
        ("vision_tower.encoder.", "language_model.model.layers."),
        ("model.vision_tower.vision_model.encoder.", "model.language_model.layers."),
        ("model.vision_tower.encoder.", "model.language_model.layers."),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("loaded", "prefixes"), SPELLINGS, indirect=["loaded"], ids=str)
def test_loading_and_exporting_changes_no_tensor_and_no_name(loaded, prefixes, tmp_path):
    module = module_of(loaded.folder.name)
    tables = [getattr(module, "MODULES", {}), names.family_table(loaded.folder.name), *getattr(module, "OTHERS", ())]
    has = lambda table: all(any(name.startswith(x) for name in table.values()) for x in prefixes)  # noqa: E731
    (table,) = (table for table in tables if has(table))
    source = renamed(loaded, tmp_path / "source", table)
    assert names.matching_table(loaded.folder.name, load_file(source / "model.safetensors")) == table
    model = hf.load_model(source)
    params = hf.load_params(source, model, tiny.mesh_of((1, 2, 2)))
    hf_export.save(tmp_path / "saved", params, source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name], err_msg=name)
    assert (tmp_path / "saved" / "preprocessor_config.json").read_bytes() == (
        source / "preprocessor_config.json"
    ).read_bytes()
    close(params, loaded.params)


def test_fused_experts_as_modules_have_them_are_the_same(tmp_path):
    loaded = load("qwen3_vl_moe")
    source = shutil.copytree(loaded.folder, tmp_path / "source", ignore=shutil.ignore_patterns("*.npz"))
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    params = hf.load_params(source, loaded.model, tiny.mesh_of((1, 2, 2)))
    close(params, loaded.params)
    hf_export.save(tmp_path / "saved", params, source)
    jax.tree.map(np.testing.assert_array_equal, load_file(tmp_path / "saved" / "model.safetensors"), tensors)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as on the hub, with the settings of the text model at the top."""
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    return (
        {name: x for name, x in config.items() if name != "text_config"}
        | {name: x for name, x in text.items() if name != "model_type"}
        | old
    )


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_an_older_config_with_the_text_settings_at_the_top_is_the_same(name, tmp_path):
    loaded = load(name)
    folder = shutil.copytree(loaded.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(flat(config)))
    assert hf.load_model(folder).cfg == loaded.model.cfg
    assert hf.fingerprint(folder) != hf.fingerprint(loaded.folder)


@towers
def test_the_settings_of_images_are_part_of_the_model(loaded, tmp_path, refused):
    folder = shutil.copytree(loaded.folder, tmp_path / "model")
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"image_mean": [0.25, 0.5, 0.5]}
    before = hf.fingerprint(folder)
    file.unlink()
    with refused("preprocessor_config.json"):
        hf.load_model(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert hf.fingerprint(folder) != before
    assert hf.load_model(folder).cfg.vision.pixel_mean == (0.25, 0.5, 0.5)


TEXT, ROPE, VISION = ("text_config",), ("text_config", "rope_parameters"), ("vision_config",)
UNSUPPORTED = {
    "without sections": ("qwen2_5_vl", ROPE, {"mrope_section": None}),
    "with sections of another head": ("qwen2_5_vl", ROPE, {"mrope_section": [4, 1, 1]}),
    "with YaRN": ("qwen2_5_vl", ROPE, {"rope_type": "yarn", "factor": 4.0}),
    "without a tower": ("qwen2_5_vl", (), {"vision_config": None}),
    "without an image's token": ("qwen2_5_vl", (), {"image_token_id": None}),
    "of another activation": ("qwen2_5_vl", VISION, {"hidden_act": "relu"}),
    "of black and white": ("qwen2_5_vl", VISION, {"in_channels": 1}),
    "with odd heads": ("qwen2_5_vl", VISION, {"num_heads": 5}),
    "with heads too small": ("qwen2_5_vl", VISION, {"num_heads": 8}),
    "of another width": ("qwen2_5_vl", TEXT, {"hidden_size": 48}),
    "squares without a tower": ("gemma3", (), {"vision_config": None}),
    "squares without a decoder": ("gemma3", (), {"text_config": None}),
    "squares without an image's token": ("gemma3", (), {"image_token_index": None}),
    "squares of another activation": ("gemma3", VISION, {"hidden_act": "relu"}),
    "squares of black and white": ("gemma3", VISION, {"num_channels": 1}),
    "squares with odd heads": ("gemma3", VISION, {"num_attention_heads": 5}),
    "with no square of tokens": ("gemma3", (), {"mm_tokens_per_image": 8}),
    "with tokens that do not divide": ("gemma3", (), {"mm_tokens_per_image": 16}),
    "that sees all text": ("gemma3", TEXT, {"use_bidirectional_attention": True}),
    "with unordered layers": ("qwen3_vl", VISION, {"deepstack_visual_indexes": [1, 0]}),
    "with a layer too many": ("qwen3_vl", VISION, {"deepstack_visual_indexes": [3]}),
    "with no square of positions": ("qwen3_vl", VISION, {"num_position_embeddings": 15}),
    "text with sections": ("qwen2_tied", ("rope_parameters",), {"rope_type": "mrope", "mrope_section": [2, 1, 1]}),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_config_that_is_not_supported_is_refused(what, refused):
    name, path, changes = UNSUPPORTED[what]
    config = json.loads((REFERENCES / name / "config.json").read_text())
    node = config
    for key in path:
        node = node[key]
    node.update(changes)
    key, value = next(iter(changes.items()))
    with refused(value if key == "rope_type" else "vision_config" if "heads" in key else key):
        module_of(config["model_type"]).decoder_config(config)


def module_of(family: str) -> Any:
    return import_module(f"jaxrl_llm.models.{family}")


# ---- records


def test_prompts_with_images_are_joined_and_taken_like_others():
    prompt = load("qwen2_vl").prompt()
    prompts = Prompts(prompt.tokens, prompt.mask, [{"n": i} for i in range(4)], np.arange(4), [], prompt.images)
    again = prompts.take([0, 1]).joined(prompts.take([2, 3]))
    jax.tree.map(np.testing.assert_array_equal, again.images, prompts.images)
    assert isinstance(again.images, Images) and again.take([3]).images.end.tolist() == prompt.images.end[3:].tolist()
    assert replace(prompts, images=None).take([0]).joined(replace(prompts, images=None)).images is None


# ---- adapters


@towers
def test_adapters_stand_beside_text_layers_and_have_the_names_of_modules(loaded, tmp_path):
    # The tower of Qwen2.5-VL has modules of these names too.
    kind = Lora(rank=2, alpha=4.0, rs=False, targets="q_proj|gate_proj", base_dtype="", path="")
    adapters = loaded.model.adapters(kind)
    params = jax.tree.map(lambda x: x + 0.1, adapters.init(jax.random.key(0)))
    peft.save(tmp_path / "adapters", params, adapters, "base")
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    layers = [
        f"base_model.model.model.language_model.layers.{i}.{module}.lora_{which}.weight"
        for i in range(loaded.model.cfg.layers) for module in ("self_attn.q_proj", "mlp.gate_proj") for which in "AB"
    ]  # fmt: skip
    assert sorted(stored) == sorted(layers)
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    in_tower = names.module_table(loaded.folder.name)["visual/layers/mlp/up/kernel"].format(0)
    modules = (in_tower, "model.language_model.layers.0.mlp.gate_proj")
    assert [bool(re.fullmatch(settings["exclude_modules"], name)) for name in modules] == [True, False]
    close(peft.load(tmp_path / "adapters", adapters), params)
    combined = adapters.combine(loaded.params, params)
    original = load_file(loaded.folder / "model.safetensors")
    table = names.matching_table(loaded.folder.name, original)
    merged = dict(hf_export.tensors(combined, table, np.float32))
    changed = {name for name, tensor in merged.items() if not np.array_equal(tensor, original[name])}
    prefix = table["embed/embedding"].removesuffix("embed_tokens.weight")
    assert changed == {
        f"{prefix}layers.{i}.{module}.weight"
        for i in range(loaded.model.cfg.layers)
        for module in ("self_attn.q_proj", "mlp.gate_proj")
    }


def test_a_run_on_texts_alone_samples_from_a_model_that_reads_images():
    loaded, mesh = load("qwen2_5_vl"), tiny.mesh_of((1, 1, 1))
    mask, greedy = loaded.stored["mask"][1:2], loaded.stored["greedy"][1:2]
    tokens = loaded.stored["tokens"][1:2]
    sampler = Sampler(loaded.model, mesh, max_completion_tokens=greedy.shape[1], stop_ids=(0,), pad_id=0)
    sampler.update_weights(loaded.params)
    prompts = Prompts(tokens, mask, [{}], np.arange(1))
    sampled = sampler.sample(prompts, jax.random.key(0), group_size=1, sampling=Sampling(temperature=0))
    np.testing.assert_array_equal(sampled.completions[:, 0], greedy)


def test_the_published_config_of_gemma_3_4b_leaves_out_most_and_is_read():
    config = {
        "model_type": "gemma3", "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144,
        "mm_tokens_per_image": 256, "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    cfg = module_of("gemma3").decoder_config(config)
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.vocab_size, cfg.norm_eps) == (8, 4, 256, 262_208, 1e-6)
    assert cfg.tied_head and cfg.window == 1024 and cfg.local.index(False) == 5
    assert cfg.rope.frequencies[0] == 1 / 8 and cfg.local_rope.frequencies[0] == 1.0
    assert (cfg.vision.merge_size, cfg.vision.bidirectional_tokens, cfg.hidden_tokens) == (4, 256, (262_144,))
    assert Decoder(cfg).size() == 4_300_079_472


# ---- images whose tokens see each other


def test_the_kernel_of_a_tpu_reads_images_as_the_plain_form(monkeypatch):
    loaded = load("gemma3")
    monkeypatch.setattr(attention_tpu, "fits", lambda *_: True)
    monkeypatch.setattr(attention_tpu, "attend_tpu", partial(attention_tpu.attend_tpu, interpret=True))
    model = Decoder(loaded.model.cfg, tiny.mesh_of((1, 1, 1)))
    with jax.default_matmul_precision("highest"):
        # Its gradients are tested alone.
        score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
        there = score(loaded.params, loaded.batch())
    (_, here), _ = scored(loaded.model)(loaded.params, loaded.batch())
    close(there, here, 1e-4)
