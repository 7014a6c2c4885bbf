"""GRPO on GSM8K with Qwen3-30B-A3B, a mixture of experts, for a slice of 32 or more accelerators. Nothing is measured.

pip install -e '.[parquet]'
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
jaxrl train --config configs/recipes/qwen3_30b_a3b_gsm8k.py --workdir runs/experts

This recipe is not planned yet. This command says whether it fits a slice:
jaxrl plan --config configs/recipes/qwen3_30b_a3b_gsm8k.py --topology v5p:2x4x4 \\
  --config.model.path=jaxrl_llm/assets/qwen3_30b_a3b
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen3-30B-A3B"
    c.mesh.tensor = 4  # devices over which the experts are split
    c.router = ConfigDict()  # router of a mixture-of-experts model; other models have no such section
    # Coefficient of the load-balance loss over the trained tokens of an update (arXiv 2101.03961); 0: off. With several
    # microbatches, this loss needs one more forward pass.
    c.router.balance_coef = 1e-3
    return c
