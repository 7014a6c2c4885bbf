"""GRPO on sums of two numbers below 50, from SmolLM2-135M-Instruct: `python -m benchmarks.real --quick`."""

from ml_collections import ConfigDict

from benchmarks.real.model import smollm2
from jaxrl_llm.configs import grpo  # configs/grpo.py explains the fields


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 20
    c.prompts_per_step, c.group_size, c.prompts_per_update, c.microbatch = 8, 8, 8, 4
    c.model.path = str(smollm2())
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.tasks.addition", 64
    c.eval.source, c.eval.every, c.eval.problems = "benchmarks.real.tasks.addition_held_out", 5, 256
    # The last number of a completion.
    c.reward.functions, c.reward.weights = ("gsm8k.accuracy(method='flexible')",), (1.0,)
    c.eval.function = c.reward.functions[0]
    c.kl = None
    # At a temperature of 1 the first samples solve 3 to 10 %, where greedy completions solve 25 %: most groups have no
    # signal.
    c.rollout.max_completion_tokens, c.rollout.temperature = 24, 0.7
    c.optim.learning_rate, c.optim.decay = 2e-5, "constant"
    return c
