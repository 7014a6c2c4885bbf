"""Tasks of reasoning-gym (arXiv 2505.24760) for SmolLM2-135M-Instruct: rows, and its own verifiers as rewards.

jaxrl evaluate --task benchmarks.real.reasoning_tasks --samples 16 --temperature 1 --by task … is pass@16 of each
(docs/real_model.md). benchmarks/real/reasoning.py learns those of LEARNED.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxrl_llm.tasks import text_of

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

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


def _problems(name: str, seed: int, size: int) -> ProceduralDataset:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **TASKS[name])


def _rows(name: str, seed: int, size: int) -> list[dict[str, Any]]:
    """Returns chats with one solved problem of the task, which shows the form of an answer, before each problem."""
    example = _problems(name, seed=2, size=1)[0]
    shown = [{"role": "user", "content": example["question"]}, {"role": "assistant", "content": example["answer"]}]
    return [
        {"prompt": [*shown, {"role": "user", "content": problem["question"]}], "answer": problem["answer"]}
        # What a verifier reads beside the answer.
        | {"task": name, "metadata": json.dumps(problem["metadata"])}
        for problem in _problems(name, seed, size)
    ]


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


@cache
def _verifier(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def _points(name: str, text: str, answer: str, metadata: str) -> float:
    try:
        return float(_verifier(name)(text, {"answer": answer, "metadata": json.loads(metadata)}))
    except Exception:  # some of the verifiers raise where they cannot read an answer
        return 0.0


def score(
    completions: list[Any], answer: list[str], task: list[str], metadata: list[str], **columns: Any
) -> list[float]:
    """The verifier's score, 0 to 1: 1 is the answer alone; an answer among other words has a part of it."""
    texts = [text_of(completion).strip() for completion in completions]
    return [_points(*of_row) for of_row in zip(task, texts, answer, metadata, strict=True)]


def accuracy(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the verifier gives all points."""
    return [float(value == 1) for value in score(completions, **columns)]
