"""Search-R1 (arXiv 2503.09516) by PPO with Qwen2.5-7B: search_r1_qwen2_5_3b_ppo.py, larger. Not measured yet.

jaxrl train --config configs/recipes/search_r1_qwen2_5_7b_ppo.py --workdir runs/search_r1_7b

With --config.microbatch=8 the run needs at most 69 % of the memory of 8 chips v5p:2x2x2, by the TPU compiler. A step
takes an estimated 155 s, if every episode has all of its 4,096 tokens (docs/plan.md).
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import search_r1_qwen2_5_3b_ppo


def get_config() -> ConfigDict:
    c = search_r1_qwen2_5_3b_ppo.get_config()
    c.model.path = "Qwen/Qwen2.5-7B"
    c.microbatch //= 2
    return c
