"""Compiles the programs of a run from shapes alone, for `train --compile-only` and `jaxrl plan`."""

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
from jaxrl_llm.structs import Batch, Images, PromptSizes, Rewards, Sizes, Tree


def compile_all(programs: Iterable[Program], say: Callable[[str], None]) -> None:
    """Compiles programs one after the other. Raises: UserError, if a program does not fit the memory.

    say: prints a line with the seconds of a program.
    """
    seconds: dict[str, float] = {}
    for program in programs:
        if program.name not in seconds:
            start = time.perf_counter()
            program.compile()
            seconds[program.name] = time.perf_counter() - start
            say(f"{seconds[program.name]:7.1f}s  {program.name}")
    say(f"{sum(seconds.values()):7.1f}s  {len(seconds)} programs")


def example_shapes(sizes: Sizes, prompt_sizes: PromptSizes, mesh: Mesh) -> tuple[Batch, Any]:
    """Returns the shapes of a batch with completions, and of one number [B, G, C] for each of its tokens."""
    place, shape_of = NamedSharding(mesh, sharding.BATCH), jax.ShapeDtypeStruct
    b, g, c = sizes.prompts_per_step, sizes.group_size, sizes.max_completion_tokens
    tokens, mask, score = (shape_of((b, g, c), dtype) for dtype in (jnp.int32, bool, jnp.float32))
    width, image_sizes, smaller = prompt_sizes
    images = Images.shapes((b,), width, image_sizes) if image_sizes else None
    prompts, prompt_mask = shape_of((b, width), jnp.int32), shape_of((b, width), bool)
    tree = Tree(tokens, tokens, tokens) if sizes.trees else None
    batch = Batch(
        prompts=prompts,
        prompt_mask=prompt_mask,
        completions=tokens,
        completion_mask=mask,
        loss_mask=mask,
        images=images,
        smaller=smaller,
        tree=tree,
    )
    return placed((batch, score), place)


def learning_programs(
    learning: Learning, shapes: Iterable[Shape], prompt_sizes: PromptSizes, channels: Iterable[str]
) -> Iterator[Program]:
    """Yields the programs of scoring and learning, for packed rows of each of `shapes`.

    channels: names of the reward functions.
    """
    sizes, shape_of = learning.sizes, jax.ShapeDtypeStruct
    b, g = sizes.prompts_per_step, sizes.group_size
    examples, score = example_shapes(sizes, prompt_sizes, learning.mesh)
    unscored = replace(examples, sampler_logprobs=score)
    total = shape_of((b, g), jnp.float32)
    rewards = Rewards(
        total,
        dict.fromkeys(channels, total),
        greedy=shape_of((b, 1), jnp.float32),
        greedy_lengths=shape_of((b, 1), jnp.int32),
        turn_numbers=examples.completions,
        turn_rewards=score,
    )
    scores = {column: score for scorer in learning.scorers.values() for column in scorer.columns}
    states = learning.device_shapes()
    coefs = jax.eval_shape(learning.coefficients, states)
    credited, _ = jax.eval_shape(learning.assign_credit, unscored, scores, rewards, coefs)
    batch = placed(credited, score.sharding)
    rows: Any = shape_of((sizes.prompts_per_update,), jnp.int32)
    for shape in shapes:
        yield from learning.programs(states, unscored, batch, rows, shape)
