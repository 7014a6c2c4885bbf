"""GRPO of Gemma 3 1B with a judge that scores by a rubric: the third step, after gemma3_1b_simpo.py, on v5e:2x4.

vllm serve Qwen/Qwen3-8B --served-model-name judge --port 8000   # on a machine of its own
jaxrl train --config configs/recipes/gemma3_1b_rubric_grpo.py --workdir runs/gemma3_1b_rubric_grpo

The judge's address is URL below. docs/rewards.md explains rubrics; a column of the rows may have rubrics instead.

Memory: 38 % of a chip of 16 GB at most, in the update. Time: 3.5 s a step without the judge, if completions have 256
tokens on average, so 0.3 hours for 300 steps. The time is an estimate at published speeds. This command printed it:

jaxrl plan --config configs/recipes/gemma3_1b_rubric_grpo.py --topology v5e:2x4 \\
  --config.model.path=jaxrl_llm/assets/gemma3_1b

The judge reads 512 completions a step and may take longer than the rest of a step, so it needs a fast machine.
Expected: the reward rises, and the metric judge.score/rubric/padding falls. Nothing here is measured.
tests/programs/test_recipes.py runs this file with a small model of the same architecture.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field

MODULE = "jaxrl_llm.configs.recipes.gemma3_1b_rubric_grpo"  # of the function below
URL = "http://127.0.0.1:8000/v1"
CRITERIA = (
    {"name": "correct", "criterion": "What the answer states is true, as far as you can tell.", "weight": 2.0},
    {"name": "follows", "criterion": "It does all that the user asks for, and nothing else.", "weight": 2.0},
    {"name": "clear", "criterion": "It is easy to read, and in an order that helps.", "weight": 1.0},
    {"name": "padding", "criterion": "It repeats itself, flatters, or has sentences that say nothing.", "weight": -1.0},
)
JUDGE = f"judge.score(url={URL!r}, model='judge', criteria={CRITERIA!r}, concurrency=64)"


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 300
    c.prompts_per_step = c.prompts_per_update = 64
    c.group_size, c.microbatch = 8, 8
    c.model.path, c.model.dtype, c.model.remat = "runs/gemma3_1b_simpo/hf", "bfloat16", "full"
    c.data.source, c.data.convert = "data/ultrafeedback/data/train-*.parquet", f"{MODULE}.question"
    c.data.max_prompt_tokens, c.rollout.max_completion_tokens = 512, 512
    c.eval.source, c.eval.convert = "data/ultrafeedback/data/test-*.parquet", f"{MODULE}.question"
    c.eval.function, c.eval.problems, c.eval.every = JUDGE, 128, 50
    c.reward.functions, c.reward.weights = (JUDGE,), (1.0,)
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.decay = 1e-6, 10, "constant"
    return c


def question(row: dict[str, Any]) -> dict[str, Any] | None:
    """{chosen: a conversation} -> {prompt: chat}; None drops a long one. Raises: KeyError."""
    prompt = row["chosen"][:-1]
    # A held-out prompt that is too long would be an error.
    return {"prompt": prompt} if sum(len(message["content"]) for message in prompt) < 1000 else None
