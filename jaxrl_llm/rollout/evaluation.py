"""The score of an engine on held-out problems."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import distributed, progress, sharding
from jaxrl_llm.rollout.grading import Graded
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import CompletionTask, measured_alike
from jaxrl_llm.structs import Rewards


def whole_batches(sequences: int, problems: int, mesh: Mesh) -> int:
    """Returns the problems per batch: min(sequences, problems), rounded up to the same number on each device."""
    devices = sharding.prompt_shards(mesh)
    return -(-min(sequences, problems) // devices) * devices


def evaluate(
    engine: Engine,
    dataset: data.Dataset,
    task: CompletionTask,
    *,
    batch: int,
    key: jax.Array,
    samples: int = 1,
    temperature: float = 0.0,
) -> Graded:
    """Samples and grades G = samples completions for each problem of a data set; with several processes, for its part.

    A completion for which the judge returns None has the score 0.
    """
    parts, count, share = [], len(dataset.rows), distributed.part(batch)
    with progress.task("evaluating problems", count) as shown:
        for i, prompts in enumerate(data.batches(dataset, batch, task.tokenizer.pad_token_id)):
            rollouts = task.sample(engine, prompts, jax.random.fold_in(key, i), samples, Sampling(temperature))
            rollouts = measured_alike(rollouts, "evaluation") if task.environments else rollouts
            graded = task.grade(prompts, rollouts)
            real = max(min(share.stop, count - i * batch) - share.start, 0)  # others fill the last batch
            channels = {name: values[:real] for name, values in graded.rewards.channels.items()}
            rewards = Rewards(np.nan_to_num(graded.rewards.total[:real]), channels)
            parts.append(Graded(graded.texts[:real], rewards, graded.turns[:real], {}))
            shown.advance(min(batch, count - shown.finished))
    texts, turns = ([x for part in parts for x in part[field]] for field in (0, 2))
    total, channels = np.concatenate([part.rewards.total for part in parts]), parts[0].rewards.channels
    channels = {name: np.concatenate([part.rewards.channels[name] for part in parts]) for name in channels}
    return Graded(texts, Rewards(total, channels), turns, {})


def mean_score(graded: Graded) -> float:
    """Returns the mean score of the completions of all processes, which exchange two numbers each."""
    scores = graded.rewards.total
    sums, sizes = zip(*distributed.exchange([scores.sum(dtype=float), scores.size]), strict=True)
    return sum(sums) / sum(sizes)
