"""The weight check: compares the log-probabilities of servers and trainer after each push."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.forward import make_logprob_fn
from jaxrl_llm.machine import distributed, sharding, transfers
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.structs import Batch, Collate, PyTree, Rollouts

# Least number of prompts, which is rounded up to a multiple of the devices, and most tokens of an answer.
MIN_PROMPTS, MAX_TOKENS = 4, 16
# Sampling and number of answers to a prompt. Greedy answers alone would hide wrong weights, because log-probabilities
# hardly differ where a model is sure.
ANSWERS_PER_PROMPT = ((Sampling(temperature=0), 1), (Sampling(), 4))

# Bounds of the largest difference: 80 times the measured difference for float32, and 7 times for bfloat16.
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.5}
MEAN_SHARE = 0.1  # bound of the mean difference, as a share of the bound of the largest difference


class WeightCheck:
    """Lets each server answer a few prompts, and compares the log-probabilities of servers and trainer.

    Metric weight_check/gap is the largest difference. Metric weight_check/gap_before compares with the trainer's
    log-probabilities at the previous push, for answers that have not changed since. If a push has not arrived, gap is
    larger than gap_before.
    """

    def __init__(self, engine: Engine, model: Decoder, mesh: Mesh, collate: Collate, *, rows: int, bound: float):
        """rows: number of rows of the data set. bound: limit of weight_check/gap."""
        self._engine, self._mesh, self._bound = engine, mesh, bound
        self._dtype = model.cfg.dtype
        self._score = make_logprob_fn(model, Sampling(), mesh, microbatch=0)
        devices = sharding.prompt_shards(mesh)
        # Each process has its own servers, which answer its prompts in turn, so each server needs one prompt.
        prompts = max(MIN_PROMPTS, engine.server_count * distributed.count())
        numbers = [number % rows for number in range(devices * -(-prompts // devices))]
        self._prompts = collate(numbers[distributed.part(len(numbers))])
        self._previous: tuple[Rollouts, np.ndarray] | None = None

    def ask(self) -> Rollouts:
        """Returns answers that the servers sample for the prompts of this process."""
        answers = []
        for sampling, count in ANSWERS_PER_PROMPT:
            limit = np.full((len(self._prompts.tokens), count), MAX_TOKENS)
            answers.append(
                self._engine.sample(
                    self._prompts, jax.random.key(0), group_size=count, sampling=sampling, max_tokens=limit
                )
            )
        # The arrays are cut to MAX_TOKENS, because all answers are scored at once, which needs memory. The last axis of
        # `truncated` is shorter, so the cut leaves it unchanged.
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[..., :MAX_TOKENS], *answers)

    def check(self, answer: Rollouts, params: PyTree) -> dict[str, Any]:
        """Returns the metrics of the answers of `ask`. params: last pushed weights.

        Call it in the thread that runs all other programs, because two programs with collectives could deadlock.
        Raises: UserError, if the servers have other weights.
        """
        prompts = self._prompts
        completions = answer.completions, answer.completion_mask, answer.loss_mask
        batch = Batch(prompts.tokens, prompts.mask, *completions, images=prompts.images)
        trainer_logprobs = transfers.to_host(self._score(params, transfers.shard_batch(batch, self._mesh)))
        mask, previous = answer.loss_mask, self._previous
        self._previous = answer, trainer_logprobs
        gaps = np.where(mask, np.abs(answer.logprobs - trainer_logprobs), 0.0)
        # Take the maximum over processes, because each process has its own servers.
        metrics = {"weight_check/gap": np.max(distributed.exchange(float(gaps.max())))}
        unchanged, gap_before = np.False_, -np.inf
        if previous:
            # Only answers with equal tokens can be compared with those of the previous push.
            unchanged = (previous[0].completions == answer.completions).all(-1, keepdims=True)
            gap_before = np.max(np.abs(answer.logprobs - previous[1]), where=mask & unchanged, initial=-np.inf)
        gap_before = np.max(distributed.exchange(float(gap_before)))
        if gap_before >= 0:
            metrics["weight_check/gap_before"] = gap_before
        stale = unchanged.all() and gap_before < gaps.max()
        self._check_gaps(
            answer, trainer_logprobs, gaps, "the servers still have the weights of the previous push" if stale else ""
        )
        return metrics

    def _check_gaps(self, answer: Rollouts, trainer_logprobs: np.ndarray, gaps: np.ndarray, cause: str) -> None:
        """Raises: UserError, if `gaps` of log-probabilities exceed the bound. cause: likely cause, "" if unknown."""
        # If both sides round to bfloat16, rare tokens differ much more than others. So the largest gap counts only for
        # greedy answers, and the mean gap for all answers.
        bounded, mean = gaps if self._dtype == "float32" else gaps[:, :1], gaps[answer.loss_mask].mean()
        # The comparison is `<=` and not a negated `>`, so that NaN fails it.
        if bounded.max() <= self._bound and mean <= MEAN_SHARE * self._bound:
            return
        if bounded.max() <= self._bound:
            gap, limit = mean, MEAN_SHARE * self._bound
            evidence = "mean log-probability differs from the trainer's"
        else:
            b, g, t = np.unravel_index(np.argmax(bounded), bounded.shape)
            gap, limit = bounded[b, g, t], self._bound
            evidence = f"log-probability of token {t} of an answer differs from the trainer's"
            evidence += f" ({answer.logprobs[b, g, t]:.4f}, not {trainer_logprobs[b, g, t]:.4f})"
        if gap / limit * self._bound < MAX_GAP[self._dtype]:
            remedy = (
                f"the rounding of {self._dtype} alone may cause it; set engine.max_gap = 0, which allows "
                f"{MAX_GAP[self._dtype]:g}"
            )
        else:
            cause = cause or "the servers have other weights, or compute in another way"
            remedy = f"{cause}; restart them, and resume the run"
        raise UserError(
            f"config.engine.max_gap allows {limit:.2g}, but after a push the servers' {evidence} by {gap:.2g}: {remedy}"
        )
