"""Supervised fine-tuning of Gemma 3 1B on the better answers of UltraFeedback: the first of three steps, on v5e:2x4.

pip install -e '.[parquet]'
hf download trl-lib/ultrafeedback_binarized --repo-type dataset --local-dir data/ultrafeedback
jaxrl sft --config configs/recipes/gemma3_1b_sft.py --workdir runs/gemma3_1b_sft

gemma3_1b_simpo.py continues with the model of this run, and gemma3_1b_rubric_grpo.py with the model of SimPO. This run
is not planned. By count, a device has 2 x 2,048 tokens of this run in memory at once, 1,024 + 2 x 1,024 tokens of
SimPO, and 512 + 8 x 512 tokens of GRPO. The update of GRPO takes 38 % of a chip.

Expected: the loss falls. Nothing here is measured. tests/programs/test_recipes.py runs the three files, one after the
other, with a small model of the same architecture.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import sft  # configs/sft.py explains every field

MODULE = "jaxrl_llm.configs.recipes.gemma3_1b_sft"  # of the function below


def get_config() -> ConfigDict:
    c = sft.get_config()
    c.num_steps, c.prompts_per_step, c.microbatch = 485, 128, 16  # one epoch of 62,135 rows
    c.model.path, c.model.dtype, c.model.remat = "google/gemma-3-1b-it", "bfloat16", "full"
    c.data.source, c.data.convert = "data/ultrafeedback/data/train-*.parquet", f"{MODULE}.chosen_answer"
    c.data.max_prompt_tokens, c.rollout.max_completion_tokens = 1024, 1024
    c.eval = None
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.warmup_ratio = 1e-5, 0, 0.1
    c.optim.weight_decay, c.optim.b2 = 0.0, 0.999
    return c


def chosen_answer(row: dict[str, Any]) -> dict[str, Any]:
    """{chosen, rejected: conversations} -> {prompt: chat, completion: the better answer}. Raises: KeyError."""
    *prompt, answer = row["chosen"]
    return {"prompt": prompt, "completion": answer["content"]}
