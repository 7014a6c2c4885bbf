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

# Least number of prompts, rounded up to a multiple of the devices; tokens of an answer at most.
PROMPTS, TOKENS = 4, 16
# Answers to a prompt. A model is hardly off where it is sure, so the greedy one alone hides a wrong model.
ANSWERS = ((Sampling(temperature=0), 1), (Sampling(), 4))

# Bounds of the largest difference: 80 times what float32 was measured to differ by, and 7 times for bfloat16.
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.5}
MEAN = 0.1  # bound of the mean difference, as a share of that of the largest


class WeightCheck:
    """Lets each server answer a few prompts, and compares the log-probabilities of servers and trainer.

    weight_check/gap is the largest difference. weight_check/gap_before is the largest difference to the trainer's
    log-probabilities at the previous push; it is of the answers that have not changed since. If a push did not arrive,
    gap > gap_before.
    """

    def __init__(self, engine: Engine, model: Decoder, mesh: Mesh, collate: Collate, *, rows: int, bound: float):
        """rows: their number in the data set; bound: limit of weight_check/gap."""
        self._engine, self._mesh, self._bound = engine, mesh, bound
        self._dtype = model.cfg.dtype
        self._score = make_logprob_fn(model, Sampling(), mesh, microbatch=0)
        devices = sharding.prompt_shards(mesh)
        # Servers answer in turn. Each process has its own ones, and its part of the prompts.
        prompts = max(PROMPTS, engine.servers * distributed.count())
        numbers = [number % rows for number in range(devices * -(-prompts // devices))]
        self._prompts = collate(numbers[distributed.part(len(numbers))])
        self._last: tuple[Rollouts, np.ndarray] | None = None

    def ask(self) -> Rollouts:
        """Samples the servers' answers."""
        answers = []
        for sampling, count in ANSWERS:
            limit = np.full((len(self._prompts.tokens), count), TOKENS)
            answers.append(
                self._engine.sample(
                    self._prompts, jax.random.key(0), group_size=count, sampling=sampling, max_tokens=limit
                )
            )
        # Cut: all are scored at once, which long completions have no memory for. The last axis of `truncated` is short.
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[..., :TOKENS], *answers)

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
        # The largest gap of all processes counts, because each process has its own servers.
        metrics = {"weight_check/gap": np.max(distributed.exchange(float(gaps.max())))}
        unchanged, before = np.False_, -np.inf
        if last:
            # Log-probabilities of other tokens cannot be compared.
            unchanged = (last[0].completions == answer.completions).all(-1, keepdims=True)
            before = np.max(np.abs(answer.logprobs - last[1]), where=mask & unchanged, initial=-np.inf)
        before = np.max(distributed.exchange(float(before)))
        if before >= 0:
            metrics["weight_check/gap_before"] = before
        stale = unchanged.all() and before < gaps.max()
        self._refuse(answer, ours, gaps, "they still have the weights before" if stale else "")
        return metrics

    def _refuse(self, answer: Rollouts, ours: np.ndarray, gaps: np.ndarray, cause: str) -> None:
        """Raises: UserError, if `gaps` of log-probabilities are above the bound. cause: "" if it is not known."""
        # Rare tokens are off by many times the usual where both sides round to bfloat16: of those only the mean counts.
        bounded, mean = gaps if self._dtype == "float32" else gaps[:, :1], gaps[answer.loss_mask].mean()
        # The comparison is `<=` and not `>`, so that NaN fails it.
        if bounded.max() <= self._bound and mean <= MEAN * self._bound:
            return
        if bounded.max() <= self._bound:
            gap, limit, evidence = mean, MEAN * self._bound, "log-probabilities differ from the trainer's in the mean"
        else:
            b, g, t = np.unravel_index(np.argmax(bounded), bounded.shape)
            gap, limit = bounded[b, g, t], self._bound
            evidence = f"log-probability of token {t} of an answer differs from the trainer's"
            evidence += f" ({answer.logprobs[b, g, t]:.4f}, not {ours[b, g, t]:.4f})"
        if gap / limit * self._bound < MAX_GAP[self._dtype]:
            remedy = f"rounding of {self._dtype} may be as large: set it to 0, which allows {MAX_GAP[self._dtype]:g}"
        else:
            remedy = f"{cause or 'they have other weights, or compute otherwise'}; start them again, and resume"
        raise UserError(
            f"config.engine.max_gap allows {limit:.2g}: after a push the servers' {evidence} by {gap:.2g}: {remedy}"
        )
