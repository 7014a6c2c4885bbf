"""TRL's documented example of GRPO, completions of 20 characters, with SmolLM2-135M-Instruct: `--case tldr`.

Reward, group size, "no KL penalty" and the form of the prompts are the example's. What differs, so that it ends within
minutes on two cores: the model (there Qwen2-0.5B-Instruct), the posts, 32 tokens (there 256), 4 prompts in a step
(there 8 completions on each of 8 GPUs), and a rate of 2e-5 for 20 steps (there 1e-6, and a day).
"""

from ml_collections import ConfigDict

from benchmarks.real import plain_addition


def get_config() -> ConfigDict:
    c = plain_addition.get_config()
    c.num_steps = c.checkpoint.every = 20
    c.prompts_per_step = c.prompts_per_update = c.microbatch = 4
    c.eval.every = 5
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.tasks.posts", 96
    c.eval.source, c.eval.problems = "benchmarks.real.tasks.posts_held_out", 64
    c.reward.functions, c.eval.function = ("benchmarks.real.tasks.length",), "benchmarks.real.tasks.is_near"
    c.rollout.max_completion_tokens = 32
    return c
