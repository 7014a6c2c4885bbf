"""GRPO on sums of two numbers below 50, from SmolLM2-135M-Instruct: `python -m benchmarks.real --quick`.

That command makes the model's folder.
"""

from ml_collections import ConfigDict

from benchmarks.real.model import FOLDER
from jaxrl_llm.configs import grpo  # configs/grpo.py explains the fields


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 10
    c.prompts_per_step, c.group_size, c.prompts_per_update, c.microbatch = 16, 8, 16, 4
    c.model.path = str(FOLDER)
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.tasks.addition", 64
    c.eval.source, c.eval.every, c.eval.problems = "benchmarks.real.tasks.addition_held_out", 2, 256
    # The last number of a completion.
    c.reward.functions, c.reward.weights = ("gsm8k.accuracy(method='flexible')",), (1.0,)
    c.eval.function = c.reward.functions[0]
    c.kl = None
    c.rollout.max_completion_tokens = 12
    # With 8 prompts, or a temperature of 0.7 or 0.9, the entropy is gone sooner, and accuracy ends lower (docs/LOG.md).
    c.optim.learning_rate, c.optim.decay = 1e-5, "constant"
    # As TRL's run, which writes nothing.
    c.checkpoint.every, c.checkpoint.keep_best = c.num_steps, 0
    return c
