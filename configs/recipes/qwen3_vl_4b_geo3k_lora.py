"""GRPO with LoRA on geometry3k with Qwen3-VL-4B: qwen2_5_vl_7b_geo3k.py with adapters in the text layers.

pip install -e '.[parquet,vision]'
hf download hiyouga/geometry3k --repo-type dataset --local-dir data/geometry3k
jaxrl train --config configs/recipes/qwen3_vl_4b_geo3k_lora.py --workdir runs/geo3k_lora

The settings are those of EasyR1's example qwen3_vl_4b_geo3k_grpo_lora: rank 64, lr 1e-5, no adapters in the tower. One
thing differs: an Instruct model of Qwen3-VL seldom writes <think> (EasyR1 #597), so watch easyr1.math/format.

Expected: EasyR1 publishes no number for this model. Not measured here. tests/programs/test_recipes.py runs this file
with a small model of the same architecture.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.lora import get_config as of_lora  # configs/lora.py explains the fields of `adapters`
from jaxrl_llm.configs.recipes import qwen2_5_vl_7b_geo3k


def get_config() -> ConfigDict:
    c = qwen2_5_vl_7b_geo3k.get_config()
    c.adapters = of_lora().adapters
    c.adapters.rank, c.adapters.alpha = 64, 64.0
    c.model.path, c.model.vision = "Qwen/Qwen3-VL-4B-Instruct", "frozen"
    c.optim.learning_rate = 1e-5
    return c
