"""GRPO on MATH with Qwen2.5-7B-Instruct and the settings of EasyR1's example qwen2_5_7b_math_grpo.

pip install -e '.[parquet]'
hf download hiyouga/math12k --repo-type dataset --local-dir data/math12k
jaxrl train --config configs/recipes/qwen2_5_7b_math.py --workdir runs/math

The example's settings, in EasyR1's words, are: rollout_batch_size 512, global_batch_size 128 (prompts: so 4 updates per
rollout), n 5, 2,048 tokens each, lr 1e-6 without a warm-up, weight_decay 0.01, low_var_kl in the loss with 0.01, clip
0.2 to 0.3 and 3 for negative advantages, 15 epochs. Three things differ: the prompt asks for thought and box in other
words; the evaluation is greedy (EasyR1 samples at temperature 0.6); the token mean is over the whole update, not over
a microbatch.

Hardware: one TPU v5p:2x2x2 (8 chips of 95 GB; EasyR1 names 8 GPUs of 80 GB). Memory: 70 % of a chip at most, while it
samples; 31 % in the update. Time: 296 s a step where all completions have 2,048 tokens, so 28 hours at most for 345
steps. The time is an estimate at published speeds. This command printed it:

jaxrl plan --config configs/recipes/qwen2_5_7b_math.py --topology v5p:2x2x2 --prompt-tokens 1024 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_7b

Expected: the published run of this setting goes from 0.75 to 0.77 (EasyR1 #24; docs/stability.md shows why a reward is
flat near its ceiling). Not measured here. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from __future__ import annotations

import re
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field

MODULE = "jaxrl_llm.configs.recipes.qwen2_5_7b_math"  # of the functions below

FORM = "First think, between <think> and </think>. Then give the final answer in \\boxed{}."


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 345  # 15 epochs of 12,000 problems
    c.prompts_per_step, c.prompts_per_update, c.group_size = 512, 128, 5
    c.microbatch, c.model.row_parts = 8, 4
    c.model.path, c.model.dtype, c.model.remat = "Qwen/Qwen2.5-7B-Instruct", "bfloat16", "full"
    c.data.source, c.data.convert = "data/math12k/data/train-*.parquet", f"{MODULE}.convert"
    c.data.max_prompt_tokens = 2048
    c.eval.source, c.eval.convert = "data/math12k/data/test-*.parquet", f"{MODULE}.convert"
    c.eval.function, c.eval.problems, c.eval.every = "math.accuracy", 500, 5
    c.reward.functions, c.reward.weights = ("math.accuracy", f"{MODULE}.has_form"), (0.9, 0.1)
    c.rollout.max_completion_tokens = 2048
    c.advantage.epsilon = 1e-6
    c.loss.clip_high, c.loss.delta = 0.3, 3.0
    c.kl.coef = 1e-2
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.decay = 1e-6, 0, "constant"
    c.optim.b2, c.optim.weight_decay = 0.999, 0.01
    c.checkpoint.every, c.checkpoint.keep = 5, 3
    return c


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """{problem, answer} -> {prompt: chat, answer}. Raises: KeyError."""
    return {"prompt": [{"role": "user", "content": f"{row['problem']}\n\n{FORM}"}], "answer": row["answer"]}


def has_form(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is a thought between its tags, and then text with a box."""
    form = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    return [float(bool(form.fullmatch(completion[0]["content"]))) for completion in completions]
