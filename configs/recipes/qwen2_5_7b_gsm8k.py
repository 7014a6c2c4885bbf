"""GRPO on GSM8K with Qwen2.5-7B-Instruct. It changes qwen2_5_0_5b_gsm8k.py, which has the command that gets the data.

python -m jaxrl_llm.train --config configs/recipes/qwen2_5_7b_gsm8k.py --workdir runs/gsm8k_7b
"""

import qwen2_5_0_5b_gsm8k
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen2.5-7B-Instruct"
    c.microbatch = 4
    c.mesh.tensor = 4
    return c
