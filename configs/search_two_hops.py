"""The task of configs/search_grpo.py with questions that need two searches: the first names what to search for next.

python -m jaxrl_llm.train --config configs/search_two_hops.py
"""

import search_grpo  # explains the fields of episodes
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = search_grpo.get_config()
    c.data.source, c.eval.source = "encyclopedia.two_hops", "encyclopedia.two_hops_held_out"
    return c
