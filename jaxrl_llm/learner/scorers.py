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
from jaxrl_llm.learner.settings import column_of
from jaxrl_llm.learner.update import FrozenBase
from jaxrl_llm.machine import transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder, decoder_of
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import Batch, PyTree

States: TypeAlias = dict[str, PyTree]  # {learner: TrainState}, and "reference": parameters


class FrozenModel(NamedTuple):
    """A model that scores but never learns."""

    model: Decoder
    params: PyTree  # parameters of `model`; of a reward model {"decoder": ..., "readout": ...}, as of a critic


class Scorer(NamedTuple):
    """Computes columns [B, G, C] for completions, such as log-probabilities by the reference."""

    columns: tuple[str, ...]  # names of the columns
    params: Callable[[States], PyTree]  # states of the run -> parameters that score
    program: Callable[[PyTree, Batch], dict[str, jax.Array]]  # (params, batch) -> columns

    def score(self, states: States, batch: Batch) -> dict[str, jax.Array]:
        """Returns the columns of a batch: {name: [B, G, C]}."""
        # Parameters in the host's memory move to the devices for this call only.
        return self.program(transfers.move(self.params(states), transfers.DEVICE), batch)

    def program_of(self, text: str, states: States, batch: Batch) -> Program | None:
        """Returns the program of `score` for batches of this shape, None if `score` runs no program.

        text: end of the program's name. states, batch: arrays or shapes.
        """
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
    microbatch: int,
    exact: bool,
    base: FrozenBase,
) -> dict[str, Scorer]:
    """Returns the scorers of reference and policy whose columns are needed, in the order in which they run.

    needed: names of columns. microbatch: prompts of a micro-batch. exact: whether the sampler's log-probabilities equal
    the trainer's at the start of the step, to rounding. base: the policy's parameters that do not learn. If the states
    of the run have no "reference", as with adapters, the base is the reference.
    """
    # Scoring has the micro-batch of the update. Another shape may round differently, and then the importance ratio of
    # the first update would not be 1.
    scorers = {}
    if "ref_logprobs" in needed:
        reference = score_columns(model, sampling, mesh, microbatch, "ref_logprobs")

        def reference_params(states: States) -> PyTree:
            if "reference" not in states:
                return base.params
            return base.combine(base.params, states["reference"])  # the complete parameters of the reference

        scorers["reference"] = Scorer(("ref_logprobs",), reference_params, reference)
    columns = [column for column in ("old_logprobs", "entropy") if column in needed]
    if exact and columns == ["old_logprobs"]:
        # The sampler has already computed the log-probabilities, so this scorer needs no forward pass.
        def known_logprobs(params: None, batch: Batch) -> PyTree:
            return {"old_logprobs": batch.sampler_logprobs}

        scorers["sampler"] = Scorer(("old_logprobs",), lambda states: None, known_logprobs)
    elif columns:
        policy = score_columns(model, sampling, mesh, microbatch, *columns)
        scorers["policy"] = Scorer(
            tuple(columns), lambda states: base.combine(base.params, states["policy"].params), policy
        )
    return scorers


def score_columns(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int, *columns: str) -> forward.ScoreFn:
    """Returns `score(params, batch) -> {column: [B, G, C]}`, with one forward pass for all columns.

    The column "entropy" has the entropies of the distribution; all other columns have the tokens' log-probabilities.
    """

    def per_token(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
        logprobs, entropy = forward.completion_logprobs(model, params, batch, sampling)
        return {column: entropy if column == "entropy" else logprobs for column in columns}

    return forward.score_in_microbatches(per_token, mesh, microbatch)


def load_frozen(
    section: str, folder: Path, policy_settings: ModelSettings, tokenizer: Any, mesh: Mesh, *, on_host: bool
) -> FrozenModel:
    """Loads the model of a section of the config from `folder`.

    policy_settings: config.model, whose dtype and row parts this model has too. tokenizer: tokenizer of the policy.
    on_host: whether the parameters stay in the host's memory while no program uses them.
    Raises: UserError, if the model cannot be loaded, or has other ids for the policy's tokens.
    """
    model = frozen_model(section, folder, policy_settings, mesh)
    # The model scores the policy's token ids, so with other ids for the same tokens it would score another text.
    vocabulary = hf.load_tokenizer(folder).get_vocab()
    different_token = next(
        (token for token, number in tokenizer.get_vocab().items() if vocabulary.get(token) != number), None
    )
    if different_token is not None:
        raise UserError(
            f"config.{section}.path = {str(folder)!r}: token {different_token!r} has another id than in the policy's "
            "tokenizer; use a model of the policy's family"
        )
    scores = section == "reward_model"
    params = hf.load_params(folder, model, mesh, learns=False, unused=hf.HEADS if scores else ())
    if scores:
        readout = jax.device_put(hf.load_readout(folder, model), NamedSharding(mesh, PartitionSpec()))
        params = {"decoder": params, "readout": readout}
    return FrozenModel(model, transfers.move(params, transfers.HOST) if on_host else params)


def frozen_model(section: str, folder: Path, policy_settings: ModelSettings, mesh: Mesh) -> Decoder:
    """Returns the model in `folder` without its parameters. Raises: UserError, for a model that is not supported."""
    model = hf.load_model(
        folder, mesh, family=policy_settings.family, dtype=policy_settings.dtype, row_parts=policy_settings.row_parts
    )
    # The parameter tree of a tied head has no head, which a reward model does not have.
    return decoder_of(replace(model.cfg, tied_head=True), mesh) if section == "reward_model" else model


def make_frozen_scorer(section: str, frozen: FrozenModel, microbatch: int, sampling: Sampling, mesh: Mesh) -> Scorer:
    """Returns the scorer of a model that never learns.

    Its column has the log-probabilities of the sampled tokens, or for a reward model the scores.
    """
    column, model = column_of(section), frozen.model
    if section == "reward_model":

        def scores(params: PyTree, batch: Batch) -> PyTree:
            return {column: forward.completion_values(model, params, batch, state_after=True)}

        score = forward.score_in_microbatches(scores, mesh, microbatch)
    else:
        score = score_columns(model, sampling, mesh, microbatch, column)
    return Scorer((column,), lambda states: frozen.params, score)
