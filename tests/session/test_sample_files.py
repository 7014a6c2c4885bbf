"""The files of a run's samples: what they hold, which steps have one, and what a killed process leaves."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket, disk
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.sample_files import SampledTask, SampleFiles
from jaxrl_llm.structs import Prompts, PromptSizes, Rewards, Rollouts, Tree

PAD = 7


class Tokenizer(SimpleNamespace):
    """Decodes every completion to an empty text."""

    pad_token_id = PAD

    def batch_decode(self, rows: list, **given: object) -> list[str]:
        return [""] * len(rows)


DATASET = SimpleNamespace(width=4, sizes=PromptSizes(4), images=None, ids=[[1, 2, 3, 4]] * 99, rows=[{}] * 99, parts={})
TASK = SampledTask(DATASET, Tokenizer())  # pyright: ignore[reportArgumentType]


def make_samples(seed: int = 0, b: int = 3, g: int = 2, c: int = 5) -> Samples:
    """Samples of an episode with an observation, a greedy reward, and a reward function that abstains once."""
    draw = np.random.default_rng(seed)
    mask = np.arange(c) < draw.integers(1, c + 1, (b, g, 1))
    rollouts = Rollouts(
        completions=np.where(mask, draw.integers(0, 2**31 - 1, mask.shape), PAD).astype(np.int32),
        completion_mask=mask,
        loss_mask=mask & (np.arange(c) != 1),
        logprobs=np.where(mask, draw.normal(size=mask.shape), 0).astype(np.float32),
        truncated=mask[..., -1],
        versions=np.where(mask, draw.integers(0, 9, mask.shape), 0).astype(np.int32),
        episodes={"turns": draw.normal(size=(b, g)).astype(np.float32)},
    )
    total = draw.normal(size=(b, g)).astype(np.float32)
    total[0, 0] = np.nan
    rewards = Rewards(total, {"judge.score": total}, greedy=total[:, :1], greedy_lengths=np.full((b, 1), 4))
    prompts = Prompts(np.zeros((b, 4), np.int32), np.ones((b, 4), bool), [{}] * b, np.arange(b, dtype=np.int32) + 20)
    graded = GradedCompletions([[""] * g] * b, rewards, [], {"judge.score/asked": 6.0})
    return Samples(prompts, rollouts, lambda: graded, metrics={"groups/replaced": np.float32(2)})


@pytest.mark.parametrize("kind", ["", "tree", "turns"])
def test_a_file_returns_the_samples_bit_for_bit(tmp_path, kind):
    files, samples = SampleFiles(tmp_path / "samples", every=1), make_samples()
    mask = samples.rollouts.completion_mask
    if kind == "turns":
        turns = np.where(mask, np.arange(5), -1).astype(np.int32), np.where(mask, 0.5, np.nan).astype(np.float32)
        samples = replace(samples, rollouts=replace(samples.rollouts, turn_numbers=turns[0], turn_rewards=turns[1]))
    if kind == "tree":
        tree = Tree.chains(mask)
        tree = replace(tree, previous=np.where(mask, -1, tree.previous), depths=np.where(mask, 0, tree.depths))
        samples = replace(samples, rollouts=replace(samples.rollouts, tree=tree))
    files.write(3, samples)
    stored = files.read(3, TASK)
    for one, other in ((samples.rollouts, stored.rollouts), (samples.rewards(), stored.rewards())):
        for field in fields(one):
            jax.tree.map(np.testing.assert_array_equal, getattr(one, field.name), getattr(other, field.name))
            kinds = [jax.tree.map(lambda x: x.dtype, getattr(x, field.name)) for x in (one, other)]
            assert kinds[0] == kinds[1], field.name
    assert stored.prompts.numbers.tolist() == [20, 21, 22]
    graded = stored.wait_for_grades()
    assert (stored.metrics, graded.metrics) == ({"groups/replaced": 2.0}, {"judge.score/asked": 6.0})


@pytest.mark.parametrize(("every", "kept"), [(0, set()), (1, {1, 2, 3, 4, 5}), (2, {1, 3, 5}), (9, {1})])
def test_each_nth_step_has_a_file_from_the_first_one_on(tmp_path, every, kept):
    files = SampleFiles(tmp_path / "samples", every)
    for step in range(1, 6):
        files.write(step, make_samples())
    assert files.steps() == kept


def test_a_resumed_run_replaces_the_files_of_later_steps(tmp_path):
    files = SampleFiles(tmp_path / "samples", every=1)
    for step in (2, 10, 11):
        files.write(step, make_samples())
    (tmp_path / "samples" / "notes.txt").touch()  # a file of the user stays
    files.remove_after(10)
    assert files.steps() == {2, 10} and (tmp_path / "samples" / "notes.txt").exists()
    files.write(10, make_samples(seed=1))
    assert files.steps() == {2, 10}
    assert (files.read(10, TASK).rollouts.completions == make_samples(seed=1).rollouts.completions).all()


def test_a_write_that_is_killed_leaves_no_file_that_counts(tmp_path, monkeypatch):
    files = SampleFiles(tmp_path / "samples", every=1)

    def killed(*names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write(1, make_samples())
    assert files.steps() == set() and [*(tmp_path / "samples").iterdir()]


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_cut_file_is_refused_in_one_line(tmp_path, kept):
    files = SampleFiles(tmp_path / "samples", every=1)
    files.write(1, make_samples())
    (file,) = (tmp_path / "samples").iterdir()
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(UserError, match="step 1") as refused:
        files.read(1, TASK)
    assert "\n" not in str(refused.value)


def test_the_files_of_all_processes_are_one_step(tmp_path, monkeypatch):
    files, parts = SampleFiles(tmp_path / "samples", every=1), [make_samples(seed) for seed in (0, 1)]
    monkeypatch.setattr("jaxrl_llm.machine.distributed.count", lambda: 2)
    monkeypatch.setattr("jaxrl_llm.machine.distributed.exchange", lambda *given: None)
    for i, part in enumerate(parts):
        monkeypatch.setattr("jaxrl_llm.machine.distributed.index", lambda i=i: i)
        files.write(1, part)
    joined = np.concatenate([part.rollouts.completions for part in parts])
    np.testing.assert_array_equal(files.read(1, TASK).rollouts.completions, joined)
    (Path(tmp_path) / "samples" / "1-1.npz").unlink()
    with pytest.raises(UserError, match="1 of 2 files"):
        files.read(1, TASK)


def test_the_files_of_a_bucket_are_objects_and_stay_out_of_copies_of_a_run(cloud):
    address = f"gs://bucket/{cloud.name}"
    files = SampleFiles(bucket.as_path(address) / "samples", every=1)
    files.write(1, make_samples())
    files.write(2, make_samples(seed=1))
    files.remove_after(1)
    assert files.steps() == {1} and [file.name for file in cloud.rglob("*.npz")] == ["1-0.npz"]
    np.testing.assert_array_equal(files.read(1, TASK).rollouts.logprobs, make_samples().rollouts.logprobs)
    assert not [name for name in bucket.small_files(bucket.file_system("--run", address), address) if "samples" in name]


def test_a_file_of_long_completions_takes_few_bytes_a_token(tmp_path):
    """64 completions of 1,024 tokens: ids of a vocabulary of 152,000 by Zipf's law, and log-probabilities at random."""
    samples, draw = make_samples(b=8, g=8, c=1024), np.random.default_rng(0)
    rollouts = samples.rollouts
    full = np.ones_like(rollouts.completion_mask)
    tokens = np.minimum(draw.zipf(1.3, full.shape), 151_999).astype(np.int32)
    logprobs = -draw.exponential(0.3, full.shape).astype(np.float32)
    versions = np.full_like(rollouts.versions, 41)
    rollouts = replace(rollouts, completions=tokens, logprobs=logprobs, versions=versions, completion_mask=full)
    start = time.process_time()
    SampleFiles(tmp_path / "samples", every=1).write(1, replace(samples, rollouts=rollouts))
    seconds, size = time.process_time() - start, (tmp_path / "samples" / "1-0.npz").stat().st_size
    print(f"{size / full.sum():.2f} bytes a token, {1e6 * seconds / full.sum():.2f} CPU seconds for a million tokens")
    assert size / full.sum() < 8
