"""The programs of a run, compiled from shapes alone: for `train --compile-only`, and for chips that are not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.algorithms.credit import CreditFn
from jaxrl_llm.learner.scorers import Scorer, States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.shapes import Shape, placed
from jaxrl_llm.structs import Batch, Config, Rewards

Program: TypeAlias = tuple[str, Callable[[], Any]]  # name, and a function that compiles it


def compile_all(programs: Iterable[Program], say: Callable[[str], None]) -> None:
    """Compiles programs one after the other, and says the seconds of each. Raises: UserError, if one is too big."""
    seconds: dict[str, float] = {}
    for name, compile in programs:
        if name not in seconds:
            start = time.perf_counter()
            compile()
            seconds[name] = time.perf_counter() - start
            say(f"{seconds[name]:7.1f}s  {name}")
    say(f"{sum(seconds.values()):7.1f}s  {len(seconds)} programs")


def of_learning(
    config: Config,
    mesh: Mesh,
    scorers: dict[str, Scorer],
    learners: dict[str, Learner],
    assign_credit: CreditFn,
    shapes: Iterable[Shape],
    width: int,
) -> Iterator[Program]:
    """Yields the programs of scoring and learning, for packed rows of each of `shapes`; width: P."""
    place = NamedSharding(mesh, sharding.BATCH)
    plain, states = placed(batch_shapes(config, width), place), state_shapes(learners)
    score = jax.ShapeDtypeStruct(plain.completions.shape, jnp.float32)
    scores = {column: score for scorer in scorers.values() for column in scorer.columns}
    policy = learners["policy"]
    coefs = jax.eval_shape(policy.coefficients, states["policy"])
    credited, _ = jax.eval_shape(assign_credit, plain, scores, _rewards(config), coefs)
    batch = placed(credited, place)
    rows = jax.ShapeDtypeStruct((config.prompts_per_update,), jnp.int32)
    for shape in shapes:
        index = jax.ShapeDtypeStruct((config.prompts_per_step, *shape), jnp.int32, sharding=place)
        text = f"{shape[0]} rows of {shape[1]} a prompt"
        for name, scorer in scorers.items():
            if isinstance(scorer.program, jax.stages.Wrapped):
                yield f"{name} scores, {text}", partial(scorer.compile, states, replace(plain, packed_index=index))
        for name, learner in learners.items():
            args = states[name], replace(batch, packed_index=index), rows
            yield f"{name} learns, {text}", partial(learner.compile, *args)


def state_shapes(learners: dict[str, Learner]) -> States:
    """Returns the states of learners and reference as shapes, with their shardings."""
    states: States = {name: learner.shapes for name, learner in learners.items()}
    return states | {"reference": states["policy"].params}


def batch_shapes(config: Config, width: int) -> Batch:
    """Returns the batch of a step before its scores, as shapes; width: P."""
    b, g, c = config.prompts_per_step, config.group_size, config.rollout.max_completion_tokens
    of = jax.ShapeDtypeStruct
    tokens, mask = of((b, g, c), jnp.int32), of((b, g, c), bool)
    prompts = of((b, width), jnp.int32), of((b, width), bool)
    return Batch(*prompts, tokens, mask, mask, sampler_logprobs=of((b, g, c), jnp.float32))


def _rewards(config: Config) -> Rewards:
    one = jax.ShapeDtypeStruct((config.prompts_per_step, config.group_size), jnp.float32)
    greedy = jax.ShapeDtypeStruct((config.prompts_per_step, 1), jnp.float32)
    lengths = jax.ShapeDtypeStruct((config.prompts_per_step, 1), jnp.int32)
    return Rewards(one, dict.fromkeys(config.reward.functions, one), greedy, lengths)
