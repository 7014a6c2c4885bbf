"""The sums of addition.py with Gemma 3 270M, a base model: `python -m benchmarks.real --case gemma_addition`."""

from ml_collections import ConfigDict

from benchmarks.real import addition
from benchmarks.real.model import GEMMA3_270M


def get_config() -> ConfigDict:
    c = addition.get_config()
    c.model.path = str(GEMMA3_270M.folder())
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.tasks.gemma_addition", 17
    c.optim.learning_rate = 5e-6  # 2e-5 ruins it in six steps (docs/LOG.md)
    c.eval.source = "benchmarks.real.tasks.gemma_addition_held_out"
    return c
