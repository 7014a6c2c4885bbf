"""Supervised fine-tuning on the sums of addition.py, before GRPO on them (docs/real_model.md has both commands)."""

from ml_collections import ConfigDict

from benchmarks.real.model import SMOLLM2
from jaxrl_llm.configs import sft  # configs/sft.py explains the fields


def get_config() -> ConfigDict:
    c = sft.get_config()
    c.num_steps, c.prompts_per_step, c.microbatch = 15, 32, 16
    c.model.path = str(SMOLLM2.folder())
    c.data.source = "benchmarks.real.tasks.addition_demonstrations"
    c.eval.source = "benchmarks.real.tasks.addition_held_out"
    c.eval.every, c.eval.problems, c.eval.function = 5, 256, "benchmarks.real.tasks.exact"
    c.rollout.max_completion_tokens = 4
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.decay, c.optim.weight_decay = 3e-5, 2, "linear", 0.0
    c.checkpoint.every = c.num_steps
    return c
