"""The weight check: after each push, compares the servers' log-probabilities with the trainer's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.forward import make_logprob_fn
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.structs import Batch, Collate, PyTree, Rollouts

# Prompts, rounded up to a multiple of the devices; tokens of an answer at most.
PROMPTS, TOKENS = 4, 16


class WeightCheck:
    """Answers a few prompts greedily and compares the log-probabilities of servers and trainer.

    weight_check/gap is the largest difference. weight_check/gap_before is the largest difference to the trainer's
    log-probabilities at the previous push; it exists if the answer has not changed since. If a push did not arrive,
    gap > gap_before.
    """

    def __init__(self, engine: Engine, model: Decoder, mesh: Mesh, collate: Collate, *, rows: int, bound: float):
        """rows: their number in the data set; bound: limit of weight_check/gap."""
        self._engine, self._mesh, self._bound = engine, mesh, bound
        self._score = make_logprob_fn(model, Sampling(), mesh, microbatch=0)
        devices = sharding.prompt_shards(mesh)
        numbers = [number % rows for number in range(devices * -(-PROMPTS // devices))]
        self._prompts = collate(numbers[distributed.part(len(numbers))])
        self._last: tuple[Rollouts, np.ndarray] | None = None

    def ask(self) -> Rollouts:
        """Samples the servers' answers."""
        limit = np.full((len(self._prompts.tokens), 1), TOKENS)
        return self._engine.sample(
            self._prompts, jax.random.key(0), group_size=1, sampling=Sampling(temperature=0), max_tokens=limit
        )

    def check(self, answer: Rollouts, params: PyTree) -> dict[str, Any]:
        """Returns the metrics of an answer; params: the last pushed weights.

        Call it in the thread that runs all other programs: two programs with collectives at the same time can deadlock.
        Raises: UserError, if the servers have other weights.
        """
        prompts = self._prompts
        completions = answer.completions, answer.completion_mask, answer.loss_mask
        batch = Batch(prompts.tokens, prompts.mask, *completions, images=prompts.images)
        ours = sharding.to_host(self._score(params, sharding.shard_batch(batch, self._mesh)))
        mask, last = answer.loss_mask, self._last
        self._last = answer, ours
        gaps = np.where(mask, np.abs(answer.logprobs - ours), 0.0)
        # Of all processes: each has servers of its own.
        metrics = {"weight_check/gap": np.max(distributed.exchange(float(gaps.max())))}
        # inf: an answer has changed, and log-probabilities of other tokens cannot be compared.
        before = np.inf
        if last and np.array_equal(last[0].completions, answer.completions):
            before = np.where(mask, np.abs(answer.logprobs - last[1]), 0.0).max()
        before = np.max(distributed.exchange(float(before)))
        if before < np.inf:
            metrics["weight_check/gap_before"] = before
        if not gaps.max() <= self._bound:
            # Not `>`, which is False for NaN.
            stale = metrics.get("weight_check/gap_before", np.inf) < gaps.max()
            b, _, t = np.unravel_index(np.argmax(gaps), gaps.shape)
            raise UserError(
                f"after a push the servers' log-probability of token {t} of a greedy answer differs from the trainer's "
                f"by {gaps.max():.2g} ({answer.logprobs[b, 0, t]:.4f}, not {ours[b, 0, t]:.4f}), more than "
                f"config.engine.max_gap = {self._bound:g}: "
                + ("they still have the weights before" if stale else "they have other weights, or compute otherwise")
                + "; start them again, and resume"
            )
        return metrics
