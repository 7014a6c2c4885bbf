"""Evaluation: samples and grades completions of held-out problems."""

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
from jaxrl_llm.rollout.agents.pool import AgentPool
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.rollout.named_environments import Environments
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import CompletionTask, SamplingPlan

GREEDY_PLAN = SamplingPlan(1, Sampling(temperature=0))


def whole_batches(max_problems: int, problems: int, mesh: Mesh) -> int:
    """Returns the problems of a batch: min(max_problems, problems), rounded up to a multiple of the devices."""
    devices = sharding.prompt_shards(mesh)
    return -(-min(max_problems, problems) // devices) * devices


def evaluate(
    engine: Engine,
    dataset: data.Dataset,
    task: CompletionTask,
    plan: SamplingPlan = GREEDY_PLAN,
    *,
    batch: int,
    seed: int,
) -> GradedCompletions:
    """Samples and grades completions of each problem of a data set. Each process does its part of the problems.

    The engine gets all problems in one call. The reward functions get one batch at a time, because their time limit
    holds for a batch. If the judge returns None, the score is NaN. batch: problems of a batch, over all processes.
    """
    key = keys.derived(seed, 0)  # steps count from 1, so no step has this key
    prompts = data.all_prompts(dataset, task.tokenizer.pad_token_id)
    local_problems = len(prompts.rows)
    with progress.task("evaluating problems: completions", local_problems * plan.group_size) as progress_bar:
        _, rollouts = task.sample(
            engine,
            prompts,
            key,
            group_size=plan.group_size,
            sampling=plan.sampling,
            channel="evaluation",
            report_ended=progress_bar.advance,
        )
    graded_batches, batch_size = [], batch // distributed.count()
    with progress.task("evaluating problems: scores", local_problems) as progress_bar:
        for start in range(0, local_problems, batch_size):
            rows = [*range(start, min(start + batch_size, local_problems))]
            rollouts_of_batch = jax.tree.map(lambda array, rows=rows: array[rows], rollouts)
            graded_batches.append(task.grade(prompts.take(rows), rollouts_of_batch))
            progress_bar.advance(len(rows))
    # The last processes may have repeated rows that fill their part of the problems; leave these out.
    own_problems = slice(max(len(dataset.rows) - local_problems * distributed.index(), 0))
    texts, turns = ([x for batch in graded_batches for x in batch[field]][own_problems] for field in (0, 2))
    rewards = jax.tree.map(lambda *x: np.concatenate(x)[own_problems], *(batch.rewards for batch in graded_batches))
    return GradedCompletions(texts, rewards, turns, {})


def mean_score(graded: GradedCompletions) -> float:
    """Returns the mean score of the completions of all processes. A completion without a verdict counts as 0.

    NaN if no completion has a verdict, for example because a judge does not answer. A health rule would take a mean of
    0 for a ruined policy.
    """
    scores = graded.rewards.total
    numbers = [np.nansum(scores, dtype=float), scores.size, int(np.sum(~np.isnan(scores)))]
    sums, sizes, verdicts = zip(*distributed.exchange(numbers), strict=True)
    return sum(sums) / sum(sizes) if sum(verdicts) else float("nan")


def open_tasks(
    eval_sets: Mapping[str, EvalSet],
    tokenizer: Any,
    environments: Environments | None,
    agents: AgentPool | None,
    timeout: float,
    exit_stack: ExitStack,
) -> dict[str, CompletionTask]:
    """Returns the task of each evaluation set that has a judge. Sets with the same judge share its process.

    timeout: seconds of a judge for one batch. exit_stack: closes the judges' processes.
    """
    judged = {section: eval_set.function for section, eval_set in eval_sets.items() if eval_set.functions}
    reward_fns = {
        name: exit_stack.enter_context(closing(RewardFn((name,), (1.0,), timeout)))
        for name in dict.fromkeys(judged.values())
    }
    episodes = environments, agents
    return {section: CompletionTask(tokenizer, reward_fns[name], *episodes) for section, name in judged.items()}


def evaluate_sets(
    engine: Engine,
    tasks: Mapping[str, CompletionTask],
    datasets: Mapping[str, data.Dataset],
    *,
    max_problems: int,
    mesh: Mesh,
    seed: int,
) -> dict[str, float]:
    """Returns the metrics of greedy completions of all sets in `tasks`.

    max_problems: upper bound of the problems that a judge gets in one batch, before `whole_batches` rounds it up.
    """
    metrics = dict[str, float]()
    for section, task in tasks.items():
        count = len(datasets[section].rows)
        batch = whole_batches(max_problems, count, mesh)
        graded = evaluate(engine, datasets[section], task, batch=batch, seed=seed)
        metrics |= metrics_of(section, mean_score(graded), count)
    return metrics
