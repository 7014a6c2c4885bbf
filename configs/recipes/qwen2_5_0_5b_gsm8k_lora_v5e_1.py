"""GRPO with LoRA on GSM8K with Qwen2.5-0.5B-Instruct, for one TPU chip v5e. It changes the recipe for a T4.

jaxrl train --config configs/recipes/qwen2_5_0_5b_gsm8k_lora_v5e_1.py --workdir runs/gsm8k_lora

Memory: 18 % of the chip of 16 GB at most; full fine-tuning of this batch takes 76 % (docs/plan.md, row v5e:1x1). With
--config.adapters.base_dtype=int8 it is 16 %. Time: 2.8 s a step where all completions have 512 tokens, so 0.4 hours for
500 steps. The time is an estimate at published speeds. This command printed it:

jaxrl plan --config configs/recipes/qwen2_5_0_5b_gsm8k_lora_v5e_1.py --topology v5e:1x1 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_0_5b

Expected: as the recipe for a T4. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k_lora_t4


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k_lora_t4.get_config()
    c.model.dtype = "bfloat16"
    c.model.row_parts = 1
    c.engine.max_sequences = 0
    return c
