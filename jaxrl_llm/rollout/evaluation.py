"""The score of an engine on held-out problems."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import distributed, progress, sharding
from jaxrl_llm.rollout.grading import Graded
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import CompletionTask, Drawing

GREEDY = Drawing(1, Sampling(temperature=0))


def whole_batches(sequences: int, problems: int, mesh: Mesh) -> int:
    """Returns the problems per batch: min(sequences, problems), rounded up to the same number on each device."""
    devices = sharding.prompt_shards(mesh)
    return -(-min(sequences, problems) // devices) * devices


def evaluate(
    engine: Engine, dataset: data.Dataset, task: CompletionTask, draw: Drawing = GREEDY, *, batch: int, key: jax.Array
) -> Graded:
    """Samples and grades completions for each problem of a data set; with several processes, for its part.

    A completion for which the judge returns None has the score 0.
    """
    parts, count, share = [], len(dataset.rows), distributed.part(batch)
    with progress.task("evaluating problems", count) as shown:
        for i, prompts in enumerate(data.batches(dataset, batch, task.tokenizer.pad_token_id)):
            step_key = jax.random.fold_in(key, i)
            rollouts = task.sample(engine, prompts, step_key, draw.group_size, draw.sampling, "evaluation")
            graded = task.grade(prompts, rollouts)
            real = slice(max(min(share.stop, count - i * batch) - share.start, 0))  # others fill the last batch
            rewards = jax.tree.map(lambda x, real=real: x[real], graded.rewards)
            parts.append(graded._replace(texts=graded.texts[real], rewards=rewards, turns=graded.turns[real]))
            shown.advance(min(batch, count - shown.finished))
    texts, turns = ([x for part in parts for x in part[field]] for field in (0, 2))
    rewards = jax.tree.map(lambda *x: np.concatenate(x), *(part.rewards for part in parts))
    return Graded(texts, replace(rewards, total=np.nan_to_num(rewards.total)), turns, {})


def mean_score(graded: Graded) -> float:
    """Returns the mean score of the completions of all processes, which exchange two numbers each."""
    scores = graded.rewards.total
    sums, sizes = zip(*distributed.exchange([scores.sum(dtype=float), scores.size]), strict=True)
    return sum(sums) / sum(sizes)
