"""How long the start of a run waits for its prompts: `python -m benchmarks.tokenizing [--rows 100000]`.

Chats of about 165 tokens in a .jsonl file and a byte-level vocabulary of 8,000, made of random words: read and
tokenized by the first start, then by a second one, which finds the token ids in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def make_words(chance: random.Random) -> list[str]:
    return ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(4000)]


def make_tokenizer(texts: list[str]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    args = parser.parse_args()
    chance = random.Random(0)
    words = make_words(chance)
    tokenizer = make_tokenizer([" ".join(chance.choices(words, k=200)) for _ in range(300)])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        from jaxrl_llm.data import prompts as data

        file = Path(folder) / "rows.jsonl"
        with file.open("w") as out:
            for i in range(args.rows):
                chat = [{"role": "user", "content": " ".join(chance.choices(words, k=91)) + f" {i}?"}]
                out.write(json.dumps({"prompt": chat, "answer": str(i)}) + "\n")
        for start in ("first", "second"):
            wall, cpu = time.perf_counter(), time.process_time()
            made = data.read(str(file), tokenizer, convert="", max_prompt_tokens=1000, overlong="error")
            made.fingerprint()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            mean = sum(map(len, made.ids)) / len(made.ids)
            print(
                f"{start} start: {len(made.ids):,} rows of {mean:.0f} tokens in {wall:.1f} s, {cpu:.1f} s of CPU time"
            )


if __name__ == "__main__":
    main()
