"""Health rules: each fires on numbers of a run that fails its way, and on no healthy one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_llm.health import Health, rules

HEALTHY = {
    "step": 5, "importance/mean": 1.0, "importance/ess": 0.999, "importance/kl": 1e-12, "rollout/lag_p95": 0.0,
    "sampler/gap_mean": 4e-7, "weight_check/gap": 1e-6, "weight_check/gap_before": 0.2, "update_norm": 0.03,
}  # fmt: skip


BOUNDS = {"max_skipped": 10}


def ids(*changes: dict) -> list[str]:
    return [found.id for found in rules.findings([HEALTHY | change for change in changes], BOUNDS)]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([{}] * 20, []),
        ([{"importance/kl": 2e-3}], ["sampler_mismatch"]),
        ([{"importance/mean": 0.4}], ["sampler_mismatch"]),
        ([{"importance/ess": 0.2}], ["sampler_mismatch"]),
        ([{"importance/kl": 2e-3, "rollout/lag_p95": 1.0}], []),  # older weights are meant to differ
        ([{"importance/mean": 0.8, "rollout/lag_p95": 2.0}], ["stale_samples"]),
        ([{"importance/mean": 0.98, "rollout/lag_p95": 2.0}], []),
        ([{"weight_check/gap": 0.2, "weight_check/gap_before": 1e-6}] * 3, ["stale_weights"]),
        ([{"weight_check/gap": 0.2, "weight_check/gap_before": 1e-6}] * 2, []),
        ([{"weight_check/gap": 1e-6, "weight_check/gap_before": 1e-6}] * 3, []),  # a learning rate of 0
        ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], ["engine_drift"]),
        ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4} for _ in range(8)], []),
        ([{"update_norm": 0.1, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], []),
        ([{"step": 0}], []),
    ],
)
def test_a_rule_fires_on_its_failure_and_on_nothing_else(changes, found):
    assert ids(*changes) == found


def test_a_record_without_the_numbers_of_a_rule_is_no_finding():
    assert rules.findings([{"step": 0, "eval/accuracy": 0.1}], BOUNDS) == []
    assert rules.findings([dict.fromkeys(HEALTHY)], BOUNDS) == []
    assert rules.findings([], BOUNDS) == []


def test_findings_are_kept_at_every_step_and_said_when_they_begin(tmp_path: Path):
    said: list[str] = []
    health = Health(tmp_path, BOUNDS, said.append)
    health.begin([])
    bad = HEALTHY | {"importance/ess": 0.1}
    records = [record | {"step": step} for step, record in enumerate((HEALTHY, bad, bad, HEALTHY, bad), 1)]
    assert {health.judge(record).action for record in records} == {"go on"}
    assert ["health sampler_mismatch (bad): effective sample size 10%" in line for line in said] == [True, True]

    def kept() -> list[tuple[int, str]]:
        lines = (tmp_path / "health.jsonl").read_text().splitlines()
        return [(line["step"], line["id"]) for line in map(json.loads, lines)]

    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch"), (5, "sampler_mismatch")]
    health.begin(records[:3])  # as a run that goes on after step 3
    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch")]
    assert len(said) == 2
    health.judge(records[2] | {"eval/accuracy": 0.5})  # the same step, evaluated later
    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch")]
    assert health.judge(None).action == "go on"


@pytest.mark.parametrize(
    ("most", "policy", "critic", "stops"), [(3, 3, 0, True), (3, 2, 2, False), (3, 0, 4, True), (0, 99, 99, False)]
)
def test_updates_skipped_in_a_row_stop_a_run_be_they_the_policys_or_the_critics(most, policy, critic, stops, tmp_path):
    record = {
        "step": 7, "updates/skipped_in_a_row": policy, "critic/updates/skipped_in_a_row": critic,
        "updates/skipped": 100, "grad_norm": None, "loss/total": 1.0,
    }  # fmt: skip
    health = Health(tmp_path, {"max_skipped": most}, print)
    health.begin([])
    verdict = health.judge(record)
    assert verdict.action == ("stop" if stops else "go on")
    if stops:
        assert f"step 7: {max(policy, critic)} updates in a row were skipped" in verdict.reason
        assert verdict.reason.endswith("(grad_norm)")
        assert "max_skipped" in verdict.fix
