"""How often the rules call a healthy run ill, and the runs on which they are judged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.health import simulated
from benchmarks.health.alarm_runs import HEALTHY, UNSEEN, makers
from benchmarks.health.ill_runs import FAULTS
from benchmarks.health.judging import BOUNDS, judge, kept, rate

LOGS = Path(__file__).parents[1] / "references" / "alarms.json.gz"


def called_ill(seeds: Iterable[int], steps: int) -> list[str]:
    """Returns what the rules say of simulated healthy runs of four sizes, and of three shares of wrong verdicts."""
    settings = {
        seed: {"sequences": (16, 32, 64, 512)[seed % 4], "wrong": (0.0, 0.1, 0.2)[seed % 3], "steps": steps}
        for seed in seeds
    }
    runs = [judge(str(given), simulated.history(seed, **given), BOUNDS) for seed, given in settings.items()]
    return [f"{run.name}: {', '.join(run.alarms)}" for run in runs if run.alarms]


def test_at_most_one_of_twenty_healthy_histories_is_called_ill():
    assert len(called_ill(range(24), 40)) <= 1  # each size with each share twice


@pytest.mark.slow
def test_no_rule_ends_a_healthy_run_of_5_000_steps():
    # `python -m benchmarks.health.alarms` judges 20 of 10,000 steps. These are of 16 and 512 sequences, with the most
    # wrong verdicts.
    assert called_ill((8, 11), 5_000) == []


def test_no_rule_calls_a_noisy_run_ill_that_learns():
    # `python -m benchmarks.health.alarms --only healthy-16-sequences-20-wrong --keep tests/references/alarms.json.gz`
    # of runs with one verdict of five wrong. Rules with bounds that know of no noise call two of the six ill.
    runs = [judge(name, records, BOUNDS) for name, records in kept(LOGS).items()]
    assert [run.healthy for run in runs] == [True] * 6
    assert {run.name: run.alarms for run in runs if run.alarms} == {}


def test_every_rule_has_a_fault_in_a_form_that_no_bound_was_calibrated_on():
    assert UNSEEN.keys() == FAULTS.keys()
    for name, fault in FAULTS.items():
        assert UNSEEN[name].changes not in (fault.changes, fault.changes | fault.second), name
        assert UNSEEN[name].changes["seed"] not in (fault.changes.get("seed", 0), fault.second.get("seed", 0))


def test_the_healthy_runs_are_sixty_and_each_has_a_seed_and_a_folder_of_its_own():
    assert len(HEALTHY) >= 60
    assert len({run.changes["seed"] for run in HEALTHY.values()}) == len(HEALTHY)
    assert len(makers()) == len(HEALTHY) + 3 * len(FAULTS)


def test_an_interval_of_a_rate_is_that_of_clopper_and_pearson():
    assert rate(0, 60) == "0 of 60 (0.0% to 6.0%)"  # 1 - 0.025 ** (1 / 60)
    assert rate(3, 60) == "3 of 60 (1.0% to 13.9%)"
