"""GRPO on the prompts of TL;DR with Qwen2-0.5B-Instruct and the reward of TRL's first example: 20 characters are best.

pip install -e '.[parquet]'
hf download trl-lib/tldr --repo-type dataset --local-dir data/tldr
jaxrl train --config configs/recipes/qwen2_0_5b_tldr.py --workdir runs/tldr

Model, data, reward, group size, 256 tokens, temperature, learning rate and "no KL penalty" are TRL's defaults. What
differs: a step has 64 prompts (TRL: 8 completions a device, whatever the number of devices), and the run has 2,000
steps.

Hardware: one TPU v5e:2x2 (4 chips of 16 GB), or one GPU. Memory: 25 % of a chip at most, in the update. Time: 1.3 s a
step where all completions have 256 tokens, so 0.7 hours for 2,000 steps. The time is an estimate at published speeds.
This command printed it; Qwen2-0.5B has the sizes of Qwen2.5-0.5B:

jaxrl plan --config configs/recipes/qwen2_0_5b_tldr.py --topology v5e:2x2 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_0_5b

Expected: the reward rises towards 0, its largest value. No number is published, and none is measured here.
tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field

MODULE = "jaxrl_llm.configs.recipes.qwen2_0_5b_tldr"  # of the functions below


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 2000
    c.prompts_per_step = c.prompts_per_update = 64
    c.group_size, c.microbatch = 8, 8
    c.model.path, c.model.dtype, c.model.remat = "Qwen/Qwen2-0.5B-Instruct", "bfloat16", "full"
    c.data.source = "data/tldr/data/train-*.parquet"
    c.data.max_prompt_tokens = 512
    c.eval.source, c.eval.function = "data/tldr/data/test-*.parquet", f"{MODULE}.is_near"
    c.eval.problems, c.eval.every = 500, 50
    c.reward.functions = (f"{MODULE}.length", f"{MODULE}.unique_characters")
    c.reward.weights = (1.0, 0.0)
    c.rollout.max_completion_tokens = 256
    c.kl = None
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.b2 = 1e-6, 0, 0.999
    return c


def length(completions: list[str], **columns: Any) -> list[float]:
    """The negative distance of the length from 20 characters."""
    return [-abs(20 - len(text)) for text in completions]


def unique_characters(completions: list[str], **columns: Any) -> list[float]:
    """The number of different characters, which is TRL's later example."""
    return [len(set(text)) for text in completions]


def is_near(completions: list[str], **columns: Any) -> list[float]:
    """1 where the length is 15 to 25 characters."""
    return [float(value >= -5) for value in length(completions)]
