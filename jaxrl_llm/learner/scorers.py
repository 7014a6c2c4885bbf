"""The models that score a step's completions: which there are, and which columns each gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from jaxrl_llm import compatibility
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import forward
from jaxrl_llm.models import hf
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Batch, Config, PyTree

States: TypeAlias = dict[str, PyTree]  # {learner: TrainState}, and "reference": parameters


# Sections of a config with a model that scores and never learns, and the column that it gives. An advantage estimator
# gets a column by naming it as an argument. One more line here is one more such model.
FROZEN = {"teacher": "teacher_logprobs"}


class Scorer(NamedTuple):
    """A model that scores."""

    columns: tuple[str, ...]  # what it gives, [B, G, C] each
    score: Callable[[States, Batch], dict[str, jax.Array]]


def make_scorers(
    config: Config,
    model: Decoder,
    sampling: Sampling,
    mesh: Mesh,
    required: tuple[str, ...],
    *,
    updates: int,
    exact: bool,
) -> dict[str, Scorer]:
    """The policy and its reference as scorers, as far as a step needs their columns, in the order in which they run.

    required: what the advantage estimator asks for; updates: on a rollout; exact: the weights that sample are those at
    the start of the step, and the sampler's log-probabilities are the trainer's own to rounding.
    """
    # As many prompts at a time as in the update: products of other shapes may round otherwise, which shows in a ratio.
    at_once = config.microbatch or config.prompts_per_update
    scorers = {}
    if config.kl.placement != "none":
        reference = score_columns(model, sampling, mesh, at_once, ref_logprobs="logprobs")
        scorers["reference"] = Scorer(("ref_logprobs",), lambda states, batch: reference(states["reference"], batch))
    columns = {}
    # With one update on a rollout, the update's own log-probabilities are the old ones.
    if updates > 1 or config.kl.placement == "reward" or "logprobs" in required:
        columns["old_logprobs"] = "logprobs"
    if config.mask.top_entropy < 1:
        columns["entropy"] = "entropy"
    if exact and list(columns) == ["old_logprobs"]:
        scorers["sampler"] = Scorer(("old_logprobs",), lambda states, batch: {"old_logprobs": batch.sampler_logprobs})
    elif columns:
        policy = score_columns(model, sampling, mesh, at_once, **columns)
        scorers["policy"] = Scorer(tuple(columns), lambda states, batch: policy(states["policy"].params, batch))
    return scorers


def score_columns(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int, **columns: str) -> forward.ScoreFn:
    """`score(params, batch) -> {column: [B, G, C]}`, from one forward pass; columns: name="logprobs" or "entropy"."""

    def per_token(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, sampling)
        made = {"logprobs": logprobs, "entropy": entropy}
        return {name: made[what] for name, what in columns.items()}

    return forward.in_microbatches(per_token, mesh, microbatch)


def make_frozen_scorer(
    section: str, folder: Path, config: Config, policy: DecoderConfig, tokenizer: Any, sampling: Sampling, mesh: Mesh
) -> Scorer:
    """The model in `folder`, of one of the sections FROZEN: its log-probabilities of what the policy sampled.

    Raises: UserError, for a model that cannot be loaded, or to which the policy's tokens mean something else.
    """
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat="none")
    compatibility.check_other_model(f"{section}.path", model.cfg, policy)
    theirs = hf.load_tokenizer(folder).get_vocab()
    other = next((token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number), None)
    if other is not None:
        raise UserError(f"config.{section}.path: its tokenizer knows {other!r} by another number: give one of the kind")
    params = hf.load_params(folder, model, mesh)
    column = FROZEN[section]
    score = score_columns(model, sampling, mesh, config.microbatch, **{column: "logprobs"})
    return Scorer((column,), lambda states, batch: score(params, batch))
