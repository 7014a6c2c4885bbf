"""GRPO on GSM8K with Qwen2.5-1.5B-Instruct. It changes qwen2_5_0_5b_gsm8k.py, which has the command that gets the data.

python -m jaxrl_llm.train --config configs/recipes/qwen2_5_1_5b_gsm8k.py --workdir runs/gsm8k_1_5b
"""

import qwen2_5_0_5b_gsm8k
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    c.microbatch = 16
    return c
