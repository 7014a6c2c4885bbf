"""Health rules: each fires on numbers of a run that fails its way, and on no healthy one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.health import rules
from jaxrl_llm.health.skips import check_skipped
from jaxrl_llm.metrics import Log

HEALTHY = {
    "step": 5, "correction/mean": 1.0, "correction/ess": 0.999, "correction/kl": 1e-12, "rollout/lag_p95": 0.0,
    "sampler/gap_mean": 4e-7, "canary/gap": 1e-6, "canary/before": 0.2, "update_norm": 0.03,
}  # fmt: skip


def ids(*changes: dict) -> list[str]:
    return [found.id for found in rules.findings([HEALTHY | change for change in changes])]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([{}] * 20, []),
        ([{"correction/kl": 2e-3}], ["F7"]),
        ([{"correction/mean": 0.4}], ["F7"]),
        ([{"correction/ess": 0.2}], ["F7"]),
        ([{"correction/kl": 2e-3, "rollout/lag_p95": 1.0}], []),  # older weights are meant to differ
        ([{"correction/mean": 0.8, "rollout/lag_p95": 2.0}], ["F30"]),
        ([{"correction/mean": 0.98, "rollout/lag_p95": 2.0}], []),
        ([{"canary/gap": 0.2, "canary/before": 1e-6}] * 3, ["F23"]),
        ([{"canary/gap": 0.2, "canary/before": 1e-6}] * 2, []),
        ([{"canary/gap": 1e-6, "canary/before": 1e-6}] * 3, []),  # a learning rate of 0
        ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], ["F24"]),
        ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4} for _ in range(8)], []),
        ([{"update_norm": 0.1, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], []),
        ([{"step": 0}], []),
    ],
)
def test_a_rule_fires_on_its_failure_and_on_nothing_else(changes, found):
    assert ids(*changes) == found


def test_a_record_without_the_numbers_of_a_rule_is_no_finding():
    assert rules.findings([{"step": 0, "eval/accuracy": 0.1}]) == []
    assert rules.findings([dict.fromkeys(HEALTHY)]) == []
    assert rules.findings([]) == []


def test_findings_are_kept_at_every_step_and_said_when_they_begin(tmp_path: Path, capsys):
    config = {"num_steps": 9, "log": {"tensorboard": False, "wandb_project": ""}}
    log = Log(tmp_path, config, start=0)
    bad = HEALTHY | {"correction/ess": 0.1}
    for step, record in enumerate((HEALTHY, bad, bad, HEALTHY, bad), 1):
        log.step(step, record | {"step": step})
    assert capsys.readouterr().out.count("health F7 (bad): effective sample size 10%") == 2
    kept = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [(line["step"], line["id"]) for line in kept] == [(2, "F7"), (3, "F7"), (5, "F7")]
    Log(tmp_path, config, start=3)
    assert len((tmp_path / "health.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("most", "policy", "critic", "stops"), [(3, 3, 0, True), (3, 2, 2, False), (3, 0, 4, True), (0, 99, 99, False)]
)
def test_updates_skipped_in_a_row_stop_a_run_be_they_the_policys_or_the_critics(most, policy, critic, stops):
    record = {
        "updates/skipped_in_a_row": policy, "critic/updates/skipped_in_a_row": critic, "updates/skipped": 100,
        "grad_norm": np.float32("nan"), "loss/total": 1.0,
    }  # fmt: skip
    words = rf"step 7: {max(policy, critic)} updates in a row .* \(grad_norm\), .* last checkpoint is runs/x/5"
    with pytest.raises(UserError, match=words) if stops else nullcontext():
        check_skipped(7, record, most=most, latest=lambda: Path("runs/x/5"))
