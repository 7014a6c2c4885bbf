"""The score of an engine on held-out problems."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.settings import EvalSet, metrics_of
from jaxrl_llm.machine import distributed, keys, progress, sharding
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import CompletionTask, SamplingPlan

GREEDY = SamplingPlan(1, Sampling(temperature=0))


def whole_batches(sequences: int, problems: int, mesh: Mesh) -> int:
    """Returns the problems per batch: min(sequences, problems), rounded up to the same number on each device."""
    devices = sharding.prompt_shards(mesh)
    return -(-min(sequences, problems) // devices) * devices


def evaluate(
    engine: Engine, dataset: data.Dataset, task: CompletionTask, draw: SamplingPlan = GREEDY, *, batch: int, seed: int
) -> GradedCompletions:
    """Samples and grades completions for each problem of a data set; with several processes, for its part.

    The engine gets all problems at once, and the reward functions those of a batch, for which they have a time limit.
    A completion for which the judge returns None has the score NaN.
    """
    key = keys.derived(seed, 0)  # no step has this number
    prompts = data.all_prompts(dataset, task.tokenizer.pad_token_id)
    local_problems = len(prompts.rows)
    with progress.task("evaluating problems: completions", local_problems * draw.group_size) as shown:
        rollouts = task.sample(engine, prompts, key, draw.group_size, draw.sampling, "evaluation", shown.advance)
    parts, size = [], batch // distributed.count()
    with progress.task("evaluating problems: scores", local_problems) as shown:
        for start in range(0, local_problems, size):
            rows = [*range(start, min(start + size, local_problems))]
            parts.append(task.grade(prompts.take(rows), jax.tree.map(lambda x, rows=rows: x[rows], rollouts)))
            shown.advance(len(rows))
    # Other rows fill the parts of the last processes.
    real = slice(max(len(dataset.rows) - local_problems * distributed.index(), 0))
    texts, turns = ([x for part in parts for x in part[field]][real] for field in (0, 2))
    rewards = jax.tree.map(lambda *x: np.concatenate(x)[real], *(part.rewards for part in parts))
    return GradedCompletions(texts, rewards, turns, {})


def mean_score(graded: GradedCompletions) -> float:
    """Returns the mean score of the completions of all processes, which exchange three numbers each.

    A completion without a verdict counts as 0. NaN if none has one, as where a judge does not answer: a health rule
    would take 0 for a ruined policy.
    """
    scores = graded.rewards.total
    numbers = [np.nansum(scores, dtype=float), scores.size, int(np.sum(~np.isnan(scores)))]
    sums, sizes, verdicts = zip(*distributed.exchange(numbers), strict=True)
    return sum(sums) / sum(sizes) if sum(verdicts) else float("nan")


def open_tasks(
    eval_sets: Mapping[str, EvalSet],
    tokenizer: Any,
    environments: EnvironmentPool | None,
    timeout: float,
    opened: ExitStack,
) -> dict[str, CompletionTask]:
    """Returns how each evaluation set is graded, without sets of pairs. Sets with the same judge share its process.

    timeout: seconds of a judge for one batch. opened: closes the processes.
    """
    judged = {section: each.function for section, each in eval_sets.items() if each.functions}
    reward_fns = {
        name: opened.enter_context(closing(RewardFn((name,), (1.0,), timeout)))
        for name in dict.fromkeys(judged.values())
    }
    return {section: CompletionTask(tokenizer, reward_fns[name], environments) for section, name in judged.items()}


def evaluate_sets(
    engine: Engine,
    tasks: Mapping[str, CompletionTask],
    datasets: Mapping[str, data.Dataset],
    *,
    sequences: int,
    mesh: Mesh,
    seed: int,
) -> dict[str, float]:
    """Returns the metrics of greedy completions of all sets with a task; sequences: at once, at most."""
    metrics = dict[str, float]()
    for section, task in tasks.items():
        count = len(datasets[section].rows)
        batch = whole_batches(sequences, count, mesh)
        graded = evaluate(engine, datasets[section], task, batch=batch, seed=seed)
        metrics |= metrics_of(section, mean_score(graded), count)
    return metrics
