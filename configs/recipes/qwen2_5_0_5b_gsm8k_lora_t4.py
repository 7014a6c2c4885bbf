"""GRPO with LoRA on GSM8K with Qwen2.5-0.5B-Instruct, for one GPU T4 of 16 GB, as Colab has it.

pip install -e '.[parquet]'
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
jaxrl train --config configs/recipes/qwen2_5_0_5b_gsm8k_lora_t4.py --workdir runs/gsm8k_lora

Activations are float32, because a T4 has no unit for bfloat16. Memory and time are not measured, and jaxrl plan knows
no T4. By arithmetic the frozen model takes 2.0 GB, the key-value cache 25 KB per token, and the adapters 70 MB.

Expected: 54.3 % is veRL's result with GRPO and LoRA of rank 32, from 36.4 % (docs/algo/baseline.md of veRL). Not
measured here. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.lora import get_config as of_lora  # configs/lora.py explains the fields of `adapters`
from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.adapters = of_lora().adapters
    c.adapters.rank, c.adapters.alpha = 32, 64.0
    c.model.dtype = "float32"
    c.prompts_per_step = c.prompts_per_update = 16
    c.microbatch, c.model.row_parts = 1, 2
    c.engine.max_sequences = 64
    c.optim.learning_rate = 1e-5  # ten times that of full fine-tuning, as in configs/lora.py
    return c
