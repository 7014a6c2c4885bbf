"""Defines a new small model: writes config.json and a byte-level BPE tokenizer with a chat template."""

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
# How Qwen2 splits a text before the merges. Next to its config.json, transformers loads any tokenizer with this.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    """Writes config.json, generation_config.json and a tokenizer that is learned from `rows`.

    sizes: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size, and vocabulary,
    the most tokens; 0: one for each byte that is found.
    rows: "prompt" holds chats or text; `column` holds the text to learn, or the turns of an episode.
    """
    from transformers import PreTrainedTokenizerFast

    texts = [text for row in rows for text in (*_texts(row["prompt"]), *_texts(row.get(column, "")))]
    core = _train_tokenizer(texts, sizes.get("vocabulary", 0))
    vocabulary = core.get_vocab()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    ends = {"eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}
    config = {name: sizes[name] for name in SIZES} | ARCHITECTURE | {"vocab_size": len(vocabulary)} | ends
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def _texts(content: Any) -> list[str]:
    """Returns the texts of a text or of messages; none of anything else, which is refused when all rows are known."""
    if isinstance(content, str):
        return [content]
    messages = content if isinstance(content, (list, tuple)) else ()
    return [str(message["content"]) for message in messages if isinstance(message, dict) and "content" in message]


def _train_tokenizer(texts: list[str], max_tokens: int) -> Any:
    """Trains a byte-level BPE of the texts with at most `max_tokens` tokens; 0: no merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, USER, ASSISTANT, END]
    # use_regex=False: it would split by GPT-2's rule, and PIECES is Qwen2's.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Without a merge every byte that occurs is a token; a byte that does not occur has none.
    characters = {c for piece, _ in byte_level.pre_tokenize_str("".join(sorted(set("".join(texts))))) for c in piece}
    # Sorted: the same texts give the same ids, in every process.
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(characters)])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer, core.decoder = byte_level, decoders.ByteLevel()
    if max_tokens:
        split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        alphabet = sorted(characters)
        trainer = trainers.BpeTrainer(
            vocab_size=max_tokens, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator(texts, trainer)
    # Marks them as special: without training they are only words of the vocabulary.
    core.add_special_tokens(special)
    return core
