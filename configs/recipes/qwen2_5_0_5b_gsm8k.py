"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct, for one host with accelerators. Nothing here is measured yet.

pip install -e '.[parquet]'
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
jaxrl train --config configs/recipes/qwen2_5_0_5b_gsm8k.py --workdir runs/gsm8k

Hardware: one TPU v5e:2x2, or one GPU. docs/plan.md plans longer prompts and completions (512 + 1,024 tokens) on
v5e:2x2: 45 % of a chip's memory and an estimated 7.3 s a step. So 500 steps take less than 1.1 hours.

Expected: veRL's table of baselines has 36.4 % before training, and 56.7 % after PPO, 54.3 % after GRPO with LoRA
(docs/algo/baseline.md of veRL). tests/programs/test_recipes.py runs this file with a small model of the same
architecture.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 500
    c.prompts_per_step = c.prompts_per_update = 64
    c.group_size = 8
    c.microbatch = 8
    c.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.data.source = "data/gsm8k/main/train-00000-of-00001.parquet"
    c.data.convert = "gsm8k.convert"
    c.data.max_prompt_tokens = 256
    c.eval.source = "data/gsm8k/main/test-00000-of-00001.parquet"
    c.eval.convert = "gsm8k.convert"
    c.eval.function = "math.accuracy"
    c.reward.functions = ("math.accuracy", "math.is_boxed")
    c.reward.weights = (1.0, 0.1)
    c.rollout.max_completion_tokens = 512
    c.optim.learning_rate = 1e-6
    c.optim.decay = "constant"
    return c
