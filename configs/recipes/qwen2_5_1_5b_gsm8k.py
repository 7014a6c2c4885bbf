"""GRPO on GSM8K with Qwen2.5-1.5B-Instruct. It changes qwen2_5_0_5b_gsm8k.py, which has the command for the data.

jaxrl train --config configs/recipes/qwen2_5_1_5b_gsm8k.py --workdir runs/gsm8k_1_5b

Hardware: one TPU v5e:2x2 (4 chips of 16 GB). Memory: 83 % of a chip at most, in the update. Time: 8.8 s a step where
all completions have 512 tokens, so 1.2 hours for 500 steps. The time is an estimate at published speeds. This command
printed it:

jaxrl plan --config configs/recipes/qwen2_5_1_5b_gsm8k.py --topology v5e:2x2 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_1_5b

Expected: 77.9 % is veRL's result with GRPO and LoRA (docs/algo/baseline.md of veRL). Not measured here.
tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    c.microbatch = 16
    return c
