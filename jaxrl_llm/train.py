"""Reinforcement learning: `jaxrl train --config FILE [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.build import COMPILE_ONLY, Parts, build, compile_only
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.errors import run_main
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.transfers import shard_batch
from jaxrl_llm.rollout.actor import WeightLease
from jaxrl_llm.rollout.samples import to_batch
from jaxrl_llm.session import loop
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.session import Session
from jaxrl_llm.structs import Config


def rl_step(session: Session, parts: Parts, lease: WeightLease, step: int) -> tuple[WeightLease, Record]:
    """Runs one step: sample, score, reward, assign credit, learn, push weights. Donates the states of the lease.

    Raises: UserError, for an error that the user can fix, such as a reward function that fails.
    """
    actor, learning = parts.actor, parts.learning
    timer = session.log.timer()
    samples = actor.next()
    timer.lap("rollout")
    session.stop.check()
    host_batch = to_batch(samples.prompts, samples.rollouts, samples.trained, parts.packing)
    sampled_batch = shard_batch(host_batch, learning.mesh)
    # Scoring starts before the rewards, because the device scores while the host computes rewards.
    scores = learning.score(lease.states, sampled_batch)
    scored = session.log.watch(scores)
    rewards = shard_batch(samples.rewards(), learning.mesh)
    batch, metrics = learning.assign_credit(sampled_batch, scores, rewards, learning.coefficients(lease.states))
    timer.lap("reward")
    # The engine may still read the parameters, so they are reclaimed before the first update donates them.
    states, push_metrics = lease.reclaim()
    minibatches = learning.minibatches(step)
    # Compilation stays outside of `deferred`, because it may take minutes in which a signal must work.
    learning.compile(parts.shape_cache, states, sampled_batch, batch, minibatches[0])
    updates = []
    # A signal waits in this block, because the old states are donated and the new states are not committed yet.
    with session.stop.deferred():
        for rows in minibatches:
            states, update_metrics = learning.update(states, batch, rows, step)
            updates.append(update_metrics)
        updated = session.log.watch(updates)
        states = learning.finish_step(states, step)
        metrics |= samples.metrics | push_metrics
        record = Record(
            step=step,
            timer=timer,
            tokens=samples.tokens(),
            updates=updates,
            metrics=metrics,
            updated=updated,
            scored=scored,
            samples=samples.with_metrics(push_metrics),
            rewards=batch.rewards,
        )
        parts.shape_cache.commit()
        session.commit(states, record)
        # The push comes last: it may launch programs, and collectives must keep one order.
        return actor.push(states, learning.policy(states), step), record


def train(session: Session, parts: Parts) -> Iterator[dict[str, Any]]:
    """Trains from the current step to the end, and yields the records of metrics.jsonl, one step late.

    Raises: UserError, for an error that the user can fix, or if a health rule stops the run.
    """
    return loop.run(session, partial(rl_step, session, parts), parts.self_test)


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Trains in this process, resumes a run in `workdir` if it holds one, and yields the records of metrics.jsonl.

    signals: True to save the run and raise KeyboardInterrupt also after SIGTERM or when the terminal closes.
    """
    with build(config, workdir, signals=signals) as (session, parts):
        yield from train(session, parts)


def main() -> None:
    arguments = parse_arguments("jaxrl_llm.train", "Reinforcement learning.", compile_only=COMPILE_ONLY)
    with distributed.join_processes(arguments.distributed):
        if arguments.compile_only:
            return compile_only(arguments.config)
        with build(arguments.config, arguments.workdir, command=True) as (session, parts):
            for _ in train(session, parts):
                pass


if __name__ == "__main__":
    run_main(main)
