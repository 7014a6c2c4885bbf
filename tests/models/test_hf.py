"""Hugging Face folders in and out, against what `transformers` computes with the same weights.

The default tests read the arrays stored by tests/make_references.py; those marked `parity`
draw new weights and run `transformers` itself.
"""

import json
import re
import shlex
import shutil
from functools import cache, partial
from importlib import import_module
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
from jaxrl_llm.machine import meshes, sharding, transfers
from jaxrl_llm.models import hf, hf_export, names, rope
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.vllm import weights
from jaxrl_llm.structs import Prompt, Prompts

REFERENCES = Path(__file__).parents[1] / "references"
NAMES = (
    "qwen2_tied", "qwen2_untied", "qwen2_window", "qwen3_tied", "qwen3_untied", "llama", "mistral", "gemma2",
    "gemma3_text", "qwen3_moe", "mixtral",
)  # fmt: skip
# Of layers with windows and two rotary bases; biases and YaRN; experts.
RICH = ("gemma3_text", "qwen2_window", "mixtral")
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
    return meshes.make_mesh(data=1, fsdp=1, tensor=1)


@cache
def load_reference(name: str) -> Loaded:
    folder = REFERENCES / name
    model, stored = hf.load_model(folder), dict(np.load(folder / "reference.npz"))
    return Loaded(folder, model, hf.load_params(folder, model, meshes.make_mesh(data=1, fsdp=1, tensor=1)), stored)


@pytest.fixture(params=NAMES)
def loaded(request):
    return load_reference(request.param)


def families(*names):
    """Parametrizes `loaded` with the references in which what a test is about differs."""
    return pytest.mark.parametrize("loaded", names, indirect=True)


@pytest.fixture
def folder(tmp_path):
    """A copy of one checkpoint, to be broken."""
    return shutil.copytree(REFERENCES / "qwen2_untied", tmp_path / "model")


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


def settle(folder, name, **changes):
    """Changes entries of a JSON file; ... takes one out."""
    settings = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))


configure = partial(settle, name="config.json")


def load(folder, mesh):
    model = hf.load_model(hf.find_checkpoint(str(folder)))
    return model, hf.load_params(folder, model, mesh)


def assert_trees_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, transfers.to_host(one), transfers.to_host(other))


# ---- the same function as transformers


# Those of the tied Qwen2 and of the untied Qwen3 are computed by the programs of others.
@families(*(name for name in NAMES if name not in ("qwen2_tied", "qwen3_untied")))
def test_logits_equal_those_of_transformers_with_left_and_right_padding(loaded):
    check_logits(loaded.model, loaded.params, loaded.stored)


@families(*RICH)
def test_greedy_completions_equal_those_of_transformers_generate(loaded, mesh):
    # The reference must be able to show it: its config.json names only one of two stop ids.
    stops = hf.stop_ids(loaded.folder, NO_TOKENIZER)
    assert len(stops) == 2 and json.loads((loaded.folder / "config.json").read_text())["eos_token_id"] in stops
    assert {int(row[np.flatnonzero(row)[-1]]) for row in loaded.stored["greedy_left"] if not row[-1]} == set(stops)
    check_greedy(loaded.folder, loaded.model, loaded.params, loaded.stored, mesh)


# ---- stop ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([7, 5], None, None, (5, 7)), ([7, 5], 9, None, (5, 7, 9)), (7, None, 3, (3, 7)), (None, 0, None, (0,)),
        (None, None, 4, (4,)), ("no file", 9, None, (9,)),
    ],
)  # fmt: skip
def test_stop_ids_are_those_of_both_configs_and_the_tokenizer(folder, generation, config, tokenizer, expected):
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": generation})) if generation != "no file" else file.unlink()
    configure(folder, eos_token_id=config)
    assert hf.stop_ids(folder, SimpleNamespace(eos_token_id=tokenizer)) == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.0, [None], -1, [1, 99999]], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_stop_id_that_the_model_does_not_have_is_refused(folder, file, value, refused):
    settle(folder, file, eos_token_id=value)
    with refused(file, "eos_token_id", repr(value)):
        hf.stop_ids(folder, NO_TOKENIZER)


def test_no_stop_id_anywhere_is_refused(folder, refused):
    (folder / "generation_config.json").unlink()
    configure(folder, eos_token_id=...)
    with refused("eos_token_id"):
        hf.stop_ids(folder, NO_TOKENIZER)


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
    if name == "qwen3_moe":
        configure(folder, num_local_experts=..., num_experts=6)
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
def test_each_family_says_which_layers_have_a_window(name, changes, local, tmp_path):
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    configure(folder, **changes)
    assert hf.load_model(folder).cfg.local == local


LAYERS = "layer_types"
UNSUPPORTED = [
    ("gemma2", {"attn_logit_softcapping": "50"}),
    ("gemma2", {"query_pre_attn_scalar": "256"}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"sliding_window": None}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", {"model_type": "gemma2"}, "rope_parameters"),
    ("mistral", {"sliding_window": "4096"}),
    ("mistral", {"sliding_window": 0}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "low_freq_factor"),
    ("qwen2_tied", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    ("qwen2_tied", {"rope_scaling": {"rope_type": "yarn", "factor": "4"}, "rope_parameters": ...}, "factor"),
    ("qwen2_tied", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ("qwen2_tied", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("qwen3_tied", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ("qwen2_tied", {"partial_rotary_factor": 0.5}),
    ("qwen2_tied", {"rope_scaling": 2.0, "rope_parameters": ...}, "2.0"),
    ("qwen3_tied", {"hidden_size": "32"}),
    ("qwen2_tied", {"vocab_size": None}),
    ("qwen2_tied", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1, LAYERS: ...}),
    ("qwen3_tied", {LAYERS: ["sliding_attention"] * 3}, "sliding_window"),
    ("qwen2_tied", {LAYERS: ["chunked_attention"] * 3}),
    ("qwen2_tied", {LAYERS: ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}),
    ("qwen3_tied", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ("qwen2_tied", {"dtype": "float8_e4m3fn"}),
    ("qwen2_tied", {"hidden_act": "gelu"}),
    ("qwen2_tied", {"rms_norm_eps": ...}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_experts_per_tok": 9}),
    ("qwen3_moe", {"moe_intermediate_size": ...}),
    ("mixtral", {"num_local_experts": "8"}),
    ("mixtral", {"num_local_experts": ...}),
    *(("qwen2_untied", {"model_type": family}) for family in ("bert", "hf", "decoder", "../qwen2", ...)),
]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=lambda case: f"{case[0]} {case[1]}".replace("Ellipsis", "..."))
def test_a_config_that_is_not_supported_is_refused(case, tmp_path, refused):
    name, changes, *words = case
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    configure(folder, **changes)
    with refused("config.json", *(words or [next(iter(changes))])):
        hf.load_model(folder)


def test_mixtral_has_one_kind_of_layers_and_its_own_rotary_base(tmp_path):
    folder = shutil.copytree(REFERENCES / "mixtral", tmp_path / "model")
    configure(folder, rope_parameters=..., rope_theta=1_000_000.0, layer_types=..., sliding_window=6)
    usual = hf.load_model(folder).cfg
    assert usual.local == (True,) * usual.layers
    configure(folder, rope_theta=..., layer_types=["full_attention"] * usual.layers)
    assert hf.load_model(folder).cfg == usual


def test_the_config_and_the_arguments_make_the_decoder(folder):
    assert hf.load_model(REFERENCES / "qwen2_window").cfg.max_positions == 128
    assert (
        rope.extended_positions({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2**15}, 2**15)
        == 2**17
    )
    configure(folder, num_key_value_heads=None)
    cfg = hf.load_model(folder, dtype="bfloat16", remat="dots").cfg
    assert (cfg.dtype, cfg.remat, cfg.kv_heads) == ("bfloat16", "dots", 4)


# ---- in and out


def test_shards_and_a_push_to_vllm_have_the_names_and_values_of_the_file(loaded, tmp_path, monkeypatch):
    limit, saved = 20_000, tmp_path / "saved"
    monkeypatch.setattr(hf_export, "SHARD_BYTES", limit)
    hf_export.save(saved, loaded.params, loaded.folder)
    with (tmp_path / "pushed").open("wb") as file:
        weights.write_stream(file, loaded.params, names.family_table(loaded.model.cfg.family), np.float32)
    before = tensors_of(loaded.folder)
    for after in (tensors_of(saved), load_file(tmp_path / "pushed")):
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            np.testing.assert_array_equal(after[name], tensor)

    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in saved.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    held = {tensor: file for file in files for tensor in load_file(saved / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    assert all(sum(x.nbytes for x in load_file(saved / file).values()) <= limit for file in files)


# The second in shards.
@families("mixtral", "qwen3_untied")
def test_a_saved_folder_has_the_given_parameters_and_other_files(loaded, mesh, tmp_path):
    source, saved = shutil.copytree(loaded.folder, tmp_path / "source"), tmp_path / "saved"
    others = {"config.json", "generation_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    for name in others - {"config.json", "generation_config.json"}:
        (source / name).write_text(name)
    for left_by_a_kill in ("saved", "saved.partial"):
        (tmp_path / left_by_a_kill).mkdir()
        (tmp_path / left_by_a_kill / "old.safetensors").write_text("old")
    trained = perturbed(loaded.params)
    hf_export.save(saved, trained, source)
    model, params = load(saved, mesh)
    assert model.cfg == loaded.model.cfg
    assert_trees_equal(params, trained)
    assert {file.name for file in tmp_path.iterdir()} == {"source", "saved"}
    assert {file.name for file in saved.iterdir()} == others | {"model.safetensors"}
    assert all((saved / name).read_bytes() == (source / name).read_bytes() for name in others)


@families("qwen2_tied")
def test_links_out_of_a_folder_are_exported_only_in_the_hubs_cache(loaded, tmp_path):
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_checkpoint_of_16_bits_is_written_back_as_it_was_but_adapters(folder, mesh, tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    stored = {name: tensor.astype(kind) for name, tensor in tensors_of(folder).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    configure(folder, dtype="torch.float32")  # but the files have 16 bits
    (folder / "adapter_config.json").write_text("{}")
    _, params = load(folder, mesh)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    query = stored["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers"]["attention"]["query"]["kernel"][1], query.T)

    hf_export.save(tmp_path / "saved", params, folder)
    written = tensors_of(tmp_path / "saved")
    assert {tensor.dtype for tensor in written.values()} == {kind}
    assert {name: x.tobytes() for name, x in written.items()} == {name: x.tobytes() for name, x in stored.items()}
    assert not (tmp_path / "saved" / "adapter_config.json").exists()


def test_a_stored_copy_of_a_tied_head_is_ignored_and_another_refused(tmp_path, mesh, refused):
    folder = shutil.copytree(REFERENCES / "qwen2_tied", tmp_path / "model")
    _, before = load(folder, mesh)
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embedding.copy())
    _, after = load(folder, mesh)
    assert_trees_equal(after, before)
    for other in (embedding + 0.1, embedding[1:]):
        rewrite(folder, lm_head__weight=np.ascontiguousarray(other))
        with refused("lm_head.weight", "model.embed_tokens.weight"):
            load(folder, mesh)


def test_the_fingerprint_changes_with_each_tensor_of_a_large_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tensors = {str(i): np.full((2**18,), i, np.float32) for i in range(4)}  # 4 MiB
    seen = set()
    for name in [None, *tensors]:
        changed = {name: tensors[name] * 1.001 + 1e-3} if name else {}
        save_file(tensors | changed, tmp_path / "model.safetensors")
        seen.add(hf.fingerprint(tmp_path))
    assert len(seen) == 5


def test_the_fingerprint_changes_with_a_weight_and_each_file_of_settings(folder):
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

# The table sharding.RULES, written out here once more: [L, in, out] kernels over fsdp and tensor.
SPECS = {
    "embed/embedding": P("tensor", "fsdp"),
    "head/kernel": P("fsdp", "tensor"),
    "layers/(attention/(query|key|value)|mlp/(gate|up))/kernel": P(None, "fsdp", "tensor"),
    "layers/(attention/(query|key|value)|mlp/(gate|up))/bias": P(None, "tensor"),
    "layers/(attention/output|mlp/down)/kernel": P(None, "tensor", "fsdp"),
    "layers/experts/(gate|up)/kernel": P(None, "tensor", "fsdp"),
    "layers/experts/down/kernel": P(None, "tensor", None, "fsdp"),
    ".*norm/scale|layers/(attention/output|mlp/down)/bias|layers/experts/router/kernel": P(),
}
ODD_VOCABULARY = {"embed/embedding": P(None, "fsdp"), "head/kernel": P("fsdp", None)}  # 61 tokens over 2 devices


@families("qwen2_untied", "llama", "gemma3_text", "qwen3_moe")
def test_loading_onto_a_mesh_gives_the_same_arrays_in_the_expected_shards(loaded):
    mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
    params = hf.load_params(loaded.folder, loaded.model, mesh)
    odd = ODD_VOCABULARY if loaded.name == "qwen2_untied" else {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = sharding.path_name(path)
        (spec,) = [odd.get(name, spec) for pattern, spec in SPECS.items() if re.fullmatch(pattern, name)]
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), name
        split = [size // (2 if axis else 1) for size, axis in zip(leaf.shape, [*spec, None, None, None], strict=False)]
        assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(split)}
    assert_trees_equal(params, loaded.params)


@families("gemma3_text", "qwen3_moe")
def test_a_model_that_never_learns_is_loaded_in_the_dtype_of_its_products(loaded):
    mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
    model = hf.load_model(loaded.folder, mesh, dtype="bfloat16")
    params = hf.load_params(loaded.folder, model, mesh, learns=False)
    assert_trees_equal(params, model.cast_for_compute(hf.load_params(loaded.folder, model, mesh)))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    assert params["embed"]["embedding"].dtype == "bfloat16" and params["norm"]["scale"].dtype == "float32"


# ---- what a person can put right is one line that names it


def cut_short(name, kept):
    """Returns a function that cuts a file of a folder: a share of it, or this many bytes."""

    def cut(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])

    return cut


ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = sorted(file.name for file in (REFERENCES / "qwen3_untied").glob("*.safetensors"))[2]
BROKEN = {  # folder, what is done to it, and what the line names
    "cut in its header": ("qwen2_untied", cut_short(ONE, 100), ONE),
    "last byte cut": ("qwen2_untied", cut_short(ONE, -1), ONE),
    "no tensor": ("qwen2_untied", partial(rewrite, model__layers__1__mlp__up_proj__weight=None),
                  "model.layers.1.mlp.up_proj.weight"),
    "no head": ("qwen2_untied", partial(rewrite, lm_head__weight=None), "lm_head.weight"),
    "another shape":
        ("qwen2_untied", partial(rewrite, model__norm__weight=np.zeros((32, 1), np.float32)), "model.norm.weight"),
    "a number that is none":
        ("qwen2_untied", partial(rewrite, model__norm__weight=np.float32([1.0] * 31 + [np.nan])), "model.norm.weight"),
    "no finite number":
        ("qwen2_untied", partial(rewrite, model__norm__weight=np.float32([1.0] * 31 + [np.inf])), "model.norm.weight"),
    "weights of 8 bits":
        ("qwen2_untied", partial(rewrite, model__norm__weight=np.zeros(32, ml_dtypes.float8_e4m3fn)), "F8_E4M3"),
    "more layers": ("qwen2_untied", partial(configure, num_hidden_layers=4), "model.layers.3."),
    "fewer layers": ("qwen2_untied", partial(configure, num_hidden_layers=2), "model.layers.2."),
    "another tensor":
        ("qwen2_untied", partial(rewrite, model__norm__bias=np.zeros(32, np.float32)), "model.norm.bias"),
    "another family": ("qwen2_untied", partial(configure, model_type="qwen3", head_dim=8), "_norm.weight"),
    "no config": ("qwen2_untied", lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no folder": ("qwen2_untied", shutil.rmtree, "TMP"),
    "weights of torch": ("qwen2_untied", lambda folder: (folder / ONE).rename(folder / "pytorch_model.bin"), ONE),
    "no index": ("qwen3_untied", lambda folder: (folder / INDEX).unlink(), INDEX),
    "no shard": ("qwen3_untied", lambda folder: (folder / SHARD).unlink(), SHARD),
    "shard cut": ("qwen3_untied", cut_short(SHARD, -100), SHARD),
    "config cut": ("qwen3_untied", cut_short("config.json", 20), "config.json"),
    "stop ids cut": ("qwen3_untied", cut_short("generation_config.json", 20), "generation_config.json"),
    "index cut": ("qwen3_untied", cut_short(INDEX, 20), INDEX),
    "binary": ("qwen3_untied", lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe\x00"), INDEX),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused(what, mesh, tmp_path, refused):
    name, spoil, word = BROKEN[what]
    folder = shutil.copytree(REFERENCES / name, tmp_path / "model")
    spoil(folder)
    with refused(word.replace("TMP", str(folder))):
        load(folder, mesh)
        hf.stop_ids(folder, NO_TOKENIZER)


def test_a_vision_model_without_support_is_refused_with_families_that_have_it(wording):
    assert {text for text in hf.TEXT_FAMILIES.values() if text} <= set(hf.known_families())
    assert not set(hf.TEXT_FAMILIES) & set(hf.known_families())
    for family, text in hf.TEXT_FAMILIES.items():
        line = hf._unsupported_family(family, {}, hf.known_families())
        assert all(name in line for name in ([text] if text else hf.known_families()))
        wording(line)
    wording(hf._unsupported_family("bert", {}, ["llama"]))


def test_weights_of_torch_come_with_the_command_that_converts_them(tmp_path, refused):
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    with refused("python -c") as caught:
        hf.weight_files(folder)
    said = str(caught.value)
    *program, code = shlex.split(said[said.index("python -c") :])
    assert program == ["python", "-c"] and compile(code, "", "exec") and repr(str(folder)) in code


def test_a_folder_of_verls_shards_comes_with_the_command_that_merges_them(tmp_path, refused):
    (tmp_path / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "actor" / "huggingface" / "config.json").write_text("{}")
    (tmp_path / "actor" / "model_world_size_2_rank_0.pt").touch()
    for place in (tmp_path, tmp_path / "actor"):
        with refused("model.path", f"--local_dir {tmp_path / 'actor'}"):
            hf.find_checkpoint(str(place))
    with refused(f"--local_dir {tmp_path / 'actor'}"):
        hf.weight_files(hf.find_checkpoint(str(tmp_path / "actor" / "huggingface")))


def test_a_repository_of_the_hub_without_safetensors_is_refused(tmp_path, refused):
    folder = tmp_path / "models--lab--old" / "snapshots" / "1234"
    folder.mkdir(parents=True)
    with refused("hf download lab/old --local-dir"):
        hf.weight_files(folder)


@pytest.mark.parametrize("name", ["GatedRepoError", "RepositoryNotFoundError", "LocalEntryNotFoundError"])
def test_a_refusal_of_the_hub_is_one_line(monkeypatch, name, refused):
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    kind = getattr(huggingface_hub.errors, name)

    def snapshot_download(*_: object, **__: object) -> str:
        raise kind("no.\nmore") if name == "LocalEntryNotFoundError" else kind("no.\nmore", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with refused("model.path") as caught:
        hf.find_checkpoint("lab/x")
    assert "more" not in str(caught.value)


def test_a_repository_of_adapters_is_refused(tmp_path, monkeypatch, refused):
    (tmp_path / hf.ADAPTER).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with refused("lab/x", "PEFT"):
        hf.find_checkpoint("lab/x")


def test_a_folder_without_a_tokenizer_is_refused(folder, refused):
    # transformers makes an empty one out of config.json: every prompt would be encoded as nothing.
    with refused(str(folder), "tokenizer.json"):
        hf.load_tokenizer(folder)


# ---- tokenizers


@pytest.fixture
def qwen(tmp_path):
    """Qwen2's config.json and a byte-level tokenizer, of fewer tokens than the model has."""
    write_qwen(tmp_path)
    return tmp_path


def test_a_tokenizer_that_is_not_qwens_splits_text_as_its_file_says(qwen):
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


def test_a_token_that_only_the_model_has_decodes_to_nothing(qwen):
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
    return import_module("make_references")


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
@pytest.mark.needs("torch")
@pytest.mark.parametrize("limit", [hf_export.SHARD_BYTES, 20_000], ids=["one file", "shards"])
def test_transformers_loads_what_is_saved(live, make_references, mesh, tmp_path, monkeypatch, limit):
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
@pytest.mark.needs("torch")
def test_the_stored_arrays_are_those_that_transformers_computes_now(loaded, make_references):
    seed = make_references.MODELS[loaded.name][0]
    now = make_references.reference(make_references.load(loaded.folder), seed)
    assert now.keys() == loaded.stored.keys()
    for name, array in now.items():
        np.testing.assert_allclose(array, loaded.stored[name], rtol=0, atol=1e-5)


@pytest.mark.parity
@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "kind"), LONG, ids=str)
def test_long_texts_have_the_logits_and_greedy_tokens_of_transformers(name, kind, make_references, mesh, tmp_path):
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
