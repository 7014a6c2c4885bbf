"""Supervised fine-tuning of a new model on demonstrations of searches; it made the model of configs/search_grpo.py.

jaxrl sft --config configs/search_sft.py
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import sft  # configs/sft.py explains the fields


def get_config() -> ConfigDict:
    c = sft.get_config()
    c.num_steps, c.prompts_per_step = 1200, 64
    c.model.vocabulary = 768
    c.data.source, c.data.max_prompt_tokens = "encyclopedia.demonstrations", 32
    c.rollout.max_completion_tokens = 160
    c.eval = None
    c.checkpoint.every = 500
    return c
