"""How long the start of a run waits for its prompts: `python -m benchmarks.speed.tokenizing [--rows 100000]`.

Chats of about 105 tokens, made of random words, in a .jsonl file and in veRL's columns in a .parquet file, and a
byte-level vocabulary of 8,000. Each start is a process of its own: the first one tokenizes, the second one finds the
token ids in the cache. Prints seconds and the growth of the process's memory at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
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


def write(folder: Path, rows: int) -> None:
    """Writes the tokenizer and both files of rows."""
    chance = random.Random(0)
    words = make_words(chance)
    make_tokenizer([" ".join(chance.choices(words, k=200)) for _ in range(300)]).save_pretrained(str(folder))
    made = []
    for i in range(rows):
        chat = [{"role": "user", "content": " ".join(chance.choices(words, k=55)) + f" {i}?"}]
        made.append({"data_source": "lab/words", "prompt": chat, "ability": "words"})
        made[-1] |= {"reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), folder / "rows.parquet")
    with (folder / "rows.jsonl").open("w") as out:
        for row in made:
            out.write(json.dumps({"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]}) + "\n")


def start(folder: Path, kind: str) -> None:
    """Reads and tokenizes a file, as the start of a run does, and prints what it took."""
    from jaxrl_llm.data import prompts as data
    from jaxrl_llm.models import hf

    tokenizer = hf.load_tokenizer(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    laps, cpu = [time.perf_counter()], time.process_time()
    made = data.read(f"{folder}/rows.{kind}", tokenizer, max_prompt_tokens=1000, overlong="error")
    laps.append(time.perf_counter())
    made.fingerprint()
    laps.append(time.perf_counter())
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{len(made.ids):,} rows of {sum(map(len, made.ids)) / len(made.ids):.0f} tokens in {laps[2] - laps[0]:.1f} s "
        f"(fingerprint {laps[2] - laps[1]:.1f} s), {time.process_time() - cpu:.1f} s of CPU time, {memory:,.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--start", nargs=2, metavar=("FOLDER", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        return start(Path(args.start[0]), args.start[1])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.rows)
        command = [sys.executable, "-m", "benchmarks.speed.tokenizing", "--start", folder]
        for kind in ("jsonl", "parquet"):
            for name in ("first", "second"):
                home = os.environ | {"XDG_CACHE_HOME": f"{folder}/{kind}"}
                done = subprocess.run([*command, kind], env=home, check=True, capture_output=True, text=True)
                print(f"{kind}, {name} start: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
