"""Supervised fine-tuning: `jaxrl sft --config configs/sft.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import Loaded, load, make_evaluation, open_outputs
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.data import columns, encoding, order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.learner import optim, update
from jaxrl_llm.learner.learning import policy_parameters
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.recipe import checks
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.session.record import Record
from jaxrl_llm.session.run import Run
from jaxrl_llm.session.signals import Stop, stop_signals
from jaxrl_llm.structs import Batch, Config, Pending, PyTree
from jaxrl_llm.train import train


def sft_step(run: Run, states: States, step: int) -> tuple[States, Record]:
    """Runs one update on the next examples. Donates the given states."""
    timer = run.log.timer()
    examples = run.actor.next()
    batch = sharding.shard_batch(examples, run.mesh)
    policy, (rows,) = run.learners["policy"], run.minibatches(step)
    policy.compile(states["policy"], batch, rows)  # may take minutes, so not in `deferred`
    with run.stop.deferred():  # a signal waits: the old states are donated, the new ones not committed
        state, metrics = policy.update(states["policy"], batch, rows)
        states, updates = {"policy": state}, [metrics | {"loss/sft": metrics["loss/total"]}]
        updated = run.log.watch(updates)
        record = Record(step, timer, int(examples.completion_mask.sum()), updates, policy.skipped(state), updated)
        run.commit(states, record)
        run.actor.push(state.params, step)
    return states, record


class Examples:
    """Batches of examples, as a `run.Source`. There is no engine, so it ignores weights."""

    def __init__(self, iterator: grain.DatasetIterator):
        self._iterator = iterator
        # _current: after the last batch read. _position: after the last batch learned from, for checkpoints.
        self._beginning = self._position = self._current = iterator.get_state()

    def reset(self, step: int, params: PyTree, pending: Pending | None = None, attempt: int = 0) -> None:
        """Continues at the position of `pending`; without it, at the start of the data. `sft` never goes back."""
        self._position = pending.position if pending else self._beginning
        self._iterator.set_state(self._position)

    def next(self) -> Batch:
        """Returns the next examples, on the host."""
        batch = next(self._iterator)
        self._current = self._iterator.get_state()
        return batch

    def finish_push(self, params: PyTree) -> dict[str, Any]:
        """Returns no metrics: there is no push to wait for."""
        return {}

    def push(self, params: PyTree, step: int) -> None:
        """Marks the last batch as learned from."""
        self._position = self._current

    def advance(self, step: int) -> None:
        """Does nothing: the iterator prefetches without a call."""

    def pending(self, seconds: float | None = None) -> Pending:
        """Returns the iterator's position after the last batch learned from."""
        return Pending(self._position, [])


@contextmanager
def build(config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False) -> Iterator[Run]:
    """Opens the run of an `sft` config, as `build.build` does for `train`. Raises: UserError."""
    with ExitStack() as opened, stop_signals(opened, signals, command) as stop:
        opened.callback(WATCHDOG.close)
        run = make_run(load(config, workdir, opened, checks.check_sft), stop)
        if command:  # here all processes have loaded their data and models, for which there is no bound
            WATCHDOG.begin(config.health.hang_minutes, distributed.end)
        yield run


def make_run(given: Loaded, stop: Stop) -> Run:
    """Builds a run of `sft`; an example is a prompt with one completion (G = 1). Raises: UserError."""
    config, model, mesh, tokenizer = given.config, given.model, given.mesh, given.tokenizer
    answers = tokenize_answers(given.dataset, tokenizer, config)
    kept = [i for i, answer in enumerate(answers) if answer.tokens]
    length = config.rollout.max_completion_tokens
    collate = partial(make_batch, given.dataset, answers, kept, length, tokenizer.pad_token_id)
    iterator = order.iterate(len(kept), config.prompts_per_step, config.seed, collate)

    def first_params() -> PyTree:
        if config.model.path:
            return given.params()
        init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes(), mesh))
        return init(jax.random.key(config.seed))

    policy = update.make_learner(
        update.policy_objective(model, losses.cross_entropy(), Sampling(), routed=model.cfg.mixture is not None),
        optim.make_optimizer(given.totals.scheduled_updates, more=optim.router_coefficients(config), **config.optim),
        mesh=mesh,
        microbatch=config.microbatch,
        aggregate=partial(losses.aggregation_weights, **config.aggregate),
        **policy_parameters(given, first_params, given.base)._asdict(),
    )
    shapes: States = {"policy": policy.shapes}
    dropped = [("over-long completions dropped", len(answers) - len(kept))]
    outputs = open_outputs(given, shapes, dropped, examples=len(kept))
    engine = Sampler(model, mesh, max_completion_tokens=length, stop_ids=given.stop_ids, pad_id=tokenizer.pad_token_id)
    evaluation = make_evaluation(given)

    def accuracy(states: States) -> float:
        engine.update_weights(policy.all_parameters(states["policy"]))
        found = evaluation(engine)
        engine.release()  # updates need the memory of the gathered weights
        return found

    return Run(
        config=config,
        mesh=mesh,
        actor=Examples(iterator),
        scorers={},
        learners={"policy": policy},
        shapes=shapes,
        stop=stop,
        assign_credit=lambda batch, *_: (batch, {}),
        reference=None,
        minibatches=lambda step: [np.arange(config.prompts_per_step, dtype=np.int32)],
        accuracy=accuracy,
        problems=len(given.held_out.rows),
        export=partial(given.export, policy),
        compilations=given.compilations,
        programs=lambda: iter(()),
        book=given.book,
        **outputs,
    )


def steps(config: Config, workdir: str | Path, *, signals: bool = False) -> Iterator[dict[str, Any]]:
    """Fine-tunes in this process and yields records, as `train.steps`."""
    with build(config, workdir, signals=signals) as run:
        yield from train(run, sft_step)


class Answer(NamedTuple):
    """Token ids of a completion, and which of them are learned: not those of an environment."""

    tokens: list[int]
    learned: list[bool]


def tokenize_answers(dataset: data.Dataset, tokenizer: Any, config: Config) -> list[Answer]:
    """Returns each row's completion with the end token, and an empty one instead of one above the limit.

    The column holds text, or the turns of an episode: each is encoded alone, as an environment does it.
    """
    column, limit = config.data.completion_column, config.rollout.max_completion_tokens
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token: name its eos_token in tokenizer_config.json")
    turns, source = [columns.turns(row[column]) for row in dataset.rows], config.data.source
    numbers = [number for number, one in zip(dataset.numbers, turns, strict=True) for _ in one]
    ids = iter(encoding.encode([text for one in turns for _, text in one], tokenizer, source, numbers=numbers))
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
    return Batch(prompts.tokens, prompts.mask, completions, mask, learned)


def main() -> None:
    given = parse_arguments("jaxrl_llm.sft", "Supervised fine-tuning.", shipped=("sft", "search_sft"))
    with distributed.joined(given.distributed), build(given.config, given.workdir, command=True) as run:
        for _ in train(run, sft_step):
            pass


if __name__ == "__main__":
    run_main(main)
