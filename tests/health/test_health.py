"""Health rules: each fires on numbers of a run that fails its way, and on no healthy one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.health import simulated
from jaxrl_llm.health import rules
from jaxrl_llm.health.finding import channel_metrics
from jaxrl_llm.health.history import KEPT_BETWEEN, KEPT_WITHOUT_GAP, LONGER_FACTOR, START_STEPS, History
from jaxrl_llm.health.rules.environment import tool_down
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.record import repeated_share, text_metrics
from jaxrl_llm.session.settings import ActingHealthSettings, RollbackSettings
from jaxrl_llm.structs import Rewards, Rollouts

HEALTHY = {
    "step": 5, "importance/mean": 1.0, "importance/ess": 0.999, "importance/kl": 1e-12, "rollout/lag_p95": 0.0,
    "importance/rounding": 2.0**-23, "sampler/gap_mean": 4e-7, "weight_check/gap": 1e-6,
    "weight_check/gap_before": 0.2, "update_norm": 0.03,
}  # fmt: skip


NOTHING_TRAINED = {"reward/no_verdict": 1.0, "importance/mean": 0.0, "importance/ess": 0.0, "groups/no_signal": 1.0}


def asked(**counts: float) -> dict[str, float]:
    """What episodes of a step count."""
    return {f"episode/{name}": count for name, count in counts.items()}


BOUNDS = {"max_skipped": 10, "stop": ("updates_skipped",), "rollback": {"rules": ("entropy_explosion",), "most": 2}}


def settings_of(bounds: dict[str, Any]) -> ActingHealthSettings:
    back = RollbackSettings(learning_rate=0.5, warmup_steps=5, **bounds["rollback"])
    return ActingHealthSettings(hang_minutes=0.0, skip=(), self_test=False, **bounds | {"rollback": back})


def pushes(*gaps: float) -> list[dict[str, float]]:
    """Weight checks of servers that answer the same after each push."""
    return [{"weight_check/gap": now, "weight_check/gap_before": before} for before, now in pairwise(gaps)]


def ids(*changes: dict) -> list[str]:
    history = History(HEALTHY | change | {"step": step} for step, change in enumerate(changes, 1))
    return [found.id for found in rules.findings(history, BOUNDS)]


FAILURES = [  # changes of a healthy record, step by step, and the findings
    ([{}] * 20, []), ([{"importance/kl": 2e-3}] * 2, ["sampler_mismatch"]),
    ([{"importance/kl": 2e-3}], []),  # one batch may be odd
    ([{"importance/kl": 2e-2}], ["sampler_mismatch"]),
    ([{"importance/kl": 2e-3, "importance/rounding": 2**-7}] * 9, []),  # bfloat16 rounds so much
    ([{"importance/kl": 2e-2, "importance/rounding": 2**-7}] * 2, ["sampler_mismatch"]),
    ([{"importance/mean": 0.4}], ["sampler_mismatch"]),
    # What the correction cuts is no proof: mean 10 is cut to 2, and then all weights are the same.
    ([{"importance/mean": 2.0, "importance/raw_mean": 10.0, "importance/raw_ess": 1.0}], ["sampler_mismatch"]),
    ([{"importance/raw_mean": 3.0, "importance/raw_ess": 0.9, "rollout/lag_p95": 2.0}] * 4, []),
    ([{"importance/raw_mean": 3.0, "importance/raw_ess": 0.9, "rollout/lag_p95": 2.0}] * 5, ["sampler_mismatch"]),
    ([{"importance/ess": 0.2}], ["sampler_mismatch"]),
    ([{"importance/kl": 2e-3, "rollout/lag_p95": 1.0}], []),  # older weights are meant to differ
    ([{"importance/mean": 0.8, "rollout/lag_p95": 2.0}] * 8, ["stale_samples"]),
    ([{"importance/mean": 0.98, "rollout/lag_p95": 2.0}] * 8, []),
    (pushes(1e-6, 1e-6, 1e-6, 0.1, 0.2, 0.3), ["stale_weights"]), (pushes(1e-6, 1e-6, 1e-6, 0.1, 0.2), []),
    ([{"weight_check/gap": 0.2, "weight_check/gap_before": 1e-6}] * 3, []),  # each push changed the answers
    ([{"weight_check/gap": 1e-6, "weight_check/gap_before": 1e-6}] * 3, []),  # a learning rate of 0
    ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], ["engine_drift"]),
    ([{"update_norm": 0.0, "sampler/gap_mean": 1e-4} for _ in range(8)], []),
    ([{"update_norm": 0.1, "sampler/gap_mean": 1e-4 * 1.5**i} for i in range(8)], []),
    ([{"update_norm": 0.1, "sampler/gap_mean": 1e-4 * 1.2**i} for i in range(20)], ["engine_drift"]),
    ([{"sampler/gap_mean": 1e-4 * 1.2**i, "rollout/lag_p95": 1.0} for i in range(20)], []),  # lag is meant to grow
    ([{"step": 0}], []),
    # Without a verdict nothing is trained: means over no token are 0, and rewards that are not there are equal.
    ([NOTHING_TRAINED] * 9, ["no_verdict"]),
    ([NOTHING_TRAINED | {"reward/no_verdict": 0.9, "importance/mean": 1.0, "importance/ess": 1.0}], []),
    ([asked(turns=3.0, errors=3.0)], ["tool_down"]), ([asked(turns=3.0, errors=2.9)], []),
    ([asked(turns=3.0, errors=1.5, searches=1.5)], ["tool_down"]),
    ([asked(turns=3.0, errors=1.0, calls=1.5, invalid=0.5)], ["tool_down"]),
    ([asked(turns=3.0, errors=1.0, calls=1.5, invalid=0.0)], []),
    ([asked(turns=3.0, errors=0.0, searches=1.5, empty=1.5)], ["tool_down"]),
    ([asked(turns=3.0, errors=0.1, searches=1.5, empty=1.4)], ["tool_down"]),
    ([asked(turns=3.0, errors=0.0, searches=1.5, empty=1.4)], []),
    ([asked(turns=1.0, errors=0.05, searches=0.05)], []),  # a single call, perhaps
    ([asked(turns=3.0, errors=0.2, searches=1.5), asked(turns=3.0, errors=1.5, searches=1.5)], []),
    ([{"step": 0}, asked(turns=3.0, errors=1.5, searches=1.5)], ["tool_down"]),
]  # fmt: skip


def test_a_rule_fires_on_its_failure_and_on_nothing_else():
    assert [(changes, found) for changes, found in FAILURES if ids(*changes) != found] == []


@pytest.mark.parametrize(("rule", "numbers"), [
    ("stale_samples", {"importance/mean": 0.8}),
    ("sampler_mismatch", {"importance/raw_mean": 3.0, "importance/raw_ess": 0.9}),
])  # fmt: skip
@pytest.mark.parametrize(("ages", "fields"), [
    ({"rollout/lag_p95": 2.0}, {"max_lag"}),
    ({"rollout/lag_p95": 2.0, "rollout/age_max": 2.0}, {"partial", "max_age"}),
    ({"rollout/lag_p95": 3.0, "rollout/age_max": 2.0}, {"max_lag", "partial", "max_age"}),
])  # fmt: skip
def test_the_remedy_for_old_samples_names_the_fields_that_made_them_old(rule, numbers, ages, fields):
    history = History(HEALTHY | numbers | ages | {"step": step} for step in range(1, 9))
    (finding,) = (x for x in rules.findings(history, BOUNDS) if x.id == rule)
    assert {*re.findall(r"rollout\.(\w+)", finding.fix)} == fields


@pytest.mark.parametrize(("failed", "empty", "severity"), [(1.4, 0.1, "error"), (0.1, 1.4, "warning")])
def test_a_tool_that_fails_is_an_error_although_a_search_found_nothing(failed, empty, severity):
    history = History([asked(turns=3.0, errors=failed, searches=1.5, empty=empty) | {"step": 1}])
    (finding,) = (x for x in rules.findings(history, BOUNDS) if x.id == "tool_down")
    assert finding.severity == severity


@pytest.mark.parametrize(("search", "down"), [
    (dict(turns=3.0, errors=1.5, searches=1.5), True),
    (dict(turns=3.0, errors=0.0, searches=1.5), False),  # but the errors of the game are as many as all searches
])  # fmt: skip
def test_the_tools_of_each_of_several_environments_are_judged_alone(search, down):
    game = dict(turns=3.0, errors=1.5, searches=0.0)
    mean = {name: (search[name] + game[name]) / 2 for name in game}
    record = {f"episode/{name}": value for name, value in mean.items()}
    for environment, values in {"game": game, "search": search}.items():
        record |= {f"episode/{environment}/{name}": value for name, value in values.items()}
    finding = tool_down(History([record | {"step": 1}, {"step": 2}]))
    assert (finding is not None) == down
    if finding:
        assert "'search'" in finding.evidence and "config.environments.search.env" in finding.fix


def test_a_record_without_the_numbers_of_a_rule_is_no_finding():
    assert rules.findings(History([{"step": 0, "eval/accuracy": 0.1}]), BOUNDS) == []
    assert rules.findings(History([dict.fromkeys(HEALTHY) | {"step": 1}]), BOUNDS) == []
    assert rules.findings(History(), BOUNDS) == []


def test_findings_are_kept_at_every_step_and_said_when_they_begin(tmp_path, wording):
    said: list[str] = []
    health = Health(tmp_path, settings_of(BOUNDS), lambda step, finding: said.append(finding.line()))
    health.start([])
    bad = HEALTHY | {"importance/ess": 0.1}
    records = [record | {"step": step} for step, record in enumerate((HEALTHY, bad, bad, HEALTHY, bad), 1)]
    assert {health.judge([record]).action for record in records} == {"continue"}
    (line,) = said  # it comes back two steps later, which is no news
    assert line.startswith("error: ") and "[sampler_mismatch, " in line
    wording(line)

    def kept() -> list[tuple[int, str]]:
        lines = (tmp_path / "health.jsonl").read_text().splitlines()
        return [(line["step"], line["id"]) for line in map(json.loads, lines)]

    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch"), (5, "sampler_mismatch")]
    health.start(records[:3])  # as a run that goes on after step 3
    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch")]
    assert len(said) == 1
    health.judge([records[2] | {"eval/accuracy": 0.5}])  # the same step, evaluated later
    assert kept() == [(2, "sampler_mismatch"), (3, "sampler_mismatch")]
    assert health.judge([]).action == "continue"


def test_a_step_whose_episodes_all_fail_names_the_episodes_and_no_judge():
    causes = [
        finding.cause
        for failed in (0.0, 1.0)
        for finding in rules.findings(History([NOTHING_TRAINED | {"step": 1, "episode/errors": failed}]), BOUNDS)
        if finding.id == "no_verdict"
    ]
    assert len(causes) == 2 and "judge" in causes[0] and "judge" not in causes[1]


def test_updates_that_are_skipped_without_a_verdict_are_not_called_infinite(tmp_path):
    record = NOTHING_TRAINED | {"step": 7, "updates/skipped_in_a_row": 3, "kl/to_reward": None, "reward/mean": None}
    (finding,) = [x for x in rules.findings(History([record]), BOUNDS | {"max_skipped": 3}) if x.id != "no_verdict"]
    assert (finding.id, finding.cause) == ("updates_skipped", "no completion has a verdict")


def test_updates_skipped_in_a_row_stop_a_run_be_they_the_policys_or_the_critics(tmp_path, wording):
    for most, policy, critic, stops in ((3, 3, 0, True), (3, 2, 2, False), (3, 0, 4, True), (0, 99, 99, False)):
        record = {
            "step": 7, "updates/skipped_in_a_row": policy, "critic/updates/skipped_in_a_row": critic,
            "updates/skipped": 100, "grad_norm": None, "loss/total": 1.0,
        }  # fmt: skip
        health = Health(tmp_path, settings_of(BOUNDS | {"max_skipped": most}), print)
        health.start([])
        verdict = health.judge([record])
        assert verdict.action == ("stop" if stops else "continue")
        if stops:
            assert verdict.step == 7 and str(max(policy, critic)) in verdict.finding.evidence
            assert "grad_norm" in verdict.finding.cause and "max_skipped" in verdict.finding.fix
            wording(verdict.finding.line())


# A healthy run, like that of configs/grpo.py: the reward rises, the entropy and the norm of the gradient fall.
STEPS = 40


def run(**named: object) -> list[dict]:
    """A run whose values of a name follow a function of the step from 0 to 1, or are constant."""
    usual = {
        "reward/mean": lambda t: 0.4 + 0.55 * t, "reward/std": lambda t: 0.49 - 0.3 * t,
        "groups/no_signal": lambda t: 0.2 + 0.6 * t, "entropy": lambda t: 0.12 - 0.1 * t,
        "grad_norm": lambda t: 1.0 - 0.7 * t, "clip/fraction": lambda t: 0.004, "clip/first": lambda t: 0.0,
        "completion/length": lambda t: 5.4 + 4 * t, "completion/truncated": lambda t: 0.004,
        "kl/ref": lambda t: 0.1 * t, "reward/task": lambda t: 0.4 + 0.55 * t, "reward/format": lambda t: 0.9,
        "logprobs/good": lambda t: -0.12 * 0.06**t, "completion/repeated": 0.01, "completion/distinct": 0.3,
        "completion/compressed": 0.3, "kl/coef": 1e-3, "loss/kl": lambda t: 1e-4 * t,
        "loss/kl_alone": lambda t: 4e-5 * t, "reward/kl": lambda t: -0.001 * t,
        "eval/accuracy": lambda t: 0.4 + 0.5 * t, "eval/problems": 1000,
        "critic/explained_variance": lambda t: 0.6 * t - (t < 0.1), "episode/turns": 2.0, "episode/errors": 0.0,
        "reward/no_verdict": 0.0,
    }  # fmt: skip
    values = usual | {name.replace("__", "/"): f for name, f in named.items()}
    made = []
    for step in range(1, STEPS + 1):
        t = (step - 1) / (STEPS - 1)
        made.append(HEALTHY | {"step": step} | {n: f(t) if callable(f) else f for n, f in values.items()})
    return made


def fired(records: list[dict]) -> dict[str, int]:
    """The first step of each finding."""
    history, first = History(), dict[str, int]()
    for record in records:
        history.add(record)
        for found in rules.findings(history, BOUNDS):
            first.setdefault(found.id, record["step"])
    return first


WIDE = dict(reward__std=0.49)
FLAT = dict(reward__mean=0.4, **WIDE)
FAULTS = {
    "phantom_clipping": dict(clip__first=0.18),
    "no_signal": dict(groups__no_signal=0.95, reward__mean=0.02, reward__std=0.1),
    "entropy_collapse": dict(entropy=lambda t: 0.12 * 0.02**t, reward__mean=0.4, reward__std=0.49),
    "entropy_explosion": dict(entropy=lambda t: 0.12 * 8**t),
    "reward_collapse": dict(
        reward__mean=lambda t: 0.9 - 0.9 * min(max(4 * t - 2, 0), 1),
        reward__std=0.3,
        entropy=lambda t: 0.1 + 0.1 * (t > 0.55),
        eval__accuracy=lambda t: 0.8 - 0.8 * (t > 0.55),
    ),
    "gradient_climb": dict(grad_norm=lambda t: 4**t, clip__fraction=lambda t: 0.01 * 9**t),
    "gradient_spike": dict(grad_norm=lambda t: 40.0 if 0.5 < t < 0.53 else 1.0),
    "good_fades": dict(logprobs__good=lambda t: -0.1 * 5**t, reward__mean=lambda t: 0.5 - 0.1 * t, reward__std=0.49),
    "repeats": dict(completion__repeated=lambda t: 0.5 * t),
    "kl_alone": dict(loss__kl_alone=lambda t: 9e-3 * t, loss__kl=lambda t: 1e-2 * t, **FLAT),
    "kl_pays": dict(reward__kl=lambda t: 0.5 * t, reward__mean=lambda t: 0.4 - 0.3 * t, reward__std=0.49),
    "truncated": dict(
        completion__truncated=lambda t: 0.6 * t,
        reward__mean=lambda t: 0.5 - 0.3 * t,
        reward__std=0.5,
        eval__accuracy=lambda t: 0.5 - 0.3 * t,
    ),
    "never_stops": dict(completion__truncated=1.0),
    "length_collapse": dict(completion__length=lambda t: 40 * 0.1**t, eval__accuracy=0.4),
    "channels_diverge": dict(
        reward__task=lambda t: 0.6 - 0.4 * t,
        reward__format=lambda t: 0.2 + 0.7 * t,
        eval__accuracy=lambda t: 0.6 - 0.4 * t,
    ),
    "critic_lags": dict(critic__explained_variance=-0.4),
    "held_out_falls": dict(eval__accuracy=lambda t: 0.8 - 0.4 * t, reward__mean=lambda t: 0.2 + 0.7 * t, **WIDE),
    "tools_unused": dict(episode__turns=1.0, **FLAT),
    "tool_errors": dict(episode__turns=2.0, episode__errors=0.2),
}


def test_no_rule_fires_on_a_healthy_run():
    assert fired(run()) == {}


SICK = {name: run(**changes) for name, changes in FAULTS.items()} | {
    "sampler_mismatch": run(importance__kl=0.1),
    "stale_weights": run(
        weight_check__gap=lambda t: 1.5 ** (STEPS * t) * 1e-3,
        weight_check__gap_before=lambda t: 1.5 ** (STEPS * t - 1) * 1e-3,
    ),
    "engine_drift": run(update_norm=0.0, sampler__gap_mean=lambda t: 1e-4 * 3 ** (STEPS * t / 8)),
    "stale_samples": run(importance__mean=0.8, rollout__lag_p95=2.0),
    "updates_skipped": run(updates__skipped_in_a_row=10),
    "no_verdict": run(reward__no_verdict=1.0),
    "tool_down": run(episode__turns=3.0, episode__errors=3.0),
}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_needs_each_metric_that_it_says_and_no_other(rule, monkeypatch):
    name, needs, records = rule.__name__, rules.RULES[rule], SICK[rule.__name__]
    monkeypatch.setattr(rules, "RULES", {rule: needs})  # alone
    assert name in fired(records) and name not in rules.unjudged_rules(records)
    for metric in needs.metrics:
        without = [{k: x for k, x in record.items() if k != metric} for record in records]
        assert name not in fired(without)
        assert metric in rules.unjudged_rules(without)[name]
    short = [record | {"step": step} for step, record in enumerate(records[-needs.records :], 1)]
    assert name not in fired(short[:-1])
    assert name in rules.unjudged_rules(short[:-1]) and name not in rules.unjudged_rules(short)
    kept = {"step", "update_norm", *needs.metrics}
    few = [
        {k: x for k, x in r.items() if k in kept or (needs.functions and k in channel_metrics(r))} for r in SICK[name]
    ]
    assert name in fired(few)


@pytest.mark.parametrize("name", ["truncated", "channels_diverge"])
def test_a_reward_that_falls_beside_a_held_out_accuracy_that_holds_is_no_fault(name):
    assert name not in fired(run(**FAULTS[name] | {"eval__accuracy": 0.5}))


@pytest.mark.parametrize("every", [7, 3, 2])
def test_a_rule_of_means_passes_over_missing_values(every):
    """A reward that is NaN in every seventh step silenced each rule of means in all steps, and no line said so."""
    sick = [record | ({"reward/mean": None} if record["step"] % every == 0 else {}) for record in SICK["kl_pays"]]
    assert {"kl_pays"} <= fired(sick).keys() and "kl_pays" not in rules.unjudged_rules(sick)


def test_a_log_that_lacks_most_values_of_a_metric_is_told():
    log = [{"step": step, "entropy": None if step % 3 else 1.0} for step in range(1, 91)]
    assert "entropy" in rules.unjudged_rules(log)["entropy_explosion"]


def test_the_records_that_rules_see_are_few_and_the_same_after_a_resume():
    records = [{"step": step, "x": step} for step in range(3000)]
    history = History(records)
    steps = [record["step"] for record in history.records]
    assert len(steps) <= LONGER_FACTOR * START_STEPS + 1 + KEPT_BETWEEN + 2 + KEPT_WITHOUT_GAP
    assert steps[: LONGER_FACTOR * START_STEPS + 1] == list(range(LONGER_FACTOR * START_STEPS + 1))
    assert steps[-KEPT_WITHOUT_GAP:] == list(range(3000 - KEPT_WITHOUT_GAP, 3000))
    assert max(b - a for a, b in pairwise(steps)) <= 4 * 3000 / KEPT_BETWEEN
    assert (
        sum(b == a + 1 for a, b in pairwise(steps[20:-KEPT_WITHOUT_GAP])) > KEPT_BETWEEN / 4
    )  # pairs, whose differences are noise
    half = History(History(records[:1700]).records)  # as the log gives it to a resumed run
    for record in records[1700:]:
        half.add(record)
    assert half.records == history.records
    history.add({"step": 2999, "x": 0})
    assert history.records[-1] == {"step": 2999, "x": 0} and len(history.records) == len(steps)


def a_step(texts: list[list[str]]) -> Samples:
    """Completions of a step, a token for each character."""
    longest = max(len(text) for group in texts for text in group)
    tokens = np.array([[[ord(c) for c in text.ljust(longest)] for text in group] for group in texts], np.int32)
    mask = np.array([[[i < len(text) for i in range(longest)] for text in group] for group in texts])
    rollouts = Rollouts(tokens, mask, mask, np.zeros(mask.shape), np.zeros(mask.shape[:2], bool), np.zeros(mask.shape))
    return Samples(None, rollouts, lambda: GradedCompletions(texts, Rewards(None, {}), [], {}))


def test_a_simulated_run_learns_and_its_noise_falls_with_more_sequences():
    runs = {size: simulated.history(0, sequences=size, steps=200) for size in (64, 1024)}
    rewards = {size: np.array([record["reward/mean"] for record in run]) for size, run in runs.items()}
    assert all(x[-50:].mean() > x[:20].mean() + 0.1 for x in rewards.values())
    noise = {size: np.diff(x).std() / np.sqrt(2) for size, x in rewards.items()}
    assert noise[64] / noise[1024] == pytest.approx(4, rel=0.2)
    errors = {size: np.mean([record["reward/error"] for record in run]) for size, run in runs.items()}
    assert errors == pytest.approx(noise, rel=0.2)


def test_a_reward_that_has_fallen_was_well_until_shortly_before_its_fall():
    for last_good, fall, steps, since in (
        (100, 1, 112, (93, 100)),  # in one step
        (100, 40, 130, (98, 110)),  # slowly: a quarter of the fall is at step 110
        (3000, 40, 3030, (2990, 3010)),  # the best window of a long plateau may be long ago
    ):
        generator, history = np.random.default_rng(0), History()
        for step in range(1, steps + 1):
            reward = 0.8 - 0.6 * min(max(step - last_good, 0) / fall, 1) + generator.normal() * 0.03
            history.add({"step": step, "reward/mean": reward, "reward/std": 0.5})
        finding = rules.rewards.reward_collapse(history)
        assert since[0] <= finding.since <= since[1]
        assert f"since step {finding.since:,}" in finding.evidence


def test_what_an_environment_says_again_is_no_repetition_of_the_policy():
    step = a_step([["ask abcdefgh abcdefgh abcdefgh"]])
    own = np.arange(30)[None, None] < 4  # the rest are documents, the same three times
    turns = [[[{"role": "assistant", "content": "ask "}, {"role": "environment", "content": "abcdefgh" * 3}]]]
    graded = step.wait_for_grades()._replace(turns=turns)
    step = replace(step, rollouts=replace(step.rollouts, loss_mask=own), wait_for_grades=lambda: graded)
    measured = text_metrics(step)
    assert measured["completion/repeated"] == 0.0
    assert measured["completion/compressed"] > 1  # of four letters, not of the documents


def test_completions_are_measured_against_their_group_and_themselves():
    one = text_metrics(a_step([["abcdefgh", "abcdefgh"], ["hgfedcba", "abababab"]]))
    assert one["completion/distinct"] == pytest.approx((1 / 2 + 1) / 2)
    assert one["completion/repeated"] == pytest.approx(3 / 5 / 4)  # "abababab" has abab, baba, abab, baba, abab
    same, noise = (text_metrics(a_step([[text] * 8])) for text in ("a" * 60, "q8#kP2!xZ5"))
    assert same["completion/compressed"] < 0.1
    assert noise["completion/compressed"] > same["completion/compressed"]
    assert repeated_share(np.arange(3)) == 0.0
