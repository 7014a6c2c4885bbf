"""A Llama or a Gemma 3 in GGUF, llama.cpp's file of weights, as a folder of Hugging Face's form, in float32.

transformers reads such files too, but only with torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, BYTE = 1, 3, 6  # types of a token; text is split into the first and the last alone
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}  # of tokens, in transformers and in GGUF
# Names of what a layer has, in GGUF and in Hugging Face's form.
KERNELS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA3_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def convert(file: Path, folder: Path) -> None:
    """Writes weights, tokenizer and config.json of the model in a file."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = FAMILIES[fields["general.architecture"]]
    config = family.config(fields)
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = family.restored(tensor.name.split(".")[-2], values, config)
        tensors[hf_name(tensor.name, family.norms)] = np.ascontiguousarray(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(family.tokenizer(fields), fields, folder)
    stops = {"eos_token_id": config["eos_token_id"], "pad_token_id": token_id(fields, "padding")}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    # Last: it says that the folder is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def hf_name(name: str, norms: dict[str, str]) -> str:
    """Returns the name of a tensor in Hugging Face's form."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{(KERNELS | norms)[kind]}.weight"


def token_id(fields: dict[str, Any], name: str) -> int:
    """Returns the id of a token with a role; a file without one for padding pads with that of the end."""
    return fields.get(f"tokenizer.ggml.{name}_token_id", fields["tokenizer.ggml.eos_token_id"])


def sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what config.json of every family has."""
    of_model = {name.split(".", 1)[1]: value for name, value in fields.items() if not name.startswith("tokenizer.")}
    return {
        "hidden_size": of_model["embedding_length"],
        "intermediate_size": of_model["feed_forward_length"],
        "num_hidden_layers": of_model["block_count"],
        "num_attention_heads": of_model["attention.head_count"],
        "num_key_value_heads": of_model["attention.head_count_kv"],
        "max_position_embeddings": of_model["context_length"],
        # A float32 in the file.
        "rms_norm_eps": round(of_model["attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": of_model["rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": token_id(fields, "bos"),
        "eos_token_id": token_id(fields, "eos"),
        "pad_token_id": token_id(fields, "padding"),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of a Llama."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"} | sizes(fields)


def gemma3_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of a Gemma 3. What the file does not say is the same in all its sizes for text."""
    width = fields["gemma3.attention.key_length"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": width,
        "query_pre_attn_scalar": width,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "attention_bias": False,
        **sizes(fields),
    }


def llama_restored(kind: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Returns a tensor as transformers has it: GGUF interleaves the halves of each head of queries and keys."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if kind not in heads:
        return values
    rows, columns = values.shape
    return values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gemma3_restored(kind: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Returns a tensor as transformers has it: GGUF adds 1 to the scale of a norm."""
    return values - 1 if kind in GEMMA3_NORMS or kind == "output_norm" else values


def llama_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Returns a tokenizer of SmolLM2's kind: BPE of bytes, each digit alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocabulary(fields), merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    return core


def gemma3_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Returns a tokenizer of Gemma's kind: SentencePiece's BPE, whose merges follow from the scores of the tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges

    ids, kinds = vocabulary(fields), fields["tokenizer.ggml.token_type"]
    scores = dict(zip(ids, fields["tokenizer.ggml.scores"], strict=True))
    merges = generate_merges(ids, scores, [token for token, kind in zip(ids, kinds, strict=True) if kind != NORMAL])
    unknown = fields["tokenizer.ggml.tokens"][token_id(fields, "unknown")]
    core = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def vocabulary(fields: dict[str, Any]) -> dict[str, int]:
    """Returns the ids of the tokens."""
    return {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}


def write_tokenizer(core: Tokenizer, fields: dict[str, Any], folder: Path) -> None:
    """Writes a tokenizer, with the tokens that stand outside of its merges, and its chat template, if it has one."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    outside = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind not in (NORMAL, BYTE)]
    core.add_special_tokens([AddedToken(x, special=True, normalized=False) for x, kind in outside if kind == CONTROL])
    core.add_tokens([AddedToken(x, normalized=False) for x, kind in outside if kind != CONTROL])
    named = {f"{role}_token": tokens[token_id(fields, name)] for role, name in ROLES.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    tokenizer.save_pretrained(str(folder))


class Family(NamedTuple):
    """What differs between families."""

    norms: dict[str, str]  # names in a layer, in GGUF and in Hugging Face's form
    config: Callable[[dict[str, Any]], dict[str, Any]]
    restored: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]
    tokenizer: Callable[[dict[str, Any]], Tokenizer]


FAMILIES = {
    "llama": Family(LLAMA_NORMS, llama_config, llama_restored, llama_tokenizer),
    "gemma3": Family(GEMMA3_NORMS, gemma3_config, gemma3_restored, gemma3_tokenizer),
}
