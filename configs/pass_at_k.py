"""Pass@k training (arXiv 2508.10751): a set of k completions earns what the best of it earns.

python -m jaxrl_llm.train --config configs/pass_at_k.py
"""

import grpo  # configs/grpo.py, where every field is explained
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.advantage = ConfigDict(dict(name="pass_at_k", k=2, threshold=0.5, epsilon=1e-4))
    return c
