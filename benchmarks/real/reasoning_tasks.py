"""Tasks of reasoning-gym (arXiv 2505.24760) for SmolLM2-135M-Instruct: rows with an example.

jaxrl evaluate --task benchmarks.real.reasoning_tasks --samples 16 --temperature 1 --by task … is pass@16 of each
(docs/real_model.md). benchmarks/real/reasoning.py learns those of LEARNED.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tasks import reasoning_gym
from jaxrl_llm.tasks.reasoning_gym import accuracy

__all__ = ("accuracy", "held_out", "learned", "learned_held_out")  # `evaluate --task` reads accuracy and held_out

# Name in reasoning-gym, and its settings: easier than the defaults, where those are far above a small model.
TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {"max_terms": 2, "max_digits": 2},
    "calendar_arithmetic": {},
    "chain_sum": {"max_terms": 3, "max_digits": 2},
    "count_bits": {"max_n": 255},
    "count_primes": {"max_n": 100},
    "decimal_chain_sum": {"max_terms": 2, "max_digits": 2, "max_decimal_places": 1},
    "family_relationships": {},
    "fraction_simplification": {"max_value": 20, "max_factor": 5},
    "gcd": {"max_value": 50},
    "lcm": {"max_value": 20},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 5},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "number_sequence": {"max_complexity": 1},
    "prime_factorization": {"max_value": 50},
    "products": {"max_digits": 2},
    "simple_equations": {"max_terms": 2, "max_value": 20},
    "spell_backward": {"max_word_len": 5},
    "syllogism": {},
    "word_sequence_reversal": {"max_words": 4},
    "word_sorting": {"max_words": 4},
}
# Of those that the model can sometimes do, without those of a yes or a no.
LEARNED = ("calendar_arithmetic", "chain_sum", "letter_counting")
ROWS, HELD_OUT, SHOWN_IN_TABLE = 1000, 48, 16  # problems of a task


def _rows(name: str, seed: int, size: int) -> list[dict[str, Any]]:
    """Returns chats with one solved problem of the task, which shows the form of an answer, before each problem."""
    (example,) = reasoning_gym.rows(task=name, seed=2, size=1, settings=TASKS[name])
    shown = [*example["prompt"], {"role": "assistant", "content": example["answer"]}]
    problems = reasoning_gym.rows(task=name, seed=seed, size=size, settings=TASKS[name])
    return [problem | {"prompt": shown + problem["prompt"]} for problem in problems]


def held_out() -> list[dict[str, Any]]:
    """Returns problems of each task."""
    return [row for name in TASKS for row in _rows(name, 1, SHOWN_IN_TABLE)]


def learned_held_out() -> list[dict[str, Any]]:
    """Returns held-out problems of the tasks that are learned."""
    return [row for name in LEARNED for row in _rows(name, 1, HELD_OUT)]


def learned() -> list[dict[str, Any]]:
    """Returns other problems of these tasks."""
    kept_out = {row["prompt"][-1]["content"] for row in learned_held_out()}
    rows = [row for name in LEARNED for row in _rows(name, 0, ROWS)]
    return [row for row in rows if row["prompt"][-1]["content"] not in kept_out]
