"""Problems of reasoning-gym (arXiv 2505.24760), which makes rows of 100 tasks, and its own verifiers as rewards."""

from __future__ import annotations

from functools import cache
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne, Count, checked_by
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.tasks import each_judged


def _require() -> None:
    """Raises: UserError, if reasoning-gym is not installed."""
    extras.require("reasoning_gym", "reasoning", "a task of reasoning_gym")


def _check(task: str, size: int, seed: int, settings: dict[str, Any] | None) -> None:
    """Raises: UserError, if reasoning-gym is not installed, or has no such task or setting."""
    _require()
    try:
        _problems(task, 1, seed, settings or {})
    except Exception as error:  # each task checks its settings in its own way
        raise UserError(
            f"reasoning_gym.rows: {task!r} with the settings {settings or {}}: {error}: use a task and settings of the "
            "gallery of reasoning-gym"
        ) from error


@checked_by(_check)
def rows(
    *, task: str, size: AtLeastOne, seed: Count = 0, settings: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns problems of a task, such as "chain_sum".

    size: number of problems; seed: seed of the first problem, to which each next one adds 1, so that seeds 0 and
    1000000 have other problems; settings: arguments of the task, such as {"max_terms": 3}, None for its defaults.
    """
    return [
        {"prompt": [{"role": "user", "content": problem["question"]}], "answer": problem["answer"], "task": task}
        | {"metadata": problem["metadata"]}  # what a verifier reads beside the answer
        for problem in _problems(task, size, seed, settings or {})
    ]


@checked_by(_require)
def score(
    completions: list[Any], answer: list[Any], task: list[Any], metadata: list[Any], **columns: Any
) -> list[float | None]:
    """Returns the verifier's points, 0 to 1. 1 is the answer alone; an answer among words may get a part."""
    # Some tasks have no answer, because their verifiers read the metadata alone.
    problems = [{"answer": one, "metadata": of_one} for one, of_one in zip(answer, metadata, strict=True)]
    return each_judged(_points, completions, task, problems)


@checked_by(_require)
def accuracy(
    completions: list[Any], answer: list[Any], task: list[Any], metadata: list[Any], **columns: Any
) -> list[float | None]:
    """Returns 1 where the verifier gives all points, else 0."""
    points = score(completions, answer, task, metadata)
    return [None if value is None else float(value == 1) for value in points]


def _problems(task: str, size: int, seed: int, settings: dict[str, Any]) -> Any:
    import reasoning_gym  # an extra

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **settings)


@cache
def _verifier(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _points(text: str, task: str, problem: dict[str, Any]) -> float:
    verifier = _verifier(task)
    try:
        return float(verifier(text.strip(), problem))
    except Exception:  # some verifiers raise an error where they cannot read an answer
        return 0.0
