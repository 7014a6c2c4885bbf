"""The conversion of `benchmarks.real`: a Llama in GGUF becomes a folder of Hugging Face's form."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from benchmarks.real.model import LAYER, convert
from jaxrl_llm.models import hf

WIDTH, HEADS, KV_HEADS, MLP, TOKENS = 32, 4, 2, 64, ("<|start|>", "<|end|>", "a", "b", "c", "ab", "1", "2", "3")


def interleaved(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Puts the halves of each head in turns, as a Llama in GGUF has them: rows 0, h/2, 1, h/2 + 1, ..."""
    half = kernel.shape[0] // heads // 2
    order = [n * 2 * half + part * half + i for n in range(heads) for i in range(half) for part in (0, 1)]
    return kernel[order]


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_llama_in_gguf_becomes_a_folder_of_hugging_face(tmp_path):
    draw = np.random.default_rng(0)
    rows = dict(attn_q=WIDTH, attn_k=WIDTH // 2, attn_v=WIDTH // 2, attn_output=WIDTH, ffn_gate=MLP, ffn_up=MLP)
    layer = {name: draw.standard_normal((n, WIDTH), np.float32) for name, n in rows.items()}
    layer["ffn_down"] = draw.standard_normal((WIDTH, MLP), np.float32)
    layer |= {name: draw.standard_normal(WIDTH, np.float32) for name in ("attn_norm", "ffn_norm")}
    whole = {"token_embd": draw.standard_normal((len(TOKENS), WIDTH), np.float32)}
    whole["output_norm"] = draw.standard_normal(WIDTH, np.float32)
    stored = layer | {"attn_q": interleaved(layer["attn_q"], HEADS), "attn_k": interleaved(layer["attn_k"], KV_HEADS)}
    named = {f"blk.0.{name}.weight": tensor for name, tensor in stored.items()}
    write_gguf(tmp_path / "model.gguf", named | {f"{name}.weight": tensor for name, tensor in whole.items()})

    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    made = load_file(folder / "model.safetensors")
    assert made.keys() == {
        "model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.0.{x}.weight" for x in LAYER.values()),
    }  # fmt: skip
    for name, tensor in layer.items():
        np.testing.assert_array_equal(made[f"model.layers.0.{LAYER[name]}.weight"], tensor)
    np.testing.assert_array_equal(made["model.embed_tokens.weight"], whole["token_embd"])

    # The folder loads here as any other.
    cfg = hf.load_model(folder).cfg
    assert (cfg.layers, cfg.width, cfg.kv_heads, cfg.vocab_size, cfg.max_positions) == (1, WIDTH, 2, len(TOKENS), 64)
    tokenizer = hf.load_tokenizer(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab12"}], tokenize=False)
    assert tokenizer(chat, add_special_tokens=False)["input_ids"] == [0, 5, 6, 7, 1]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
