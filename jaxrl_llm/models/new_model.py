"""Defines a new small model: writes config.json and a byte-level BPE tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
# The tokens of Qwen2.5-VL around an image, and in its place.
BEGINS, ENDS, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The same, where a content may also be a list of parts.
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    " + message['content'] }}",
    " }}{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '"
    + BEGINS
    + IMAGE
    + ENDS
    + "' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
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
VISION_ARCHITECTURE = {
    "hidden_act": "silu",
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
}
TOKEN_PIXELS = 28 * 28  # of a merged token
PIXELS = TOKEN_PIXELS, 256 * TOKEN_PIXELS  # of an image, least and most
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
    "size": dict(zip(("shortest_edge", "longest_edge"), PIXELS, strict=True)),
    "temporal_patch_size": VISION_ARCHITECTURE["temporal_patch_size"],
}


def write_folder(folder: Path, sizes: Mapping[str, Any], rows: list[dict[str, Any]], column: str) -> None:
    """Writes config.json, generation_config.json and a tokenizer that is learned from `rows`.

    sizes: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size; vocabulary,
    the most tokens, 0: one for each byte that is found; and vision_config, the sizes of a tower that reads images,
    None: the model reads none.
    rows: "prompt" holds chats or text; `column` holds the text to learn, or the turns of an episode.
    """
    from transformers import PreTrainedTokenizerFast

    tower = sizes.get("vision_config")
    texts = [text for row in rows for text in (*_texts(row["prompt"]), *_texts(row.get(column, "")))]
    core = _train_tokenizer(texts, sizes.get("vocabulary", 0), (BEGINS, ENDS, IMAGE, VIDEO) if tower else ())
    vocabulary = core.get_vocab()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = VISION_TEMPLATE if tower else CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    ends = {"eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}
    config = {name: sizes[name] for name in SIZES} | ARCHITECTURE | {"vocab_size": len(vocabulary)} | ends
    if tower:
        config = _with_tower(config, tower, vocabulary) | ends
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def _with_tower(text: dict[str, Any], tower: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Returns the config.json of a Qwen2.5-VL model with this text model. tower: sizes."""
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    # The pairs of numbers that turn with time, row and column, in about the shares of Qwen2.5-VL.
    time, row = pairs // 4, (pairs - pairs // 4) // 2
    rope = {"rope_type": "default", "rope_theta": text["rope_theta"], "mrope_section": [time, row, pairs - time - row]}
    whole = ("architectures", "model_type", "rope_theta")
    inner = {name: value for name, value in text.items() if name not in whole}
    output = {"out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [tower["depth"] - 1]}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": vocabulary[IMAGE],
        "video_token_id": vocabulary[VIDEO],
        "vision_start_token_id": vocabulary[BEGINS],
        "vision_end_token_id": vocabulary[ENDS],
        # No token begins a text; without this, transformers takes the one of Qwen's own vocabulary.
        "text_config": inner | {"model_type": "qwen2_5_vl_text", "bos_token_id": None, "rope_parameters": rope},
        "vision_config": {**tower, **VISION_ARCHITECTURE, **output},
    }


def _texts(content: Any) -> list[str]:
    """Returns the texts of a text or of messages; none of anything else, which is refused when all rows are known."""
    if isinstance(content, str):
        return [content]
    messages = content if isinstance(content, (list, tuple)) else ()
    contents = [message["content"] for message in messages if isinstance(message, dict) and "content" in message]
    # The content of a message with images is a list of parts.
    return ["".join(_parts(content)) if isinstance(content, list) else str(content) for content in contents]


def _parts(content: list[Any]) -> list[str]:
    return [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]


def _train_tokenizer(texts: list[str], max_tokens: int, vision: tuple[str, ...] = ()) -> Any:
    """Trains a byte-level BPE of the texts with at most `max_tokens` tokens; 0: no merges.

    vision: the tokens of images.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, USER, ASSISTANT, END, *vision]
    # use_regex=False: it would split by GPT-2's rule, and PIECES is Qwen2's.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The tokenizer has no merges: each byte that occurs in the texts is a token, and other bytes have none.
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
