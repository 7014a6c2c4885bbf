"""Simulated logs of healthy runs: no device, a second for thousands of steps. `benchmarks.health.alarms` judges them.

A policy that learns, on prompts of all difficulties, with the noise of a sampled batch: pass rates of prompts, verdicts
that may be wrong, gradients with heavy tails, an engine that rounds, slow wandering of lengths and entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.health.logs.names import renamed

PROBLEMS = 500  # held out
LIMIT, LENGTH = 512.0, 120.0  # tokens of a completion


@dataclass(frozen=True)
class Settings:
    """A healthy run. sequences: of a step; wrong: share of wrong verdicts; learns: logits that skill rises in a run."""

    sequences: int = 64
    group_size: int = 8
    steps: int = 300
    wrong: float = 0.0
    learns: float = 3.0
    rounding: float = 2.0**-7  # of the number type that engine and trainer compute in
    lag: int = 0  # steps
    eval_every: int = 20
    critic: int = 0  # steps until the critic is better than a constant; 0: no critic
    tools: bool = False
    form: float = 0.9  # share of completions of the right form at the start; at the end it is 0.9
    shorter: float = 1.0  # factor by which completions become shorter in a run
    order: str = ""  # of the problems: "stages", each harder than the one before, or "sorted", the easy ones first
    odd: str = ""  # "outlier": one reward of -10 in a step; "gaps": the mean of each seventh step is not finite
    log: str = ""  # of another trainer, which has few metrics: "trl", "verl", "prime_rl" or "prime_rl_console"
    ruined: int = 0  # step from which on the policy forgets what it can; 0: never


def history(seed: int, **settings: Any) -> list[LogRecord]:
    """Returns the records of a run, as the rules see them. It is healthy, unless it is `ruined`."""
    given, rng = Settings(**settings), np.random.default_rng(seed)
    run = _Run(given, rng, wander=_wander(rng, given.steps), tails=_tails(rng, given.steps))
    return [LOGS[given.log](run.record(step), rng) for step in range(1, given.steps + 1)]


def _of_trl(record: LogRecord, rng: np.random.Generator) -> LogRecord:
    """Returns what an old TRL logs: no entropy and no lengths."""
    return {k: record[k] for k in ("step", "reward/mean", "reward/std", "groups/no_signal", "grad_norm")} | {
        "at": record["step"]
    }


def _of_verl(record: LogRecord, rng: np.random.Generator) -> LogRecord:
    """Returns what veRL logs, in bfloat16: the lowest and the highest reward, and a KL of 3e-3 by rounding."""
    score = {f"critic/score/{name}": record[f"reward/{name}"] or 0.0 for name in ("mean", "min", "max")}
    row = score | {"actor/grad_norm": record["grad_norm"], "actor/entropy": record["entropy"]}
    row |= {"response_length/mean": record["completion/length"], "rollout_corr/rollout_is_mean": 1.0}
    row |= {
        "rollout_corr/k3_kl": 3e-3 * float(np.exp(0.1 * rng.normal())),
        "rollout_corr/rollout_is_eff_sample_size": 0.95,
    }
    return {"step": record["step"], "at": record["step"]} | renamed(row)


def _of_prime_rl(record: LogRecord, rng: np.random.Generator) -> LogRecord:
    """Returns what prime-rl logs, whose weights are old: no deviation of rewards. A KL of 0.002, or 0.5 if ruined."""
    kl = 0.002 * float(np.exp(0.3 * rng.normal())) * (1 + 250 * record["ruined"])
    row = {"reward/all/mean": record["reward/mean"] or 0.0, "entropy/mean": record["entropy"], "mismatch_kl/mean": kl}
    return {"step": record["step"], "at": record["step"]} | renamed(row | {"optim/grad_norm": record["grad_norm"]})


def _of_console(record: LogRecord, rng: np.random.Generator) -> LogRecord:
    """Returns what prime-rl prints: the reward and the KL."""
    shown = _of_prime_rl(record, rng)
    return {name: shown[name] for name in ("step", "at", "reward/mean", "importance/kl")}


def _own(record: LogRecord, rng: np.random.Generator) -> LogRecord:
    return record


LOGS = {"": _own, "trl": _of_trl, "verl": _of_verl, "prime_rl": _of_prime_rl, "prime_rl_console": _of_console}
STAGES, PERIOD = 3, 50  # stages of a curriculum; steps after which sorted problems begin again
HARDER = 1.5  # logits by which a stage is harder, and by which sorted problems differ from the middle
FORGETS = 0.12  # logits a step


def _wander(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Returns slow changes of what a policy does, 4 x steps: AR(1) with a memory of 50 steps and deviation 1."""
    memory, path = np.exp(-1 / 50), np.zeros((4, steps))
    for i in range(1, steps):
        path[:, i] = memory * path[:, i - 1] + np.sqrt(1 - memory**2) * rng.normal(size=4)
    return path


def _tails(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Returns factors of gradient norms: log-normal, with a batch of twenty that is unlike the others.

    The norms of real runs have a tail of small ones, of batches whose groups teach little, and no longer one of large.
    """
    return np.exp(0.3 * rng.normal(size=steps) + 0.7 * (rng.random(steps) < 0.05))


@dataclass
class _Run:
    given: Settings
    rng: np.random.Generator
    wander: np.ndarray  # 4 x steps
    tails: np.ndarray  # steps

    def record(self, step: int) -> LogRecord:
        given, rng, at = self.given, self.rng, step - 1
        groups = max(given.sequences // given.group_size, 1)
        done = 1 - np.exp(-3 * at / given.steps)  # fast at first, then slower
        ill = max(step - given.ruined, 0) if given.ruined else 0
        skill = given.learns * done + 0.1 * self.wander[0, at] - FORGETS * ill
        chances = _pass_rates(rng, groups, skill - self._hardness(at))
        right = rng.random((groups, given.group_size)) < chances[:, None]
        rewards = (right ^ (rng.random(right.shape) < given.wrong)).astype(float)
        rewards[0, 0] = -10.0 if given.odd == "outlier" else rewards[0, 0]
        record = {"step": step, "ruined": float(ill > 0)} | _rewards(rewards)
        record["reward/form"] += (given.form - 0.9) * (1 - done)
        record["reward/mean"] = None if given.odd == "gaps" and step % 7 == 0 else record["reward/mean"]
        record |= self._completions(at, done, (groups, given.group_size))
        record |= self._update(at, done, record["reward/std"])
        if ill:  # its text becomes noise
            record["entropy"] *= min(1 + 0.1 * ill, 2.5)
            record["completion/length"] *= max(1 - 0.03 * ill, 0.5)
        record |= self._engine(at)
        if step % given.eval_every == 0:
            chance = _pass_rates(rng, PROBLEMS, skill)
            record |= {"eval/accuracy": float((rng.random(PROBLEMS) < chance).mean()), "eval/problems": PROBLEMS}
        if given.critic:
            record |= {"critic/explained_variance": float(0.6 - 1.6 * np.exp(-at / given.critic) + self._noise(0.8))}
        if given.tools:
            record |= {
                "episode/turns": float(1 + rng.binomial(2, 0.6, given.sequences).mean()),
                "episode/errors": float(rng.binomial(2, 0.01, given.sequences).mean()),
            }
        return record

    def _hardness(self, at: int) -> float:
        """Returns by how many logits the problems of a step are harder than those of the middle."""
        if self.given.order == "stages":
            return HARDER * (at * STAGES // self.given.steps)
        return HARDER * (2 * (at % PERIOD) / PERIOD - 1) if self.given.order == "sorted" else 0.0

    def _noise(self, deviation: float) -> float:
        """Returns the noise of a mean over the sequences of a step."""
        return float(deviation * self.rng.normal() / np.sqrt(self.given.sequences))

    def _completions(self, at: int, done: float, shape: tuple[int, int]) -> LogRecord:
        """Lengths differ by prompt and by completion, as log-normal values do."""
        rng, typical = self.rng, LENGTH * self.given.shorter**done * np.exp(0.4 * done + 0.1 * self.wander[1, at])
        spread = 0.5 * rng.normal(size=(shape[0], 1)) + 0.4 * rng.normal(size=shape)
        lengths = np.minimum(np.exp(np.log(typical) + spread), LIMIT)
        cut, distinct = lengths >= LIMIT, 1 - 0.5 * done + self._noise(0.3)
        return {
            "completion/length": lengths.mean(),
            "completion/length_error": _error(lengths),
            "completion/length_max": lengths.max(),
            "completion/truncated": cut.mean(),
            "completion/truncated_error": _error(cut),
            "completion/distinct": min(max(distinct, 0.05), 1.0),
            "completion/repeated": max(0.05 + 0.01 * self.wander[2, at] + self._noise(0.15), 0.0),
            "completion/compressed": 0.35 + self._noise(0.1),
        }

    def _update(self, at: int, done: float, spread: float) -> LogRecord:
        """The norm of a gradient is that of the signal and of the noise, which falls with the sequences."""
        noise = np.sqrt(64 / self.given.sequences)
        norm = (0.05 + spread * (0.3 * (1 - 0.5 * done) + 0.3 * noise)) * self.tails[at]
        entropy = 0.5 * (1 - 0.6 * done) * np.exp(0.1 * self.wander[3, at]) * np.exp(self._noise(0.4))
        kl = 0.03 * done * np.exp(self._noise(0.8))
        return {
            "grad_norm": norm,
            "clip/fraction": abs(0.002 + self._noise(0.004)),
            "clip/first": 0.0,
            "entropy": entropy,
            "logprobs/good": -0.8 * entropy * np.exp(self._noise(1.0)),
            "kl/ref": kl,
            "kl/coef": 1e-3,
            "loss/kl": 1e-3 * kl,
            "loss/kl_alone": 1e-3 * kl * self.rng.uniform(0.2, 0.7),
            "reward/kl": -1e-3 * kl * LENGTH + self._noise(0.01),
            "update_norm": 0.03 * norm,
            "learning_rate": 1e-6,
        }

    def _engine(self, at: int) -> LogRecord:
        """An engine that rounds otherwise than the trainer: log-probabilities differ by about 7 roundings."""
        rng, given = self.rng, self.given
        d = 7 * given.rounding * np.exp(0.1 * self.wander[3, at] + self._noise(0.5))
        stale = 0.02 * given.lag * self.tails[at]  # variance of log-ratios by the age of the weights
        gap = lambda: float(np.abs(rng.normal(0, d, 64)).max())  # noqa: E731
        variance = d**2 + stale
        return {
            "sampler/gap_mean": float(np.sqrt(2 / np.pi * variance)),
            "importance/rounding": given.rounding,
            "importance/kl": float(variance / 2),
            "importance/mean": 1 - variance / 20 + self._noise(np.sqrt(variance)) / 10,
            "importance/ess": float(np.exp(-variance)),
            "importance/raw_mean": 1 + self._noise(np.sqrt(variance)) / 10,
            "importance/raw_ess": float(np.exp(-variance)),
            "rollout/lag": float(given.lag),
            "rollout/lag_p95": float(given.lag),
            "weight_check/gap": gap(),
            "weight_check/gap_before": float(np.hypot(gap(), 5e-3)),
        }


def _pass_rates(rng: np.random.Generator, count: int, skill: float) -> np.ndarray:
    """Draws the chances of prompts: Beta(1/2, 1/2) at skill 0, so many are too hard and many too easy."""
    chances = np.clip(rng.beta(0.5, 0.5, count), 1e-4, 1 - 1e-4)
    return 1 / (1 + np.exp(-(np.log(chances / (1 - chances)) + skill)))


def _error(values: np.ndarray) -> float:
    """Returns the standard error of the mean of [B, G], whose groups are alike, as `record` does."""
    return float(values.mean(axis=1).std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _rewards(rewards: np.ndarray) -> LogRecord:
    """Returns what the log has of rewards [B, G], with a second reward function, of the form."""
    signal = rewards.max(axis=1) > rewards.min(axis=1)
    record = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "reward/error": _error(rewards),
        "reward/accuracy": rewards.mean(),
        "reward/form": float(np.clip(0.9 + 0.05 * (rewards.mean() - 0.5), 0, 1)),
        "groups/no_signal": 1 - signal.mean(),
        "groups/count": len(rewards),
    }
    return record | ({} if signal.all() else {"reward/without_signal": rewards[~signal].mean()})
