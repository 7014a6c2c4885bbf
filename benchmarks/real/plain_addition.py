"""The sums of addition.py by plain GRPO: the work that TRL does beside it (`--case plain_addition --trl N`).

What differs from addition.py: no groups are sampled in the place of those without signal, which TRL's GRPOTrainer
cannot do; fewer prompts in a step, and fewer steps, at a constant rate.
"""

from ml_collections import ConfigDict

from benchmarks.real import addition


def get_config() -> ConfigDict:
    c = addition.get_config()
    c.rollout.resample_rounds = 0
    c.prompts_per_step = c.prompts_per_update = c.microbatch = 16
    c.num_steps = c.checkpoint.every = 12
    c.optim.decay = "constant"
    c.eval.every = 2
    return c
