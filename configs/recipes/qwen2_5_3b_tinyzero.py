"""Countdown as in TinyZero: PPO with the base model Qwen2.5-3B, which thinks before it answers.

pip install -e '.[parquet]'
hf download Jiayi-Pan/Countdown-Tasks-3to4 --repo-type dataset --local-dir data/countdown
jaxrl train --config configs/recipes/qwen2_5_3b_tinyzero.py --workdir runs/tinyzero

The settings are those of TinyZero's script: 256 prompts in a rollout, 128 in an update, prompts of 256 and completions
of 1,024 tokens, rates 1e-6 and 1e-5, KL penalty 0.001 in the reward, gamma and lambda 1. On purpose differ:

- The prompt says the same in other words. The reward has the same parts: 0.1 for the tags, 1 for a right answer.
- Problems are held out by their numbers and target. TinyZero takes the last 1,024 rows.
- 1,275 steps. TinyZero's 15 epochs are 19,200 steps.

Hardware: one TPU v5e:4x4 (16 chips of 16 GB); TinyZero names 2 GPUs for a model of 3B. Memory: 71 % of a chip at most,
while it samples; 61 % in the update. Time: 19.1 s a step where all completions have 1,024 tokens, so 6.8 hours for
1,275 steps. The time is an estimate at published speeds. This command printed it:

jaxrl plan --config configs/recipes/qwen2_5_3b_tinyzero.py --topology v5e:4x4 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_3b

Expected: TinyZero says that a base model of 3B learns to search and to check itself, and one of 0.5B does not; it
publishes no number as text. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every field; configs/ppo.py those of the critic
from jaxrl_llm.configs.ppo import with_critic

MODULE = "jaxrl_llm.configs.recipes.qwen2_5_3b_tinyzero"  # of the functions below

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
QUESTION = (
    "A user asks, and an assistant thinks between <think> and </think> before it answers between <answer> and "
    "</answer>.\nUser: Make {target} from the numbers {numbers}. Use each number once, and only + - * / and brackets. "
    "The answer is the expression alone, for example <answer>(1 + 2) / 3</answer>.\nAssistant: I think step by step.\n"
    "<think>"
)


def get_config() -> ConfigDict:
    c = with_critic(grpo.get_config())
    c.num_steps = 1275
    c.prompts_per_step, c.prompts_per_update, c.group_size, c.microbatch = 256, 128, 1, 16
    c.model.path, c.model.dtype, c.model.remat = "Qwen/Qwen2.5-3B", "bfloat16", "full"
    c.data.source, c.data.convert = "data/countdown/data/train-*.parquet", f"{MODULE}.train_row"
    c.data.max_prompt_tokens = 256
    c.eval.source, c.eval.convert = c.data.source, f"{MODULE}.held_out_row"
    c.eval.problems, c.eval.every, c.eval.function = 1024, 50, f"{MODULE}.accuracy"
    c.reward.functions = (f"{MODULE}.accuracy", f"{MODULE}.has_answer")
    c.reward.weights = (0.9, 0.1)
    c.rollout.max_completion_tokens = 1024
    c.advantage.lam = 1.0
    c.critic.warmup_steps, c.critic.clip = 0, 0.5
    c.critic.optim.learning_rate, c.critic.optim.warmup_steps = 1e-5, 0
    c.critic.optim.decay, c.critic.optim.b2, c.critic.optim.weight_decay = "constant", 0.999, 0.01
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.decay = 1e-6, 0, "constant"
    c.optim.b2, c.optim.weight_decay = 0.999, 0.01
    c.checkpoint.every = 50
    return c


def row(data: dict[str, Any]) -> dict[str, Any]:
    """{nums, target} -> {prompt: text, numbers, target}. Raises: KeyError."""
    numbers, target = [int(n) for n in data["nums"]], int(data["target"])
    question = QUESTION.format(target=target, numbers=", ".join(map(str, numbers)))
    return {"prompt": question, "numbers": numbers, "target": target}


def train_row(data: dict[str, Any]) -> dict[str, Any] | None:
    """The row, if it is one to learn from."""
    return None if _held_out(data) else row(data)


def held_out_row(data: dict[str, Any]) -> dict[str, Any] | None:
    """The row, if it is one to evaluate: all problems of a set of numbers with a target are on one side."""
    return row(data) if _held_out(data) else None


def _held_out(data: dict[str, Any]) -> bool:
    return (sum(int(n) ** 3 for n in data["nums"]) + int(data["target"])) % 50 == 0


def answer(text: str) -> str | None:
    """The last answer between its tags."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def has_answer(completions: list[str], **columns: Any) -> list[float]:
    """1 where there is an answer between its tags."""
    return [float(answer(text) is not None) for text in completions]


def accuracy(completions: list[str], numbers: list[list[int]], target: list[int], **columns: Any) -> list[float]:
    """1 where the answer uses every number once and comes to the target."""
    found = [answer(text) or "" for text in completions]
    return [
        float(sorted(int(n) for n in re.findall(r"\d+", said)) == sorted(given) and value(said) == wanted)
        for said, given, wanted in zip(found, numbers, target, strict=True)
    ]


def value(expression: str) -> Fraction | None:
    """What an expression of + - * / and brackets comes to; None if it is not one."""
    if not re.fullmatch(r"[\d+\-*/() ]{1,100}", expression):
        return None
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not + - * / of numbers")
