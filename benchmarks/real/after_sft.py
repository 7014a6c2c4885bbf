"""GRPO on the sums of addition.py after fine-tuning on them: `python -m benchmarks.real --case after_sft`.

That command first makes the fine-tuned model by sft_addition.py.
"""

from ml_collections import ConfigDict

from benchmarks.real import addition
from benchmarks.real.model import fine_tuned


def get_config() -> ConfigDict:
    c = addition.get_config()
    c.model.path = str(fine_tuned())
    return c
