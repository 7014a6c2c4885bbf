"""Models that read pictures, against what `transformers` computes with the same weights, and against themselves.

The arrays are those stored by tests/make_references.py.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache, partial
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
from jaxrl_llm.data import image_layout, images
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import attention_tpu, hf, hf_export, names, peft, vision
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.weights import Placing, sampling_decoder
from jaxrl_llm.structs import Batch, Images, Prompt, Prompts

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3")
TOLERANCE = 2e-4  # of a logit, in float32
PATCHES = {
    "qwen2_vl": 84,
    "qwen2_5_vl": 160,
    "qwen3_vl": 84,
    "qwen3_vl_moe": 84,
    "gemma3": 108,
}  # of the largest prompt


class Loaded(NamedTuple):
    folder: Path
    model: Decoder
    params: Any
    stored: dict[str, np.ndarray]  # what `transformers` computed
    form: images.ImageFormat

    @property
    def pictures(self) -> list[list[np.ndarray]]:
        """The pixels of each prompt's pictures."""
        ends = np.cumsum(self.stored["counts"])
        return [
            [self.stored[f"picture_{i}"] for i in range(end - count, end)]
            for end, count in zip(ends, self.stored["counts"], strict=True)
        ]

    def prompt(self, side: str = "left", count: int = 0) -> Prompt:
        """The prompts padded on a side, with their pictures padded to `count` patches; 0: as few as fit."""
        tokens, mask = (self.stored[name] for name in ("tokens", "mask"))
        if side == "right":
            shift = [np.roll(x, -int((~real).sum())) for x, real in zip(tokens, mask, strict=True)]
            tokens, mask = np.stack(shift), mask[:, ::-1]
        count = count or PATCHES[self.folder.name]
        sizes = image_layout.image_sizes(count, self.form)
        return Prompt(tokens, mask, image_layout.stack(tokens, mask, self.pictures, self.form, sizes))

    def batch(self, side: str = "left", *, group: int = 1, count: int = 0) -> Batch:
        """The prompts and their completions; group: 2, to have also what `transformers` writes."""
        prompt, completions = self.prompt(side, count), self.stored["completions"]
        greedy = self.stored["greedy"][:, : completions.shape[1]]
        tokens = np.stack([completions, greedy], axis=1)[:, :group]
        mask = np.stack([self.stored["completion_mask"], np.ones(greedy.shape, bool)], axis=1)[:, :group]
        return Batch(prompt.tokens, prompt.mask, tokens, mask, mask, images=prompt.images)


# Families that differ in what a test is about.
towers = pytest.mark.parametrize("loaded", ["qwen2_5_vl", "gemma3"], indirect=True)
layered = pytest.mark.parametrize("loaded", ["qwen3_vl", "gemma3"], indirect=True)


@cache
def load(name: str) -> Loaded:
    folder = REFERENCES / name
    model, form = hf.load_model(folder), images.read_format(folder)
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
        of_prompt, of_rows, _ = model.forward(params, prompt, *rows)
        return model.logits(params, of_prompt), model.logits(params, of_rows)

    return jax.jit(run)


@cache
def scored(model: Decoder) -> Any:
    """(params, batch) -> mean of the log-probabilities of completion tokens, these, and the gradient."""

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, Sampling())
        return jnp.sum(logprobs) / jnp.sum(batch.completion_mask), (logprobs, entropy)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def close(a: Any, b: Any, atol: float = 0.0) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


# ---- against transformers


def test_positions_are_those_of_transformers_for_pictures_between_at_both_ends_and_none(loaded):
    stored, length = loaded.stored, loaded.stored["tokens"].shape[1]
    for side in ("left", "right"):
        prompt = loaded.prompt(side)
        for b, real in enumerate(stored["mask"]):
            np.testing.assert_array_equal(
                prompt.images.positions[b][:, prompt.mask[b]], stored["positions"][b, :, :length][:, real]
            )
            after = stored["positions"][b, :, length:][:, stored["completion_mask"][b]]
            np.testing.assert_array_equal(
                after, np.broadcast_to(prompt.images.end[b] + np.arange(after.shape[1]), after.shape)
            )


def test_the_vectors_of_pictures_are_those_of_transformers(loaded):
    prompt = loaded.prompt()
    tower = jax.jit(vision.Tower(loaded.model.cfg, loaded.model.cfg.vision))
    vectors, columns = np.asarray(tower(loaded.params["visual"], prompt.images)), prompt.images.columns
    inside = columns < prompt.tokens.shape[1]
    each = zip(np.moveaxis(vectors, 1, 0), columns, inside, strict=True)
    in_order = np.concatenate([x[:, at][:, np.argsort(c[at])] for x, c, at in each], axis=1)
    np.testing.assert_allclose(in_order, loaded.stored["features"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_prompts_and_completions_are_those_of_transformers_and_placeholders_have_none(loaded, side):
    prompt, stored, never = loaded.prompt(side), loaded.stored, list(loaded.model.cfg.never)
    of_prompt, of_rows = all_logits(loaded.model)(loaded.params, prompt, *rows(loaded.batch(side)))
    logits = []
    for b, mask in enumerate(stored["completion_mask"]):
        logits += [np.asarray(of_prompt)[b][prompt.mask[b]], np.asarray(of_rows)[b, 0][mask]]
    logits = np.concatenate(logits)
    assert never == [loaded.form.image_token, *loaded.form.others] and np.all(logits[:, never] == -np.inf)
    np.testing.assert_allclose(
        np.delete(logits, never, 1), np.delete(stored["logits"], never, 1), rtol=0, atol=TOLERANCE
    )


def test_greedy_tokens_are_those_of_transformers(loaded):
    batch = loaded.batch(group=2)
    of_prompt, of_rows = all_logits(loaded.model)(loaded.params, loaded.prompt(), *rows(batch))
    greedy = batch.completions[:, 1]
    np.testing.assert_array_equal(np.argmax(of_prompt, -1)[:, -1], greedy[:, 0])
    np.testing.assert_array_equal(np.argmax(of_rows, -1)[:, 1, :-1], greedy[:, 1:])


def test_log_probabilities_and_gradients_of_the_whole_tower_are_those_of_transformers(loaded):
    stored, batch = loaded.stored, loaded.batch()
    (_, (logprobs, entropy)), gradient = scored(loaded.model)(loaded.params, batch)
    np.testing.assert_allclose(np.asarray(logprobs)[batch.completion_mask], stored["logprobs"], rtol=0, atol=TOLERANCE)
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


@towers
def test_neither_the_side_of_padding_nor_extending_a_prompt_nor_remat_changes_anything(loaded):
    (_, whole), gradient = scored(loaded.model)(loaded.params, loaded.batch(group=2))
    for model, batch in (
        (loaded.model, loaded.batch("right", group=2)),
        # Two parts: `extend` after `prefill`.
        (Decoder(replace(loaded.model.cfg, row_parts=2, remat="full")), loaded.batch(group=2)),
    ):
        (_, other), other_gradient = scored(model)(loaded.params, batch)
        close(other, whole, 1e-5)
        close(other_gradient, gradient, 1e-5)


@towers
def test_more_padding_of_patches_and_fewer_queries_at_a_time_change_nothing(loaded, monkeypatch):
    (_, few), gradient = scored(loaded.model)(loaded.params, loaded.batch())
    # No multiple of the queries at a time.
    more = loaded.batch(count=PATCHES[loaded.folder.name] + 16 * 4)
    monkeypatch.setattr(vision, "QUERIES", 90)
    (_, many), other = scored(Decoder(loaded.model.cfg))(loaded.params, more)
    close(many, few, 1e-5)
    close(other, gradient, 1e-5)


@layered
def test_a_text_row_is_the_row_of_its_text_decoder_alone_or_beside_pictures(loaded):
    batch = loaded.batch()
    (_, (beside, _)), _ = scored(loaded.model)(loaded.params, batch)
    row = jax.tree.map(lambda x: x[1:2], batch)
    assert not row.images.segments.any()
    (_, (alone, _)), gradient = scored(loaded.model)(loaded.params, row)
    text = Decoder(replace(loaded.model.cfg, vision=None, rope=replace(loaded.model.cfg.rope, axes=())))
    params = {name: leaf for name, leaf in loaded.params.items() if name != "visual"}

    def logprobs(params: Any, row: Batch) -> jax.Array:
        hidden = text.forward(params, row.prompt, *rows(row))
        states = jnp.concatenate([hidden[0][:, -1:], hidden[1][:, 0, :-1]], axis=1)
        logits = text.logits(params, states).at[..., list(loaded.model.cfg.never)].set(-jnp.inf)
        each = jnp.take_along_axis(jax.nn.log_softmax(logits), row.completions[:, 0, :, None], axis=-1)[..., 0]
        return jnp.where(row.completion_mask[:, 0], each, 0.0)

    expected = jax.jit(logprobs)(params, replace(row, images=None))
    close(beside[1], expected, 1e-5)
    close(alone[0], expected, 1e-5)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient["visual"]))


@layered
def test_a_batch_without_pictures_does_not_run_the_tower(loaded):
    row = jax.tree.map(lambda x: x[1:2], loaded.batch())
    broken = loaded.params | {"visual": jax.tree.map(lambda x: x * jnp.nan, loaded.params["visual"])}
    (_, scores), gradient = scored(loaded.model)(broken, row)
    for leaf in jax.tree.leaves((scores, gradient)):
        assert np.all(np.isfinite(leaf))
    assert not np.all(np.isfinite(scored(loaded.model)(broken, jax.tree.map(lambda x: x[:2], loaded.batch()))[0][1][0]))


# With experts over tensor.
@pytest.mark.parametrize("loaded", ["qwen3_vl_moe", "gemma3"], indirect=True)
def test_a_mesh_gives_the_same_numbers(loaded):
    (_, here), gradient = scored(loaded.model)(loaded.params, loaded.batch())
    mesh = tiny.mesh_of((1, 2, 2))
    params = jax.device_put(loaded.params, sharding.shardings(loaded.params, mesh))
    kernels = {sharding.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params["visual"])}
    split = {name for name, x in kernels.items() if not x.sharding.is_fully_replicated}
    assert split == {name for name in kernels if name.endswith("kernel")}
    model = Decoder(loaded.model.cfg, mesh)
    (_, there), other = scored(model)(params, sharding.shard_batch(loaded.batch(), mesh))
    close(there, here, 1e-5)
    close(other, gradient, 1e-5)


@towers
def test_each_picture_and_each_of_its_places_matters(loaded):
    batch = loaded.batch()
    (_, (before, _)), _ = scored(loaded.model)(loaded.params, batch)
    for b, n in ((0, 3), (2, 0), (2, -1), (3, 5)):
        real = np.flatnonzero(batch.images.segments[b])
        patches = batch.images.patches.copy()
        patches[b, real[n]] ^= 255
        (_, (after, _)), _ = scored(loaded.model)(
            loaded.params, replace(batch, images=replace(batch.images, patches=patches))
        )
        moved = np.max(np.abs(np.asarray(after) - np.asarray(before)), axis=(1, 2))
        assert moved[b] > 1e-5 and np.all(np.delete(moved, b) < 1e-6)


def test_half_precision_is_near():
    loaded = load("qwen2_vl")
    model = Decoder(replace(loaded.model.cfg, dtype="bfloat16"))
    (_, (exact, _)), _ = scored(loaded.model)(loaded.params, loaded.batch())
    used = model.as_used(loaded.params)
    assert used["visual"]["layers"]["qkv"]["kernel"].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(used["visual"]["layers"]["mlp_norm"])} == {jnp.dtype("float32")}
    (_, (near, _)), gradient = scored(model)(loaded.params, loaded.batch())
    assert np.max(np.abs(np.asarray(near) - np.asarray(exact))) < 0.5
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    # What is stored as it is used gives the same numbers.
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
    close(score(used, loaded.batch()), score(loaded.params, loaded.batch()), 0.0)


# ---- tokens that are never sampled


def test_a_token_that_stands_for_pictures_is_never_sampled_and_scored_with_the_distribution_of_the_others():
    loaded = load("qwen2_5_vl")
    cfg = replace(loaded.model.cfg, final_soft_cap=5.0)
    model, batch = Decoder(cfg), loaded.batch()
    # A head that prefers these tokens.
    embedding = loaded.params["embed"]["embedding"]
    params = loaded.params | {"embed": {"embedding": embedding.at[jnp.array(cfg.never)].multiply(20.0)}}
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)):

        def loss(params: Any, batch: Batch, sampling: Sampling = sampling) -> tuple[jax.Array, Any]:
            logprobs, entropy = forward.completion_logprobs(model, params, batch, sampling)
            return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

        (_, scores), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        for leaf in jax.tree.leaves((scores, gradient)):
            assert np.all(np.isfinite(leaf))
        assert np.all(np.exp(scores[0]) <= 1 + 1e-5) and np.all(scores[1] >= -1e-5)
    free = replace(loaded.model.cfg, vision=replace(loaded.model.cfg.vision, never=()))
    for of, is_sampled in ((model, False), (Decoder(free), True)):
        _, of_rows = all_logits(of)(params, loaded.prompt(), *rows(batch))
        assert np.isin(np.argmax(of_rows, -1), cfg.never).any() == is_sampled


# ---- files


def renamed(loaded: Loaded, copy: Path, table: names.TensorNames) -> Path:
    """A copy of a folder with other names of its tensors."""
    shutil.copytree(loaded.folder, copy, ignore=shutil.ignore_patterns("*.npz"))
    tensors = load_file(copy / "model.safetensors")
    before, other = names.table_of(loaded.folder.name, tensors), {}
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
    module = module_of(loaded)
    tables = [getattr(module, "MODULES", {}), names.family_table(loaded.folder.name), *getattr(module, "OTHERS", ())]
    has = lambda table: all(any(name.startswith(x) for name in table.values()) for x in prefixes)  # noqa: E731
    (table,) = (table for table in tables if has(table))
    source = renamed(loaded, tmp_path / "source", table)
    assert names.table_of(loaded.folder.name, load_file(source / "model.safetensors")) == table
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


def test_the_settings_of_pictures_are_part_of_the_model(loaded, tmp_path):
    folder = shutil.copytree(loaded.folder, tmp_path / "model")
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"image_mean": [0.25, 0.5, 0.5]}
    before = hf.fingerprint(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
        hf.load_model(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert hf.fingerprint(folder) != before
    assert hf.load_model(folder).cfg.vision.mean == (0.25, 0.5, 0.5)


BROKEN = {
    "without sections": (("text_config", "rope_parameters"), {"mrope_section": None}, "mrope_section is None"),
    "with sections of another head": (
        ("text_config", "rope_parameters"),
        {"mrope_section": [4, 1, 1]},
        "half of a head",
    ),
    "with YaRN": (
        ("text_config", "rope_parameters"),
        {"rope_type": "yarn", "factor": 4.0},
        "'yarn' is not supported with",
    ),
    "without a tower": ((), {"vision_config": None}, "vision_config is None"),
    "without a picture's token": ((), {"image_token_id": None}, "image_token_id"),
    "of another activation": (("vision_config",), {"hidden_act": "relu"}, "hidden_act of vision_config is 'relu'"),
    "of black and white": (("vision_config",), {"in_channels": 1}, "in_channels of vision_config is 1"),
    "with odd heads": (("vision_config",), {"num_heads": 5}, "cannot divide"),
    "with heads too small": (("vision_config",), {"num_heads": 8}, "multiples of 4"),
    "of another width": (("text_config",), {"hidden_size": 48}, "hidden_size of the text model 48"),
}


SQUARES = {  # of Gemma 3
    "without a tower": ((), {"vision_config": None}, "vision_config is None"),
    "without a decoder": ((), {"text_config": None}, "text_config is None"),
    "without a picture's token": ((), {"image_token_index": None}, "image_token_index"),
    "of another activation": (("vision_config",), {"hidden_act": "relu"}, "hidden_act of vision_config is 'relu'"),
    "of black and white": (("vision_config",), {"num_channels": 1}, "num_channels of vision_config is 1"),
    "with odd heads": (("vision_config",), {"num_attention_heads": 5}, "cannot divide"),
    "with no square of tokens": ((), {"mm_tokens_per_image": 8}, "mm_tokens_per_image is 8"),
    "with tokens that do not divide": ((), {"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16"),
    "that sees all text": (("text_config",), {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
}


@pytest.mark.parametrize(
    ("loaded", "what"),
    [*(("qwen2_5_vl", what) for what in BROKEN), *(("gemma3", what) for what in SQUARES)],
    indirect=["loaded"],
)
def test_a_config_that_is_not_supported_is_one_line(loaded, what):
    path, changes, line = (SQUARES if loaded.folder.name == "gemma3" else BROKEN)[what]
    config = json.loads((loaded.folder / "config.json").read_text())
    node = config
    for name in path:
        node = node[name]
    node.update(changes)
    with pytest.raises(UserError, match=line) as refused:
        module_of(loaded).decoder_config(config)
    assert "\n" not in str(refused.value)


def module_of(loaded: Loaded) -> Any:
    return __import__(f"jaxrl_llm.models.{loaded.folder.name}", fromlist=["decoder_config"])


def test_a_text_family_still_refuses_the_rotary_embedding_of_pictures():
    text = json.loads((REFERENCES / "qwen2_tied" / "config.json").read_text())
    text["rope_parameters"] = {"rope_type": "mrope", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    with pytest.raises(UserError, match="rope type 'mrope' is not supported"):
        __import__("jaxrl_llm.models.qwen2", fromlist=["decoder_config"]).decoder_config(text)


# ---- records


def test_prompts_with_pictures_are_joined_and_taken_like_others(loaded):
    prompt = loaded.prompt()
    prompts = Prompts(prompt.tokens, prompt.mask, [{"n": i} for i in range(4)], np.arange(4), [], prompt.images)
    again = prompts.take([0, 1]).joined(prompts.take([2, 3]))
    jax.tree.map(np.testing.assert_array_equal, again.images, prompts.images)
    assert isinstance(again.images, Images) and again.take([3]).images.end.tolist() == prompt.images.end[3:].tolist()
    assert replace(prompts, images=None).take([0]).joined(replace(prompts, images=None)).images is None


# ---- adapters


@pytest.mark.parametrize("loaded", [x for x in NAMES if x != "qwen3_vl_moe"], indirect=True)
def test_adapters_stand_beside_text_layers_only_and_have_the_names_of_modules(loaded, tmp_path):
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
    (_, (before, _)), _ = scored(loaded.model)(loaded.params, loaded.batch())
    score = jax.jit(partial(forward.completion_logprobs, loaded.model, sampling=Sampling()))
    assert np.max(np.abs(score(combined, loaded.batch())[0] - before)) > 0.01
    original = load_file(loaded.folder / "model.safetensors")
    table = names.table_of(loaded.folder.name, original)
    merged = dict(hf_export.tensors(combined, table, np.float32))
    changed = {name for name, tensor in merged.items() if not np.array_equal(tensor, original[name])}
    prefix = table["embed/embedding"].removesuffix("embed_tokens.weight")
    assert changed == {
        f"{prefix}layers.{i}.{module}.weight"
        for i in range(loaded.model.cfg.layers)
        for module in ("self_attn.q_proj", "mlp.gate_proj")
    }


# ---- DeepStack


@layered
def test_the_copy_of_a_sampler_reads_pictures_as_the_trainer_does(loaded):
    mesh, prompt = tiny.mesh_of((1, 1, 1)), loaded.prompt()
    sampler = sampling_decoder(loaded.model, mesh)
    assert sampler.cfg.transposed
    hidden, prefix = jax.jit(sampler.prefill)(Placing(sampler, mesh)(loaded.params), prompt)
    expected = jax.jit(loaded.model.prefill)(loaded.params, prompt)
    close(hidden, expected[0], 1e-5)
    close(jax.tree.map(lambda *x: jnp.stack(x), *prefix), expected[1], 1e-5)


def test_a_run_on_texts_alone_samples_from_a_model_that_reads_pictures():
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
    cfg = module_of(load("gemma3")).decoder_config(config)
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.vocab_size, cfg.norm_eps) == (8, 4, 256, 262_208, 1e-6)
    assert cfg.tied_head and cfg.window == 1024 and cfg.local.index(False) == 5
    assert cfg.rope.frequencies[0] == 1 / 8 and cfg.local_rope.frequencies[0] == 1.0
    assert (cfg.vision.merge, cfg.vision.table, cfg.vision.two_way, cfg.never) == (4, 64, 256, (262_144,))
    assert Decoder(cfg).size() == 4_300_079_472


@pytest.mark.parametrize(
    "changes",
    [{"deepstack_visual_indexes": [1, 0]}, {"deepstack_visual_indexes": [3]}, {"num_position_embeddings": 15}],
)
def test_a_tower_that_does_not_fit_its_decoder_is_one_line(changes):
    config = json.loads((REFERENCES / "qwen3_vl" / "config.json").read_text())
    config["vision_config"] |= changes
    with pytest.raises(UserError, match=next(iter(changes))):
        module_of(load("qwen3_vl")).decoder_config(config)


# ---- pictures whose tokens see each other


def test_the_kernel_of_a_tpu_reads_pictures_as_the_plain_form(monkeypatch):
    loaded = load("gemma3")
    monkeypatch.setattr(attention_tpu, "fits", lambda *_: True)
    monkeypatch.setattr(attention_tpu, "attend_tpu", partial(attention_tpu.attend_tpu, interpret=True))
    model = Decoder(loaded.model.cfg, tiny.mesh_of((1, 1, 1)))
    with jax.default_matmul_precision("highest"):
        # Its gradients are tested alone.
        score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))
        there = score(loaded.params, loaded.batch(group=2))
    (_, here), _ = scored(loaded.model)(loaded.params, loaded.batch(group=2))
    close(there, here, 1e-4)
