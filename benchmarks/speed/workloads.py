"""The work that every trainer is timed on. Standard library only: every trainer reads it in its own environment."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One GRPO step: a Qwen2-architecture model of random float32 weights, and B x G completions."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab_size: int
    prompts: int  # B
    group: int  # G
    prompt_tokens: int  # P, exactly, of every prompt
    completion_tokens: int  # C, the limit
    median_length: int = 0  # of log-normal completion lengths; 0: every completion takes all C tokens
    learning_rate: float = 1e-5

    def model_config(self) -> dict:
        """The config.json of the model."""
        return dict(
            architectures=["Qwen2ForCausalLM"], model_type="qwen2", torch_dtype="float32", dtype="float32",
            vocab_size=self.vocab_size, hidden_size=self.width, intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.width // self.heads, max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-6,
            hidden_act="silu", tie_word_embeddings=True, use_sliding_window=False, attention_dropout=0.0,
            bos_token_id=None, eos_token_id=STOP, pad_token_id=PAD,
        )  # fmt: skip

    def prompt_ids(self, step: int) -> list[list[int]]:
        """B prompts of P token ids, without the stop and padding tokens."""
        rng = random.Random(f"prompts {step}")
        low = 1 + max(STOP, PAD)
        return [[rng.randrange(low, self.vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def lengths(self, step: int) -> list[list[int]]:
        """How many tokens, a stop token included, each of the B x G completions takes."""
        if not self.median_length:
            return [[self.completion_tokens] * self.group for _ in range(self.prompts)]
        rng = random.Random(f"lengths {step}")

        def one() -> int:
            length = round(math.exp(rng.gauss(math.log(self.median_length), SIGMA)))
            return min(max(length, 1), self.completion_tokens)

        return [[one() for _ in range(self.group)] for _ in range(self.prompts)]

    def useful_gflop(self, step: int) -> float:
        """Matrix products that a group-native step needs: one forward to sample, one for the reference, three to learn.

        Each prompt once for its group, each completion token once, attention to what is there, nothing recomputed.
        """
        d, h = self.width, self.width // self.heads
        layer = 2 * d * h * (2 * self.heads + 2 * self.kv_heads) + 6 * d * self.mlp_width
        lengths = [n for group in self.lengths(step) for n in group]
        tokens, prompt_tokens = sum(lengths), self.prompts * self.prompt_tokens
        attended = self.prompts * self.prompt_tokens**2 / 2 + sum(n * self.prompt_tokens + n * n / 2 for n in lengths)
        per_pass = self.layers * (layer * (tokens + prompt_tokens) + 4 * d * attended)
        return 5 * (per_pass + 2 * d * self.vocab_size * tokens) / 1e9


PAD, STOP = 0, 1
SIGMA = 0.8  # of the logarithm of ragged lengths
CLIP_NORM, KL_COEF, TEMPERATURE = 1.0, 0.04, 1.0  # GRPO's settings, for every trainer

SMALL = dict(width=512, layers=8, heads=8, kv_heads=2, mlp_width=1408, vocab_size=8192)
WIDE_HEAD = dict(width=256, layers=4, heads=4, kv_heads=2, mlp_width=704, vocab_size=151_936)
# Whether a benchmark runs at all. At the rate of the others float32 rounds its KL divergence to 0, which peers refuse.
TINY = dict(width=64, layers=2, heads=2, kv_heads=2, mlp_width=64, vocab_size=64, learning_rate=1e-2)
WORKLOADS = {
    w.name: w
    for w in (
        Workload("even", **SMALL, prompts=8, group=8, prompt_tokens=64, completion_tokens=128),
        Workload("vocabulary", **WIDE_HEAD, prompts=8, group=8, prompt_tokens=64, completion_tokens=128),
        Workload("long_prompt", **SMALL, prompts=8, group=16, prompt_tokens=512, completion_tokens=64),
        Workload("ragged", **SMALL, prompts=8, group=8, prompt_tokens=64, completion_tokens=256, median_length=48),
        Workload("ragged_6", **SMALL, prompts=6, group=8, prompt_tokens=96, completion_tokens=192, median_length=40),
        Workload("tiny", **TINY, prompts=2, group=4, prompt_tokens=8, completion_tokens=8, median_length=4),
    )
}


def reward(completion: list[int]) -> float:
    """The share of even token ids: cheap, and different within every group."""
    return sum(token % 2 == 0 for token in completion) / max(len(completion), 1)


def parity_of_length(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within a group, of texts or messages."""
    return [float(len(str(completion)) % 2) for completion in completions]


def read(folder: str) -> Workload:
    """The workload that `benchmarks.speed.step` wrote beside the model."""
    return Workload(**json.loads(Path(folder, "workload.json").read_text()))


def write(workload: Workload, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.json").write_text(json.dumps(asdict(workload)))
    config = workload.model_config()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # Otherwise TRL also stops at the stop tokens of the folder's tokenizer.
    stops = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(stops))
