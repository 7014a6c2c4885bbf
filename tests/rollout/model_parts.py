"""Samplers of a random model and of a model folder, whose prompts and trainer are here too, for tests of rollouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny import CONFIG, mesh_of, model_and_params

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.learner.forward import make_logprob_fn
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import hf
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Batch, Prompts, Rollouts

ARITHMETIC = Path(hf.__file__).parents[1] / "assets" / "arithmetic"
ONE, WIDTH = (1, 1, 1), 16


random_model = cache(partial(model_and_params, scale=3.0))


def random_sampler(config: DecoderConfig = CONFIG, shape: tuple[int, int, int] = ONE, **bounds: Any) -> Sampler:
    """An engine with random weights, whose version is 5."""
    (model, params), mesh = random_model(config), mesh_of(shape)
    made = Sampler(model, mesh, **dict(stop_ids=(3, 4), pad_id=0) | bounds)
    made.update_weights(jax.device_put(params, sharding.shardings(params, mesh)), 5)
    return made


@cache
def parts(folder: Path = ARITHMETIC, shape: tuple[int, int, int] = ONE) -> tuple[Any, Any, Any]:
    """Mesh, model and tokenizer."""
    mesh = mesh_of(shape)
    return mesh, hf.load_model(folder, mesh), hf.load_tokenizer(folder)


@cache
def sampler(folder: Path = ARITHMETIC, shape: tuple[int, int, int] = ONE, *, length: int, **bounds: int) -> Sampler:
    """An engine with the weights of the folder, whose version is 3."""
    mesh, model, tokenizer = parts(folder, shape)
    ends = dict(stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id)
    made = Sampler(model, mesh, max_completion_tokens=length, **ends, **bounds)
    made.update_weights(hf.load_params(folder, model, mesh, learns=False), 3)
    return made


@cache
def prompts(count: int = 8, folder: Path = ARITHMETIC) -> Prompts:
    """The first questions of the arithmetic task."""
    _, _, tokenizer = parts(folder)
    limits = dict(max_prompt_tokens=WIDTH, overlong="error", problems=count)
    rows = data.read("arithmetic.train", tokenizer, convert="", **limits)
    return data.make_prompts(replace(rows, width=WIDTH), range(count), tokenizer.pad_token_id)


def trainer_logprobs(asked: Prompts, rollouts: Rollouts, sampling: Sampling, folder: Path = ARITHMETIC) -> np.ndarray:
    """The log-probabilities of a forward pass over whole episodes, with nothing kept."""
    mesh, model, _ = parts(folder)
    batch = Batch(
        asked.tokens, asked.mask, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask,
        sampler_logprobs=rollouts.logprobs, tree=rollouts.tree,
    )  # fmt: skip
    program = make_logprob_fn(model, sampling, mesh, microbatch=0)
    return np.asarray(program(hf.load_params(folder, model, mesh), transfers.shard_batch(batch, mesh)))


def same(a: Rollouts, b: Rollouts, where: Any = ...) -> None:
    for name in ("completions", "completion_mask", "loss_mask", "logprobs", "truncated"):
        np.testing.assert_array_equal(getattr(a, name)[where], getattr(b, name)[where], err_msg=name)
