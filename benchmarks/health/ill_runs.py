"""Runs of the embedded task that are made to fail, one per health rule: `python -m benchmarks.health.ill_runs RULE`.

It prints what the rules find. The exit code is 1 if RULE does not find its fault in time.

A fault is a change of the config. Some name an engine or a reward function of this module, and some change a part of
the run. Each has a second form, of another strength, which no bound was calibrated on.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import structs
from jaxrl_llm.build import Parts, build
from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import logs
from jaxrl_llm.health.doctor import print_findings
from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.health.judge import judge_records
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import Engine, EngineChoice, EngineInputs
from jaxrl_llm.session.session import Session
from jaxrl_llm.tasks.protocol import Reply
from jaxrl_llm.train import train

ROOT = Path(__file__).parents[2]
HERE = "benchmarks.health.ill_runs"  # also where this module is the program
SMALL = {
    "num_steps": 40, "prompts_per_step": 32, "prompts_per_update": 32, "eval": None, "checkpoint.every": 10_000,
    "checkpoint.keep_best": 0, "log.to": (), "log.completions_every": 0, "reward.timeout": 0.0,
    "health.self_test": False,
    # One device: a faulty engine computes beside other programs, and collectives of both could wait for each other.
    "mesh.fsdp": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A run that one rule must find ill."""

    story: str
    changes: dict[str, Any]  # of the config
    second: dict[str, Any]  # further changes, for the second form
    begins: int = 1  # step with which the fault begins
    within: int = 16  # steps from there in which the rule must find it
    config: str = "grpo"
    inject: Callable[[Session, Parts], None] = field(default=lambda session, parts: None)  # changes a part of the run


def reward(*functions: str, weights: tuple[float, ...] = (1.0,)) -> dict[str, Any]:
    """Returns a config's reward functions, of this module where the name has no dot."""
    names = tuple(name if "." in name else f"{HERE}.{name}" for name in functions)
    return {"reward.functions": names, "reward.weights": weights}


# Reward functions.


def texts(completions: list[Any]) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def equal(completions: list[Any], **columns: Any) -> list[float]:
    """Cannot tell completions apart."""
    return [1.0 for _ in completions]


def abstains(completions: list[Any], **columns: Any) -> list[None]:
    """Has no verdict, as a judge that nobody can reach."""
    return [None for _ in completions]


def short(completions: list[Any], **columns: Any) -> list[float]:
    """Pays for not answering."""
    return [-float(len(text)) for text in texts(completions)]


def repetition(completions: list[Any], **columns: Any) -> list[float]:
    """Pays for saying the same again."""
    return [float(sum(a == b for a, b in pairwise(text))) for text in texts(completions)]


def ones(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Pays for the digit 1, for every other prompt. So the policy never has all there is."""
    pairs = zip(texts(completions), prompts, strict=True)
    return [text.count("1") * float(chance(str(prompt)) > 0) for text, prompt in pairs]


def noise(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Is noise for one prompt of eight, and the same for all completions of the others."""
    return [chance(f"{prompt}{i}") * (chance(str(prompt)) > 0.75) for i, prompt in enumerate(prompts)]


def chance(text: str) -> float:
    """Returns a number from -1 to 1 that looks random, but is the same for the same text."""
    return 2 * int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 - 1


# Environments.

TURNS = dict(most=3, tokens=6, observation_tokens=4, workers=4, timeout=0.0)


class Failing:
    """A tool that the policy calls when it ends a thought, and that fails in a share of the turns."""

    stops = (">",)

    def __init__(self, *, share: float):
        self._share = share

    def reset(self, row: dict[str, Any]) -> None:
        pass

    def step(self, text: str) -> Reply:
        failed = {"errors": float(chance(text) < 2 * self._share - 1)}
        return Reply("0", metrics=failed) if ">" in text else Reply(done=True, metrics=failed)


class Silent:
    """A tool whose server is gone. It counts its calls; other turns end the episode."""

    stops = (">",)

    def reset(self, row: dict[str, Any]) -> None:
        pass

    def step(self, text: str) -> Reply:
        return Reply("0", metrics={"calls": 1.0, "errors": 1.0}) if ">" in text else Reply(done=True)


# Engines.


class Deaf(Sampler):
    """Ignores pushes after the first ones."""

    hears, max_gap = 4, 1e9

    def update_weights(self, params: structs.PyTree, version: int = 0) -> None:
        if version <= self.hears:
            self.heard = jax.tree.map(jnp.copy, params)
        super().update_weights(self.heard, version)


class Noisy(Sampler):
    """Computes with weights that are off by a share of their size. The share may grow with each push."""

    noise, growth = 0.05, 1.0

    def update_weights(self, params: structs.PyTree, version: int = 0) -> None:
        share = self.noise * self.growth**version

        def off(x: jax.Array, number: int) -> jax.Array:
            drawn = jax.random.normal(jax.random.key(number), x.shape)
            return x + share * jnp.std(x) * drawn

        leaves, tree = jax.tree.flatten(params)
        super().update_weights(tree.unflatten([off(x, i) for i, x in enumerate(leaves)]), version)


class Endless(Sampler):
    """Strips the stop token."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named | {"stop_ids": ()})


class Repeating(Sampler):
    """Uses one key for all members of a group."""

    def sample(self, prompts: structs.Prompts, key: jax.Array, *, group_size: int, **named: Any) -> structs.Rollouts:
        single = super().sample(prompts, key, group_size=1, **named)
        return jax.tree.map(lambda x: np.repeat(x, group_size, axis=1), single)


def engine_of(kind: type[Sampler], **settings: Any) -> EngineChoice:
    """Returns the choice of a faulty sampler."""

    def start(inputs: EngineInputs) -> Engine:
        engine = kind(
            inputs.model, inputs.mesh, max_completion_tokens=inputs.max_completion_tokens, stop_ids=inputs.stop_ids,
            pad_id=inputs.pad_id,
        )  # fmt: skip
        for name, value in settings.items():
            setattr(engine, name, value)
        return engine

    return EngineChoice(start, in_trainer=True)


def deaf(*, hears: int = 4) -> EngineChoice:
    return engine_of(Deaf, hears=hears)


def noisy(*, noise: float = 0.05, growth: float = 1.0) -> EngineChoice:
    return engine_of(Noisy, noise=noise, growth=growth)


def endless() -> EngineChoice:
    return engine_of(Endless)


def repeating() -> EngineChoice:
    return engine_of(Repeating)


def engine(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns the section of a config with an engine of this module."""
    return {"engine": {"name": f"{HERE}.{name}"} | arguments}


# Parts of a run.


def credit(change: Callable[..., Any]) -> Callable[[Session, Parts], None]:
    """Returns an injection into the assignment of credit: change(step, batch, scores, rewards) -> scores, rewards."""

    def inject(session: Session, parts: Parts) -> None:
        assign = parts.learning.assign_credit

        def changed(batch: Any, scores: Any, rewards: Any, coefs: Any) -> Any:
            scores, rewards = change(session.run_state.step + 1, batch, scores, rewards)
            return assign(batch, scores, rewards, coefs)

        parts.learning.assign_credit = changed

    return inject


def invert_kl(step: int, batch: Any, scores: Any, rewards: Any) -> Any:
    """Gives the KL term the wrong sign: it pays for leaving the reference."""
    old = scores["old_logprobs"]
    return scores | {"ref_logprobs": 2 * old - scores["ref_logprobs"]}, rewards


def mix_up_values(step: int, batch: Any, scores: Any, rewards: Any) -> Any:
    """Gives each prompt the values of the one before it."""
    return scores | {"values": jnp.roll(scores["values"], 1, axis=0)}, rewards


def one_large_reward(
    step: int, batch: Any, scores: Any, rewards: Any, *, at: int = 20, times: float = 100.0
) -> tuple[Any, Any]:
    """Multiplies the rewards of a batch, as a unit that is mixed up."""
    return scores, replace(rewards, total=rewards.total * (times if step == at else 1.0))


def fast(factor: Callable[[int], float]) -> Callable[[Session, Parts], None]:
    """Returns an injection that multiplies the policy's moves in a step by factor(step), as a wrong rate."""

    def inject(session: Session, parts: Parts) -> None:
        learner = parts.learning.learners["policy"]

        class Fast(type(learner)):
            def update(self, state: Any, batch: Any, rows: Any) -> Any:
                before = jax.tree.map(jnp.copy, state.params)
                state, metrics = super().update(state, batch, rows)
                times = factor(session.run_state.step + 1)
                if times != 1:
                    moved = jax.tree.map(lambda a, b: a + times * (b - a), before, state.params)
                    state = replace(state, params=moved)
                return state, metrics

        parts.learning.learners["policy"] = Fast(**vars(learner))

    return inject


def grow(session: Session, parts: Parts) -> None:
    """Multiplies rewards and moves by 1.07 in the first step, and again in each step."""
    credit(lambda step, batch, scores, rewards: (scores, replace(rewards, total=1.07**step * rewards.total)))(
        session, parts
    )
    fast(lambda step: 1.07**step)(session, parts)


FAULTS: dict[str, Fault] = {
    "sampler_mismatch": Fault(
        "the engine computes with rounded weights", engine("noisy", noise=0.1), engine("noisy", noise=0.2), within=2
    ),
    "stale_weights": Fault(
        "pushes stop arriving after step 4", engine("deaf", hears=4), engine("deaf", hears=9), begins=5
    ),
    "engine_drift": Fault(
        "the engine drifts, and the policy does not learn",
        engine("noisy", noise=0.001, growth=1.5) | reward("equal") | {"kl": None},
        engine("noisy", noise=0.003, growth=1.3),
    ),
    "stale_samples": Fault(
        "samples are 8 steps old",
        {"rollout.max_lag": 8, "optim.learning_rate": 1e-3},
        {"rollout.max_lag": 6, "optim.learning_rate": 1.5e-3},
        within=24,
    ),
    "updates_skipped": Fault(
        "a rate so high that the weights overflow",
        {"optim.learning_rate": 1e30},
        {"optim.learning_rate": 1e25},
    ),
    "phantom_clipping": Fault(
        "old log-probabilities are those of an engine that rounds otherwise",
        engine("noisy", noise=0.3) | {"prompts_per_update": 16},
        engine("noisy", noise=0.25) | {"prompts_per_update": 8},
    ),
    "no_signal": Fault(
        "one key for all members of a group", engine("repeating"),
        {"engine": {"name": "jax", "max_sequences": 0}} | reward("equal"),
    ),
    "no_verdict": Fault(
        "a judge that answers nobody", reward("abstains"),
        reward("abstains", "short", weights=(1.0, 0.0)) | {"seed": 1}, within=1,
    ),
    "entropy_collapse": Fault(
        "a reward that one digit hacks, for every other prompt",
        reward("ones") | {"optim.learning_rate": 1e-3, "kl": None},
        {"seed": 1, "optim.learning_rate": 7e-4}, within=40,
    ),
    "entropy_explosion": Fault(
        "an entropy bonus", {"entropy.coef": 10.0, "optim.learning_rate": 1e-3}, {"entropy.coef": 20.0, "seed": 1},
        within=30,
    ),
    "reward_collapse": Fault(
        "rate x 100 for three steps", {}, {"seed": 1}, begins=20,
        inject=fast(lambda step: 100.0 if 20 <= step < 23 else 1.0),
    ),
    "held_out_falls": Fault(
        "a reward that repetition hacks, while held-out problems are judged",
        reward("repetition") | {"optim.learning_rate": 1e-3, "eval.every": 4, "eval.problems": 500},
        {"seed": 1, "optim.learning_rate": 6e-4}, within=40,
    ),
    "gradient_climb": Fault(
        "the unit of the rewards and the rate grow by 7 % with each step, 8 optimizer steps on a rollout, no anchor",
        {"prompts_per_update": 8, "epochs": 2, "kl": None, "advantage.normalize": "none"},
        {"epochs": 4, "seed": 1}, within=40, inject=grow,
    ),
    "gradient_spike": Fault(
        "a batch whose rewards are in another unit",
        {"advantage.normalize": "none"}, {"seed": 1}, begins=20, within=1, inject=credit(one_large_reward),
    ),
    "good_fades": Fault(
        "samples are 6 steps old, at a high rate, without an anchor",
        {"rollout.max_lag": 6, "optim.learning_rate": 1e-3, "kl": None},
        {"rollout.max_lag": 8, "seed": 1}, within=40,
    ),
    "repeats": Fault(
        "a reward that repetition hacks", reward("repetition") | {"optim.learning_rate": 1e-3},
        {"seed": 1, "optim.learning_rate": 6e-4}, within=40,
    ),
    "kl_alone": Fault(
        "a KL penalty where the reward says nothing",
        reward("noise") | {"kl.coef": 0.1, "optim.learning_rate": 3e-4}, {"kl.coef": 0.5, "seed": 1}, within=40,
    ),
    "kl_pays": Fault(
        "an inverted KL term in the reward", {"kl.coef": 0.3}, {"kl.coef": 0.6}, config="rloo", within=40,
        inject=credit(invert_kl),
    ),
    "truncated": Fault(
        "a rate that ruins the policy", {"optim.learning_rate": 3e-3}, {"optim.learning_rate": 4e-3}, within=30
    ),
    "never_stops": Fault("the engine strips the stop token", engine("endless"), {"seed": 1}, within=8),
    "length_collapse": Fault(
        "a reward that short answers hack", reward("short") | {"optim.learning_rate": 1e-3}, {"seed": 1}, within=40
    ),
    "channels_diverge": Fault(
        "a reward that repetition hacks, and none for the accuracy",
        reward("repetition", "arithmetic.accuracy", weights=(1.0, 0.0)) | {"optim.learning_rate": 3e-4}, {"seed": 1},
        within=40,
    ),
    "critic_lags": Fault(
        "a critic whose values are those of other prompts",
        {"prompts_per_step": 64, "prompts_per_update": 64, "critic.warmup_steps": 0}, {"seed": 1},
        config="ppo", within=40, inject=credit(mix_up_values),
    ),
    "tools_unused": Fault(
        "a tool that the policy has never seen",
        {"env": {"name": "calculator.Calculator", "most_characters": 20}, "turns": TURNS}, {"seed": 1}, within=12,
    ),
    "tool_down": Fault(
        "a tool that fails in all turns",
        {"env": {"name": f"{HERE}.Failing", "share": 1.0}, "turns": TURNS},
        {"env": {"name": f"{HERE}.Silent"}, "seed": 1}, within=1,
    ),
    "tool_errors": Fault(
        "a tool that fails in half of the turns",
        {"env": {"name": f"{HERE}.Failing", "share": 0.5}, "turns": TURNS},
        {"env": {"name": f"{HERE}.Failing", "share": 0.3}, "seed": 1}, within=12,
    ),
}  # fmt: skip


def config_of(fault: Fault, *, second: bool = False) -> structs.Config:
    """Returns the config of a fault."""
    config = load(ROOT / "configs" / f"{fault.config}.py")
    changes = SMALL | fault.changes | (fault.second if second else {})
    for section in ("engine", "env", "turns"):
        if section in changes:
            config[section] = type(config)(changes.pop(section))
    config.update_from_flattened_dict(changes)
    return config


def run_fault(fault: Fault, workdir: Path, *, second: bool = False) -> Iterator[LogRecord]:
    """Runs a fault until its end, and yields the records. A rule may stop the run."""
    with build(config_of(fault, second=second), workdir) as (session, parts), suppress(UserError):
        fault.inject(session, parts)
        yield from train(session, parts)


def demonstrate(rule: str) -> bool:
    """Runs the fault of a rule and prints what the rules find. Returns whether this rule found it in time."""
    fault = FAULTS[rule]
    print(f"{rule}: {fault.story}, from step {fault.begins:,} on")
    with TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        for _ in run_fault(fault, workdir):
            pass
        # From the log, not from the loop: the record of a step at which a rule stops the run is only there.
        records = logs.read(workdir)
        spans = judge_records(records, config_of(fault).health.to_dict())
    print_findings(spans, records)
    steps = [span.first for span in spans if span.finding.id == rule]
    print(f"{rule} should find it within {fault.within} steps: " + (f"step {steps[0]:,}" if steps else "it did not"))
    return bool(steps) and fault.begins <= steps[0] < fault.begins + fault.within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=sorted(FAULTS), metavar="RULE", help=", ".join(sorted(FAULTS)))
    sys.exit(int(not demonstrate(parser.parse_args().rule)))


if __name__ == "__main__":
    main()
