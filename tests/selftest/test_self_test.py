"""The self-test at step 0: silent on the embedded default, and each check fires on its own fault."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
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
from jaxrl_llm.models import lora
from jaxrl_llm.models.adapters import as_array, merge_adapters, quantize_int8
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import COMPARED_TOKENS, Trial, make_trial
from jaxrl_llm.structs import Rewards, Rollouts
from jaxrl_llm.tools import doctor
from jaxrl_llm.train import steps

ROOT = Path(__file__).parents[2]
SMALL = {
    "num_steps": 2, "prompts_per_step": 4, "prompts_per_update": 4, "group_size": 4, "optim.warmup_steps": 0,
    "optim.decay": "constant", "eval": None, "checkpoint.keep_best": 0, "log.to": (),
    "log.completions_every": 1, "mesh.fsdp": 1, "reward.functions": ("arithmetic.accuracy",), "reward.weights": (1.0,),
}  # fmt: skip


def tiny(**changes) -> ConfigDict:
    c = configs.load(ROOT / "configs" / "grpo.py")
    c.update_from_flattened_dict(SMALL | changes)
    return c


@contextmanager
def restored(workdir: Path, **changes):
    with build(tiny(**changes), workdir) as (session, parts):
        session.restore()
        yield SimpleNamespace(session=session, parts=parts)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with restored(tmp_path_factory.mktemp("run") / "run") as run:
        yield run


def prepared(run) -> Trial:
    return make_trial(run.parts, run.session.run_state.states, full=True)


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
    checked = self_test.all_reports(run.parts, run.session.run_state.states, full=full)
    return {x.id: (x.applicable, [finding.id for finding in x.findings]) for x in checked if x.id}


class Faulty:
    """An engine that always samples with one key, and returns the completions of the next prompt."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample(self, prompts, key, **how):
        return each(lambda x: np.roll(x, 1, axis=0), self._engine.sample(prompts, jax.random.key(0), **how))


def test_the_doctor_tells_each_check_and_none_finds_a_thing(run, healthy, monkeypatch, capsys):
    built = []

    @contextmanager
    def build(config: ConfigDict, workdir: Path):
        built.append(config)
        session = SimpleNamespace(restore=lambda: None, run_state=run.session.run_state)
        parts = copy(run.parts)
        parts.wait_until_idle = lambda: built.append("rested")
        yield session, parts

    # One trial of one run serves this test and those below.
    monkeypatch.setattr(doctor, "build", build)
    monkeypatch.setattr(self_test, "make_trial", lambda parts, states, full: healthy if full else None)
    monkeypatch.setattr(sys, "argv", ["doctor", "--config", str(ROOT / "configs" / "grpo.py"), "--selftest", "--json"])
    with pytest.raises(SystemExit, match="0"):
        doctor.main()
    config, rested = built
    assert (config.checkpoint.keep, config.checkpoint.keep_best, config.log.to, rested) == (1, 0, (), "rested")
    checked = json.loads(capsys.readouterr().out)["self_test"]
    assert {check["id"]: check["passed"] for check in checked} == {
        f"S{i}": None if i == 8 else True for i in range(1, 11)
    }


def test_in_a_run_it_is_silent_and_leaves_out_what_needs_other_programs(run):
    before = dict(run.session.compilations.programs)
    done = said(run, full=False)
    assert all(found == [] for _, found in done.values())
    assert [id for id, (was_done, _) in done.items() if not was_done] == ["S1", "S7", "S8", "S10"]
    new = {name for name in run.session.compilations.programs if name not in before}
    assert not new & {"gradient", "update_step", "jit_gradient", "jit_update_step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model.dtype": "bfloat16", "epochs": 2},
        {"rollout.max_lag": 1, "host_memory.reference": True, "host_memory.optimizer": True},
    ],
    ids=["rounding-and-updates", "lag-and-host-memory"],
)
def test_it_is_silent_with(changes, tmp_path):
    with restored(tmp_path, **changes) as run:
        for full in (False, True):
            assert all(found == [] for _, found in said(run, full=full).values())


def test_a_reference_that_scores_at_another_temperature_is_found(run, monkeypatch):
    """By the update: the reference's own program makes this mistake with the policy's weights too."""
    scorer = run.parts.learning.scorers["reference"]
    warmer = make_logprob_fn(run.parts.model, Sampling(temperature=1.1), run.parts.learning.mesh, microbatch=0)
    program = lambda params, batch: {"ref_logprobs": warmer(params, batch)}  # noqa: E731
    monkeypatch.setitem(run.parts.learning.scorers, "reference", scorer._replace(program=program))
    assert findings(self_test.reference_agrees(prepared(run))) == ["reference_differs"]


def test_a_reference_in_a_run_is_compared_with_a_program_of_its_own(trial):
    trial.full, trial.scores = False, trial.scores | {"old_logprobs": trial.scores["ref_logprobs"]}
    assert findings(self_test.reference_agrees(trial)) == []
    trial.scores |= {"ref_logprobs": trial.scores["ref_logprobs"] * 1.01}
    assert findings(self_test.reference_agrees(trial)) == ["reference_differs"]
    trial.scores = {}  # a run without a reference
    assert not self_test.reference_agrees(trial).applicable


def test_old_log_probabilities_of_another_policy_are_found(trial):
    trial.full = False  # the loss alone
    assert findings(self_test.ratio_is_one(trial)) == []
    for shift, clipped in ((0.01, False), (0.5, True)):
        trial.batch = replace(trial.batch, old_logprobs=trial.policy - shift)
        (finding,) = self_test.ratio_is_one(trial).findings
        assert finding.id == "ratio_not_one" and finding.severity == "error"
        assert (", 0.00%" in finding.evidence) is not clipped


def each(change: Callable[[np.ndarray], np.ndarray], rollouts: Rollouts) -> Rollouts:
    return jax.tree.map(change, rollouts)


# What a fault changes in a healthy trial, the check, and what it finds.
FAULTS = {
    "log-probabilities of the sampler": (
        lambda t: {"rollouts": replace(t.rollouts, logprobs=t.rollouts.logprobs + np.float32([[0], [0], [1e-3], [0]]))},
        "sampler_agrees", "sampler_disagrees"),
    "a group without one of its completions": (
        lambda t: {"rollouts": each(lambda x: x[:, :3], t.rollouts),
                   "batch": replace(t.batch, advantages=t.batch.advantages[:, :3])},
        "groups_are_whole", "groups_broken"),
    "advantages without the baseline of their group": (
        lambda t: {"batch": replace(t.batch, advantages=t.batch.advantages - jnp.mean(t.batch.advantages) + 0.1)},
        "groups_are_whole", "advantages_not_centered"),
    "no stop token": (lambda t: {"parts": replace(t.parts, stop_ids=())}, "stop_is_learned", "no_stop_token"),
    "a stop token outside of the loss mask": (
        lambda t: {"rollouts": replace(
            t.rollouts, loss_mask=t.rollouts.loss_mask & ~np.isin(t.rollouts.completions, t.parts.stop_ids))},
        "stop_is_learned", "stop_not_trained"),
    "completions that are all cut": (
        lambda t: {"rollouts": replace(each(lambda x: np.concatenate([x] * 4), t.rollouts),
                                       truncated=np.ones((16, 4), bool))},
        "stop_is_learned", "nothing_stops"),
    "a prompt without the generation prompt": (
        lambda t: {"parts": replace(
            t.parts, dataset=replace(t.parts.dataset, ids=[x[:-1] for x in t.parts.dataset.ids]))},
        "stop_is_learned", "no_generation_prompt"),
    "one key for all members of a group": (
        lambda t: {"rollouts": each(lambda x: np.concatenate([np.repeat(x[:, :1], 4, axis=1)] * 2), t.rollouts),
                   "other_key_rollouts": each(lambda x: np.concatenate([x] * 2), t.other_key_rollouts)},
        "samples_differ", "samples_repeat"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "check", "found"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_in(change, check, found, trial):
    answer = getattr(self_test, check)(replace(trial, **change(trial)))
    assert found in findings(answer)
    assert found != "samples_repeat" or "members of a group" in answer.findings[0].evidence


def test_an_engine_that_mixes_up_prompts_or_has_one_key_is_found(run, monkeypatch):
    monkeypatch.setattr(run.parts.actor, "engine", Faulty(run.parts.actor.engine))
    trial = prepared(run)
    assert findings(self_test.sampler_agrees(trial)) == ["sampler_disagrees"]
    assert findings(self_test.samples_differ(trial)) == ["samples_repeat"]


def test_a_server_at_another_temperature_is_found_by_its_mean_gap(trial, monkeypatch):
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


class Judge:
    """A reward function that sees what `judge` sees."""

    def __init__(self, judge):
        self._judge = judge

    def __call__(self, rows, texts, ids, columns):
        each = [[self._judge(row, text) for text in group] for row, group in zip(rows, texts, strict=True)]
        return GradedCompletions(texts, Rewards(np.array(each, np.float32), {}), [], {})

    def close(self) -> None:
        pass


def judged(trial: Trial, judge, **row) -> self_test.CheckReport:
    rows = [{k: v for k, v in r.items() if k != "answer"} | row for r in trial.parts.dataset.rows[:4]]
    dataset = replace(trial.parts.dataset, rows=rows) if row else trial.parts.dataset
    trial.parts = replace(trial.parts, open_reward_fn=lambda: Judge(judge), dataset=dataset)
    return self_test.reward_sees(trial)


@pytest.mark.parametrize(
    "judge", [lambda text: 0.0, lambda text: 1.0, lambda text: -len(text)], ids=["0", "1", "short"]
)
def test_a_reward_that_prefers_no_good_answer_is_found(trial, judge):
    (finding,) = judged(trial, lambda row, text: judge(text)).findings
    assert (finding.id, finding.severity) == ("reward_blind", "warning")


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


@pytest.mark.parametrize(("begun", "wanted"), [("<think>\n", "\n</think>\n<answer>\n72\n</answer>"),
                                              ("<think>\n\n</think>\n\n", "<answer>\n72\n</answer>")])  # fmt: skip
def test_a_thought_that_the_prompt_opens_is_in_no_form_of_an_answer(trial, begun, wanted):
    row = {"solution": 72, "assistant_prefill": begun}
    assert findings(judged(trial, lambda row, text: float(text == wanted), **row)) == []
    assert findings(judged(trial, lambda row, text: float(text.startswith("<think>")), **row)) == ["reward_blind"]


def test_rows_without_an_answer_are_judged_but_not_compared(trial):
    answer = judged(trial, lambda row, text: 0.0, target=24)
    assert findings(answer) == [] and "no column answer, solution" in answer.text


@pytest.mark.parametrize("row", [{}, {"target": 24}])
def test_a_judge_that_answers_nobody_is_found(trial, row):
    (finding,) = judged(trial, lambda row, text: np.nan, **row).findings
    assert (finding.id, finding.severity) == ("no_verdict", "error")
    assert "arithmetic.accuracy" in finding.cause


def test_a_reward_that_fails_on_an_empty_completion_is_found(trial):
    def fails(row, text):
        raise UserError("reward mine raised IndexError")

    assert findings(judged(trial, fails)) == ["reward_fails"]


def test_a_function_in_this_process_is_not_called_in_a_run(trial):
    trial.full = False
    facts = trial.parts.recipe_summary
    trial.parts = replace(trial.parts, recipe_summary=facts._replace(reward=replace(facts.reward, timeout=0.0)))
    assert "reward.timeout = 0" in judged(trial, lambda row, text: 1 / 0).text


def test_functions_that_ask_for_what_an_episode_measured_get_it(trial):
    """As in a run: environment.reward, and one that names a metric which this episode does not have."""
    names = ("environment.reward", "test_self_test.counted")
    judge = partial(RewardFn, names, (1.0, 1.0), 0, field="")
    summary = trial.parts.recipe_summary._replace(environments={"env": object()})
    trial.parts = replace(trial.parts, open_reward_fn=judge, recipe_summary=summary)
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


def test_equal_completions_of_a_policy_that_is_sure_are_no_finding(trial):
    same = jax.tree.map(lambda x: np.repeat(x[:1, :1], 4, axis=1), trial.rollouts)
    trial.rollouts = replace(same, logprobs=same.logprobs * 1e-3)
    trial.other_key_rollouts = replace(same, completions=same.completions[..., :COMPARED_TOKENS])
    assert findings(self_test.samples_differ(trial)) == []


def test_an_engine_that_ignores_pushes_or_a_parameter_of_them_is_found(run, monkeypatch):
    trial, engine = prepared(run), run.parts.actor.engine  # leaves the engine with weights
    kept = trial.params["norm"]
    partly = lambda params, version=0: type(engine).update_weights(engine, params | {"norm": kept}, version)  # noqa: E731
    for push in (partly, lambda params, version=0: None):
        monkeypatch.setattr(engine, "update_weights", push)
        assert findings(self_test.push_arrives(trial)) == ["push_has_no_effect"]


@pytest.mark.slow
def test_a_push_that_loses_new_adapters_is_found_although_they_begin_as_0(tmp_path, monkeypatch):
    adapters = configs.load(ROOT / "configs" / "lora.py").adapters
    monkeypatch.setattr(lora.LoraKernel, "merged", lambda kernel: as_array(kernel.frozen))
    with restored(tmp_path / "run", adapters=adapters) as run:
        assert findings(self_test.push_arrives(prepared(run))) == ["push_has_no_effect"]


def test_the_push_of_a_base_in_int8_moves_its_scales_and_leaves_its_numbers(monkeypatch):
    pushed: list[Any] = []
    engine = SimpleNamespace(max_gap=None, update_weights=lambda params: pushed.append(params))
    params = {"kernel": quantize_int8(jnp.arange(24.0).reshape(4, 6)), "adapter": jnp.ones(3)}
    trial = SimpleNamespace(full=True, exact=True, engine=engine, params=params, sample=lambda *_: None)
    monkeypatch.setattr(self_test, "_logprob_gap", lambda trial, params, sampled: float(params is trial.params))
    assert findings(self_test.push_arrives(trial)) == []  # type: ignore[arg-type]
    moved, after = pushed
    assert after is params
    assert moved["kernel"].qvalue.dtype == jnp.int8
    np.testing.assert_array_equal(moved["kernel"].qvalue, params["kernel"].qvalue)
    np.testing.assert_allclose(merge_adapters(moved)["kernel"], 1.05 * merge_adapters(params)["kernel"], rtol=1e-6)
    np.testing.assert_allclose(moved["adapter"], 1.05)


def test_after_it_the_engine_has_the_weights_of_the_run(run, healthy):
    self_test.push_arrives(healthy)
    sampled = healthy.sample(3, 4)
    assert self_test._logprob_gap(healthy, healthy.params, sampled) < 1e-4


def test_servers_are_asked_by_the_check_of_their_weights(trial):
    def reclaim():
        raise UserError("they still have the weights before")

    lease = SimpleNamespace(reclaim=lambda: ({}, {"weight_check/gap": 1e-5}))
    actor = SimpleNamespace(lease=lease, engine=SimpleNamespace(max_gap=1e-3))
    trial.parts = replace(trial.parts, actor=actor)
    assert findings(self_test.push_arrives(trial)) == []
    lease.reclaim = reclaim
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
        assert ("self-test: 6 checks" in capsys.readouterr().out) is test
    for file in ("records", "run/completions.jsonl", "run/hf/model.safetensors"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()


def test_in_a_run_findings_are_told_and_kept_and_do_not_stop_it(run, monkeypatch, capsys, wording):
    blind = replace(run.parts, open_reward_fn=lambda: Judge(lambda row, text: 0.0))
    run_self_test(run.session, blind)
    wording(re.sub(r" in [\d.]+ s", "", capsys.readouterr().out))
    (line,) = (run.session.workdir / "health.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "reward_blind" and json.loads(line)["step"] == 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("--selftest", ["--config", str(ROOT / "configs" / "sft.py")]), ("--config", ["--run", "runs/x"])],
)
def test_what_has_no_self_test_is_refused(field, arguments, monkeypatch, refused):
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments, "--selftest"])
    with refused(field):
        doctor.main()


def test_every_check_is_in_the_table_of_the_docs():
    text = (ROOT / "docs" / "health.md").read_text()
    for id, _ in self_test.CHECKS:
        assert f"| {id} |" in text
