"""The programs of a run, compiled from shapes alone: for `train --compile-only`, and for chips that are not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import Shape, placed
from jaxrl_llm.structs import Batch, Rewards, Sizes


def compile_all(programs: Iterable[Program], say: Callable[[str], None]) -> None:
    """Compiles programs one after the other, and says the seconds of each. Raises: UserError, if one is too big."""
    seconds: dict[str, float] = {}
    for program in programs:
        if program.name not in seconds:
            start = time.perf_counter()
            program.compile()
            seconds[program.name] = time.perf_counter() - start
            say(f"{seconds[program.name]:7.1f}s  {program.name}")
    say(f"{sum(seconds.values()):7.1f}s  {len(seconds)} programs")


def learning_programs(
    learning: Learning, shapes: Iterable[Shape], width: int, channels: Iterable[str]
) -> Iterator[Program]:
    """Yields the programs of scoring and learning, for packed rows of each of `shapes`; width: P.

    channels: names of the reward functions.
    """
    place, sizes = NamedSharding(learning.mesh, sharding.BATCH), learning.sizes
    plain, states = placed(batch_shapes(sizes, width), place), learning.all_shapes()
    score = jax.ShapeDtypeStruct(plain.completions.shape, jnp.float32)
    scores = {column: score for scorer in learning.scorers.values() for column in scorer.columns}
    coefs = jax.eval_shape(learning.learners["policy"].coefficients, states["policy"])
    credited, _ = jax.eval_shape(learning.assign_credit, plain, scores, _rewards(sizes, channels), coefs)
    batch = placed(credited, place)
    rows: Any = jax.ShapeDtypeStruct((sizes.prompts_per_update,), jnp.int32)
    for shape in shapes:
        yield from learning.programs(states, plain, batch, rows, shape)


def batch_shapes(sizes: Sizes, width: int) -> Batch:
    """Returns the batch of a step before its scores, as shapes; width: P."""
    b, g, c = sizes.prompts_per_step, sizes.group_size, sizes.max_completion_tokens
    of = jax.ShapeDtypeStruct
    tokens, mask = of((b, g, c), jnp.int32), of((b, g, c), bool)
    prompts = of((b, width), jnp.int32), of((b, width), bool)
    return Batch(*prompts, tokens, mask, mask, sampler_logprobs=of((b, g, c), jnp.float32))


def _rewards(sizes: Sizes, channels: Iterable[str]) -> Rewards:
    total = jax.ShapeDtypeStruct((sizes.prompts_per_step, sizes.group_size), jnp.float32)
    greedy = jax.ShapeDtypeStruct((sizes.prompts_per_step, 1), jnp.float32)
    lengths = jax.ShapeDtypeStruct((sizes.prompts_per_step, 1), jnp.int32)
    return Rewards(total, dict.fromkeys(channels, total), greedy, lengths)
