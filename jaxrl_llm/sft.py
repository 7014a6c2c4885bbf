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

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.algorithms.supervised import ACCURACY_METRIC
from jaxrl_llm.build import load, make_evaluation, open_run_session, opened_run, policy_learner
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.config.records import Call
from jaxrl_llm.data import order
from jaxrl_llm.data.examples import Examples, make_batch, tokenize_answers
from jaxrl_llm.data.settings import metrics_of
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.learner import forward, update
from jaxrl_llm.learner.learning import Models, TrainedModels, make_reference, policy_parameters
from jaxrl_llm.learner.scorers import States, make_scorers
from jaxrl_llm.machine import distributed, keys, progress, sharding, transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.models import hf
from jaxrl_llm.recipe import read_sft
from jaxrl_llm.recipe.recipe import SftRecipe
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.session import loop
from jaxrl_llm.session.checkpoint import SAMPLES
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.opening import WorkDirectory
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.saved_run import new_model_folder
from jaxrl_llm.session.session import Session
from jaxrl_llm.structs import AnyArray, Array, Batch, Config, PyTree, StatefulPart


@dataclass(kw_only=True)
class SupervisedLearning(TrainedModels):
    """Scoring and updates of a step of `sft`, in which only the policy learns."""

    shape_cache: ShapeCache  # says which programs are already compiled for the shape of a batch

    def scored(self, states: States, batch: Batch) -> Batch:
        """Returns a batch with the columns that the loss needs, such as ref_logprobs."""
        columns: dict[str, Array] = {}
        for name, scorer in self.scorers.items():
            self._ensure_compiled(scorer.program_of(name, states, batch), batch)
            columns |= scorer.score(states, batch)
        return replace(batch, columns=columns)

    def programs(self, batch: Batch, loss_column: PyTree, rows: AnyArray) -> Iterator[Program]:
        """Yields the programs of a step. The arguments may be arrays or only their shapes.

        loss_column: a column [B, G, C] that a scorer adds to the batch. rows: indices of the prompts of an update.
        """
        states = self.device_shapes()
        for name, scorer in self.scorers.items():
            if program := scorer.program_of(name, states, batch):
                yield program
        columns = {column: loss_column for scorer in self.scorers.values() for column in scorer.columns}
        yield self.learners["policy"].program_of("", states["policy"], replace(batch, columns=columns), rows)

    def compile(self, states: States, batch: Batch, rows: AnyArray) -> None:
        """Compiles the update, which may take minutes. Raises: UserError, if it does not fit the memory."""
        self._ensure_compiled(self.learners["policy"].program_of("", states["policy"], batch, rows), batch)

    def _ensure_compiled(self, program: Program | None, batch: Batch) -> None:
        # This compiles once per phase, because all batches have the same shape.
        if program:
            self.shape_cache.ensure_compiled(program.phase, batch.completions.shape, lambda shape: program.compile())


@dataclass
class SftParts:
    """The parts of a step of `sft`."""

    examples: Examples
    learning: SupervisedLearning
    rows: AnyArray  # indices of the examples of an update: all of them
    evaluate: Callable[[States], dict[str, float]]  # states -> metrics of all evaluation sets
    export: Callable[[States], None]  # writes the policy as a Hugging Face folder

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart]:
        """Parts that a checkpoint holds besides the models' states: the position in the data."""
        return {SAMPLES: self.examples}

    def start(self, states: States, step: int, attempt: int) -> States:
        """Returns the states, because no other thread uses them between the steps."""
        return states

    def wait_until_idle(self) -> None:
        """Returns immediately, because no other thread uses the states."""

    def unlearned_text(self) -> str:
        """Returns "", because no example is left behind."""
        return ""


def sft_step(session: Session, parts: SftParts, states: States, step: int) -> tuple[States, Record]:
    """Runs one update on the next examples. Donates the given states."""
    timer, learning = session.log.timer(), parts.learning
    examples = parts.examples.next()
    batch = learning.scored(states, transfers.shard_batch(examples, learning.mesh))
    # Compilation stays outside of `deferred`, because it may take minutes in which a signal must work.
    learning.compile(states, batch, parts.rows)
    # A signal waits in this block, because the old states are donated and the new states are not committed yet.
    with session.stop.deferred():
        state, metrics = learning.learners["policy"].update(states["policy"], batch, parts.rows)
        states, updates = states | {"policy": state}, [metrics | {"loss/sft": metrics["loss/total"]}]
        updated = session.log.watch(updates)
        tokens = int(examples.completion_mask.sum())
        record = Record(step, timer, tokens, updates=updates, metrics={}, updated=updated)
        session.commit(states, record)
        parts.examples.learned()
    return states, record


def build(
    config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False
) -> AbstractContextManager[tuple[Session, SftParts]]:
    """Opens the run of an `sft` config, as `build.build` does for `train`. Raises: UserError."""
    return opened_run(config, workdir, read_sft, make_run, signals=signals, command=command)


def make_run(work_directory: WorkDirectory, recipe: SftRecipe) -> tuple[Session, SftParts]:
    """Builds a run of `sft`; an example is a prompt with one completion, or with a pair. Raises: UserError."""
    # The examples are tokenized once. A row whose completion exceeds the limit has an empty answer, and is not trained.
    inputs = load(work_directory, recipe, partial(find_model, work_directory, recipe))
    tokenizer, length = inputs.tokenizer, recipe.rollout.max_completion_tokens
    answers = tokenize_answers(inputs.dataset, tokenizer, recipe.data, length, inputs.stop_ids)
    trained_rows = [i for i, row in enumerate(answers) if row]
    pad_id = tokenizer.pad_token_id
    collate = partial(make_batch, inputs.dataset, answers, kept_rows=trained_rows, length=length, pad_id=pad_id)
    examples = Examples(order.iterate(len(trained_rows), recipe.prompts_per_step, recipe.seed, collate))
    learning = make_learning(
        recipe, inputs.models, partial(first_params, recipe, inputs), inputs.base, inputs.shape_cache
    )
    rows = np.arange(recipe.prompts_per_step, dtype=np.int32)
    export = partial(inputs.export, work_directory, learning.learners["policy"])
    parts = SftParts(examples, learning, rows, make_evaluate(work_directory, recipe, inputs, learning), export)
    # The banner counts what the run does not learn from, because nothing may be dropped silently.
    banner_rows = [("over-long completions dropped", len(answers) - len(trained_rows))]
    if equal_pairs := sum(len(answers[i]) > 1 and answers[i][0] == answers[i][1] for i in trained_rows):
        banner_rows.append(("pairs of equal completions, which have no gradient", equal_pairs))
    session = open_run_session(
        work_directory=work_directory,
        recipe=recipe,
        inputs=inputs,
        models=learning,
        banner_rows=banner_rows,
        counts=[len(trained_rows)],
    )
    session.trainer = parts
    return session, parts


def find_model(work_directory: WorkDirectory, recipe: SftRecipe) -> Path:
    """Returns the folder of the initial model. A model without a path gets a folder that exists during the run only."""
    if recipe.model.path:
        return hf.find_checkpoint(recipe.model.path)
    return work_directory.resources.enter_context(
        new_model_folder(recipe.model, recipe.data, recipe.data.completion_column)
    )


def make_learning(
    recipe: SftRecipe, models: Models, params: Callable[[], PyTree], base: PyTree, shape_cache: ShapeCache
) -> SupervisedLearning:
    """Builds the policy's learner, and the reference if the loss needs one.

    params() -> initial parameters of the policy. base: frozen parameters under adapters, None if all parameters learn.
    """
    mesh, needed_columns, microbatch = models.mesh, recipe.loss_columns, recipe.sizes.at_once
    trained_parameters = policy_parameters(models, params, base, recipe.seed)
    scorers = make_scorers(
        models.model, Sampling(), mesh, needed_columns, microbatch=microbatch, exact=False, base=trained_parameters.base
    )
    objective = update.policy_objective(models.model, recipe.loss, Sampling())
    policy = policy_learner(recipe, mesh, objective, trained_parameters)
    reference = make_reference(models, policy, trained_parameters, None) if "ref_logprobs" in needed_columns else None
    return SupervisedLearning(
        mesh=mesh, scorers=scorers, learners={"policy": policy}, reference=reference, shape_cache=shape_cache
    )


def first_params(recipe: SftRecipe, inputs: Inputs) -> PyTree:
    """Returns the initial parameters, from the model's folder or random."""
    model, mesh = inputs.models.model, inputs.models.mesh
    if recipe.model.path:
        return inputs.params()
    init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes, mesh))
    return init(keys.key(recipe.seed))


def make_evaluate(
    work_directory: WorkDirectory, recipe: SftRecipe, inputs: Inputs, learning: SupervisedLearning
) -> Callable[[States], dict[str, float]]:
    """Returns evaluate(states) -> metrics of all evaluation sets.

    A set of preference pairs is evaluated by comparing completions, and any other set by sampling from the policy.
    Raises: UserError, if a held-out completion of a pair is longer than config.rollout.max_completion_tokens.
    """
    # A set without a reward function holds preference pairs.
    pair_sections = [section for section, problems in recipe.eval_sets.items() if not problems.functions]
    evaluations = [make_pair_evaluation(recipe, inputs, learning, section) for section in pair_sections]
    if len(pair_sections) < len(recipe.eval_sets):
        evaluations.append(make_sampled_evaluation(work_directory, recipe, inputs, learning))
    return lambda states: dict(chain(*(evaluate(states).items() for evaluate in evaluations)))


def make_sampled_evaluation(
    work_directory: WorkDirectory, recipe: SftRecipe, inputs: Inputs, learning: SupervisedLearning
) -> Callable[[States], dict[str, float]]:
    """Returns evaluate(states) -> metrics of greedy completions for the held-out problems."""
    engine = Sampler(
        inputs.models.model,
        learning.mesh,
        max_completion_tokens=recipe.rollout.max_completion_tokens,
        stop_ids=inputs.stop_ids,
        pad_id=inputs.tokenizer.pad_token_id,
        max_sequences=recipe.sizes.sequences_per_step,
    )
    evaluation = make_evaluation(work_directory, recipe, inputs)

    def evaluate(states: States) -> dict[str, float]:
        engine.update_weights(learning.policy(states))
        metrics = evaluation(engine)
        engine.release()  # frees the gathered weights, because updates need their memory
        return metrics

    return evaluate


def make_pair_evaluation(
    recipe: SftRecipe, inputs: Inputs, learning: SupervisedLearning, section: str
) -> Callable[[States], dict[str, float]]:
    """Returns evaluate(states) -> share of held-out pairs whose chosen completion has the larger implicit reward.

    section: config section of the pairs. Raises: UserError, if a completion exceeds rollout.max_completion_tokens.
    """
    dataset, tokenizer, length = inputs.held_out[section], inputs.tokenizer, recipe.rollout.max_completion_tokens
    answers = tokenize_answers(dataset, tokenizer, recipe.data, length, inputs.stop_ids)
    if () in answers:  # the empty answer stands for a completion that is too long
        raise UserError(
            f"config.{section}.source: a completion of row {dataset.numbers[answers.index(())]} is longer than "
            f"config.rollout.max_completion_tokens = {length}: raise the limit, or remove the row"
        )
    pair_count, batch_size = len(answers), recipe.prompts_per_step
    pad_id = tokenizer.pad_token_id
    collate = partial(make_batch, dataset, answers, kept_rows=range(pair_count), length=length, pad_id=pad_id)
    logprobs_of = forward.make_logprob_fn(inputs.models.model, Sampling(), learning.mesh, recipe.sizes.at_once)
    preferred = jax.jit(partial(count_preferred, recipe.loss))

    def evaluate(states: States) -> dict[str, float]:
        params, correct_pairs = learning.policy(states), 0
        with progress.task("evaluating pairs", pair_count) as progress_bar:
            for start in range(0, pair_count, batch_size):
                # All batches have the same shape, so copies of the last pair fill the last batch. They do not count.
                rows = [min(i, pair_count - 1) for i in range(start, start + batch_size)]
                counted_pairs = min(batch_size, pair_count - start)
                batch = transfers.shard_batch(collate(rows[distributed.part(batch_size)]), learning.mesh)
                batch = learning.scored(states, batch)
                correct_pairs += int(preferred(logprobs_of(params, batch), batch, counted_pairs))
                progress_bar.advance(counted_pairs)
        return metrics_of(section, correct_pairs / pair_count, pair_count)

    return evaluate


def count_preferred(loss: Call, logprobs: Array, batch: Batch, count: AnyArray) -> jax.Array:
    """Returns in how many of the first `count` pairs of a batch the chosen completion has the larger reward."""
    _, metrics = loss(logprobs, batch, **batch.columns)
    return jnp.sum(jnp.where(jnp.arange(len(logprobs)) < count, metrics[ACCURACY_METRIC][:, 0, 0], 0.0))


def train(session: Session, parts: SftParts) -> Iterator[dict[str, Any]]:
    """Fine-tunes from the current step to the end, and yields the records of metrics.jsonl, one step late."""
    return loop.run(session, partial(sft_step, session, parts))


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Fine-tunes in this process, resumes a run in `workdir` if it holds one, and yields the records of metrics.jsonl.

    signals: True to save the run and raise KeyboardInterrupt also after SIGTERM or when the terminal closes.
    """
    with build(config, workdir, signals=signals) as (session, parts):
        yield from train(session, parts)


def main() -> None:
    shipped = ("sft", "search_sft", "pictures_sft", "dpo", "simpo")
    arguments = parse_arguments(
        "jaxrl_llm.sft", "Supervised fine-tuning, also on pairs of completions.", shipped=shipped
    )
    with (
        distributed.join_processes(arguments.distributed),
        build(arguments.config, arguments.workdir, command=True) as (session, parts),
    ):
        for _ in train(session, parts):
            pass


if __name__ == "__main__":
    run_main(main)
