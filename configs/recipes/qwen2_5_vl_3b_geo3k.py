"""GRPO on geometry3k with Qwen2.5-VL-3B: qwen2_5_vl_7b_geo3k.py for the smaller model.

pip install -e '.[parquet,vision]'
hf download hiyouga/geometry3k --repo-type dataset --local-dir data/geometry3k
jaxrl train --config configs/recipes/qwen2_5_vl_3b_geo3k.py --workdir runs/geo3k

Hardware: one host of eight H100s of 80 GB, or a TPU v5p:2x2x2. Memory: 70 % at most of what JAX takes of an H100 (75 %
of it), while it samples, and 38 % in the update; 50 and 18 % of a TPU chip. Time: 58 s a step on the GPUs and 131 s on
the TPUs where all completions that are learned from have 2,048 tokens. The times are estimates at published speeds.
This command printed it, and the same with --topology v5p:2x2x2:

jaxrl plan --config configs/recipes/qwen2_5_vl_3b_geo3k.py --topology h100:8 --prompt-tokens 1024 --pixels 512x512 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_vl_3b

Expected: 0.24 to 0.38 on the 601 problems of the test set is EasyR1's result with GRPO (assets/baselines.md, v0.3.2).
Not measured here. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_vl_7b_geo3k


def get_config() -> ConfigDict:
    c = qwen2_5_vl_7b_geo3k.get_config()
    c.model.path = "Qwen/Qwen2.5-VL-3B-Instruct"
    c.microbatch = 16
    return c
