"""Writes the files of a new small model: config.json, and a byte-level BPE tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
# Tokens of Qwen2.5-VL: start and end enclose an image, whose patches IMAGE_TOKEN stands for (VIDEO_TOKEN for videos).
IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# What a tool returns is a part of the assistant's turn, which goes on after it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set goes_on = not loop.first and loop.previtem['role'] == 'tool' and message['role'] == 'assistant' %}"
    "{% if message['role'] != 'tool' and not goes_on %}"
    "{{ '<|' + message['role'] + '|>' }}{% endif %}{{ '' + message['content'] }}"
    "{% set ends = loop.last or loop.nextitem['role'] != 'tool' %}"
    "{% if message['role'] == 'assistant' and ends %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<|assistant|>' }}{% endif %}"
)
# This template also accepts a message whose content is a list of texts and images.
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '' + message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '"
    + IMAGE_START
    + IMAGE_TOKEN
    + IMAGE_END
    + "' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
)
# Qwen2's expression for splitting a text before BPE. With a Qwen2 config.json, transformers always splits by it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
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
VISION_ARCHITECTURE = {
    "hidden_act": "silu",
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
}
TOKEN_PIXELS = 28 * 28  # pixels of a merged token
PIXEL_LIMITS = TOKEN_PIXELS, 256 * TOKEN_PIXELS  # smallest and largest number of pixels of an image
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": VISION_ARCHITECTURE["spatial_merge_size"],
    "patch_size": VISION_ARCHITECTURE["patch_size"],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": dict(zip(("shortest_edge", "longest_edge"), PIXEL_LIMITS, strict=True)),
    "temporal_patch_size": VISION_ARCHITECTURE["temporal_patch_size"],
}


def write_folder(folder: Path, sizes: Mapping[str, Any], rows: list[dict[str, Any]], column: str) -> None:
    """Writes config.json, generation_config.json and a tokenizer that is trained on `rows`.

    sizes: the keys SIZE_KEYS of config.json; "vocabulary", the largest number of tokens (0 = one token for each byte
    that occurs); and "vision_config", the sizes of a vision tower (None for a text model). rows: rows of the data set,
    whose "prompt" is a text or a chat. column: name of the column with the completion text or the turns of an episode.
    """
    from transformers import PreTrainedTokenizerFast

    tower = sizes.get("vision_config")
    texts = [text for row in rows for text in (*_texts(row["prompt"]), *_texts(row.get(column, "")))]
    bpe_tokenizer = _train_tokenizer(
        texts, sizes.get("vocabulary", 0), (IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN) if tower else ()
    )
    vocabulary = bpe_tokenizer.get_vocab()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = VISION_TEMPLATE if tower else CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    special_ids = {"eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}
    config = {name: sizes[name] for name in SIZE_KEYS} | ARCHITECTURE | {"vocab_size": len(vocabulary)} | special_ids
    if tower:
        config = _with_tower(config, tower, vocabulary) | special_ids
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special_ids, indent=2) + "\n")


def _with_tower(text: dict[str, Any], tower: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Returns the config.json of a Qwen2.5-VL model. text: config.json of its text model. tower: sizes of its tower."""
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    # The rotary pairs are divided among time, row and column in about the shares of Qwen2.5-VL.
    time_pairs, row_pairs = pairs // 4, (pairs - pairs // 4) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": text["rope_theta"],
        "mrope_section": [time_pairs, row_pairs, pairs - time_pairs - row_pairs],
    }
    outer_keys = ("architectures", "model_type", "rope_theta")
    text_config = {name: value for name, value in text.items() if name not in outer_keys}
    fixed_settings = {"out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [tower["depth"] - 1]}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": vocabulary[IMAGE_TOKEN],
        "video_token_id": vocabulary[VIDEO_TOKEN],
        "vision_start_token_id": vocabulary[IMAGE_START],
        "vision_end_token_id": vocabulary[IMAGE_END],
        # bos_token_id is null, because transformers would otherwise use the id of Qwen's vocabulary.
        "text_config": text_config | {"model_type": "qwen2_5_vl_text", "bos_token_id": None, "rope_parameters": rope},
        "vision_config": {**tower, **VISION_ARCHITECTURE, **fixed_settings},
    }


def _texts(content: Any) -> list[str]:
    """Returns the texts in a text or a list of messages. Other content gives none, and is refused later."""
    if isinstance(content, str):
        return [content]
    messages = content if isinstance(content, (list, tuple)) else ()
    contents = [message["content"] for message in messages if isinstance(message, dict) and "content" in message]
    # The content of a message with images is a list of parts.
    return ["".join(_parts(content)) if isinstance(content, list) else str(content) for content in contents]


def _parts(content: list[Any]) -> list[str]:
    return [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]


def _train_tokenizer(texts: list[str], max_tokens: int, image_tokens: tuple[str, ...] = ()) -> Any:
    """Returns a byte-level BPE tokenizer that is trained on the texts.

    max_tokens: largest size of the vocabulary, 0 = no merges. image_tokens: special tokens for images.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special_tokens = [PAD, USER, ASSISTANT, END, *image_tokens]
    # use_regex is False, because it would split by GPT-2's expression, and SPLIT_PATTERN is Qwen2's.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The new tokenizer has no merges: each byte that occurs in the texts is a token, and other bytes have none.
    characters = {c for piece, _ in byte_level.pre_tokenize_str("".join(sorted(set("".join(texts))))) for c in piece}
    # Sort the bytes, so that the same texts give the same ids in every process.
    vocabulary = {token: i for i, token in enumerate([*special_tokens, *sorted(characters)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    if max_tokens:
        split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        alphabet = sorted(characters)
        trainer = trainers.BpeTrainer(
            vocab_size=max_tokens, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    # A tokenizer that is not trained has the special tokens as entries of its vocabulary, so mark them as special here.
    tokenizer.add_special_tokens(special_tokens)
    return tokenizer
