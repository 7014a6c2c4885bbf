"""Evaluation: all problems are one stream through the engine, whose completions end one after the other."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from model_parts import ONE, parts, sampler
from test_episodes import Echo
from tiny import mesh_of

from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.settings import metrics_of
from jaxrl_llm.machine import progress
from jaxrl_llm.rollout import scores
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.evaluation import GREEDY_PLAN, evaluate, mean_score, whole_batches
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.rollout.jax import compiled
from jaxrl_llm.rollout.jax.sizes import PageKind, sizes_of
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.session import Session
from jaxrl_llm.structs import Rewards

PROBLEMS, BATCH = 43, 16
engine = partial(sampler, length=12)
KEY = jax.random.key(0)


@cache
def problems() -> data.Dataset:
    tokenizer = parts()[2]
    limits = dict(max_prompt_tokens=16, overlong="error", problems=PROBLEMS)
    return data.read("arithmetic.held_out", tokenizer, convert="", **limits)


def task(environments: EnvironmentPool | None = None, judge: str = "arithmetic.accuracy") -> CompletionTask:
    return CompletionTask(parts()[2], RewardFn((judge,), (1.0,), 0), environments)


@cache
def by_batches() -> tuple[list, np.ndarray]:
    """Texts and scores of greedy batches of one size, each sampled and graded alone."""
    sampler, texts, scores = engine(), [], []
    for start in (0, BATCH, PROBLEMS - BATCH):
        prompts = data.make_prompts(problems(), range(start, start + BATCH), 0)
        graded = task().grade(*task().sample(sampler, prompts, KEY, 1, GREEDY_PLAN.sampling, "test"))
        scores += [*graded.rewards.total][len(texts) - start :]
        texts += graded.texts[len(texts) - start :]
    return texts, np.stack(scores)


@pytest.mark.parametrize(
    ("shape", "at_once"), [(ONE, 3), pytest.param((2, 2, 2), BATCH, marks=pytest.mark.slow)], ids=str
)
def test_a_stream_of_all_problems_has_the_texts_and_scores_of_batches(shape, at_once):
    graded = evaluate(engine(shape=shape, max_sequences=at_once), problems(), task(), batch=BATCH, seed=0)
    texts, scores = by_batches()
    assert graded.texts == texts
    np.testing.assert_array_equal(graded.rewards.total, scores)
    assert 0 < scores.mean() < 1 or len({*map(str, texts)}) > 9  # they differ


def test_an_evaluation_without_any_verdict_has_no_accuracy(wording):
    """0 would be taken for a ruined policy, by a health rule that goes back and by eval.patience."""
    part, none = np.array([[1.0, np.nan], [np.nan, 0.0]]), np.full((2, 2), np.nan)
    graded = [GradedCompletions([], Rewards(total, {"judge": total}), None, {}) for total in (part, none)]
    assert mean_score(graded[0]) == 0.25 and np.isnan(mean_score(graded[1]))
    some, nothing = (scores.measure_all(each, [{}, {}], None, "") for each in graded)
    assert (some["accuracy"], some["pass"]["2"]) == (0.25, 0.5)
    assert dict(scores.result_lines(some))["judge"] == "0.5 (2 without a verdict)"
    assert nothing["accuracy"] is None and dict(scores.result_lines(nothing))["accuracy"] == "–"
    said: list[str] = []
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(evaluate_every=2, steps=8), run_state=SimpleNamespace(states={}),
        trainer=SimpleNamespace(evaluate=lambda states: metrics_of("eval", mean_score(graded[len(said) == 0]), 2)),
        checkpoints=SimpleNamespace(accuracies={}), log=SimpleNamespace(print_line=said.append),
    )  # fmt: skip
    session.log.with_verdicts = partial(Log.with_verdicts, session.log)
    assert Session.evaluate(session, 2) == {} and session.checkpoints.accuracies == {}
    wording("\n".join(said))
    assert Session.evaluate(session, 4) == {"eval/accuracy": 0.25, "eval/problems": 2}


@pytest.mark.parametrize("sequences", [0, 24])
@pytest.mark.parametrize("devices", [1, 4])
def test_thousands_of_problems_have_the_programs_and_the_cache_of_a_batch(sequences, devices):
    mesh = mesh_of((1, devices, 1))
    batch = whole_batches(64, 4000, mesh)
    of = partial(sizes_of, group_size=1, prompt_width=16, completion_length=100, kind=PageKind(devices))
    whole, part = (of(count, max_sequences=min(sequences or 64, 64)) for count in (4000, batch))
    assert whole.refills and whole == replace(part, refills=True)  # and a program for prompts that begin later


def test_the_progress_advances_while_episodes_end(monkeypatch):
    shown, seen, begin, decode = [], [], progress.task, compiled.CallPrograms.decode

    @contextmanager
    def watched(name: str, total: int | None = None):
        with begin(name, total) as task:
            shown.append(task)
            yield task

    def decoded(self, *args):
        seen.append(next(task.finished for task in shown if "completions" in task.name))
        return decode(self, *args)

    monkeypatch.setattr(progress, "task", watched)
    monkeypatch.setattr(compiled.CallPrograms, "decode", decoded)
    limits = dict(most=3, tokens=8, observation_tokens=4, workers=2, timeout=0)
    pool = EnvironmentPool(parts()[2], partial(Echo, turns=2, length=1), **limits)
    evaluate(engine(length=30, max_sequences=8, observation_tokens=4), problems(), task(pool), batch=BATCH, seed=0)
    assert seen == sorted(seen) and seen[0] == 0
    assert len({*seen}) > 3 and 0 < seen[-1] < PROBLEMS
    told = {task.name.split(": ")[1]: (task.finished, task.total) for task in shown if "evaluating" in task.name}
    assert told == {"completions": (PROBLEMS, PROBLEMS), "scores": (PROBLEMS, PROBLEMS)}
