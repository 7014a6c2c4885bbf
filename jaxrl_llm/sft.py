"""Supervised fine-tuning, also on pairs: `jaxrl sft --config FILE [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.algorithms.supervised import ACCURACY_METRIC
from jaxrl_llm.build import load, make_evaluation, open_outputs, opened_run, policy_learner
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.config.records import Call
from jaxrl_llm.data import order
from jaxrl_llm.data.examples import Examples, make_batch, tokenize_answers
from jaxrl_llm.data.settings import metrics_of
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.learner import forward, update
from jaxrl_llm.learner.learning import Models, Reference, make_reference, policy_parameters
from jaxrl_llm.learner.scorers import Scorer, States, make_scorers
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import distributed, keys, progress, sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import Book
from jaxrl_llm.models import hf
from jaxrl_llm.recipe import read_sft
from jaxrl_llm.recipe.recipe import SftRecipe
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.session import loop
from jaxrl_llm.session.checkpoint import SAMPLES
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.opening import Workplace
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.saved_run import new_model_folder
from jaxrl_llm.session.session import Session
from jaxrl_llm.structs import AnyArray, Array, Batch, Config, PyTree, StatefulPart


@dataclass
class Supervised:
    """All that computes with models in a step of `sft`: what scores examples, and the policy, which learns."""

    mesh: Mesh
    scorers: dict[str, Scorer]
    policy: Learner
    reference: Reference | None  # None: nothing asks for it, or it is the base of the policy's new adapters
    book: Book

    def shapes(self) -> States:
        """Returns the states of a checkpoint, as shapes with shardings."""
        return {"policy": self.policy.shapes}

    def all_shapes(self) -> States:
        """Returns the states that the devices hold, as shapes with shardings."""
        return self.shapes() | ({"reference": self.reference.shapes} if self.reference else {})

    def first(self) -> States:
        """Returns the states at step 0."""
        policy = self.policy.init()
        return {"policy": policy} | ({"reference": self.reference.copy(policy.params)} if self.reference else {})

    def restored(self, states: States, attempt: int) -> States:
        """Returns the states of a checkpoint with the reference, which it leaves out, because it never moves."""
        anchor = {"reference": self.reference.load()} if self.reference and "reference" not in states else {}
        return states | anchor

    def scored(self, states: States, batch: Batch) -> Batch:
        """Returns a batch with the columns that the loss asks for."""
        columns: dict[str, Array] = {}
        for name, scorer in self.scorers.items():
            self._ready(scorer.described(name, states, batch), batch)
            columns |= scorer.score(states, batch)
        return replace(batch, columns=columns)

    def programs(self, batch: Batch, score: PyTree, rows: AnyArray) -> Iterator[Program]:
        """Yields the programs of a step from shapes alone. score: the shape of a column that the loss asks for."""
        states = self.all_shapes()
        for name, scorer in self.scorers.items():
            if program := scorer.described(name, states, batch):
                yield program
        columns = {column: score for scorer in self.scorers.values() for column in scorer.columns}
        yield self.policy.described("", states["policy"], replace(batch, columns=columns), rows)

    def compile(self, states: States, batch: Batch, rows: AnyArray) -> None:
        """Compiles the update, which may take minutes. Raises: UserError, if it does not fit the memory."""
        self._ready(self.policy.described("", states["policy"], batch, rows), batch)

    def _ready(self, program: Program | None, batch: Batch) -> None:
        # Once, because all batches have one shape.
        if program:
            self.book.ready(program.phase, batch.completions.shape, lambda shape: program.compile())


@dataclass
class SftParts:
    """The parts of a step of `sft`."""

    examples: Examples
    learning: Supervised
    rows: AnyArray  # of an update: all examples
    measure: Callable[[States], dict[str, float]]  # -> metrics of all evaluation sets
    export: Callable[[States], None]  # writes the policy as a folder of Hugging Face

    @property
    def kept(self) -> Mapping[str, StatefulPart]:
        """What a checkpoint keeps beside the states."""
        return {SAMPLES: self.examples}

    def begin(self, states: States, step: int, attempt: int) -> States:
        """Returns the states: only the steps use them."""
        return states

    def rest(self) -> None:
        """Returns at once: only the steps use the states."""


def sft_step(session: Session, parts: SftParts, states: States, step: int) -> tuple[States, Record]:
    """Runs one update on the next examples. Donates the given states."""
    timer, learning = session.log.timer(), parts.learning
    examples = parts.examples.next()
    batch = learning.scored(states, sharding.shard_batch(examples, learning.mesh))
    learning.compile(states, batch, parts.rows)  # may take minutes, so not in `deferred`
    with session.stop.deferred():  # a signal waits: the old states are donated, the new ones not committed
        state, metrics = learning.policy.update(states["policy"], batch, parts.rows)
        states, updates = states | {"policy": state}, [metrics | {"loss/sft": metrics["loss/total"]}]
        updated = session.log.watch(updates)
        record = Record(step, timer, int(examples.completion_mask.sum()), updates, {}, updated)
        session.commit(states, record)
        parts.examples.learned()
    return states, record


def build(
    config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False
) -> AbstractContextManager[tuple[Session, SftParts]]:
    """Opens the run of an `sft` config, as `build.build` does for `train`. Raises: UserError."""
    return opened_run(config, workdir, read_sft, make_run, signals=signals, command=command)


def make_run(place: Workplace, recipe: SftRecipe) -> tuple[Session, SftParts]:
    """Builds a run of `sft`; an example is a prompt with one completion, or with a pair. Raises: UserError."""
    inputs = load(place, recipe, partial(find_model, place, recipe))
    tokenizer, length = inputs.tokenizer, recipe.rollout.max_completion_tokens
    answers = tokenize_answers(inputs.dataset, tokenizer, recipe.data, length, inputs.stop_ids)
    short = [i for i, row in enumerate(answers) if row]
    collate = partial(make_batch, inputs.dataset, answers, short, length, tokenizer.pad_token_id)
    examples = Examples(order.iterate(len(short), recipe.prompts_per_step, recipe.seed, collate))
    learning = make_learning(recipe, inputs.models, partial(first_params, recipe, inputs), inputs.base, inputs.book)
    rows = np.arange(recipe.prompts_per_step, dtype=np.int32)
    export = partial(inputs.export, place, learning.policy)
    parts = SftParts(examples, learning, rows, make_measure(place, recipe, inputs, learning), export)
    table = [("over-long completions dropped", len(answers) - len(short))]
    if equal := sum(len(answers[i]) > 1 and answers[i][0] == answers[i][1] for i in short):
        table.append(("pairs of equal completions, which teach nothing", equal))
    return open_outputs(place, recipe, inputs, learning, table, [len(short)])(parts), parts


def find_model(place: Workplace, recipe: SftRecipe) -> Path:
    """Returns the folder of the model that the run begins with; that of a new one is removed when the run ends."""
    if recipe.model.path:
        return hf.find_checkpoint(recipe.model.path)
    return place.opened.enter_context(new_model_folder(recipe.model, recipe.data, recipe.data.completion_column))


def make_learning(
    recipe: SftRecipe, models: Models, params: Callable[[], PyTree], base: PyTree, book: Book
) -> Supervised:
    """Combines the reference, if the loss asks for it, and the policy.

    params() returns the policy's first parameters; base: parameters that do not learn, None if all learn.
    """
    mesh, needed, at_once = models.mesh, recipe.loss_columns, recipe.sizes.at_once
    learns = policy_parameters(models, params, base, recipe.seed)
    scorers = make_scorers(models.model, Sampling(), mesh, needed, at_once=at_once, exact=False, base=learns.base)
    policy = policy_learner(recipe, models, update.policy_objective(models.model, recipe.loss, Sampling()), learns)
    reference = make_reference(models, policy, learns, None) if "ref_logprobs" in needed else None
    return Supervised(mesh, scorers, policy, reference, book)


def first_params(recipe: SftRecipe, inputs: Inputs) -> PyTree:
    """Returns the parameters that the run begins with, from a folder or new."""
    model, mesh = inputs.models.model, inputs.models.mesh
    if recipe.model.path:
        return inputs.params()
    init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes, mesh))
    return init(keys.key(recipe.seed))


def make_measure(
    place: Workplace, recipe: SftRecipe, inputs: Inputs, learning: Supervised
) -> Callable[[States], dict[str, float]]:
    """Returns `measure(states)` -> metrics of all evaluation sets. Raises: UserError, as `make_comparison`."""
    compared = [section for section, problems in recipe.eval_sets.items() if not problems.functions]
    measures = [make_comparison(recipe, inputs, learning, section) for section in compared]
    if len(compared) < len(recipe.eval_sets):
        measures.append(make_sampled(place, recipe, inputs, learning))
    return lambda states: dict(chain(*(measure(states).items() for measure in measures)))


def make_sampled(
    place: Workplace, recipe: SftRecipe, inputs: Inputs, learning: Supervised
) -> Callable[[States], dict[str, float]]:
    """Returns `measure(states)` -> metrics of greedy completions of the held-out problems."""
    engine = Sampler(
        inputs.models.model,
        learning.mesh,
        max_completion_tokens=recipe.rollout.max_completion_tokens,
        stop_ids=inputs.stop_ids,
        pad_id=inputs.tokenizer.pad_token_id,
        max_sequences=recipe.sizes.sequences_per_step,
    )
    evaluation = make_evaluation(place, recipe, inputs)

    def measure(states: States) -> dict[str, float]:
        engine.update_weights(learning.policy.all_parameters(states["policy"]))
        measured = evaluation(engine)
        engine.release()  # updates need the memory of the gathered weights
        return measured

    return measure


def make_comparison(
    recipe: SftRecipe, inputs: Inputs, learning: Supervised, section: str
) -> Callable[[States], dict[str, float]]:
    """Returns `measure(states)` -> the share of held-out pairs whose chosen completion has the larger reward.

    section: of the pairs. Raises: UserError, if a completion is longer than the limit.
    """
    dataset, tokenizer, length = inputs.held_out[section], inputs.tokenizer, recipe.rollout.max_completion_tokens
    answers = tokenize_answers(dataset, tokenizer, recipe.data, length, inputs.stop_ids)
    if () in answers:
        raise UserError(
            f"{section}.source row {dataset.numbers[answers.index(())]}: a completion is longer than "
            f"rollout.max_completion_tokens = {length}: raise it, or leave the row out"
        )
    count, size = len(answers), recipe.prompts_per_step
    collate = partial(make_batch, dataset, answers, range(count), length, tokenizer.pad_token_id)
    logprobs_of = forward.make_logprob_fn(inputs.models.model, Sampling(), learning.mesh, recipe.sizes.at_once)
    preferred = jax.jit(partial(count_preferred, recipe.loss))

    def measure(states: States) -> dict[str, float]:
        params, right = learning.policy.all_parameters(states["policy"]), 0
        with progress.task("evaluating pairs", count) as shown:
            for start in range(0, count, size):
                # All batches have one shape: the last pair fills the last of them, and does not count there.
                rows = [min(i, count - 1) for i in range(start, start + size)]
                batch = sharding.shard_batch(collate(rows[distributed.part(size)]), learning.mesh)
                batch = learning.scored(states, batch)
                right += int(preferred(logprobs_of(params, batch), batch, min(size, count - start)))
                shown.advance(min(size, count - start))
        return metrics_of(section, right / count, count)

    return measure


def count_preferred(loss: Call, logprobs: Array, batch: Batch, count: AnyArray) -> jax.Array:
    """Returns how many of the first `count` pairs of a batch have a larger reward of the chosen completion."""
    _, metrics = loss(logprobs, batch, **batch.columns)
    return jnp.sum(jnp.where(jnp.arange(len(logprobs)) < count, metrics[ACCURACY_METRIC][:, 0, 0], 0.0))


def train(session: Session, parts: SftParts) -> Iterator[dict[str, Any]]:
    """Fine-tunes from the current step to the end, and yields the records of metrics.jsonl, one step late."""
    return loop.run(session, partial(sft_step, session, parts))


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Fine-tunes in this process and yields records, as `train.steps`."""
    with build(config, workdir, signals=signals) as (session, parts):
        yield from train(session, parts)


def main() -> None:
    shipped = ("sft", "search_sft", "pictures_sft", "dpo", "simpo")
    given = parse_arguments("jaxrl_llm.sft", "Supervised fine-tuning, also on pairs of completions.", shipped=shipped)
    with distributed.joined(given.distributed), build(given.config, given.workdir, command=True) as (session, parts):
        for _ in train(session, parts):
            pass


if __name__ == "__main__":
    run_main(main)
