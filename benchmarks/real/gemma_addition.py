"""The sums of addition.py by adapters, with Gemma 3 270M, a base model: `benchmarks.real --case gemma_addition`.

Its embedding has 168 of the 268 million weights, and steps of 2e-5 in all of them ruin it (docs/LOG.md).
"""

from ml_collections import ConfigDict

from benchmarks.real import lora_addition
from benchmarks.real.model import GEMMA3_270M


def get_config() -> ConfigDict:
    c = lora_addition.get_config()
    c.model.path = str(GEMMA3_270M.folder())
    c.data.source, c.data.max_prompt_tokens = "benchmarks.real.tasks.gemma_addition", 17
    c.optim.learning_rate = 2e-4
    c.eval.source = "benchmarks.real.tasks.gemma_addition_held_out"
    return c
