"""Search-R1 (arXiv 2503.09516) by GRPO with Qwen2.5-7B: search_r1_qwen2_5_3b_grpo.py, larger. Not measured yet.

jaxrl train --config configs/recipes/search_r1_qwen2_5_7b_grpo.py --workdir runs/search_r1_7b
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import search_r1_qwen2_5_3b_grpo


def get_config() -> ConfigDict:
    c = search_r1_qwen2_5_3b_grpo.get_config()
    c.model.path = "Qwen/Qwen2.5-7B"
    c.microbatch //= 2
    return c
