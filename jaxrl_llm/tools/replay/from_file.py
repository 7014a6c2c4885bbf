"""Computes the loss and gradient of a step again from the file of a replay and from weights, without the run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import build_policy_learner
from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.completion_gradients import make_completion_gradients
from jaxrl_llm.machine import transfers
from jaxrl_llm.recipe.missing import collected
from jaxrl_llm.structs import Batch, Config, Images, Tree
from jaxrl_llm.tools.replay.observer import make_token_numbers
from jaxrl_llm.tools.replay.record import StepRecord
from jaxrl_llm.tools.report.runs import tuples

# Fields of a config that decide about samples alone, and may name files and functions that this machine lacks.
SAMPLING = {"reward.functions": ("arithmetic.accuracy",), "reward.weights": (1.0,), "data.source": "arithmetic.train"}
SAMPLING |= {"data.convert": "", "data.mixture": ConfigDict(), "environments": ConfigDict()}
SAMPLING |= dict.fromkeys(("env", "turns", "eval"))
# Fields of `Batch` that are fields of a record, and those that are entries of its `columns`.
IN_RECORD = ("prompts", "prompt_mask", "completions", "completion_mask", "loss_mask", "advantages")
IN_COLUMNS = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")


def loss_and_gradient(record: StepRecord, model: str) -> dict[str, tuple[float, float]]:
    """Computes loss and gradient of a step's first update again. Returns {quantity: (in the file, now)}.

    model: folder or hub id of the weights before the step (of the adapters, if the run has adapters); "" = the weights
    that the config in the file names.
    Raises: UserError, if the file has no gradient, or this machine lacks the model or a function of the loss.
    """
    if not record.gradient:
        raise UserError(f"--from: the file has no gradient, because step {record.step} trained the critic alone")
    config: Config = ConfigDict(tuples(record.config))
    # The config of the run is read without the fields that only decide about samples.
    for name, value in SAMPLING.items():
        section, _, field = name.rpartition(".")
        (config[section] if section else config)[field] = value
    if model:
        fields = flatten(config)
        config.update_from_flattened_dict({"adapters.path" if "adapters.path" in fields else "model.path": model})
    with collected():
        recipe = recipes.read(config)
    # The loss and the gradients are computed for the prompts of the first update.
    rows = np.array(record.first_update)
    learner, policy_model, mesh = build_policy_learner(recipe, len(rows))
    params, base = learner.init().params, learner.base
    batch = transfers.shard_batch(jax.tree.map(lambda x: x[rows], batch_of(record)), mesh)
    coefs = {name: np.float32(x) for name, x in record.coefficients.items()}
    token_numbers = make_token_numbers(learner, policy_model, recipe.rollout.sampling, mesh, recipe.microbatch)
    computed = transfers.to_host(token_numbers((base.combine(base.params, params), coefs), batch))
    completion_gradients = make_completion_gradients(learner, mesh, recipe.microbatch)
    gradient_norm, completion_norms, _ = completion_gradients(params, batch, coefs, base.params)
    # The terms of the completions add up to the gradient, so their projections on the gradient add up to its norm.
    recorded_norms, cosines = record.gradient["norm"][rows], record.gradient["cosine"][rows]
    mask = record.loss_mask[rows]
    weights = np.asarray(learner.aggregate(jax.device_put(mask)))
    # Each quantity has two values: the one in the file, and the one that was computed now.
    columns = {name: (record.columns[name][rows], computed[name]) for name in ("logprobs", "loss")}
    pairs: dict[str, Any] = {
        "mean log-probability": [x[mask].mean(dtype=np.float64) for x in columns["logprobs"]],
        "loss": [(x * weights)[mask].sum(dtype=np.float64) for x in columns["loss"]],
        "norm of the gradient": [(recorded_norms * cosines).sum(dtype=np.float64), gradient_norm],
        "largest norm of a completion": [recorded_norms.max(), np.asarray(completion_norms).max()],
    }
    return {name: (float(recorded), float(computed_now)) for name, (recorded, computed_now) in pairs.items()}


def batch_of(record: StepRecord) -> Batch:
    """Returns the batch of a step's updates, as its file holds it."""
    # The names of the inputs are FIELD, or TABLE/FIELD for the fields of a table or record in the batch.
    tables: dict[str, dict[str, Any]] = {"": {}, "columns": {}, "images": {}, "tree": {}}
    for name, array in record.inputs.items():
        table, _, key = name.rpartition("/")
        tables[table][key] = array
    fields = {name: getattr(record, name) for name in IN_RECORD} | tables[""]
    fields |= {name: record.columns.get(name) for name in IN_COLUMNS} | {"columns": tables["columns"]}
    fields |= {name: kind(**tables[name]) for name, kind in (("images", Images), ("tree", Tree)) if tables[name]}
    return Batch(**fields)
