"""GRPO on GSM8K with Qwen2.5-7B-Instruct. It changes qwen2_5_0_5b_gsm8k.py, which has the command for the data.

python -m jaxrl_llm.train --config configs/recipes/qwen2_5_7b_gsm8k.py --workdir runs/gsm8k_7b

Hardware: one TPU v5e:4x4 (16 chips of 16 GB). docs/plan.md has longer prompts and completions (512 + 1,024 tokens) on
the same mesh: 83 % of a chip's memory and an estimated 20.0 s a step, so less than 2.8 hours for 500 steps.

Expected: 93.4 % is veRL's result with GRPO and LoRA (docs/algo/baseline.md of veRL). Not measured here.
tests/test_recipes.py runs this file with a small model of the same architecture.
"""

import qwen2_5_0_5b_gsm8k
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen2.5-7B-Instruct"
    c.microbatch = 4
    c.mesh.tensor = 4
    return c
