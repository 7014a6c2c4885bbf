"""Dynamic sampling: which groups are replaced, by what, and that nothing of a group is left behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import distributed, meshes, transfers
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import (
    CompletionTask,
    Samples,
    SampleSource,
    SamplingPlan,
    apply_replacements,
    episode_metrics,
    resample_groups,
)
from jaxrl_llm.session.record import source_metrics
from jaxrl_llm.structs import Prompts, Rewards, Rollouts

B, G, C = 4, 2, 3


def collate(marks: np.ndarray) -> Prompts:
    """The row of a mark has this mark in all its columns."""
    rows = [{"mark": int(m)} for m in marks]
    return Prompts(marks[:, None].astype(np.int32), np.ones((len(marks), 1), bool), rows, marks)


def sampled(number: int, signal: list[bool]) -> Samples:
    """Groups whose every entry is number * 10 + their place; those with a signal earn 0 and 1, the others 1 and 1."""
    marks = number * 10 + np.arange(B)
    completions = np.broadcast_to(marks[:, None, None], (B, G, C)).astype(np.int32)
    mask = np.ones((B, G, C), bool)
    prompts = collate(marks)
    rollouts = Rollouts(completions, mask, mask, completions.astype(np.float32), np.zeros((B, G), bool), completions)
    total = np.array([[0.0, 1.0] if s else [1.0, 1.0] for s in signal], np.float32)
    texts = [[str(m)] * G for m in marks]
    graded = GradedCompletions(texts, Rewards(total, {"mark": np.repeat(marks[:, None], G, 1)}), [], {})
    return Samples(prompts, rollouts, lambda: graded)


def refilled(*args) -> tuple[Samples, int]:
    decoder = SimpleNamespace(batch_decode=lambda ids, **_: [str(tokens[0]) for tokens in ids])
    samples, replaced = resample_groups(*args)
    return apply_replacements(samples, decoder, None), replaced


def marks(whole: Samples) -> list[int]:
    """Which group stands at each place, after checking that all of it does."""
    texts, rewards, *_ = whole.wait_for_grades()
    found = [row["mark"] for row in whole.prompts.rows]
    assert [t[0] for t in texts] == [str(m) for m in found]
    for array in (whole.prompts.tokens, whole.rollouts.completions, whole.rollouts.logprobs, rewards.channels["mark"]):
        assert [set(group.reshape(-1).tolist()) for group in array] == [{m} for m in found]
    return found


def test_groups_without_signal_are_replaced_in_order_by_fresh_ones_with_one():
    rounds = {1: sampled(1, [False, True, False, False]), 2: sampled(2, [True, True, True, True])}
    whole, replaced = refilled(sampled(0, [True, False, False, False]), rounds.__getitem__, collate, 3)
    assert marks(whole) == [0, 11, 20, 21]
    assert replaced == 3
    assert whole.replaced_rows == [1, 2, 3, 10, 12, 13]  # also those of fresh groups without a signal
    assert not whole.no_signal.any()


def test_a_group_of_a_mixture_gives_way_to_one_of_its_source_alone():
    def two_sources(number: int, signal: list[bool]) -> Samples:
        found = sampled(number, signal)
        return replace(found, prompts=replace(found.prompts, sources=["easy", "b", "easy", "b"]))

    rounds = {1: two_sources(1, [False, True, False, True]), 2: two_sources(2, [False, True, True, True])}
    whole, replaced = refilled(two_sources(0, [False, True, False, False]), rounds.__getitem__, collate, 2)
    assert (marks(whole), replaced) == ([22, 1, 2, 11], 2)  # the place 2 stays, though 13, 21 and 23 have a signal


def test_the_log_says_how_much_of_each_source_teaches():
    groups = sampled(0, [False, True, False, False])
    record = source_metrics(replace(groups, prompts=replace(groups.prompts, sources=["easy", "b", "easy", "b"])))
    assert {name: float(x) for name, x in record.items() if "reward" not in name} == {
        "source/easy/share": 0.5, "source/easy/no_signal": 1.0, "source/b/share": 0.5, "source/b/no_signal": 0.5,
    }  # fmt: skip


def test_refilling_ends_at_the_bound_and_draws_nothing_that_it_does_not_need():
    drawn = []

    def draw(i: int) -> Samples:
        drawn.append(i)
        return sampled(i, [True, False, False, False])

    whole, replaced = refilled(sampled(0, [True, False, False, False]), draw, collate, 2)
    assert (marks(whole), replaced, drawn) == ([0, 10, 20, 3], 2, [1, 2])
    whole, replaced = refilled(sampled(0, [True] * 4), draw, collate, 2)
    assert (marks(whole), replaced, drawn) == ([0, 1, 2, 3], 0, [1, 2])


def source(truncated: np.ndarray, plan: SamplingPlan, environments: Any = None) -> SampleSource:
    """A source of one batch, with an engine whose completions are all zeros."""

    def sample(prompts: Prompts, key: object, **_: object) -> Rollouts:
        mask, zeros = np.ones((B, G, C), bool), np.zeros((B, G, C), np.int32)
        return Rollouts(zeros, mask, mask, zeros.astype(np.float32), truncated, zeros)

    task = CompletionTask(None, SimpleNamespace(start=lambda grade: grade), environments)
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    prompts = iter([sampled(0, [True] * B).prompts])
    return SampleSource(plan, SimpleNamespace(sample=sample), prompts, collate, task, mesh, C)


def test_completions_that_the_limit_cut_are_left_out_if_asked():
    cut = np.array([[True, False]] * B)
    for left_out in (False, True):
        whole = source(cut, SamplingPlan(G, Sampling(), masks_truncated=left_out)).sample(jax.random.key(0))
        assert whole.rollouts.completion_mask.all()
        np.testing.assert_array_equal(whole.trained[..., 0], ~(cut & left_out))


def test_a_group_that_the_limit_cut_as_a_whole_has_no_signal_if_left_out():
    groups = sampled(0, [True, True, False, True])
    cut = np.array([[True, True], [True, False], [False, False], [False, False]])
    for left_out in (False, True):
        found = replace(groups, rollouts=replace(groups.rollouts, truncated=cut), masks_truncated=left_out)
        assert found.no_signal.tolist() == [left_out, False, True, False]


def test_metrics_of_environments_of_another_process_alone_are_0_here(monkeypatch):
    """Otherwise the trees that the processes save would differ, and so would the columns of their rewards."""
    monkeypatch.setattr(distributed, "exchange", lambda own, channel: [own, ["sold", "turns"]])
    one = np.ones((B, G), np.float32)
    batch = SimpleNamespace(truncated=one > 1, metrics=lambda: {"turns": one, "bought": one}, finish=lambda: None)
    environments = SimpleNamespace(start_batch=lambda rows, group: batch)
    made = source(one > 1, SamplingPlan(G, Sampling(), greedy=True), environments)
    kept = transfers.to_host(made.to_checkpoint(made.sample(jax.random.key(0))))
    for rollouts in (kept["rollouts"], kept["greedy"]):
        assert {name: x.mean() for name, x in rollouts.episodes.items()} == {"bought": 1, "sold": 0, "turns": 1}
    assert episode_metrics(kept["rollouts"])[0][0] == {"bought": 1, "sold": 0, "turns": 1}
