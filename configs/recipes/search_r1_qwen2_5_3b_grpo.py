"""Search-R1 (arXiv 2503.09516) by GRPO: the task and the settings of search_r1_qwen2_5_3b_ppo.py. Not measured yet.

jaxrl train --config configs/recipes/search_r1_qwen2_5_3b_grpo.py --workdir runs/search_r1_grpo

A rollout has 512 prompts with 5 completions. It has 2 updates, each on 256 prompts with all their completions. The
original counts its minibatch of 256 in completions, so it makes 10 updates per rollout; its runs collapsed.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import search_grpo
from jaxrl_llm.configs.recipes.search_r1_qwen2_5_3b_ppo import with_search


def get_config() -> ConfigDict:
    c = with_search(search_grpo.get_config())
    c.group_size = 5
    c.microbatch = 8
    c.kl.placement, c.kl.estimator, c.kl.coef = "loss", "k3", 1e-3
    return c
