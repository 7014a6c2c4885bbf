"""GRPO on GSM8K with Qwen2.5-7B-Instruct. It changes qwen2_5_0_5b_gsm8k.py, which has the command for the data.

jaxrl train --config configs/recipes/qwen2_5_7b_gsm8k.py --workdir runs/gsm8k_7b

Hardware: one TPU v5e:4x4 (16 chips of 16 GB). Memory: 75 % of a chip at most, in the update. Time: 9.3 s a step where
all completions have 512 tokens, so 1.3 hours for 500 steps. The time is an estimate at published speeds. This command
printed it:

jaxrl plan --config configs/recipes/qwen2_5_7b_gsm8k.py --topology v5e:4x4 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_7b

Expected: 93.4 % is veRL's result with GRPO and LoRA (docs/algo/baseline.md of veRL). Not measured here.
tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen2.5-7B-Instruct"
    c.microbatch = 4
    c.mesh.tensor = 4
    return c
