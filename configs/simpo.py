"""Simple preference optimization (SimPO, arXiv 2405.14734) on the task of configs/dpo.py, without a reference.

jaxrl sft --config configs/simpo.py
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import dpo  # configs/sft.py explains the fields


def get_config() -> ConfigDict:
    c = dpo.get_config()
    c.loss = ConfigDict(dict(name="simpo"))
    c.loss.beta = 2.0  # the reward is beta times the mean log-probability of a token
    c.loss.gamma = 1.0  # by which the reward of the chosen completion should be larger
    c.loss.label_smoothing, c.loss.nll_coef = 0.0, 1.0
    return c
