"""Hugging Face folders in and out, against what `transformers` computes with the same weights.

The default tests read the arrays stored by tests/make_references.py; those marked `parity`
draw new weights and run `transformers` itself.
"""

import json
import shlex
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import huggingface_hub
import huggingface_hub.errors
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from test_recipes import write_qwen
from tokenizers import Tokenizer

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import forward, head
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import hf, hf_export, names, rope
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.vllm import weights
from jaxrl_llm.structs import Batch, Prompt, Prompts

REFERENCES = Path(__file__).parent / "references"
NAMES = (
    "qwen2_tied", "qwen2_untied", "qwen2_window", "qwen3_tied", "qwen3_untied", "llama", "mistral", "gemma2",
    "gemma3_text", "qwen3_moe", "mixtral",
)  # fmt: skip
TOLERANCE = 2e-4  # of a logit, in float32
NO_TOKENIZER = SimpleNamespace(eos_token_id=None)


class Loaded(NamedTuple):
    folder: Path
    model: Decoder
    params: Any
    stored: dict[str, np.ndarray]  # what `transformers` computed

    @property
    def name(self) -> str:
        return self.folder.name


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(data=1, fsdp=1, tensor=1)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request, mesh):
    folder = REFERENCES / request.param
    model = hf.load_model(folder)
    return Loaded(folder, model, hf.load_params(folder, model, mesh), dict(np.load(folder / "reference.npz")))


@pytest.fixture
def folder(tmp_path):
    """A copy of one checkpoint, to be broken."""
    return shutil.copytree(REFERENCES / "qwen2_untied", tmp_path / "model")


@pytest.fixture
def sharded_folder(tmp_path):
    return shutil.copytree(REFERENCES / "qwen3_untied", tmp_path / "model")


# ---- helpers


@cache
def flat_forward(model):
    """(params, tokens [B, S], mask) -> logits [B, S, V], compiled once for a model."""
    return jax.jit(lambda params, *batch: model.logits(params, model.prefill(params, Prompt(*batch))[0]))


def check_logits(model, params, arrays):
    # Both paddings as one batch: a row must not depend on what is beside it.
    tokens = np.concatenate([arrays["tokens_left"], arrays["tokens_right"]])
    mask = np.concatenate([arrays["mask_left"], arrays["mask_right"]])
    logits = np.asarray(flat_forward(model)(params, tokens, mask))[mask]
    expected = np.concatenate([arrays["logits_left"], arrays["logits_right"]])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def check_greedy(folder, model, params, arrays, mesh):
    stops = hf.stop_ids(folder, NO_TOKENIZER)
    sampler = Sampler(model, mesh, max_completion_tokens=12, stop_ids=stops, pad_id=0)
    sampler.update_weights(params)
    ones = np.ones_like(arrays["prompts"], bool)
    for tokens, mask, expected in (
        (arrays["tokens_left"], arrays["mask_left"], arrays["greedy_left"]),
        (arrays["tokens_right"], arrays["mask_right"], arrays["greedy_left"]),
        (arrays["prompts"], ones, arrays["greedy_prompts"]),
    ):
        prompts, greedy = Prompts(tokens, mask, [], np.arange(len(tokens))), Sampling(temperature=0)
        rollouts = sampler.sample(prompts, jax.random.key(0), group_size=2, sampling=greedy)
        stopped = np.isin(expected, stops)
        for member in range(2):
            np.testing.assert_array_equal(rollouts.completions[:, member], expected)
            np.testing.assert_array_equal(rollouts.completion_mask[:, member], np.cumsum(stopped, 1) - stopped == 0)
            np.testing.assert_array_equal(rollouts.truncated[:, member], ~stopped.any(1))


def perturbed(params):
    """Parameters as training would leave them: every one changed."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [leaf + jnp.asarray(0.02 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(tree, moved)


def tensors_of(folder):
    """Every tensor of a folder, whichever file holds it."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        more = load_file(file)
        assert not more.keys() & tensors.keys()
        tensors |= more
    return tensors


def rewrite(folder, **changes):
    """Changes tensors of a one-file folder; None takes one out."""
    tensors = tensors_of(folder) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def configure(folder, **changes):
    """Changes entries of config.json; ... takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def load(folder, mesh):
    model = hf.load_model(hf.find(str(folder)))
    return model, hf.load_params(folder, model, mesh)


def error_of(call, *arguments):
    """The one line of the UserError that a call must end in."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


def assert_trees_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, sharding.to_host(one), sharding.to_host(other))


# ---- the same function as transformers


def test_logits_equal_those_of_transformers_with_left_and_right_padding(loaded):
    check_logits(loaded.model, loaded.params, loaded.stored)


def test_greedy_completions_equal_those_of_transformers_generate(loaded, mesh):
    check_greedy(loaded.folder, loaded.model, loaded.params, loaded.stored, mesh)


def test_group_native_logprobs_equal_the_flat_forward(loaded, monkeypatch):
    model, params, stored = loaded.model, loaded.params, loaded.stored
    vocabulary, group, width = model.cfg.vocab_size, 2, 5
    rows = ((0, "left"), (2, "right"), (0, "right"), (2, "left"))
    prompts, prompt_mask = (np.stack([stored[f"{what}_{side}"][i] for i, side in rows]) for what in ("tokens", "mask"))
    completions = np.random.default_rng(1).integers(0, vocabulary, (len(rows), group, width)).astype(np.int32)
    mask = np.arange(width) < np.array([[5, 1], [2, 5], [3, 4], [5, 2]])[..., None]
    monkeypatch.setattr(head, "tokens_at_once", lambda *_: 2 * len(rows) * group)  # the head in three parts
    score = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling(temperature=0.7)))
    logprobs, entropy = sharding.to_host(score(params, Batch(prompts, prompt_mask, completions, mask, mask)))

    flat, flat_mask = np.zeros((len(rows), group, 12), np.int32), np.zeros((len(rows), group, 12), bool)
    for b, g in np.ndindex(len(rows), group):
        row = [*prompts[b][prompt_mask[b]], *completions[b, g][mask[b, g]]]
        flat[b, g, : len(row)], flat_mask[b, g, : len(row)] = row, True
    logits = flat_forward(model)(params, flat.reshape(-1, 12), flat_mask.reshape(-1, 12))
    distribution = np.asarray(jax.nn.log_softmax(logits / 0.7)).reshape(*flat.shape, vocabulary)
    for b, g in np.ndindex(len(rows), group):
        before, n = prompt_mask[b].sum() - 1, mask[b, g].sum()
        predicted = distribution[b, g, before : before + n]
        expected = predicted[np.arange(n), completions[b, g, :n]]
        np.testing.assert_allclose(logprobs[b, g, :n], expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(entropy[b, g, :n], -(np.exp(predicted) * predicted).sum(-1), rtol=0, atol=TOLERANCE)
    assert not logprobs[~mask].any()
    assert not entropy[~mask].any()


def test_both_stop_ids_of_generation_config_end_a_completion(loaded):
    # The reference must be able to show it: its config.json names only one of the two.
    one = json.loads((loaded.folder / "config.json").read_text())["eos_token_id"]
    stops = hf.stop_ids(loaded.folder, NO_TOKENIZER)
    assert len(stops) == 2
    assert one in stops
    greedy = loaded.stored["greedy_left"]
    last = {int(row[np.flatnonzero(row)[-1]]) for row in greedy if not row[-1]}
    assert last == set(stops)


# ---- stop ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([7, 5], None, None, (5, 7)),
        ([7, 5], 9, None, (5, 7, 9)),
        (7, None, 3, (3, 7)),
        (None, 0, None, (0,)),
        (None, None, 4, (4,)),
    ],
)
def test_stop_ids_are_those_of_both_configs_and_the_tokenizer(folder, generation, config, tokenizer, expected):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    configure(folder, eos_token_id=config)
    assert hf.stop_ids(folder, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_a_folder_without_generation_config_stops_by_config_json(folder):
    (folder / "generation_config.json").unlink()
    configure(folder, eos_token_id=9)
    assert hf.stop_ids(folder, NO_TOKENIZER) == (9,)


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.0, [None]])
def test_a_stop_id_that_is_no_number_is_named(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    line = error_of(hf.stop_ids, folder, NO_TOKENIZER)
    assert f"generation_config.json: eos_token_id is {value!r}: give a token's number" in line


def test_no_stop_id_anywhere_is_an_error(folder):
    (folder / "generation_config.json").unlink()
    configure(folder, eos_token_id=...)
    assert "no eos_token_id" in error_of(hf.stop_ids, folder, NO_TOKENIZER)


# ---- config.json


@pytest.mark.parametrize("name", NAMES)
def test_an_older_config_json_means_the_same_model(name, tmp_path):
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    if name == "gemma3_text":
        configure(folder, rope_local_base_freq=rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items() if key != "rope_theta"}
    configure(folder, rope_theta=rope["rope_theta"], rope_scaling=scaling if scaling["type"] != "default" else None)
    configure(folder, rope_parameters=..., dtype=..., torch_dtype="float32")
    assert hf.load_model(folder).cfg == hf.load_model(REFERENCES / name).cfg


@pytest.mark.parametrize(
    ("name", "changes", "local"),
    [
        ("qwen2_window", {"layer_types": ...}, (False, True, True)),
        ("qwen2_window", {"layer_types": ..., "use_sliding_window": False}, ()),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": ...}, (True, True, True)),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (True, False, False)),
        ("gemma2", {"layer_types": ..., "num_hidden_layers": 5}, (True, False, True, False, True)),
        ("gemma3_text", {"layer_types": ..., "num_hidden_layers": 8}, (True,) * 5 + (False,) + (True,) * 2),
        ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 2}, (True, False, True)),
    ],
)
def test_which_layers_have_a_window_is_said_in_the_words_of_each_family(name, changes, local, tmp_path):
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    configure(folder, **changes)
    assert hf.load_model(folder).cfg.local == local


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50', which is no number"),
        ("gemma2", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar is '256', which is no number"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu': only 'silu', 'gelu_pytorch_tanh'"),
        ("gemma2", {"sliding_window": None}, "no 'sliding_window'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        ("gemma3_text", {"model_type": "gemma2"}, "rope_parameters differ between layers"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096', which is no number"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "no 'low_freq_factor'"),
    ],
)
def test_what_a_family_does_not_have_or_a_broken_setting_is_refused_by_its_name(name, changes, said, tmp_path):
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    configure(folder, **changes)
    assert said in error_of(hf.load_model, folder)


def test_mixtral_has_one_kind_of_layers_and_its_own_rotary_base(tmp_path):
    folder = shutil.copytree(REFERENCES / "mixtral", tmp_path / "model")
    configure(folder, rope_parameters=..., rope_theta=1_000_000.0, layer_types=..., sliding_window=6)
    usual = hf.load_model(folder).cfg
    assert usual.local == (True,) * usual.layers
    configure(folder, rope_theta=..., layer_types=["full_attention"] * usual.layers)
    assert hf.load_model(folder).cfg == usual


def test_a_model_with_yarn_has_the_positions_after_it():
    assert hf.load_model(REFERENCES / "qwen2_window").cfg.max_positions == 128
    hf_settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert rope.longest(hf_settings, 32_768) == 131_072


def test_a_null_number_of_key_value_heads_means_as_many_as_query_heads(folder):
    configure(folder, num_key_value_heads=None)
    assert hf.load_model(folder).cfg.kv_heads == 4


def test_dtype_and_remat_are_those_asked_for(folder):
    cfg = hf.load_model(folder, dtype="bfloat16", remat="dots").cfg
    assert (cfg.dtype, cfg.remat) == ("bfloat16", "dots")


# ---- in and out


def test_load_save_load_is_identical(loaded, mesh, tmp_path):
    saved = tmp_path / "saved"
    hf_export.save(saved, loaded.params, loaded.folder)
    before, after = tensors_of(loaded.folder), tensors_of(saved)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        np.testing.assert_array_equal(after[name], tensor)
    model, params = load(saved, mesh)
    assert model.cfg == loaded.model.cfg
    assert_trees_equal(params, loaded.params)


def test_weights_that_are_pushed_to_vllm_have_the_names_and_values_of_the_file(loaded, tmp_path):
    with (tmp_path / "pushed").open("wb") as file:
        weights.write_stream(file, loaded.params, names.family_table(loaded.model.cfg.family), np.float32)
    pushed, stored = load_file(tmp_path / "pushed"), tensors_of(loaded.folder)
    assert pushed.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(pushed[name], tensor)


def test_a_saved_folder_has_the_parameters_given_and_not_the_source_s(loaded, mesh, tmp_path):
    trained = perturbed(loaded.params)
    hf_export.save(tmp_path / "saved", trained, loaded.folder)
    assert_trees_equal(load(tmp_path / "saved", mesh)[1], trained)


def test_a_saved_folder_has_the_other_files_of_the_source_and_no_stale_index(loaded, tmp_path):
    source = shutil.copytree(loaded.folder, tmp_path / "source")
    others = {"config.json", "generation_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    for name in others - {"config.json", "generation_config.json"}:
        (source / name).write_text(name)
    hf_export.save(tmp_path / "saved", loaded.params, source)
    assert {file.name for file in (tmp_path / "saved").iterdir()} == others | {"model.safetensors"}
    for name in others:
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()


def test_links_out_of_a_model_folder_are_not_exported_and_those_of_the_hub_s_cache_are(loaded, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "main"
    shutil.copytree(loaded.folder, snapshot)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "0f").write_text("merges")
    (snapshot / "merges.txt").symlink_to("../../blobs/0f")
    plain = shutil.copytree(loaded.folder, tmp_path / "plain")
    (plain / "own.txt").write_text("own")
    (plain / "vocab.txt").symlink_to("own.txt")
    for folder, links in ((snapshot, {"merges.txt"}), (plain, {"own.txt", "vocab.txt"})):
        (folder / "keys.json").symlink_to(tmp_path / "secret.json")
        hf_export.save(tmp_path / "saved", loaded.params, folder)
        saved = {file.name for file in (tmp_path / "saved").iterdir()}
        assert links <= saved and "keys.json" not in saved
    assert not any(file.is_symlink() for file in (tmp_path / "saved").iterdir())


def test_saving_replaces_an_earlier_folder_and_leaves_nothing_beside_it(loaded, tmp_path):
    for left_by_a_kill in ("saved", "saved.partial"):
        (tmp_path / left_by_a_kill).mkdir()
        (tmp_path / left_by_a_kill / "old.safetensors").write_text("old")
    hf_export.save(tmp_path / "saved", loaded.params, loaded.folder)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert not (tmp_path / "saved" / "old.safetensors").exists()


def test_a_sharded_save_reloads_equal_and_its_index_is_right(loaded, mesh, tmp_path, monkeypatch):
    limit = 20_000
    monkeypatch.setattr(hf_export, "SHARD_BYTES", limit)
    saved = tmp_path / "saved"
    trained = perturbed(loaded.params)
    hf_export.save(saved, trained, loaded.folder)
    assert_trees_equal(load(saved, mesh)[1], trained)

    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in saved.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    held = {tensor: file for file in files for tensor in load_file(saved / file)}
    assert index["weight_map"] == held
    assert held.keys() == tensors_of(loaded.folder).keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors_of(saved).values())
    assert all(sum(x.nbytes for x in load_file(saved / file).values()) <= limit for file in files)


def test_the_sharded_reference_really_is_sharded():
    assert len(list((REFERENCES / "qwen3_untied").glob("*.safetensors"))) > 2
    assert (REFERENCES / "qwen3_untied" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_checkpoint_of_16_bits_is_computed_in_float32_and_written_back_as_it_was(folder, mesh, tmp_path, key, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    stored = {name: tensor.astype(kind) for name, tensor in tensors_of(folder).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    configure(folder, **{"dtype": ..., key: dtype})
    _, params = load(folder, mesh)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    query = stored["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers"]["attention"]["query"]["kernel"][1], query.T)

    hf_export.save(tmp_path / "saved", params, folder)
    written = tensors_of(tmp_path / "saved")
    assert {tensor.dtype for tensor in written.values()} == {kind}
    assert {name: x.tobytes() for name, x in written.items()} == {name: x.tobytes() for name, x in stored.items()}


def test_a_stored_copy_of_a_tied_head_is_ignored_and_another_head_is_refused(tmp_path, mesh):
    folder = shutil.copytree(REFERENCES / "qwen2_tied", tmp_path / "model")
    _, before = load(folder, mesh)
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embedding.copy())
    _, after = load(folder, mesh)
    assert_trees_equal(after, before)
    for other in (embedding + 0.1, embedding[1:]):
        rewrite(folder, lm_head__weight=np.ascontiguousarray(other))
        assert "lm_head.weight differs from model.embed_tokens.weight: set tie" in error_of(load, folder, mesh)


def test_a_folder_is_written_back_in_the_dtype_of_its_files_and_without_left_over_adapters(folder, mesh, tmp_path):
    configure(folder, dtype="torch.bfloat16")  # but the files are float32
    (folder / "adapter_config.json").write_text("{}")
    _, params = load(folder, mesh)
    hf_export.save(tmp_path / "saved", params, folder)
    written, stored = tensors_of(tmp_path / "saved"), tensors_of(folder)
    assert {name: x.tobytes() for name, x in written.items()} == {name: x.tobytes() for name, x in stored.items()}
    assert not (tmp_path / "saved" / "adapter_config.json").exists()


def test_the_fingerprint_changes_with_a_weight_the_config_the_chat_template_and_the_stop_ids(folder):
    first = hf.fingerprint(folder)
    assert hf.fingerprint(folder) == first
    tensors = tensors_of(folder)
    rewrite(folder, model__norm__weight=tensors["model.norm.weight"] + 1)
    second = hf.fingerprint(folder)
    configure(folder, rms_norm_eps=1e-5)
    third = hf.fingerprint(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    fourth = hf.fingerprint(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    assert len({first, second, third, fourth, hf.fingerprint(folder)}) == 5


# ---- on a mesh

# Names as in the table of sharding.RULES, written out here once more: [L, in, out] kernels over fsdp and tensor.
SPECS = {
    "embed/embedding": P("tensor", "fsdp"),
    "norm/scale": P(),
    "head/kernel": P("fsdp", "tensor"),
    "layers/attention_norm/scale": P(),
    "layers/mlp_norm/scale": P(),
    "layers/attention_post_norm/scale": P(),
    "layers/mlp_post_norm/scale": P(),
    "layers/attention/query_norm/scale": P(),
    "layers/attention/key_norm/scale": P(),
    "layers/attention/query/kernel": P(None, "fsdp", "tensor"),
    "layers/attention/key/kernel": P(None, "fsdp", "tensor"),
    "layers/attention/value/kernel": P(None, "fsdp", "tensor"),
    "layers/attention/output/kernel": P(None, "tensor", "fsdp"),
    "layers/attention/query/bias": P(None, "tensor"),
    "layers/attention/key/bias": P(None, "tensor"),
    "layers/attention/value/bias": P(None, "tensor"),
    "layers/attention/output/bias": P(),
    "layers/mlp/gate/bias": P(None, "tensor"),
    "layers/mlp/up/bias": P(None, "tensor"),
    "layers/mlp/down/bias": P(),
    "layers/mlp/gate/kernel": P(None, "fsdp", "tensor"),
    "layers/mlp/up/kernel": P(None, "fsdp", "tensor"),
    "layers/mlp/down/kernel": P(None, "tensor", "fsdp"),
    "layers/experts/router/kernel": P(),
    "layers/experts/gate/kernel": P(None, "tensor", "fsdp"),
    "layers/experts/up/kernel": P(None, "tensor", "fsdp"),
    "layers/experts/down/kernel": P(None, "tensor", None, "fsdp"),
}
ODD_VOCABULARY = {"embed/embedding": P(None, "fsdp"), "head/kernel": P("fsdp", None)}  # 61 tokens over 2 devices


def test_loading_onto_a_mesh_gives_the_same_arrays_in_the_expected_shards(loaded):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    params = hf.load_params(loaded.folder, loaded.model, mesh)
    specs = SPECS | (ODD_VOCABULARY if loaded.name == "qwen2_untied" else {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = specs[sharding.path_name(path)]
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), sharding.path_name(path)
        split = [size // (2 if axis else 1) for size, axis in zip(leaf.shape, [*spec, None, None, None], strict=False)]
        assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(split)}
    assert_trees_equal(params, loaded.params)


def test_a_model_that_never_learns_is_loaded_in_the_dtype_of_its_products(loaded):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    model = hf.load_model(loaded.folder, mesh, dtype="bfloat16")
    params = hf.load_params(loaded.folder, model, mesh, learns=False)
    assert_trees_equal(params, model.as_used(hf.load_params(loaded.folder, model, mesh)))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    assert params["embed"]["embedding"].dtype == "bfloat16" and params["norm"]["scale"].dtype == "float32"


def test_a_model_on_a_mesh_gives_the_logits_of_transformers(mesh):
    folder = REFERENCES / "qwen2_untied"
    wide = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    model, params = load(folder, wide)
    stored = np.load(folder / "reference.npz")
    batch = sharding.shard_batch((stored["tokens_left"], stored["mask_left"]), wide)
    logits = np.asarray(flat_forward(model)(params, *batch))[stored["mask_left"]]
    np.testing.assert_allclose(logits, stored["logits_left"], rtol=0, atol=TOLERANCE)


# ---- what a person can put right is one line that names it


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1], ids=["all", "length", "header", "half", "last byte"])
def test_a_truncated_safetensors_file_is_named_in_one_line(folder, mesh, kept):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    line = error_of(load, folder, mesh)
    assert str(file) in line
    assert "cut short" in line


def test_a_missing_tensor_is_named_in_one_line(folder, mesh):
    rewrite(folder, model__layers__1__mlp__up_proj__weight=None)
    line = error_of(load, folder, mesh)
    assert "no tensor model.layers.1.mlp.up_proj.weight" in line


def test_a_missing_head_of_an_untied_model_is_named_in_one_line(folder, mesh):
    rewrite(folder, lm_head__weight=None)
    assert "no tensor lm_head.weight" in error_of(load, folder, mesh)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder, mesh):
    rewrite(folder, model__layers__2__self_attn__k_proj__weight=np.zeros((32, 16), np.float32))
    line = error_of(load, folder, mesh)
    assert "model.layers.2.self_attn.k_proj.weight is (32, 16)" in line
    assert "(16, 32)" in line


def test_a_config_of_more_layers_than_the_checkpoint_is_an_error(folder, mesh):
    configure(folder, num_hidden_layers=4)
    assert "no tensor model.layers.3." in error_of(load, folder, mesh)


def test_a_config_of_fewer_layers_than_the_checkpoint_is_an_error(folder, mesh):
    configure(folder, num_hidden_layers=2)
    line = error_of(load, folder, mesh)
    assert "model.layers.2." in line
    assert "unknown to qwen2" in line


def test_a_tensor_that_the_family_does_not_have_is_an_error(folder, mesh):
    rewrite(folder, model__layers__0__self_attn__o_proj__bias=np.zeros(32, np.float32))
    assert "model.layers.0.self_attn.o_proj.bias is unknown to qwen2" in error_of(load, folder, mesh)


def test_the_weights_of_another_family_are_an_error(folder, mesh):
    configure(folder, model_type="qwen3", head_dim=8)
    assert "_norm.weight" in error_of(load, folder, mesh)


@pytest.mark.parametrize("family", ["bert", "no_such_model", "hf", "decoder", "../qwen2", ...])
def test_a_config_of_another_architecture_names_those_supported(folder, family):
    configure(folder, model_type=family)
    line = error_of(hf.load_model, folder)
    assert str(folder / "config.json") in line
    assert "not supported" in line
    assert "qwen2, qwen2_5_vl, qwen2_vl, qwen3" in line
    assert family is ... or repr(family) in line


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_tied"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "the rope settings have no 'factor'"),
        ({"rope_parameters": ..., "rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor of the rope settings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "the rope settings have no 'low_freq_factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "it changes with the length of a text"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "take the rope scaling out"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"rope_parameters": ..., "rope_scaling": 2.0}, "the rope settings are 2.0: restore the file"),
        ({"hidden_size": "32"}, "hidden_size is '32', which is no number: restore the file"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        (
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1, "layer_types": ...},
            "no 'sliding_",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "no 'sliding_window'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
            "layer_types names 2 layers, num_hidden_layers is 3",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not supported; use the checkpoint"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": ...}, "no 'rms_norm_eps'"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(tmp_path, name, changes, said):
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    configure(folder, **changes)
    line = error_of(hf.load_model, folder)
    assert "config.json" in line
    assert said in line


def test_a_folder_without_config_json_is_an_error(folder):
    (folder / "config.json").unlink()
    for call, argument in ((hf.find, str(folder)), (hf.load_model, folder)):
        line = error_of(call, argument)
        assert str(folder) in line
        assert "config.json" in line


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    line = error_of(hf.find, str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in line


def test_every_vision_model_is_said_to_be_one_with_a_family_that_trains_here():
    assert {text for text in hf.VISION.values() if text} <= set(hf.families())
    assert not set(hf.VISION) & set(hf.families())
    for family, text in hf.VISION.items():
        line = hf._unsupported(family, {}, hf.families())
        assert line.startswith(
            "is a vision-language model of a kind that is not supported: give one of gemma3, qwen2_5_vl, "
            "qwen2_vl, qwen3_vl"
        )
        assert line.endswith(f" of the family {text}" if text else ", ".join(hf.families()))
    assert hf._unsupported("bert", {}, ["llama"]) == "is not supported; there is llama"


def test_weights_of_torch_come_with_the_command_that_converts_them(tmp_path, monkeypatch):
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(UserError) as refused:
        hf.weight_files(folder)
    said = str(refused.value)
    program, option, code = shlex.split(said[said.index("python -c") :])
    assert (program, option) == ("python", "-c")
    made = {}

    class Model:
        def save_pretrained(self, to: str) -> None:
            made["to"] = to

        @classmethod
        def from_pretrained(cls, path: str, dtype: str) -> "Model":
            made["of"] = (path, dtype)
            return cls()

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=Model))
    exec(code, {})
    assert made == {"of": (str(folder), "auto"), "to": str(folder)}


def test_a_repository_without_safetensors_in_the_hubs_cache_says_how_to_fetch_all_of_it(tmp_path):
    folder = tmp_path / "models--lab--old" / "snapshots" / "1234"
    folder.mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"the hub has none of lab/old: fetch all of it .hf download lab/old --local-dir"
    ):
        hf.weight_files(folder)


REFUSALS = {
    "GatedRepoError": "ask for access on its page, and log in with a token",
    "RepositoryNotFoundError": "check the name; a private one needs a token",
    "LocalEntryNotFoundError": r"fetch it where there is a network \(hf download lab/x --local-dir DIR\) and give that",
}


@pytest.mark.parametrize(("name", "line"), REFUSALS.items())
def test_a_refusal_of_the_hub_comes_with_what_helps(monkeypatch, name, line):
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    kind = getattr(huggingface_hub.errors, name)

    def snapshot_download(*_: object, **__: object) -> str:
        raise kind("no.\nmore") if name == "LocalEntryNotFoundError" else kind("no.\nmore", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=f"model.path 'lab/x' is no local folder, and the hub says: no: {line}"):
        hf.find("lab/x")


def test_a_repository_of_adapters_is_said_to_be_one(tmp_path, monkeypatch):
    (tmp_path / hf.ADAPTER).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(
        UserError, match=r"'lab/x' holds adapters of PEFT .*: give their base, the model that it adapts, as"
    ):
        hf.find("lab/x")


def test_a_hub_id_that_cannot_be_fetched_is_an_error():
    assert "no-such-organization/no-such-model" in error_of(hf.find, "no-such-organization/no-such-model")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b'{"eos_token_id": [1, ', b"\xff\xfe\x00", b""], ids=["cut", "binary", "empty"])
def test_a_broken_json_file_is_named_in_one_line(sharded_folder, mesh, name, content):
    (sharded_folder / name).write_bytes(content)

    def read():
        load(sharded_folder, mesh)
        hf.stop_ids(sharded_folder, NO_TOKENIZER)

    assert str(sharded_folder / name) in error_of(read)


def test_a_folder_without_safetensors_is_an_error(folder, mesh):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    line = error_of(load, folder, mesh)
    assert str(folder) in line
    assert "no model.safetensors" in line


def test_shards_without_their_index_are_told_from_other_formats(sharded_folder, mesh):
    (sharded_folder / "model.safetensors.index.json").unlink()
    assert "no model.safetensors.index.json, which says where each tensor is" in error_of(load, sharded_folder, mesh)


def test_a_missing_shard_named_by_the_index_is_named(sharded_folder, mesh):
    shard = sorted(sharded_folder.glob("*.safetensors"))[2]
    shard.unlink()
    assert str(shard) in error_of(load, sharded_folder, mesh)


def test_a_truncated_shard_is_named(sharded_folder, mesh):
    shard = sorted(sharded_folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert str(shard) in error_of(load, sharded_folder, mesh)


def test_a_folder_without_a_tokenizer_is_an_error(folder):
    # transformers makes an empty one out of config.json: every prompt would be encoded as nothing.
    line = error_of(hf.load_tokenizer, folder)
    assert str(folder) in line
    assert "restore tokenizer.json" in line


# ---- tokenizers


@pytest.fixture
def qwen(tmp_path):
    """Qwen2's config.json and a byte-level tokenizer, of fewer tokens than the model has."""
    write_qwen(tmp_path)
    return tmp_path


def settle(folder, name, **changes):
    settings = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))


def test_a_tokenizer_that_is_not_qwens_splits_text_as_its_tokenizer_json_says(qwen):
    digits = {"type": "Digits", "individual_digits": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    begin = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": begin, "pair": begin, "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}  # fmt: skip
    pre = {"type": "Sequence", "pretokenizers": [digits, bytes_]}
    settle(qwen, "tokenizer.json", pre_tokenizer=pre, post_processor=post)
    settle(qwen, "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", bos_token="<|endoftext|>")
    raw, loaded = Tokenizer.from_file(str(qwen / "tokenizer.json")), hf.load_tokenizer(qwen)
    for text in ("3 apples and 1234 eggs", " 12 * 5 = 60\n"):
        assert loaded(text)["input_ids"] == raw.encode(text).ids
        assert loaded(text)["input_ids"][0] == 0


@pytest.mark.parametrize(("changes", "pad"), [
    ({}, "<|endoftext|>"), ({"pad_token": None}, "<|im_end|>"), ({"pad_token": "<|im_end|>"}, "<|im_end|>"),
    ({"pad_token": None, "eos_token": None}, "<|endoftext|>"),
])  # fmt: skip
def test_any_token_serves_as_padding(qwen, changes, pad):
    settle(qwen, "tokenizer_config.json", **changes)
    tokenizer = hf.load_tokenizer(qwen)
    assert (tokenizer.pad_token, hf.stop_ids(qwen, tokenizer)) == (pad, (0, 2))


def test_a_token_that_the_model_has_and_the_tokenizer_has_not_decodes_to_nothing(qwen):
    tokenizer, model = hf.load_tokenizer(qwen), hf.load_model(qwen)
    assert len(tokenizer) < model.cfg.vocab_size
    (three,) = tokenizer("3", add_special_tokens=False)["input_ids"]
    completions = np.array([[[three, model.cfg.vocab_size - 1, three]]])
    assert data.decode(tokenizer, completions, np.ones_like(completions, bool))[0] == [["33"]]


@pytest.mark.parametrize("place", ["jinja", "tokenizer_config.json", "named"])
def test_a_chat_template_is_found_wherever_it_is_kept(qwen, place):
    text = (qwen / "chat_template.jinja").read_text()
    if place != "jinja":
        (qwen / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "?"}]
        settle(qwen, "tokenizer_config.json", chat_template=named if place == "named" else text)
    (ids,) = encode([[{"role": "user", "content": "3 apples"}]], hf.load_tokenizer(qwen), "here")
    assert hf.load_tokenizer(qwen).decode(ids.tolist()).endswith("<|im_end|>\n<|im_start|>assistant\n")


# ---- transformers itself

FRESH = {  # seeds, not the stored
    "qwen2_tied": 15, "qwen2_untied": 0, "qwen2_window": 2, "qwen3_tied": 4, "qwen3_untied": 6, "llama": 3,
    "mistral": 3, "gemma2": 1, "gemma3_text": 2, "qwen3_moe": 1, "mixtral": 1,
}  # fmt: skip
OLD = {"rope_theta": 1_000.0, "original_max_position_embeddings": 32}  # 32 positions, and a model stretched to more
ROPES = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_theta": 500.0, "factor": 3.0},
    "llama3": OLD | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": OLD | {"factor": 4.0},
    "yarn by attention_factor": OLD | {"factor": 4.0, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn by mscale": OLD | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
}
LONG = [
    *((name, None) for name in NAMES),
    *(("llama", kind) for kind in ROPES),
    ("mistral", "yarn"),
    ("qwen3_tied", "yarn"),
]


@pytest.fixture(scope="module")
def make_references():
    pytest.importorskip("torch")
    return __import__("make_references")


@pytest.fixture(scope="module", params=NAMES)
def live(request, make_references, mesh, tmp_path_factory):
    """A checkpoint drawn and computed by `transformers` just now."""
    name, seed = request.param, FRESH[request.param]
    torch_model = make_references.build(name, seed)
    folder = tmp_path_factory.mktemp("live") / name
    torch_model.save_pretrained(folder)
    model, params = load(folder, mesh)
    return Loaded(folder, model, params, make_references.reference(torch_model, seed))


@pytest.mark.parity
def test_fresh_weights_give_the_logits_of_transformers_with_left_and_right_padding(live):
    check_logits(live.model, live.params, live.stored)


@pytest.mark.parity
def test_fresh_weights_give_the_greedy_completions_of_transformers(live, mesh):
    check_greedy(live.folder, live.model, live.params, live.stored, mesh)


@pytest.mark.parity
@pytest.mark.parametrize("limit", [hf_export.SHARD_BYTES, 20_000], ids=["one file", "shards"])
def test_transformers_loads_a_saved_folder_and_computes_the_same(
    live, make_references, mesh, tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(hf_export, "SHARD_BYTES", limit)
    saved = tmp_path / "saved"
    trained = perturbed(live.params)
    hf_export.save(saved, trained, live.folder)
    reloaded = make_references.load(saved)
    arrays = make_references.reference(reloaded, FRESH[live.name])
    assert np.abs(arrays["logits_left"] - live.stored["logits_left"]).max() > 100 * TOLERANCE  # it was trained
    check_logits(live.model, trained, arrays)
    check_greedy(saved, live.model, trained, arrays, mesh)


@pytest.mark.parity
def test_the_stored_arrays_are_those_that_transformers_computes_now(loaded, make_references):
    seed = make_references.MODELS[loaded.name][0]
    now = make_references.reference(make_references.load(loaded.folder), seed)
    assert now.keys() == loaded.stored.keys()
    for name, array in now.items():
        np.testing.assert_allclose(array, loaded.stored[name], rtol=0, atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "kind"), LONG, ids=str)
def test_20_texts_longer_than_a_window_have_the_logits_and_the_64_greedy_tokens_of_transformers(
    name, kind, make_references, mesh, tmp_path
):
    settings = ROPES[kind] | {"rope_type": kind.split()[0]} if kind else {}
    torch_model = make_references.other_rope(name, 7, **settings)
    torch_model.save_pretrained(tmp_path)
    model, params = load(tmp_path, mesh)
    rng, width = np.random.default_rng(3), 40
    lengths = rng.integers(2, width + 1, 20)
    mask = np.arange(width) >= width - lengths[:, None]
    tokens = np.where(mask, rng.integers(1, model.cfg.vocab_size, mask.shape), 0).astype(np.int32)
    gap = np.abs(
        np.asarray(flat_forward(model)(params, tokens, mask))[mask] - make_references.logits(torch_model, tokens, mask)
    )
    print(f"{name}, rope {kind or 'of its reference'}: max |difference of a logit| {gap.max():.1e}")
    assert gap.max() < TOLERANCE
    sampler = Sampler(model, mesh, max_completion_tokens=64, stop_ids=(), pad_id=0)
    sampler.update_weights(params)
    prompts, greedy = Prompts(tokens, mask, [], np.arange(20)), Sampling(temperature=0)
    rollouts = sampler.sample(prompts, jax.random.key(0), group_size=1, sampling=greedy)
    expected = make_references.generate(torch_model, tokens, mask, new_tokens=64)
    np.testing.assert_array_equal(rollouts.completions[:, 0], expected)
