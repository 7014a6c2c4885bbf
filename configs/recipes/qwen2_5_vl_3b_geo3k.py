"""GRPO on geometry3k with Qwen2.5-VL-3B: qwen2_5_vl_7b_geo3k.py for the smaller model.

pip install -e '.[parquet,vision]'
hf download hiyouga/geometry3k --repo-type dataset --local-dir data/geometry3k
jaxrl train --config configs/recipes/qwen2_5_vl_3b_geo3k.py --workdir runs/geo3k

Expected: 0.24 to 0.38 on the 601 problems of the test set is EasyR1's result with GRPO (assets/baselines.md, v0.3.2).
Not measured here. tests/test_recipes.py runs this file with a small model of the same architecture.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_vl_7b_geo3k


def get_config() -> ConfigDict:
    c = qwen2_5_vl_7b_geo3k.get_config()
    c.model.path = "Qwen/Qwen2.5-VL-3B-Instruct"
    c.microbatch = 16
    return c
