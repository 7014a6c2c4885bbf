"""Defines a new small model: writes config.json and a byte-level tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
ARCHITECTURE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def write_folder(folder: Path, sizes: Mapping[str, Any], rows: list[dict[str, Any]], column: str) -> None:
    """Writes config.json, generation_config.json and a tokenizer with one token for each byte found in `rows`.

    sizes: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size.
    rows: "prompt" holds chats or text; `column` holds the text to learn.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [str(row.get(column, "")) for row in rows]
    for row in rows:
        prompt = row["prompt"]
        texts += [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    # Next to a Qwen2 config.json, transformers loads any tokenizer as a Qwen2Tokenizer, with Qwen's pre-tokenizer and
    # decoder. They change nothing for a tokenizer with Qwen's byte notation and no merges.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = sorted(
        {c for piece, _ in byte_level.pre_tokenize_str("".join(sorted(set("".join(texts))))) for c in piece}
    )
    vocabulary = {token: i for i, token in enumerate([PAD, USER, ASSISTANT, END, *characters])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer, core.decoder = byte_level, decoders.ByteLevel()
    core.add_special_tokens([PAD, USER, ASSISTANT, END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    ends = {"eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}
    config = {name: sizes[name] for name in SIZES} | ARCHITECTURE | {"vocab_size": len(vocabulary)} | ends
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
