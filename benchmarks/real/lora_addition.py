"""The sums of addition.py by adapters alone: `python -m benchmarks.real --case lora_addition`."""

from ml_collections import ConfigDict

from benchmarks.real import addition
from jaxrl_llm.configs import lora


def get_config() -> ConfigDict:
    c = addition.get_config()
    c.adapters = lora.get_config().adapters
    c.optim.learning_rate = 5e-4
    return c
