"""Noise alone makes no rule fire: the rate of false alarms holds for the noise of small and large batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from test_health import BOUNDS

from benchmarks.health import simulated
from jaxrl_llm.health import noise, rules
from jaxrl_llm.health.history import RECENT_STEPS, START_STEPS, History

RATE, RUNS, STEPS = 0.2, 30, 60
DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "of verdicts": lambda rng, shape: rng.random(shape) < 0.3,
    "of rare verdicts": lambda rng, shape: rng.random(shape) < 0.01,
    "with heavy tails": lambda rng, shape: rng.standard_t(2.5, shape),
}


def test_the_parts_of_all_looks_fall_and_add_up_to_the_rate():
    parts = [noise.level(look) for look in range(1, 5001)]
    assert all(a > b for a, b in pairwise(parts))
    assert sum(parts) == pytest.approx(noise.RATE * (1 - np.log(2) / np.log(5002)))


def test_the_noise_of_a_step_is_found_under_a_trend_and_across_a_jump():
    rng, steps = np.random.default_rng(0), np.arange(400)
    for change in (0 * steps, 0.01 * steps, 50.0 * (steps > 200)):
        assert noise.step_noise(steps, rng.normal(0, 0.5, 400) + change).deviation == pytest.approx(0.5, rel=0.1)
    every_other = noise.step_noise(steps[::2], rng.normal(0, 0.5, 200))
    assert every_other.deviation == pytest.approx(0.5, rel=0.15)
    assert noise.step_noise(steps[::3], steps[::3]).deviation == np.inf  # no neighbours
    found = [noise.step_noise(steps[:13], rng.normal(size=13)) for _ in range(2000)]
    of_squares = np.var([one.deviation**2 for one in found]) / np.mean([one.deviation**2 for one in found]) ** 2
    assert 2 / of_squares == pytest.approx(found[0].freedom, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "sequences"), [("normal", 16), ("of verdicts", 16), ("of rare verdicts", 16), ("with heavy tails", 4096)]
)
def test_noise_passes_its_bound_in_no_more_runs_than_the_rate(kind, sequences, monkeypatch):
    """With a large rate, which shows in few runs: of RUNS, the share of RATE, and three deviations of its binomial."""
    monkeypatch.setattr(noise, "RATE", RATE)
    rng, passed = np.random.default_rng(sequences), np.zeros(3, int)
    for _ in range(RUNS):
        history, fired = History(), np.zeros(3, bool)
        for step, batch in enumerate(DRAWS[kind](rng, (STEPS, sequences)).astype(float), 1):
            history.add({"step": step, "x": batch.mean()})
            center = 0.3 * (kind == "of verdicts") + 0.01 * (kind == "of rare verdicts")
            fired |= [
                history.rise_strength("x") > 1,
                history.fall_strength("x") > 1,
                history.strength_above("x", center) > 1,
            ]
        passed += fired
    assert (passed <= RUNS * RATE + 3 * np.sqrt(RUNS * RATE * (1 - RATE))).all(), passed


@pytest.mark.parametrize("error", [{}, {"reward/error": 0.02, "groups/count": 64}])
def test_a_change_beyond_noise_is_found_within_the_window(error):
    rng, history, fallen = np.random.default_rng(0), History(), []
    for step in range(1, 41):
        history.add({"step": step, "reward/mean": rng.normal(0.8 - 0.4 * (step > 30), 0.02)} | error)
        fallen += [step] if history.fall_strength("reward/mean") > 1 else []
    assert 30 < fallen[0] <= 30 + RECENT_STEPS and fallen[-1] == 40


def test_a_small_batch_shows_over_many_steps_what_it_hides_in_few():
    rng, history = np.random.default_rng(1), History()
    for step in range(1, 201):
        history.add({"step": step, "x": rng.normal(0.9 * (step > 100), 0.4)})
    assert history.rise_strength("x") < 1 < history.with_longer_means().rise_strength("x")
    assert history.with_longer_means().start_mean("x") == pytest.approx(
        np.mean(history.with_longer_means().start_values("x"))
    )
    assert len(history.with_longer_means().start_values("x")) == 4 * START_STEPS


def found(records: list[dict]) -> set[str]:
    history, ids = History(), set()
    for record in records:
        history.add(record)
        ids |= {finding.id for finding in rules.findings(history, BOUNDS) if finding.severity != "note"}
    return ids


@pytest.mark.parametrize("seed", range(4))
def test_a_critic_that_still_gets_better_is_told_from_a_useless_one(seed):
    """One that needs 100 steps was called ill at step 16."""
    given = {"sequences": (16, 64)[seed % 2], "steps": 120, "tools": True}
    assert found(simulated.history(seed, critic=100, **given)) == set()
    useless = simulated.history(seed, critic=3, **given)
    for record in useless:
        record["critic/explained_variance"] -= 1.0  # better after 10 steps, and never better than a constant
    assert found(useless) == {"critic_lags"}


def test_a_policy_that_cannot_change_is_not_ruined():
    """docs/LOG.md: with 16 sequences, the best mean of 8 steps is far above the last one in every run of 150 steps."""
    for seed in range(2):
        assert "reward_collapse" not in found(simulated.history(seed, sequences=16, steps=150, learns=0.0))


@pytest.mark.parametrize("update", [1e-3, 5e-3])
def test_rounding_is_no_push_that_did_not_arrive(update):
    """64 greedy tokens in bfloat16, and updates that change less than rounding does: either gap may be the larger."""
    for seed in range(3):
        rng, records = np.random.default_rng(seed), []
        for step in range(1, 101):
            rounding, moved = rng.normal(0, 0.02, (2, 64)), rng.normal(0, update, 64)
            gap, before = np.abs(rounding[0]).max(), np.abs(rounding[0] + moved).max()
            records.append({"step": step, "weight_check/gap": gap, "weight_check/gap_before": before})
        assert found(records) == set()
        weights = np.cumsum(rng.normal(0, 0.2, (100, 64)), axis=0)  # from step 50 on the engine keeps its weights
        for step in range(50, 100):
            gaps = {"gap": weights[step] - weights[49], "gap_before": weights[step - 1] - weights[49]}
            records[step] |= {
                f"weight_check/{name}": np.abs(x + rng.normal(0, 0.02, 64)).max() for name, x in gaps.items()
            }
        assert found(records) == {"stale_weights"}


def test_a_reward_function_that_falls_on_harder_problems_is_not_hacked():
    given = {"sequences": 256, "steps": 150, "form": 0.3}
    healthy = simulated.history(2, order="stages", learns=1.5, **given)
    assert healthy[-1]["reward/accuracy"] < healthy[0]["reward/accuracy"] - 0.15
    assert "channels_diverge" not in found(healthy)
    assert "channels_diverge" in found(simulated.history(2, learns=-3.0, **given))


def with_groups(share: float, mean: float) -> list[dict]:
    """A run in whose groups without a signal the mean reward is `mean`, of rewards from 0 to 1."""
    rewards = {"reward/mean": mean, "reward/std": 0.1, "reward/min": 0.0, "reward/max": 1.0}
    groups = {"groups/no_signal": share, "groups/count": 64, "reward/without_signal": mean}
    return [{"step": step} | rewards | groups for step in range(1, 31)]


def test_problems_that_are_too_easy_are_told_from_those_that_are_too_hard(wording):
    causes = set()
    for mean in (0.97, 0.02, 0.5):  # too easy, too hard, either
        (finding,) = rules.findings(History(with_groups(0.95, mean)), BOUNDS)
        assert finding.id == "no_signal"
        wording(finding.cause)
        causes.add(finding.cause)
    assert len(causes) == 3


def test_a_task_of_which_all_is_learned_that_can_be_is_solved():
    """Three of four problems can be solved: then their groups are all right, and those of the others all wrong."""
    learned = with_groups(0.97, 0.75)
    for record in learned:
        record["reward/mean"], record["reward/std"] = min(0.3 + 0.05 * record["step"], 0.75), 0.45
    assert found(learned) == set()


def test_a_brief_answer_that_is_right_is_no_collapse():
    run = lambda **more: [  # noqa: E731
        {"step": s, "completion/length": 400 * 0.9**s, "reward/mean": 0.1 + 0.05 * s, "reward/std": 0.3}
        | {name: f(s) for name, f in more.items()}
        for s in range(1, 31)
    ]
    judged = {"eval/problems": lambda s: 500}
    assert found(run()) == set()  # the reward is up by more than its deviation, and an answer has more than 8 tokens
    assert found(run(**judged, **{"eval/accuracy": lambda s: 0.1 + 0.02 * s})) == set()
    verdicts = {"reward/mean": lambda s: 0.5 + 0.013 * s, "reward/std": lambda s: 0.45}  # at most 0 or 1
    assert found(run(**verdicts)) == set()
    held = {"reward/mean": lambda s: 0.9, "reward/std": lambda s: 0.3, "eval/accuracy": lambda s: 0.9}
    assert found(run(**held | judged)) == set()
    assert "length_collapse" in found(run(**held | judged | {"eval/accuracy": lambda s: 0.9 - 0.02 * s}))
    for rise in (0.0, -0.01):
        assert "length_collapse" in found(run(**verdicts | {"reward/mean": lambda s, rise=rise: 0.5 + rise * s}))
    assert "length_collapse" in found(run(**verdicts, **{"reward/task": lambda s: 0.9 - 0.02 * s}))
    assert "length_collapse" in found(run(**judged, **{"eval/accuracy": lambda s: 0.1}))
