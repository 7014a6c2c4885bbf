"""Writes the files of a new small model: config.json, and a byte-level BPE tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Special tokens of a new tokenizer: padding, begin of a message of the user and of the assistant, end of a message.
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
# Special tokens of Qwen2.5-VL: IMAGE_START and IMAGE_END enclose an image, and IMAGE_TOKEN stands for its patches.
IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Chat template in Jinja. The text that a tool returns is a part of the assistant's turn, which continues after it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set goes_on = not loop.first and loop.previtem['role'] == 'tool' and message['role'] == 'assistant' %}"
    "{% if message['role'] != 'tool' and not goes_on %}"
    "{{ '<|' + message['role'] + '|>' }}{% endif %}{{ '' + message['content'] }}"
    "{% set ends = loop.last or loop.nextitem['role'] != 'tool' %}"
    "{% if message['role'] == 'assistant' and ends %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<|assistant|>' }}{% endif %}"
)
# Chat template of models that read images: a message's content may also be a list of texts and images.
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
# Keys of config.json whose values the caller of `write_folder` chooses.
SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
# Entries of config.json that are equal in all new models.
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
# Entries of vision_config in config.json that are equal in all new models that read images.
VISION_ARCHITECTURE = {
    "hidden_act": "silu",
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
}
TOKEN_PIXELS = 28 * 28  # pixels of an image token, which stands for 2 x 2 patches
PIXEL_LIMITS = TOKEN_PIXELS, 256 * TOKEN_PIXELS  # smallest and largest number of pixels of an image
# Content of preprocessor_config.json: how an image becomes patches.
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

    tower_sizes = sizes.get("vision_config")
    # Train the tokenizer on the texts of the data set, and write its files.
    texts = [text for row in rows for text in (*_texts(row["prompt"]), *_texts(row.get(column, "")))]
    image_tokens = (IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN) if tower_sizes else ()
    bpe_tokenizer = _train_tokenizer(texts, sizes.get("vocabulary", 0), image_tokens)
    token_ids = bpe_tokenizer.get_vocab()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = VISION_TEMPLATE if tower_sizes else CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    # Write the files that describe the model.
    special_ids = {"eos_token_id": token_ids[END], "pad_token_id": token_ids[PAD]}
    chosen_sizes = {name: sizes[name] for name in SIZE_KEYS}
    config = chosen_sizes | ARCHITECTURE | {"vocab_size": len(token_ids)} | special_ids
    if tower_sizes:
        config = _with_tower(config, tower_sizes, token_ids) | special_ids
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special_ids, indent=2) + "\n")


def _with_tower(
    text_model: dict[str, Any], tower_sizes: Mapping[str, Any], token_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the config.json of a Qwen2.5-VL model, from that of its text model and the sizes of its vision tower."""
    # The rotary pairs of a head are divided among time, row and column in about the shares of Qwen2.5-VL.
    pairs = text_model["hidden_size"] // text_model["num_attention_heads"] // 2
    time_pairs, row_pairs = pairs // 4, (pairs - pairs // 4) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": text_model["rope_theta"],
        "mrope_section": [time_pairs, row_pairs, pairs - time_pairs - row_pairs],
    }
    # bos_token_id is null, because transformers would otherwise use the id of Qwen's vocabulary.
    text_settings = {"model_type": "qwen2_5_vl_text", "bos_token_id": None, "rope_parameters": rope}
    outer_keys = ("architectures", "model_type", "rope_theta")
    text_config = {name: value for name, value in text_model.items() if name not in outer_keys}
    tower_settings = {"out_hidden_size": text_model["hidden_size"], "fullatt_block_indexes": [tower_sizes["depth"] - 1]}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": text_model["dtype"],
        "tie_word_embeddings": text_model["tie_word_embeddings"],
        "image_token_id": token_ids[IMAGE_TOKEN],
        "video_token_id": token_ids[VIDEO_TOKEN],
        "vision_start_token_id": token_ids[IMAGE_START],
        "vision_end_token_id": token_ids[IMAGE_END],
        "text_config": text_config | text_settings,
        "vision_config": {**tower_sizes, **VISION_ARCHITECTURE, **tower_settings},
    }


def _texts(content: Any) -> list[str]:
    """Returns the texts in a column's value, which may be a text or a list of messages; [] for any other value."""
    if isinstance(content, str):
        return [content]
    messages = content if isinstance(content, (list, tuple)) else ()
    contents = [message["content"] for message in messages if isinstance(message, dict) and "content" in message]
    # The content of a message with images is a list of parts: texts and images.
    return ["".join(_part_texts(content)) if isinstance(content, list) else str(content) for content in contents]


def _part_texts(content: list[Any]) -> list[str]:
    """Returns the texts among the parts of a message with images."""
    return [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]


def _train_tokenizer(texts: list[str], max_tokens: int, image_tokens: tuple[str, ...] = ()) -> Any:
    """Returns a byte-level BPE tokenizer that is trained on the texts.

    max_tokens: largest size of the vocabulary, 0 = no merges. image_tokens: special tokens for images.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special_tokens = [PAD, USER, ASSISTANT, END, *image_tokens]
    # use_regex is False, because it would split by GPT-2's expression, and SPLIT_PATTERN is Qwen2's.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Find the bytes that occur in the texts; byte-level BPE shows each byte as one printable character. The characters
    # are sorted, so that the same texts give the same ids in every process.
    distinct_characters = "".join(sorted(set("".join(texts))))
    alphabet = sorted({c for piece, _ in byte_level.pre_tokenize_str(distinct_characters) for c in piece})
    # First make a tokenizer without merges: each byte that occurs in the texts is a token.
    token_ids = {token: i for i, token in enumerate([*special_tokens, *alphabet])}
    tokenizer = Tokenizer(models.BPE(token_ids, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    if max_tokens:
        # Learn merges from the texts, until the vocabulary has max_tokens tokens.
        split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        trainer = trainers.BpeTrainer(
            vocab_size=max_tokens, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    # Special tokens are ordinary entries of the vocabulary before a training, so mark them as special here.
    tokenizer.add_special_tokens(special_tokens)
    return tokenizer
