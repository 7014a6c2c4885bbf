"""GRPO on Countdown with Qwen2.5-0.5B-Instruct. It changes configs/grpo.py; the problems are in the package.

jaxrl train --config configs/recipes/qwen2_5_0_5b_countdown.py --workdir runs/countdown

Hardware: one TPU v5e:1x1 (a chip of 16 GB), or one GPU. Memory: 76 % of the chip at most, in the update. Time: 1.2 s a
step where all completions have 64 tokens, so 10 minutes for 500 steps. The time is an estimate at published speeds.
This command printed it:

jaxrl plan --config configs/recipes/qwen2_5_0_5b_countdown.py --topology v5e:1x1 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_0_5b

Expected: no number is published for these problems and this length, and none is measured here. TinyZero says that a
base model of 0.5B does not learn to search. tests/selftest/test_self_test_configs.py makes an update with a small
model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 500
    c.prompts_per_step = c.prompts_per_update = 64
    c.group_size = 8
    c.microbatch = 8
    c.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.data.source = "countdown.train"
    c.data.max_prompt_tokens = 128
    c.eval.source = "countdown.held_out"
    c.eval.function = "countdown.accuracy"
    c.eval.problems = 500
    c.reward.functions = ("countdown.accuracy", "countdown.is_expression")
    c.reward.weights = (1.0, 0.1)
    c.rollout.max_completion_tokens = 64
    c.optim.learning_rate = 1e-6
    c.optim.decay = "constant"
    return c
