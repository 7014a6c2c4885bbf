"""Reinforcement learning: `jaxrl train --config FILE [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.build import COMPILE_ONLY, build, compile_only
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.errors import run_main
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.sharding import shard_batch
from jaxrl_llm.rollout.samples import to_batch
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.run import Run
from jaxrl_llm.structs import Config


def rl_step(run: Run, states: States, step: int) -> tuple[States, Record]:
    """Runs one step: sample, score, reward, assign credit, learn, push weights. Donates the given states.

    Raises: UserError, for an error that the user can fix, such as a reward function that fails.
    """
    timer = run.log.timer()
    samples = run.actor.next()
    timer.lap("rollout")
    run.stop.check()
    plain = shard_batch(to_batch(samples, run.packing), run.mesh)
    scores = run.score(states, plain)  # before the rewards: the device scores while the host rewards
    scored = run.log.watch(scores)
    rewards = shard_batch(samples.rewards(), run.mesh)
    batch, metrics = run.assign_credit(plain, scores, rewards, run.coefficients(states))
    timer.lap("reward")
    # Wait for the push: the engine may still read the parameters that the first update donates.
    metrics |= samples.metrics | run.actor.finish_push(run.policy(states))
    learners, minibatches = run.learning(step), run.minibatches(step)
    run.compile(states, plain, batch, minibatches[0])  # may take minutes, so not in `deferred`
    updates = []
    with run.stop.deferred():  # a signal waits: the old states are donated, the new ones not committed
        for rows in minibatches:
            updates.append({})
            for name, learner in learners.items():
                state, of_learner = learner.update(states[name], batch, rows)
                states, updates[-1] = states | {name: state}, updates[-1] | of_learner
        updated = run.log.watch(updates)
        states = run.settled(states, step)
        for name, learner in run.learners.items():
            metrics |= learner.skipped(states[name])
        record = Record(step, timer, samples.tokens(), updates, metrics, updated, scored, samples, batch.rewards)
        run.commit(states, record)
        run.actor.push(run.policy(states), step)  # last: it may run other programs on the devices
    return states, record


def train(run: Run, one_step: Callable[[Run, States, int], tuple[States, Record]] = rl_step) -> Iterator[dict]:
    """Trains from the current step to the end, and yields the records of metrics.jsonl, one step late.

    Raises: UserError, for an error that the user can fix, or if a health rule stops the run.
    """
    states, step = run.begin()
    while step < run.config.num_steps and not run.stagnates():
        run.stop.check()
        states, record = one_step(run, states, step + 1)
        record.evaluation = run.evaluate(record.step)
        # Always the previous step, not the newest record that is ready: timing must not decide when a rule stops a run.
        before = run.log.finish()
        if run.judge(before) or run.write(record):  # a rule sends the run back
            states, step = run.begin()
        else:
            step = record.step
            run.actor.advance(step)
        if before:
            yield before
    if last := run.log.finish():
        run.judge(last)
        yield last
    run.finish()


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Trains in this process and yields the records of metrics.jsonl, resuming a run in the workdir. See `build`."""
    with build(config, workdir, signals=signals) as run:
        yield from train(run)


def main() -> None:
    given = parse_arguments("jaxrl_llm.train", "Reinforcement learning.", compile_only=COMPILE_ONLY)
    with distributed.joined(given.distributed):
        if given.compile_only:
            return compile_only(given.config)
        with build(given.config, given.workdir, command=True) as run:
            for _ in train(run):
                pass


if __name__ == "__main__":
    run_main(main)
