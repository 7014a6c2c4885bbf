"""Runs that are made to fail: the rule of each finds it within the steps that it may take."""

from __future__ import annotations

import pytest
from test_train import ROOT

from benchmarks.health import ill_runs
from benchmarks.health.judging import judge, kept
from jaxrl_llm.health import logs, rules
from jaxrl_llm.health.history import History


def test_every_rule_has_a_fault():
    assert set(ill_runs.FAULTS) == {rule.__name__ for rule in rules.RULES}


# `python -m benchmarks.health.alarms --make-runs --only first- --keep tests/references/faults.json.gz`
LOGS = kept(ROOT / "tests" / "references" / "faults.json.gz")


@pytest.mark.parametrize("name", ill_runs.FAULTS)
def test_a_rule_finds_its_fault_in_the_log_of_a_run(name):
    fault = ill_runs.FAULTS[name]
    records = LOGS[f"first-{name}"][: fault.begins + fault.within]
    step, _ = judge(name, records, ill_runs.config_of(fault).health.to_dict()).alarms[name]
    assert fault.begins <= step < fault.begins + fault.within


# One of each way in which a part of a run is made to fail: engine, weights, reward, tools. Kept logs have other faults.
IN_RUNS = ("sampler_mismatch", "stale_weights", "no_verdict", "tool_down")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_RUNS)
def test_a_run_is_found_ill_in_time(name, tmp_path):
    fault, history = ill_runs.FAULTS[name], History()
    bounds = ill_runs.config_of(fault).health.to_dict()
    found = lambda: name in {finding.id for finding in rules.findings(history, bounds)}  # noqa: E731
    for record in ill_runs.run_fault(fault, tmp_path / "run"):
        history.add(record)
        if found():
            break
    else:  # the rule has stopped the run, before this record was given
        history = History(logs.read(tmp_path / "run"))
    assert found()
    assert fault.begins <= history.records[-1]["step"] < fault.begins + fault.within


@pytest.mark.slow
def test_a_demonstration_tells_what_is_wrong_and_who_finds_it(monkeypatch, capsys):
    monkeypatch.setitem(ill_runs.SMALL, "num_steps", 8)
    monkeypatch.setattr("sys.argv", ["ill_runs", "never_stops"])
    with pytest.raises(SystemExit) as ended:
        ill_runs.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "never_stops" in out and "step 8: error: " in out
