"""The programs of a run, compiled from shapes alone: for `train --compile-only`, and for chips that are not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import Shape, placed
from jaxrl_llm.structs import Batch, Images, ImageSizes, Rewards, Sizes


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


def example_shapes(sizes: Sizes, width: int, image_sizes: ImageSizes | None, mesh: Mesh) -> tuple[Batch, Any]:
    """Returns a batch of prompts with their completions, and a column of scores [B, G, C], as shapes. width: P."""
    place, of = NamedSharding(mesh, sharding.BATCH), jax.ShapeDtypeStruct
    b, g, c = sizes.prompts_per_step, sizes.group_size, sizes.max_completion_tokens
    tokens, mask, score = (of((b, g, c), dtype) for dtype in (jnp.int32, bool, jnp.float32))
    images = Images.shapes((b,), width, image_sizes) if image_sizes else None
    batch = Batch(of((b, width), jnp.int32), of((b, width), bool), tokens, mask, mask, images=images)
    return placed((batch, score), place)


def learning_programs(
    learning: Learning,
    shapes: Iterable[Shape],
    width: int,
    channels: Iterable[str],
    image_sizes: ImageSizes | None = None,
) -> Iterator[Program]:
    """Yields the programs of scoring and learning, for packed rows of each of `shapes`; width: P.

    channels: names of the reward functions. image_sizes: sizes of the prompts' images, None if prompts have no images.
    """
    sizes, of = learning.sizes, jax.ShapeDtypeStruct
    b, g = sizes.prompts_per_step, sizes.group_size
    examples, score = example_shapes(sizes, width, image_sizes, learning.mesh)
    plain = replace(examples, sampler_logprobs=score)
    total = of((b, g), jnp.float32)
    rewards = Rewards(total, dict.fromkeys(channels, total), of((b, 1), jnp.float32), of((b, 1), jnp.int32))
    scores = {column: score for scorer in learning.scorers.values() for column in scorer.columns}
    states = learning.device_shapes()
    coefs = jax.eval_shape(learning.coefficients, states)
    credited, _ = jax.eval_shape(learning.assign_credit, plain, scores, rewards, coefs)
    batch = placed(credited, score.sharding)
    rows: Any = of((sizes.prompts_per_update,), jnp.int32)
    for shape in shapes:
        yield from learning.programs(states, plain, batch, rows, shape)
