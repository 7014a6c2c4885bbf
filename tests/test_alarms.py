"""The runs on which the rules are judged, healthy ones and ones with a fault."""

from __future__ import annotations

from benchmarks.alarm_runs import HEALTHY, UNSEEN, makers
from benchmarks.judging import rate
from jaxrl_llm.health.faults import FAULTS


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
