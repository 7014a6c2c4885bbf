"""Supervised fine-tuning: `jaxrl sft --config configs/sft.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import load, make_evaluation, open_outputs, opened_run, policy_learner
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.data import columns, encoding, order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.settings import DataSettings
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.learner import update
from jaxrl_llm.learner.learning import policy_parameters
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import distributed, sharding
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
from jaxrl_llm.structs import AnyArray, Batch, Config, PartState, PyTree, StatefulPart


@dataclass
class SftParts:
    """The parts of a step of `sft`. Only the policy has states."""

    examples: Examples
    policy: Learner
    mesh: Mesh
    rows: AnyArray  # of an update: all examples
    book: Book
    accuracy: Callable[[States], float]  # on the evaluation's problems
    problems: int
    export: Callable[[States], None]  # writes the policy as a folder of Hugging Face

    @property
    def kept(self) -> Mapping[str, StatefulPart]:
        """What a checkpoint keeps beside the states."""
        return {SAMPLES: self.examples}

    def shapes(self) -> States:
        """Returns the states of a checkpoint, as shapes with shardings."""
        return {"policy": self.policy.shapes}

    def first(self) -> States:
        """Returns the states at step 0."""
        return {"policy": self.policy.init()}

    def restored(self, states: States, attempt: int) -> States:
        """Returns the states of a checkpoint, which are complete."""
        return states

    def begin(self, states: States, step: int, attempt: int) -> States:
        """Returns the states: only the steps use them."""
        return states

    def rest(self) -> None:
        """Returns at once: only the steps use the states."""


def sft_step(session: Session, parts: SftParts, states: States, step: int) -> tuple[States, Record]:
    """Runs one update on the next examples. Donates the given states."""
    timer, policy = session.log.timer(), parts.policy
    examples = parts.examples.next()
    batch = sharding.shard_batch(examples, parts.mesh)
    program = policy.described("", states["policy"], batch, parts.rows)
    # Once, because all batches have one shape. It may take minutes, so not in `deferred`.
    parts.book.ready(program.phase, batch.completions.shape, lambda shape: program.compile())
    with session.stop.deferred():  # a signal waits: the old states are donated, the new ones not committed
        state, metrics = policy.update(states["policy"], batch, parts.rows)
        states, updates = {"policy": state}, [metrics | {"loss/sft": metrics["loss/total"]}]
        updated = session.log.watch(updates)
        record = Record(step, timer, int(examples.completion_mask.sum()), updates, {}, updated)
        session.commit(states, record)
        parts.examples.learned()
    return states, record


class Examples:
    """Batches of examples, and the position in them."""

    def __init__(self, iterator: grain.DatasetIterator):
        self._iterator = iterator
        # _position: after the last batch learned from, for checkpoints.
        self._beginning = self._position = iterator.get_state()

    def next(self) -> Batch:
        """Returns the next examples, on the host."""
        return next(self._iterator)

    def learned(self) -> None:
        """Marks the last batch as learned from: the iterator stands behind it."""
        self._position = self._iterator.get_state()

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the position after the last batch learned from."""
        return PartState({"position": self._position})

    def load(self, state: PartState | None) -> None:
        """Goes on at the position of a state; None: at the start of the data."""
        self._position = state.notes["position"] if state else self._beginning
        self._iterator.set_state(self._position)


def build(
    config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False
) -> AbstractContextManager[tuple[Session, SftParts]]:
    """Opens the run of an `sft` config, as `build.build` does for `train`. Raises: UserError."""
    return opened_run(config, workdir, read_sft, make_run, signals=signals, command=command)


def make_run(place: Workplace, recipe: SftRecipe) -> tuple[Session, SftParts]:
    """Builds a run of `sft`; an example is a prompt with one completion (G = 1). Raises: UserError."""
    inputs = load(place, recipe, partial(find_model, place, recipe))
    models, tokenizer, length = inputs.models, inputs.tokenizer, recipe.rollout.max_completion_tokens
    model, mesh = models.model, models.mesh
    answers = tokenize_answers(inputs.dataset, tokenizer, recipe.data, length)
    short = [i for i, answer in enumerate(answers) if answer.tokens]
    collate = partial(make_batch, inputs.dataset, answers, short, length, tokenizer.pad_token_id)
    iterator = order.iterate(len(short), recipe.prompts_per_step, recipe.seed, collate)
    policy = make_policy(recipe, inputs)
    engine = Sampler(
        model,
        mesh,
        max_completion_tokens=length,
        stop_ids=inputs.stop_ids,
        pad_id=tokenizer.pad_token_id,
        max_sequences=recipe.sizes.sequences_per_step,
    )
    evaluation = make_evaluation(place, recipe, inputs)

    def accuracy(states: States) -> float:
        engine.update_weights(policy.all_parameters(states["policy"]))
        measured = evaluation(engine)
        engine.release()  # updates need the memory of the gathered weights
        return measured

    rows, problems = np.arange(recipe.prompts_per_step, dtype=np.int32), len(inputs.held_out.rows)
    export = partial(inputs.export, place, policy)
    parts = SftParts(Examples(iterator), policy, mesh, rows, inputs.book, accuracy, problems, export)
    dropped = [("over-long completions dropped", len(answers) - len(short))]
    return open_outputs(place, recipe, inputs, parts, dropped, [len(short)])(parts), parts


def find_model(place: Workplace, recipe: SftRecipe) -> Path:
    """Returns the folder of the model that the run begins with; that of a new one is removed when the run ends."""
    if recipe.model.path:
        return hf.find(recipe.model.path)
    return place.opened.enter_context(new_model_folder(recipe.model, recipe.data, recipe.data.completion_column))


def make_policy(recipe: SftRecipe, inputs: Inputs) -> Learner:
    """Builds the learner of the cross-entropy of completions."""
    model, mesh = inputs.models.model, inputs.models.mesh

    def first_params() -> PyTree:
        if recipe.model.path:
            return inputs.params()
        init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes(), mesh))
        return init(jax.random.key(recipe.seed))

    objective = update.policy_objective(model, losses.cross_entropy, Sampling())
    learns = policy_parameters(inputs.models, first_params, inputs.base, recipe.seed)
    return policy_learner(recipe, inputs.models, objective, learns)


def train(session: Session, parts: SftParts) -> Iterator[dict[str, Any]]:
    """Fine-tunes from the current step to the end, and yields the records of metrics.jsonl, one step late."""
    return loop.run(session, partial(sft_step, session, parts))


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Fine-tunes in this process and yields records, as `train.steps`."""
    with build(config, workdir, signals=signals) as (session, parts):
        yield from train(session, parts)


class Answer(NamedTuple):
    """Token ids of a completion, and which of them are learned: not those of an environment."""

    tokens: list[int]
    learned: list[bool]


def tokenize_answers(dataset: data.Dataset, tokenizer: Any, settings: DataSettings, limit: int) -> list[Answer]:
    """Returns each row's completion with the end token, and an empty one instead of one above the limit of tokens.

    The column holds text, or the turns of an episode: each is encoded alone, as an environment does it.
    """
    column = settings.completion_column
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token: name its eos_token in tokenizer_config.json")
    turns, source = [columns.turns(row[column]) for row in dataset.rows], settings.source
    numbers = [number for number, one in zip(dataset.numbers, turns, strict=True) for _ in one]
    encoded = encoding.encode([text for one in turns for _, text in one], tokenizer, source, numbers=numbers)
    if dataset.images:
        dataset.images.check_completions(encoded, tokenizer, source, numbers)
    ids = iter(encoded)
    end, answers = Answer([tokenizer.eos_token_id], [True]), []
    for one in turns:
        parts = [Answer(tokens.tolist(), [own] * len(tokens)) for (own, _), tokens in zip(one, ids, strict=False)]
        tokens, learned = (list(chain(*x)) for x in zip(*parts, end, strict=True))
        answers.append(Answer(tokens, learned))
    if all(len(answer.tokens) > limit for answer in answers):
        raise UserError(f"all completions are longer than rollout.max_completion_tokens = {limit}: raise it")
    return [answer if len(answer.tokens) <= limit else Answer([], []) for answer in answers]


def make_batch(
    dataset: data.Dataset, answers: list[Answer], kept: list[int], length: int, pad_id: int, indices: Sequence[int]
) -> Batch:
    """Makes a Batch with G = 1 from the examples kept[indices], on the host."""
    rows = [kept[i] for i in indices]
    prompts = data.make_prompts(dataset, rows, pad_id)
    completions = np.full((len(rows), 1, length), pad_id, np.int32)
    mask, learned = np.zeros(completions.shape, bool), np.zeros(completions.shape, bool)
    for b, i in enumerate(rows):
        used = slice(len(answers[i].tokens))
        completions[b, 0, used], mask[b, 0, used], learned[b, 0, used] = answers[i].tokens, True, answers[i].learned
    return Batch(prompts.tokens, prompts.mask, completions, mask, learned, images=prompts.images)


def main() -> None:
    given = parse_arguments("jaxrl_llm.sft", "Supervised fine-tuning.", shipped=("sft", "search_sft", "pictures_sft"))
    with distributed.joined(given.distributed), build(given.config, given.workdir, command=True) as (session, parts):
        for _ in train(session, parts):
            pass


if __name__ == "__main__":
    run_main(main)
