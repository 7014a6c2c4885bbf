"""GRPO on three tasks of reasoning-gym, with SmolLM2-135M-Instruct: `python -m benchmarks.real --case reasoning`."""

from ml_collections import ConfigDict

from benchmarks.real import addition


def get_config() -> ConfigDict:
    c = addition.get_config()
    c.num_steps = c.checkpoint.every = 30
    c.prompts_per_step = c.prompts_per_update = 16
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.reasoning_tasks.learned", 128
    c.eval.source, c.eval.problems = "benchmarks.real.reasoning_tasks.learned_held_out", 144
    c.reward.functions = ("reasoning_gym.score",)
    c.eval.function = "reasoning_gym.accuracy"
    c.rollout.max_completion_tokens = 6
    return c
