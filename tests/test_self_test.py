"""The self-test at step 0: silent on the embedded default, and each check fires on its own fault."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from test_steps import numbers

from jaxrl_llm.algorithms.losses import aggregation_weights
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import build, run_self_test
from jaxrl_llm.config import load as configs
from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.forward import make_logprob_fn
from jaxrl_llm.learner.update import make_gradient
from jaxrl_llm.models.adapters import int8, merged
from jaxrl_llm.rollout.grading import Graded, RewardFn
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import AGAIN, Trial, prepare
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tools import doctor
from jaxrl_llm.train import steps

ROOT = Path(__file__).parent.parent
SMALL = {
    "num_steps": 2, "prompts_per_step": 4, "prompts_per_update": 4, "optim.warmup_steps": 0,
    "optim.decay": "constant", "eval": None, "checkpoint.keep_best": 0, "log.to": (),
    "log.completions_every": 1, "mesh.fsdp": 1,
}  # fmt: skip


def tiny(name: str = "grpo", **changes) -> ConfigDict:
    c = configs.load(ROOT / "configs" / f"{name}.py")
    of_one = {"group_size": 4} if name == "grpo" else {"critic.warmup_steps": 1, "critic.optim.warmup_steps": 0}
    c.update_from_flattened_dict(SMALL | of_one | changes)
    return c


@contextmanager
def restored(workdir: Path, **changes):
    with build(tiny(**changes), workdir) as (session, parts):
        session.restore()
        yield SimpleNamespace(session=session, parts=parts, subject=parts)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with restored(tmp_path_factory.mktemp("run") / "run") as run:
        yield run


def prepared(run) -> Trial:
    return prepare(run.subject, run.session.at.states, full=True)


@pytest.fixture(scope="module")
def healthy(run) -> Trial:
    """A trial without a fault; tests change a copy of it."""
    return prepared(run)


@pytest.fixture
def trial(healthy) -> Trial:
    return replace(healthy, gradients=dict(healthy.gradients))


def findings(answer: self_test.CheckReport) -> list[str]:
    assert answer.applicable and answer.text
    return [finding.id for finding in answer.findings]


def said(run, *, full: bool) -> dict[str, tuple[bool, list[str]]]:
    checked = self_test.check(run.subject, run.session.at.states, full=full)
    return {x.id: (x.applicable, [finding.id for finding in x.findings]) for x in checked if x.id}


class Faulty:
    """An engine with a fault."""

    def __init__(self, engine: Any, *, deaf: bool = False, key: Any = None, change=lambda rollouts: rollouts):
        self._engine, self._deaf, self._key, self._change = engine, deaf, key, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample(self, prompts, key, **how):
        return self._change(self._engine.sample(prompts, key if self._key is None else self._key, **how))

    def update_weights(self, params, version=0) -> None:
        if not self._deaf:
            self._engine.update_weights(params, version)


def with_engine(run, monkeypatch, **fault) -> Trial:
    monkeypatch.setattr(run.subject.actor, "engine", Faulty(run.subject.actor.engine, **fault))
    return prepared(run)


def test_it_is_silent_on_the_embedded_default(run):
    done = said(run, full=True)
    assert list(done) == [f"S{i}" for i in range(1, 11)]
    assert all(found == [] for _, found in done.values())
    assert [id for id, (was_done, _) in done.items() if not was_done] == ["S8"]


def test_in_a_run_it_is_silent_and_leaves_out_what_needs_other_programs(run):
    before = dict(run.session.compilations.programs)
    done = said(run, full=False)
    assert all(found == [] for _, found in done.values())
    assert [id for id, (was_done, _) in done.items() if not was_done] == ["S1", "S7", "S8", "S10"]
    new = {name for name in run.session.compilations.programs if name not in before}
    assert not new & {"gradient", "update_step", "jit_gradient", "jit_update_step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"model.dtype": "bfloat16", "epochs": 2}),
        ("grpo", {"rollout.max_lag": 1, "host_memory.reference": True, "host_memory.optimizer": True}),
    ],
)
def test_it_is_silent_with(name, changes, tmp_path):
    with restored(tmp_path, name=name, **changes) as run:
        for full in (False, True):
            assert all(found == [] for _, found in said(run, full=full).values())


def test_a_reference_that_scores_at_another_temperature_is_found(run, monkeypatch):
    """By the update: the reference's own program makes this mistake with the policy's weights too."""
    scorer = run.subject.learning.scorers["reference"]
    warmer = make_logprob_fn(run.subject.model, Sampling(temperature=1.1), run.subject.learning.mesh, microbatch=0)
    program = lambda params, batch: {"ref_logprobs": warmer(params, batch)}  # noqa: E731
    monkeypatch.setitem(run.subject.learning.scorers, "reference", scorer._replace(program=program))
    assert findings(self_test.reference_agrees(prepared(run))) == ["reference_differs"]


def test_in_a_run_the_reference_is_compared_with_a_program_of_its_own_if_there_is_one(trial):
    trial.full, trial.scores = False, trial.scores | {"old_logprobs": trial.scores["ref_logprobs"]}
    assert findings(self_test.reference_agrees(trial)) == []
    trial.scores |= {"ref_logprobs": trial.scores["ref_logprobs"] * 1.01}
    assert findings(self_test.reference_agrees(trial)) == ["reference_differs"]


def test_a_reference_with_other_weights_is_found(run, monkeypatch):
    other = jax.tree.map(lambda x: x * 1.01, run.session.at.states["reference"])
    monkeypatch.setattr(run.session.at, "states", run.session.at.states | {"reference": other})
    assert findings(self_test.reference_agrees(prepared(run))) == ["reference_differs"]


def test_a_run_without_a_reference_is_not_compared(trial):
    trial.scores = {}
    assert not self_test.reference_agrees(trial).applicable


@pytest.mark.parametrize(("shift", "clipped"), [(0.01, False), (0.5, True)])
def test_old_log_probabilities_of_another_policy_are_found(trial, shift, clipped):
    trial.full = False  # the loss alone
    assert findings(self_test.ratio_is_one(trial)) == []
    trial.batch = replace(trial.batch, old_logprobs=trial.policy - shift)
    (finding,) = self_test.ratio_is_one(trial).findings
    assert finding.id == "ratio_not_one" and finding.severity == "error"
    assert (", 0.00%" in finding.evidence) is not clipped


def test_a_sampler_that_reports_other_log_probabilities_is_found(trial):
    logprobs = trial.rollouts.logprobs + np.float32(1e-3) * (np.arange(4)[:, None] == 2)
    trial.rollouts = replace(trial.rollouts, logprobs=logprobs)
    assert findings(self_test.sampler_agrees(trial)) == ["sampler_disagrees"]


def test_a_server_at_another_temperature_is_found_though_its_largest_gap_may_be_large(trial, monkeypatch):
    shape = (*trial.rollouts.completions.shape, 1000)
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    warm, cold = (jax.nn.log_softmax(logits / temperature)[..., 0] for temperature in (1.0, 0.9))
    engine = SimpleNamespace(max_gap=0.5)  # as in the recipe with vLLM
    trial.parts = replace(trial.parts, actor=SimpleNamespace(engine=engine))
    monkeypatch.setattr(Trial, "exact", False)
    for sampled, found in ((warm + 0.001, []), (cold, ["sampler_disagrees"])):
        trial.policy, trial.rollouts = warm, replace(trial.rollouts, logprobs=np.asarray(sampled))
        assert findings(self_test.sampler_agrees(trial)) == found
    engine.max_gap = 1e-4  # a stricter bound of the largest gap bounds the mean too
    trial.rollouts = replace(trial.rollouts, logprobs=np.asarray(warm + 0.001))
    assert findings(self_test.sampler_agrees(trial)) == ["sampler_disagrees"]


def test_a_sampler_of_other_prompts_is_found(run, monkeypatch):
    turned = lambda rollouts: jax.tree.map(lambda x: np.roll(x, 1, axis=0), rollouts)  # noqa: E731
    trial = with_engine(run, monkeypatch, change=turned)
    assert findings(self_test.sampler_agrees(trial)) == ["sampler_disagrees"]


def test_a_group_that_lost_a_completion_is_found(trial):
    trial.rollouts = jax.tree.map(lambda x: x[:, :3], trial.rollouts)
    trial.batch = replace(trial.batch, advantages=trial.batch.advantages[:, :3])
    assert "groups_broken" in findings(self_test.groups_are_whole(trial))


def test_advantages_without_the_baseline_of_their_group_are_found(trial):
    advantages = trial.batch.advantages - jnp.mean(trial.batch.advantages) + 0.1
    trial.batch = replace(trial.batch, advantages=advantages)
    assert findings(self_test.groups_are_whole(trial)) == ["advantages_not_centered"]


class Judge:
    """A reward function that sees what `judge` sees."""

    def __init__(self, judge):
        self._judge = judge

    def __call__(self, rows, texts, ids, columns):
        each = [[self._judge(row, text) for text in group] for row, group in zip(rows, texts, strict=True)]
        return Graded(texts, Rewards(np.array(each, np.float32), {}), [], {})

    def close(self) -> None:
        pass


def judged(trial: Trial, judge, **row) -> self_test.CheckReport:
    rows = [{k: v for k, v in r.items() if k != "answer"} | row for r in trial.parts.dataset.rows[:4]]
    dataset = replace(trial.parts.dataset, rows=rows) if row else trial.parts.dataset
    trial.parts = replace(trial.parts, reward_fn=lambda: Judge(judge), dataset=dataset)
    return self_test.reward_sees(trial)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_reward_that_is_constant_is_found(trial, reward):
    (finding,) = judged(trial, lambda row, text: reward).findings
    assert (finding.id, finding.severity) == ("reward_blind", "warning")


def test_a_reward_that_prefers_to_hear_nothing_is_found(trial):
    assert findings(judged(trial, lambda row, text: -len(text))) == ["reward_blind"]


@pytest.mark.parametrize(
    ("wanted", "row"),
    [
        ("<answer>72</answer>", {"solution": 72}),
        ("\\boxed{72}", {"ground_truth": "72"}),
        ("#### 72", {"answer": "7 times 10, and 2\n#### 72"}),
        ("a whole text", {"completion": "a whole text"}),
    ],
)
def test_a_good_answer_is_given_in_the_form_that_the_reward_wants(trial, wanted, row):
    assert findings(judged(trial, lambda row, text: float(text == wanted), **row)) == []


def test_rows_without_an_answer_are_judged_but_not_compared(trial):
    answer = judged(trial, lambda row, text: 0.0, target=24)
    assert findings(answer) == [] and "no column answer, solution" in answer.text


@pytest.mark.parametrize("row", [{}, {"target": 24}])
def test_a_judge_that_answers_nobody_is_found(trial, row):
    (finding,) = judged(trial, lambda row, text: np.nan, **row).findings
    assert (finding.id, finding.severity) == ("no_verdict", "error")
    assert "arithmetic.accuracy" in finding.cause


def test_a_reward_that_cannot_judge_an_empty_completion_is_found_and_stops_nothing(trial):
    def fails(row, text):
        raise UserError("reward mine raised IndexError")

    assert findings(judged(trial, fails)) == ["reward_fails"]


def test_a_function_in_this_process_is_not_called_in_a_run(trial):
    trial.full = False
    facts = trial.parts.facts
    trial.parts = replace(trial.parts, facts=facts._replace(reward=replace(facts.reward, timeout=0.0)))
    assert "reward.timeout = 0" in judged(trial, lambda row, text: 1 / 0).text


class Quiet:
    """An environment that says nothing."""

    schemas = ()


def test_functions_that_ask_for_what_an_episode_measured_get_it(trial):
    """As in a run: environment.reward, and one that names a metric which this episode does not have."""
    names = ("environment.reward", "test_self_test.counted")
    judge = partial(RewardFn, names, (1.0, 1.0), 0, field="")
    trial.parts = replace(trial.parts, reward_fn=judge, environments=Quiet())
    assert findings(self_test.reward_sees(trial)) == ["reward_blind"]  # both are 0 of every text


def counted(completions, episode, loss_mask, turns, **columns):
    return [measured["searches"] for measured, *_ in zip(episode, loss_mask, turns, strict=True)]


def test_a_row_has_the_generation_prompt_of_its_own_template_arguments(trial):
    tokenizer, own = copy(trial.parts.tokenizer), {"quiet": True}
    row = {"prompt": [{"role": "user", "content": "1+1"}], "chat_template_kwargs": own}
    quiet = "{% if add_generation_prompt %}{{ '<' if quiet is defined else '>' }}{% endif %}"
    tokenizer.chat_template = "{{ messages[0]['content'] }}" + quiet
    dataset = data.tokenize([row], tokenizer, max_prompt_tokens=99, overlong="error")
    for ids, found in ((dataset.ids, []), ([dataset.ids[0][:-1]], ["no_generation_prompt"])):
        trial.parts = replace(trial.parts, tokenizer=tokenizer, dataset=replace(dataset, ids=ids))
        assert findings(self_test.stop_is_learned(trial)) == found


def test_a_missing_stop_token_is_found(trial):
    trial.parts = replace(trial.parts, stop_ids=())
    assert "no_stop_token" in findings(self_test.stop_is_learned(trial))


def test_a_sampler_that_strips_its_stop_token_is_found(run, monkeypatch):
    def stripped(rollouts):
        mask = rollouts.completion_mask & ~np.isin(rollouts.completions, run.subject.stop_ids)
        return replace(rollouts, completion_mask=mask, loss_mask=mask)

    trial = with_engine(run, monkeypatch, change=stripped)
    assert findings(self_test.stop_is_learned(trial)) == ["stop_not_trained"]


def test_a_stop_token_outside_of_the_loss_mask_is_found(trial):
    mask = trial.rollouts.loss_mask & ~np.isin(trial.rollouts.completions, trial.parts.stop_ids)
    trial.rollouts = replace(trial.rollouts, loss_mask=mask)
    assert findings(self_test.stop_is_learned(trial)) == ["stop_not_trained"]


def test_completions_that_are_all_cut_are_found(trial):
    many = jax.tree.map(lambda x: np.concatenate([x] * 4), trial.rollouts)
    trial.rollouts = replace(many, truncated=np.ones_like(many.truncated))
    assert findings(self_test.stop_is_learned(trial)) == ["nothing_stops"]


def test_a_prompt_without_the_generation_prompt_is_found(trial):
    cut = [tokens[:-1] for tokens in trial.parts.dataset.ids]
    trial.parts = replace(trial.parts, dataset=replace(trial.parts.dataset, ids=cut))
    assert findings(self_test.stop_is_learned(trial)) == ["no_generation_prompt"]


def test_a_loss_that_divides_by_the_tokens_of_its_micro_batch_is_found(trial):
    def objective(params, batch, coefs):
        each = jnp.sum(params["norm"]["scale"]) / jnp.sum(batch.loss_mask)
        return jnp.broadcast_to(each, batch.loss_mask.shape), {}

    def gradient(microbatch):
        aggregate = lambda mask: aggregation_weights(mask, mode="token_mean")  # noqa: E731
        return make_gradient(objective, trial.parts.learning.mesh, microbatch, aggregate=aggregate, dtype="float32")

    learning = trial.parts.learning
    policy = replace(learning.learners["policy"], gradient=gradient)
    trial.parts = replace(trial.parts, learning=replace(learning, learners={"policy": policy}))
    trial.gradients = {}
    assert findings(self_test.gradient_stays(trial)) == ["microbatch_changes_gradient"] * 2


def test_a_sampler_with_one_key_is_found(run, monkeypatch):
    trial = with_engine(run, monkeypatch, key=jax.random.key(0))
    assert findings(self_test.samples_differ(trial)) == ["samples_repeat"]


def test_a_sampler_with_one_key_for_all_members_is_found(trial):
    trial.rollouts = jax.tree.map(lambda x: np.concatenate([np.repeat(x[:, :1], 4, axis=1)] * 2), trial.rollouts)
    trial.again = jax.tree.map(lambda x: np.concatenate([x] * 2), trial.again)
    (finding,) = self_test.samples_differ(trial).findings
    assert "members of a group" in finding.evidence


def test_equal_completions_of_a_policy_that_is_sure_are_no_finding(trial):
    same = jax.tree.map(lambda x: np.repeat(x[:1, :1], 4, axis=1), trial.rollouts)
    trial.rollouts = replace(same, logprobs=same.logprobs * 1e-3)
    trial.again = replace(same, completions=same.completions[..., :AGAIN])
    assert findings(self_test.samples_differ(trial)) == []


def test_an_engine_that_ignores_pushes_is_found(run, monkeypatch):
    trial = prepared(run)  # leaves the engine with weights
    monkeypatch.setattr(run.subject.actor, "engine", Faulty(run.subject.actor.engine, deaf=True))
    assert findings(self_test.push_arrives(trial)) == ["push_has_no_effect"]


def test_a_push_that_leaves_out_a_parameter_is_found(run, healthy, monkeypatch):
    engine = run.subject.actor.engine
    kept = healthy.params["norm"]
    partly = lambda params, version=0: type(engine).update_weights(engine, params | {"norm": kept}, version)  # noqa: E731
    monkeypatch.setattr(engine, "update_weights", partly)
    assert findings(self_test.push_arrives(replace(healthy))) == ["push_has_no_effect"]


def test_the_push_of_a_base_in_int8_moves_its_scales_and_leaves_its_numbers(monkeypatch):
    pushed: list[Any] = []
    engine = SimpleNamespace(max_gap=None, update_weights=lambda params: pushed.append(params))
    params = {"kernel": int8(jnp.arange(24.0).reshape(4, 6)), "adapter": jnp.ones(3)}
    trial = SimpleNamespace(full=True, exact=True, engine=engine, params=params, sample=lambda *_: None)
    monkeypatch.setattr(self_test, "_gap", lambda trial, params, sampled: float(params is trial.params))
    assert findings(self_test.push_arrives(trial)) == []  # type: ignore[arg-type]
    moved, after = pushed
    assert after is params
    assert moved["kernel"].qvalue.dtype == jnp.int8
    np.testing.assert_array_equal(moved["kernel"].qvalue, params["kernel"].qvalue)
    np.testing.assert_allclose(merged(moved)["kernel"], 1.05 * merged(params)["kernel"], rtol=1e-6)
    np.testing.assert_allclose(moved["adapter"], 1.05)


def test_after_it_the_engine_has_the_weights_of_the_run(run, healthy):
    self_test.push_arrives(healthy)
    sampled = healthy.sample(3, 4)
    assert self_test._gap(healthy, healthy.params, sampled) < 1e-4


def test_servers_are_asked_by_the_check_of_their_weights(trial):
    def take_back():
        raise UserError("they still have the weights before")

    lent = SimpleNamespace(take_back=lambda: ({}, {"weight_check/gap": 1e-5}))
    actor = SimpleNamespace(lent=lent, engine=SimpleNamespace(max_gap=1e-3))
    trial.parts = replace(trial.parts, actor=actor)
    assert findings(self_test.push_arrives(trial)) == []
    lent.take_back = take_back
    (finding,) = self_test.push_arrives(trial).findings
    assert finding.id == "push_has_no_effect" and "weights before" in finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_has_the_same_numbers_and_samples_with_and_without_it(lag, tmp_path, capsys):
    for name, test in (("with", True), ("without", False)):
        config = tiny(**{"rollout.max_lag": lag, "health.self_test": test, "checkpoint.every": 1})
        (tmp_path / name).mkdir()
        records = numbers(list(steps(config, tmp_path / name / "run")))
        (tmp_path / name / "records").write_text(json.dumps(records))
        assert ("self-test: 6 checks passed in " in capsys.readouterr().out) is test
    for file in ("records", "run/completions.jsonl", "run/hf/model.safetensors"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()


def test_in_a_run_findings_are_told_and_kept_and_do_not_stop_it(run, monkeypatch, capsys):
    blind = replace(run.subject, reward_fn=lambda: Judge(lambda row, text: 0.0))
    run_self_test(run.session, blind)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("self-test: 5 checks passed, 1 found something in ")
    assert second.strip().startswith("health warning: no form of the row's answer earns more")
    (line,) = (run.session.workdir / "health.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "reward_blind" and json.loads(line)["step"] == 0


def test_the_doctor_tells_each_check(monkeypatch, capsys):
    given = {"group_size": 4, **SMALL}
    fields = [f"--config.{name}={value}" for name, value in given.items()]
    command = ["doctor", "--config", str(ROOT / "configs" / "grpo.py"), *fields, "--selftest", "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="0"):
        doctor.main()
    told = json.loads(capsys.readouterr().out)
    assert {check["id"]: check["passed"] for check in told["self_test"]} == {
        f"S{i}": None if i == 8 else True for i in range(1, 11)
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", str(ROOT / "configs" / "sft.py"), "--selftest"], "supervised fine-tuning has no self-test"),
        (["--run", "runs/x", "--selftest"], "or --run LOG alone"),
    ],
)
def test_what_has_no_self_test_is_told_in_a_line(arguments, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    with pytest.raises(UserError, match=words):
        doctor.main()


def test_every_check_is_in_the_table_of_the_docs():
    text = (ROOT / "docs" / "health.md").read_text()
    for id, _ in self_test.CHECKS:
        assert f"| {id} |" in text
