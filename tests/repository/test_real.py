"""The real model of `benchmarks.real`: a small one in the same file format becomes a folder, which is trained."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from benchmarks.real import reasoning_tasks as tasks_of_gym
from benchmarks.real import tasks
from benchmarks.real.gguf_folder import GEMMA3_NORMS, KERNELS, LLAMA_NORMS, convert
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.models import hf
from jaxrl_llm.recipe import missing

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROOT = Path(__file__).parents[2]
WIDTH, HEADS, KEY_HEADS, SIDE, MLP, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["th", "the"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = {
    "attn_q": (HEADS * SIDE, WIDTH), "attn_k": (KEY_HEADS * SIDE, WIDTH), "attn_v": (KEY_HEADS * SIDE, WIDTH),
    "attn_output": (WIDTH, HEADS * SIDE), "ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH), "ffn_down": (WIDTH, MLP),
}  # fmt: skip


def interleaved(kernel: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp has them: of the two halves of a head in turn."""
    halves = kernel.reshape(heads, 2, SIDE // 2, -1)
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(kernel.shape)


def gguf(file: Path, family: str, words: list[str], tokenizer: str, kinds: list[int], **fields: Any) -> GGUFWriter:
    """Begins a file of one family with a vocabulary and the fields of a small model."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, family)
    fields |= dict(embedding_length=WIDTH, feed_forward_length=MLP, head_count=HEADS, head_count_kv=KEY_HEADS)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    return writer


def finish(writer: GGUFWriter, folder: Path) -> dict[str, np.ndarray]:
    """Writes the file, converts it, and returns the tensors of its folder."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(folder / "small.gguf", folder)
    return load_file(folder / "model.safetensors")


def write_llama(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Converts a small random Llama, and returns each tensor as it was drawn and as the folder has it."""
    from gguf import GGMLQuantizationType, quantize

    kinds = [3 if word in SPECIAL else 1 for word in WORDS]
    fields = dict(context_length=256, block_count=LAYERS, rope_freq_base=1e5, layer_norm_rms_eps=1e-5)
    writer = gguf(folder / "small.gguf", "llama", WORDS, "gpt2", kinds, **fields, vocab_size=len(WORDS))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng, drawn = np.random.default_rng(0), {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        values = drawn[hf_name] = rng.normal(len(shape) == 1, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            eight = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(interleaved(values, heads) if heads else values, eight), raw_dtype=eight)

    add("token_embd.weight", "model.embed_tokens.weight", (len(WORDS), WIDTH))
    add("output_norm.weight", "model.norm.weight", (WIDTH,))
    for i in range(LAYERS):
        for name, hf_name in (KERNELS | LLAMA_NORMS).items():
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name, 0)
            add(f"blk.{i}.{name}.weight", f"model.layers.{i}.{hf_name}.weight", SHAPES.get(name, (WIDTH,)), heads)
    written = finish(writer, folder)
    assert written.keys() == drawn.keys()
    return {name: (values, written[name]) for name, values in drawn.items()}


@pytest.mark.needs("gguf")
def test_a_file_of_weights_becomes_a_folder_with_the_same_tensors_and_tokens(tmp_path):
    for values, written in write_llama(tmp_path).values():
        # 8 bits of numbers around 0.1.
        np.testing.assert_allclose(written, values, atol=4e-3)
    cfg = hf.load_model(tmp_path).cfg
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim) == (4, 2, 16)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e5
    # The tokenizer splits digits, and joins what was merged.
    tokenizer = hf.load_tokenizer(tmp_path)
    ids = tokenizer("<|im_start|>the 12+3é")["input_ids"]
    assert [WORDS[i] for i in ids] == ["<|im_start|>", "the", "Ġ", "1", "2", "+", "3", "Ã", "©"]
    assert tokenizer.decode(ids) == "<|im_start|>the 12+3é" and tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "1+1"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\n1+1<|im_end|>\n"


@pytest.mark.needs("gguf")
def test_a_gemma_becomes_a_folder_with_norms_less_1_and_merges_by_score(tmp_path):
    control, fallback = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{byte:02X}>" for byte in "é".encode()]
    words = [*control, "\n", *fallback, "a", "b", "c", "▁", "ab", "bc", "▁ab", "1"]
    fields = dict(context_length=64, block_count=1, key_length=SIDE, rope_freq_base=1e6, layer_norm_rms_eps=1e-6)
    kinds = [3] * 4 + [4] + [6] * 2 + [1] * 8
    writer = gguf(tmp_path / "small.gguf", "gemma3", words, "llama", kinds, **fields, sliding_window=8)
    writer.add_token_scores([-1000.0] * 7 + [-4.0] * 4 + [-1.0, -2.0, -3.0, -4.0])
    for role, number in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{role}_token_id")(number)
    draw = np.random.default_rng(0)
    shapes = SHAPES | {name: (WIDTH,) for name in GEMMA3_NORMS} | {"attn_q_norm": (SIDE,), "attn_k_norm": (SIDE,)}
    layer = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors = {f"blk.0.{name}.weight": values for name, values in layer.items()}
    tensors["token_embd.weight"] = draw.standard_normal((len(words), WIDTH), np.float32)
    for name, values in (tensors | {"output_norm.weight": np.ones(WIDTH, np.float32)}).items():
        writer.add_tensor(name, values)
    written = finish(writer, tmp_path)
    for name, values in layer.items():
        theirs = written[f"model.layers.0.{(KERNELS | GEMMA3_NORMS)[name]}.weight"]
        np.testing.assert_array_equal(theirs, values - 1 if name in GEMMA3_NORMS else values)
    assert not written["model.norm.weight"].any()
    cfg = hf.load_model(tmp_path).cfg
    assert (cfg.family, cfg.kv_heads, cfg.head_dim, cfg.window, cfg.local) == ("gemma3_text", 2, SIDE, 8, (True,))
    tokenizer = hf.load_tokenizer(tmp_path)
    ids = tokenizer("<bos>abc ab\né1<eos>", add_special_tokens=False)["input_ids"]
    # "ab" has a larger score than "bc", so it is merged first.
    assert [words[i] for i in ids] == ["<bos>", "ab", "c", "▁ab", "\n", *fallback, "1", "<eos>"]
    assert tokenizer.decode(ids) == "<bos>abc ab\né1<eos>"


def test_no_held_out_sum_is_learned_from_and_answers_are_right():
    learned, held_out = (
        {x["prompt"].removeprefix(tasks.EXAMPLE): x["answer"] for x in rows()}
        for rows in (tasks.addition, tasks.addition_held_out)
    )
    assert len(learned) + len(held_out) == tasks.BELOW**2 and not learned.keys() & held_out.keys()
    for question, answer in (learned | held_out).items():
        assert sum(map(int, re.findall(r"\d+", question))) == int(answer)
    assert tasks.exact([" 46", "46\n", " 46.", " 48"], ["46"] * 4) == [1.0, 1.0, 0.0, 0.0]


CONFIGS = [file for file in sorted((ROOT / "benchmarks/real").glob("*.py")) if "def get_config" in file.read_text()]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_of_a_real_model_is_accepted(file):
    with missing.collected():  # such as the package reasoning-gym
        recipes.read_either(load(file))


def test_every_case_has_a_config():
    assert {case.config() for case in importlib.import_module("benchmarks.real.__main__").CASES.values()} <= {*CONFIGS}


@pytest.mark.needs("reasoning_gym")
def test_answers_of_reasoning_gym_have_all_points_and_none_is_held_out():
    for rows in (tasks_of_gym.held_out(), tasks_of_gym.learned_held_out()):
        columns = {name: [row[name] for row in rows] for name in ("answer", "task", "metadata")}
        assert set(tasks_of_gym.accuracy(columns["answer"], **columns)) == {1.0}
        assert set(tasks_of_gym.accuracy(["I do not know"] * len(rows), **columns)) == {0.0}
    asked = [
        {row["prompt"][-1]["content"] for row in make()}
        for make in (tasks_of_gym.learned, tasks_of_gym.learned_held_out)
    ]
    assert not asked[0] & asked[1] and len(asked[0]) > 1000
    assert {row["task"] for row in tasks_of_gym.learned()} == set(tasks_of_gym.LEARNED)
