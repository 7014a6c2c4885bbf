"""What a run does about a finding: it stops, skips the update, or goes back to a checkpoint."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_steps import numbers, tiny, written

from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import Parts, build
from jaxrl_llm.errors import StoppedByHealth, UserError
from jaxrl_llm.health import rules
from jaxrl_llm.health.finding import Finding, RuleInputs
from jaxrl_llm.health.history import History
from jaxrl_llm.learner import optim
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.recipe import combinations
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.rollback import Decision, Rollbacks, last_healthy, rollback_step
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.session.session import Session
from jaxrl_llm.train import steps, train

RATE = 1e-4  # of configs/grpo.py


def too_fast(history: History) -> Finding | None:
    """A rule that finds something at steps 10 and 11, until the rate is lower."""
    last = history.last_records[-1]
    if last["step"] not in (10, 11) or last["learning_rate"] < 0.6 * RATE:
        return None
    return Finding("error", f"step {last['step']} has the whole rate", "of a test", "lower it")


def from_step(step: int, history: History) -> Finding | None:
    late = history.last_records[-1]["step"] >= step
    return Finding("error", f"it is step {step}", "of a test", "begin anew") if late else None


def always(history: History) -> Finding | None:
    """A rule that finds something from step 3 on."""
    return from_step(3, history)


def late(history: History) -> Finding | None:
    """A rule that finds something from step 11 on."""
    return from_step(11, history)


def add_rules(patch: pytest.MonkeyPatch) -> None:
    known = rules.RULES | {rule: RuleInputs(()) for rule in (too_fast, always, late, ill_at_thirty)}
    for module in (rules, combinations):
        patch.setattr(module, "RULES", known)


@pytest.fixture(autouse=True)
def own_rules(monkeypatch):
    add_rules(monkeypatch)


def back(rule: str = "too_fast", **changes):
    """A run of 12 steps that goes back at the findings of a rule."""
    sizes = {"num_steps": 12, "eval.every": 4, "group_size": 2, "kl.refresh.every": 3, "health.rollback.rules": (rule,)}
    return tiny(**sizes | {"health.rollback.warmup_steps": 2} | changes)


NO_EVALUATION = {"eval": None, "checkpoint.keep_best": 0}


@pytest.mark.slow
def test_a_run_goes_back_once_and_ends_with_a_lower_rate(tmp_path, capsys):
    records = list(steps(back(**NO_EVALUATION), tmp_path / "run"))
    assert [r["step"] for r in records] == [*range(1, 10), *range(3, 13)]  # that of step 10 has the finding
    rates = {r["step"]: r["learning_rate"] / RATE for r in written(tmp_path / "run") if r["step"]}
    assert [rates[step] for step in (1, 2)] == pytest.approx([0.5, 1.0])  # the first warm-up has one step
    assert [rates[step] for step in (3, 4, 5, 12)] == pytest.approx([1 / 6, 2 / 6, 0.5, 0.5])
    first = {r["step"]: r["reward/mean"] for r in records[:9]}
    again = {r["step"]: r["reward/mean"] for r in records[9:]}
    assert any(first[step] != again[step] for step in range(3, 10))  # other samples
    kept = json.loads((tmp_path / "run/rollbacks/1.json").read_text())
    assert (kept["step"], kept["to"], kept["finding"]["id"]) == (10, 2, "too_fast")
    assert [json.loads(line)["step"] for line in (tmp_path / "run/rollbacks/1/metrics.jsonl").open()][-1] >= 10
    out = capsys.readouterr().out
    assert "rollback 1 of at most 3: back to step 2" in out


ACCURACIES = [0.1, 0.2, 0.9, 0.2, 0.9, 0.3, 0.1, 0.0, 0.4, 0.5, 0.6]  # of each fourth step, again and again
# With the number of calls before the one that is interrupted.
MOMENTS = [
    (Log, "start", 0), (Actor, "load", 0), (Actor, "start", 0), (Actor, "next", 2), (Learning, "score", 2),
    (Rollbacks, "decide", 0), (Checkpoints, "go_back", 0), (Checkpoints, "go_back", 0), (Checkpoints, "go_back", 0),
    (Samples, "rewards", 1), (Learning, "coefficients", 2), (Learning, "update", 1), (Learning, "finish_step", 1),
    (Session, "commit", 1), (Actor, "push", 1), (Parts, "evaluate", 1), (Session, "evaluate", 1), (Log, "finish", 2),
    (Log, "write", 1), (Checkpoints, "save", 1), (Session, "write", 2), (Session, "judge", 1),
    (Checkpoints, "resume", 0), (Inputs, "export", 0),
]  # fmt: skip


def ill_at_thirty(history: History) -> Finding | None:
    """A rule that finds something at step 30, until the rate is lower."""
    last = history.last_records[-1]
    ill = last["step"] == 30 and last["learning_rate"] > 0.6 * RATE
    return Finding("error", "it is step 30", "of a test", "lower it") if ill else None


def evaluated(config, workdir: Path) -> None:
    """Runs to the end, with these accuracies."""
    with build(config, workdir) as (session, parts):
        evaluate = parts.evaluate
        accuracy = lambda: ACCURACIES[session.run_state.step // 4 % len(ACCURACIES)]  # noqa: E731
        parts.evaluate = lambda states: evaluate(states) | {"eval/accuracy": accuracy()}
        list(train(session, parts))


def interruptible(monkeypatch, owner: type, method: str, skipped: int, *, crash: bool) -> None:
    """Interrupts a call of a method: by a signal before it, or by a crash after it."""
    function, calls = getattr(owner, method), []

    def call(*given, **more):
        calls.append(1)
        due = len(calls) == 1 + skipped
        if due and not crash:
            signal.raise_signal(signal.SIGINT)
        done = function(*given, **more)
        if due and crash:
            raise UserError("the host is lost: nothing is saved")
        return done

    monkeypatch.setattr(owner, method, call)


@pytest.mark.slow
def test_a_run_that_is_interrupted_at_each_moment_ends_like_one_that_is_not(tmp_path, monkeypatch):
    """In each phase of a step, an evaluation, a save, a rollback, a resume and the export: before or after it."""
    changes = {"rollout.max_lag": 1, "num_steps": 76, "checkpoint.every": 3, "checkpoint.keep": 1}
    changes |= {"kl": None, "reward.timeout": 0.0}
    changes["kl.refresh"] = None
    config = back("ill_at_thirty", **changes)
    runs = {name: tmp_path / name for name in ("straight", "interrupted")}
    evaluated(config, runs["straight"])
    missed = []
    for number, (owner, method, skipped) in enumerate(MOMENTS):  # signals and crashes take turns
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt, UserError):
            interruptible(patch, owner, method, skipped, crash=number % 2 == 1)
            evaluated(config, runs["interrupted"])
            missed.append(method)
    evaluated(config, runs["interrupted"])
    assert not missed
    assert numbers(written(runs["interrupted"])) == numbers(written(runs["straight"]))
    weights = [(run / "hf/model.safetensors").read_bytes() for run in runs.values()]
    assert weights[0] == weights[1]
    kept = [sorted(file.name for file in (run / "checkpoints").iterdir()) for run in runs.values()]
    assert kept[0] == kept[1]
    assert [SavedRun(run).find("best") for run in runs.values()] == [8, 8]
    decided = [[file.read_text() for file in sorted(run.glob("rollbacks/*.json"))] for run in runs.values()]
    assert decided[0] == decided[1] and len(decided[0]) == 1


@pytest.mark.slow
def test_a_spike_is_skipped_and_after_the_last_rollback_a_run_stops(tmp_path):
    acts = {"health.skip": ("gradient_spike",), "health.rollback.most": 1, "num_steps": 11, "eval": None}
    acts |= {"reward.timeout": 0.0}  # in this process
    config = back("late", **acts | {"kl.refresh": None, "checkpoint.keep_best": 0})
    with build(config, tmp_path / "run") as (session, parts):
        plain = parts.learning.assign_credit

        def spike(*args):
            batch, metrics = plain(*args)
            calls.append(1)
            return replace(batch, advantages=batch.advantages + (1000.0 if len(calls) == 10 else 0.0)), metrics

        calls: list[int] = []
        parts.learning.assign_credit = spike
        with pytest.raises(StoppedByHealth, match=r"step 11: .*rollback\.most"):
            list(train(session, parts))
    (went_back,) = (json.loads(file.read_text()) for file in (tmp_path / "run/rollbacks").glob("*.json"))
    assert (went_back["step"], went_back["to"], went_back["finding"]["id"]) == (11, 3, "late")
    first = {r["step"]: r for r in written(tmp_path / "run/rollbacks/1")}
    assert [step for step, r in first.items() if r["skip/gradient_spike"]] == [10]
    assert first[10]["updates/skipped"] == 1
    assert [step for step, r in first.items() if not r["update_norm"]] == [10]
    assert first[8]["grad_norm/bound"] == 0 < first[9]["grad_norm/bound"]  # eight updates make the usual norm


@pytest.mark.slow
def test_a_rule_may_stop_a_run_and_what_it_stops_at_is_not_saved(tmp_path):
    with pytest.raises(StoppedByHealth, match="step 3: "):
        list(steps(tiny(**{"health.stop": ("always",)}), tmp_path / "run"))
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("step", "since", "checkpoints", "before", "to"),
    [
        (40, None, [], [], 0),
        (8, None, [5, 7], [], 5),  # none is old enough: the oldest
        (40, None, [25, 35], [], 25),  # 35 may be ill already: a fast problem is 8 steps old at most
        (58, None, [25, 50], [25], 50),  # it is healthy for longer than the last one
        (57, None, [10, 25, 50], [25], 10),  # it is ill again at once: further back
        (57, None, [25, 50], [25], 25),  # there is none further back
        (40, 10, [5, 10, 30, 35], [], 10),  # the rule knows the begin of a slow problem
        (40, 39, [5, 10, 30, 35], [], 30),
    ],
)
def test_a_run_goes_back_to_a_checkpoint_that_is_older_than_the_problem(step, since, checkpoints, before, to):
    earlier = [Decision(0, at, {}) for at in before]
    assert rollback_step(last_healthy(step, {"since": since}), checkpoints, earlier) == to


@pytest.mark.parametrize(
    ("mean", "square", "skipped"), [(1.0, 1.01, False), (0.4, 0.2, True), (2.5, 6.3, True), (1.0, 4.0, True)]
)
def test_an_update_on_samples_of_other_weights_is_skipped(mean, square, skipped):
    metrics = {"importance/raw_mean": jnp.float32(mean), "importance/raw_square": jnp.float32(square)}
    metrics |= {"importance/mean": jnp.float32(1), "importance/square": jnp.float32(1)}  # as the correction leaves them
    assert bool(optim.sampler_mismatch(metrics)) == skipped


@pytest.mark.parametrize(("deviation", "skipped"), [(0.2, True), (0.8, False)])
def test_a_norm_is_a_spike_by_the_noise_of_the_norms_before_it(deviation, skipped):
    """20 healthy runs of 10,000 updates, whose norms differ little or much: none is skipped, but 20 times the usual."""
    bound = optim.spike_bound()

    def update(state, norm):
        now = bound.value(state)
        return bound.adapt(state, {"grad_norm": norm}), (now > 0) & (norm > now)

    norms = jnp.exp(deviation * jax.random.normal(jax.random.key(0), (20, 10_000)))
    state = jnp.tile(jnp.float32(bound.start), (20, 1))
    last, refused = jax.vmap(lambda state, of_run: jax.lax.scan(update, state, of_run))(state, norms)
    assert not refused.any()
    assert bool((jax.vmap(bound.value)(last) < 20.0).all()) == skipped


@pytest.mark.parametrize("flat", [[0.0], [0.0] * 20, [1e-9] * 20, [0.01]])
def test_updates_without_a_gradient_at_the_start_leave_the_guard_on(flat):
    bound = optim.spike_bound()
    state = jnp.float32(bound.start)
    for norm in [*flat, *[1.0] * 100]:
        assert not 0 < bound.value(state) < norm  # a skipped update does not move the bound: all later ones would be
        state = bound.adapt(state, {"grad_norm": jnp.float32(norm)})
    assert 9 < bound.value(state) < 12


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_early_and_stays_ended(tmp_path, capsys):
    def went_on(patience: int) -> list[int]:
        changes = {"num_steps": 9, "eval.every": 1, "eval.patience": patience, "optim.learning_rate": 1e-9}
        return [record["step"] for record in steps(tiny(**changes), tmp_path / "run")]

    assert went_on(2)[-1] == 2
    assert "early stop" in capsys.readouterr().out
    assert (tmp_path / "run/hf/model.safetensors").is_file()
    assert went_on(2) == []
    assert went_on(4)[-1] == 4


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("health.stop", {"health.stop": ("no_signals",)}),
        ("'always'", {"health.rollback.rules": ("always",), "health.stop": ("always",)}),
        ("config.health.skip", {"health.skip": ("spikes",)}),
        ("rollback.rules", {"health.rollback.rules": ()}),
    ],
)
def test_an_action_that_cannot_be_is_refused(field, changes, refused):
    with refused(field):
        recipes.read(tiny(**changes))
