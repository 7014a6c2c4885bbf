"""Scorers: models that compute columns [B, G, C] for the completions of a step, such as log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.forward import REMEDY
from jaxrl_llm.learner.update import FrozenBase
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import Batch, PyTree

States: TypeAlias = dict[str, PyTree]  # {learner: TrainState}, and "reference": parameters


# Columns [B, G, C] that policy and reference compute before the first update of a step. An advantage estimator or a
# loss gets a column as an argument of this name; the critic has `values`, and other models those of `column_of`.
COLUMNS = ("old_logprobs", "entropy", "ref_logprobs")


def column_of(section: str) -> str:
    """Returns the column of a model that never learns, by its section: `reward_model`, or `teachers.NAME`."""
    return "reward_model_scores" if section == "reward_model" else f"{section.removeprefix('teachers.')}_logprobs"


class FrozenModel(NamedTuple):
    """A model that scores but never learns."""

    model: Decoder
    params: PyTree  # of a reward model: as of a critic, {"decoder": ..., "readout": ...}


class Scorer(NamedTuple):
    """A model that scores completions."""

    columns: tuple[str, ...]  # their names; each is [B, G, C]
    params: Callable[[States], PyTree]  # its parameters
    program: Callable[[PyTree, Batch], dict[str, jax.Array]]  # (params, batch) -> columns

    def score(self, states: States, batch: Batch) -> dict[str, jax.Array]:
        """Returns {column: [B, G, C]}."""
        # Parameters in host memory come to the device for this call only.
        return self.program(sharding.move(self.params(states), sharding.DEVICE), batch)

    def program_of(self, text: str, states: States, batch: Batch) -> Program | None:
        """Returns what `score` runs for batches of this shape, if it is a program; states and batch may be shapes."""
        if not isinstance(self.program, jax.stages.Wrapped):
            return None
        params = self.params(states)
        return Program("scoring", f"scoring of {text}", partial(self.program.trace, params, batch), REMEDY, params)


def make_scorers(
    model: Decoder,
    sampling: Sampling,
    mesh: Mesh,
    needed: Collection[str],
    *,
    at_once: int,
    exact: bool,
    base: FrozenBase,
) -> dict[str, Scorer]:
    """Returns reference and policy as scorers, in the order in which they run, if one of their columns is `needed`.

    at_once: prompts of an update in memory at a time. exact: the sampler has the weights of the start of the step, and
    its log-probabilities equal the trainer's, to rounding. base: the policy's parameters that do not learn; they are
    the reference, if there is no other.
    """
    # Scoring takes the update's number of prompts at a time: another shape may round differently, and the ratio of the
    # first update would not be 1.
    scorers = {}
    if "ref_logprobs" in needed:
        reference = score_columns(model, sampling, mesh, at_once, "ref_logprobs")

        def reference_params(states: States) -> PyTree:
            return base.combine(base.params, states["reference"]) if "reference" in states else base.params

        scorers["reference"] = Scorer(("ref_logprobs",), reference_params, reference)
    columns = [column for column in ("old_logprobs", "entropy") if column in needed]
    if exact and columns == ["old_logprobs"]:
        # The sampler has already computed them: no forward pass is needed.
        def known_logprobs(params: None, batch: Batch) -> PyTree:
            return {"old_logprobs": batch.sampler_logprobs}

        scorers["sampler"] = Scorer(("old_logprobs",), lambda states: None, known_logprobs)
    elif columns:
        policy = score_columns(model, sampling, mesh, at_once, *columns)
        scorers["policy"] = Scorer(
            tuple(columns), lambda states: base.combine(base.params, states["policy"].params), policy
        )
    return scorers


def score_columns(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int, *columns: str) -> forward.ScoreFn:
    """Returns `score(params, batch) -> {column: [B, G, C]}`, with one forward pass for all columns.

    The column "entropy" has the entropies of the distribution, all others the log-probabilities of the tokens.
    """

    def per_token(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, sampling)
        return {column: entropy if column == "entropy" else logprobs for column in columns}

    return forward.in_microbatches(per_token, mesh, microbatch)


def load_frozen(
    section: str, folder: Path, start: ModelSettings, tokenizer: Any, mesh: Mesh, *, on_host: bool
) -> FrozenModel:
    """Loads the model in `folder`; section: its section of the config.

    start: dtype and row parts of the policy. on_host: the parameters are in the host's memory while nothing uses them.
    Raises: UserError, if the model cannot be loaded, or has other ids for the policy's tokens.
    """
    model = frozen_model(section, folder, start, mesh)
    # Token ids pass from one model to the other: equal text with other ids would be scored as other text.
    theirs = hf.load_tokenizer(folder).get_vocab()
    other = next((token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number), None)
    if other is not None:
        raise UserError(f"config.{section}.path: its tokenizer knows {other!r} by another number: give one of the kind")
    scores = section == "reward_model"
    params = hf.load_params(folder, model, mesh, learns=False, unused=hf.HEADS if scores else ())
    if scores:
        readout = jax.device_put(hf.load_readout(folder, model), NamedSharding(mesh, PartitionSpec()))
        params = {"decoder": params, "readout": readout}
    return FrozenModel(model, sharding.move(params, sharding.HOST) if on_host else params)


def frozen_model(section: str, folder: Path, start: ModelSettings, mesh: Mesh) -> Decoder:
    """Returns the model in `folder` without its parameters. Raises: UserError, for a model that is not supported."""
    model = hf.load_model(folder, mesh, family=start.family, dtype=start.dtype, row_parts=start.row_parts)
    # A reward model has no head for the vocabulary; with tied_head, the parameter tree has none.
    return Decoder(replace(model.cfg, tied_head=True), mesh) if section == "reward_model" else model


def make_frozen_scorer(section: str, frozen: FrozenModel, microbatch: int, sampling: Sampling, mesh: Mesh) -> Scorer:
    """Returns a model as a scorer: its log-probabilities of the sampled tokens, or the scores of a reward model."""
    column, model = column_of(section), frozen.model
    if section == "reward_model":

        def scores(params: PyTree, batch: Batch) -> PyTree:
            return {column: forward.completion_values(model, params, batch, after=True)}

        score = forward.in_microbatches(scores, mesh, microbatch)
    else:
        score = score_columns(model, sampling, mesh, microbatch, column)
    return Scorer((column,), lambda states: frozen.params, score)
