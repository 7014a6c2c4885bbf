"""Preference learning in `sft`: DPO and SimPO on pairs, which are groups of two that share their prompt."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from test_steps import numbers, written
from test_update import flat_scores

from jaxrl_llm import evaluate, sft
from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import losses, supervised
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import load
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.learner import update
from jaxrl_llm.machine import transfers
from jaxrl_llm.models import hf
from jaxrl_llm.structs import Batch
from jaxrl_llm.tasks import arithmetic

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
TRL = json.loads((ROOT / "tests" / "references" / "trl_preferences.json").read_text())
MEAN = partial(losses.aggregation_weights, mode="sequence_mean")
PAIR = Columns(pair=("chosen", "rejected"))
ASKED = [{"role": "user", "content": "1+2"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def inputs_of(loss: str, batch: Batch) -> Batch:
    """The batch with the columns that a loss asks for."""
    return batch if loss == "dpo" else dataclasses.replace(batch, columns={})


@pytest.mark.parametrize("case", TRL, ids=[f"{case['loss']} {case['fields']}" for case in TRL])
def test_value_gradient_and_metrics_are_those_of_trl(case):
    mask = np.array(case["mask"])
    logprobs, ref = (np.array(case[name], np.float32) for name in ("logprobs", "ref_logprobs"))
    batch = inputs_of(case["loss"], Batch(None, None, None, mask, mask, columns={"ref_logprobs": ref}))
    function = partial(getattr(supervised, case["loss"]), **case["fields"])

    def total(logprobs):
        loss, metrics = function(logprobs, batch, **batch.columns)
        return jnp.sum(loss * MEAN(mask)), metrics

    (value, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logprobs)
    np.testing.assert_allclose(value, case["value"], rtol=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-5, atol=1e-6)
    ours = {"chosen": "chosen", "rejected": "rejected", "margins": "margin", "accuracies": "accuracy"}
    shares = update.MetricWeights.of(mask)
    for theirs, name in ours.items():
        mean = update.reduce_metric("", metrics[f"reward/{name}"], shares)
        np.testing.assert_allclose(mean, case["metrics"][f"rewards/{theirs}"], rtol=1e-5, atol=1e-6)


def pairs() -> Batch:
    """Pairs of completions of 1 to C tokens, with the log-probabilities of a reference."""
    batch = tiny.batch()
    two = (x[:, :2] for x in (batch.completions, batch.completion_mask, batch.loss_mask))
    return Batch(batch.prompts, batch.prompt_mask, *two, columns={"ref_logprobs": batch.ref_logprobs[:, :2]})


def gradient_of_table(loss, shape, microbatch, monkeypatch):
    """Gradients of a model that is a table of log-probabilities, and metrics, on the host."""
    table = lambda model, params, batch, sampling: ((params["table"][batch.prompts[:, 0]],) * 2, None)  # noqa: E731
    monkeypatch.setattr(update, "completion_logprobs_and_load", table)
    batch, mesh = dataclasses.replace(inputs_of(loss, pairs()), prompts=np.arange(tiny.B)[:, None]), tiny.mesh_of(shape)
    params = {"table": np.random.default_rng(3).normal(-1, 1, batch.loss_mask.shape).astype(np.float32)}
    objective = update.policy_objective(None, partial(getattr(supervised, loss), nll_coef=0.5), Sampling())
    gradient = jax.jit(update.make_gradient(objective, mesh, microbatch, aggregate=MEAN, dtype="float32"))
    return transfers.to_host(gradient(params, transfers.shard_batch(batch, mesh), {}))


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_mesh_and_micro_batch_change_no_gradient(loss, monkeypatch):
    ours, theirs = (gradient_of_table(loss, *x, monkeypatch) for x in (((2, 2, 2), 4), ((1, 1, 1), 0)))
    assert ours[1].keys() >= {"reward/margin", "reward/accuracy", "logprobs/chosen", "loss/nll"}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), ours, theirs)


def test_a_metric_of_pairs_is_their_mean_however_long_they_are():
    mask = np.arange(5)[None, None] < np.array([[5, 5], [1, 1]])[..., None]
    values = np.array([[[1.0], [1.0]], [[0.0], [0.0]]])
    assert update.reduce_metric("", values, update.MetricWeights.of(mask)) == pytest.approx(0.5)
    assert update.reduce_metric("x_max", values, update.MetricWeights.of(mask)) == 1


TURNS = [*ASKED, *said("3"), *ASKED]
SPLIT = {  # TRL's implicit prompts: chosen, rejected -> prompt, and the ends
    "messages": (ASKED + said("3"), ASKED + said("4"), ASKED, said("3"), said("4")),
    "a turn before": (TURNS + said("3"), TURNS + said("5"), TURNS, said("3"), said("5")),
    "text": ("Q: sky? A: blue", "Q: sky? A: green", "Q: sky? A:", " blue", " green"),
    "text without a space": ("1+2=3", "1+2=4", "1+2=", "3", "4"),
}


@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_a_prompt_that_both_completions_begin_with_is_split_off(case, tmp_path):
    chosen, rejected, *split = case
    row = {"chosen": chosen, "rejected": rejected, "score": 1}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    loaded = load_rows(str(tmp_path / "x.jsonl"), columns=PAIR)
    assert [loaded.rows[0][name] for name in ("prompt", "chosen", "rejected", "score")] == [*split, 1]
    assert loaded.read_as == "the common beginning of 'chosen' and 'rejected' is the prompt, as in TRL"


def test_a_prompt_as_text_beside_whole_conversations_is_theirs(tmp_path):
    """As in ultrafeedback_binarized; beside answers alone it is the prompt as text, as TRL reads it."""
    whole, answers = (
        {"prompt": "1+2", "chosen": [*before, *said("3")], "rejected": [*before, *said("4")]} for before in (ASKED, [])
    )
    (tmp_path / "x.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(answers))
    loaded = load_rows(str(tmp_path / "x.jsonl"), columns=PAIR)
    assert [row["prompt"] for row in loaded.rows] == [ASKED, "1+2"]
    assert all((row["chosen"], row["rejected"]) == (said("3"), said("4")) for row in loaded.rows)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("yes", "no"), (ASKED + said("3"), ASKED + said("3")), (ASKED + said("3"), "3")],
    ids=["without a common beginning", "equal", "of other types"],
)
def test_an_implicit_prompt_is_refused_of_columns(chosen, rejected, tmp_path, refused):
    (tmp_path / "x.jsonl").write_text(json.dumps({"chosen": chosen, "rejected": rejected}))
    with refused("x.jsonl row 1", "'chosen' and 'rejected'"):
        load_rows(str(tmp_path / "x.jsonl"), columns=PAIR)


def config(**changes):
    """A small run of configs/dpo.py."""
    c = load(ROOT / "configs" / "dpo.py")
    small = {
        "num_steps": 3, "schedule_steps": 3, "prompts_per_step": 8, "optim.warmup_steps": 0, "mesh.fsdp": 1,
        "log.to": (), "eval": None, "loss.nll_coef": 0.0, "checkpoint.every": 1, "checkpoint.keep": 5,
    }  # fmt: skip
    c.update_from_flattened_dict(small | changes)
    return c


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("whole") / "run"
    list(sft.steps(config(), workdir))
    return workdir


def test_a_run_begins_at_its_reference_and_then_prefers_what_was_chosen(whole):
    first, *_, last = written(whole)
    assert first["loss/sft"] == pytest.approx(np.log(2), abs=1e-5)
    assert [first[f"reward/{name}"] for name in ("chosen", "rejected", "margin")] == pytest.approx([0, 0, 0], abs=1e-4)
    assert last["reward/margin"] > 0.001 and last["reward/accuracy"] > 0.6
    assert last["loss/sft"] < first["loss/sft"]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(whole, tmp_path):
    """As after a kill behind a checkpoint that holds no reference: it comes from the folder of the first model."""
    shutil.copytree(whole, tmp_path / "run")
    for step in ("2", "3"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    shutil.rmtree(tmp_path / "run" / "hf")
    list(sft.steps(config(), tmp_path / "run"))
    assert numbers(written(tmp_path / "run")) == numbers(written(whole))
    assert "with the `dpo` loss on pairs of completions" in (whole / "hf" / "README.md").read_text()
    weights = [run / "hf" / "model.safetensors" for run in (whole, tmp_path / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_banner_counts_pairs_that_teach_nothing(tmp_path, capsys):
    rows = arithmetic.pairs()[:8]
    for row in rows[:3]:
        row["rejected"] = row["chosen"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with sft.build(config(**{"data.source": str(tmp_path / "pairs.jsonl"), "data.convert": ""}), tmp_path / "run"):
        counts = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "equal completions" in line]
    assert counts == ["3"]


def preferred_by_hand(folder: Path, rows: list[dict]) -> float:
    """The share of rows whose chosen completion gains more over the first model, each with a prompt of its own."""
    tokenizer, mesh = hf.load_tokenizer(folder), tiny.mesh_of((1, 1, 1))
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    chat = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    prompts, answers = np.zeros((len(rows), 16), np.int32), np.zeros((len(rows), 2, 16), np.int32)
    real, used = prompts != 0, answers != 0
    for b, row in enumerate(rows):
        prompt = ids(chat(row["prompt"]))
        prompts[b, -len(prompt) :], real[b, -len(prompt) :] = prompt, True
        for g, column in enumerate(("chosen", "rejected")):
            answer = [*ids(row[column]), tokenizer.eos_token_id]
            answers[b, g, : len(answer)], used[b, g, : len(answer)] = answer, True
    batch, sums = Batch(prompts, real, answers, used, used), []
    for place in (folder, MODEL):
        model = hf.load_model(place, mesh)
        score = jax.jit(lambda params, model=model: flat_scores(model, params, batch, Sampling())[0].sum(axis=-1))
        sums.append(np.asarray(score(hf.load_params(place, model, mesh))))
    gains = sums[0] - sums[1]
    return float(np.mean(gains[:, 0] > gains[:, 1]))


@pytest.mark.slow
def test_held_out_pairs_are_compared_each_once(tmp_path, monkeypatch, refused):
    """Ten pairs in batches of eight: the end of the last batch is filled, and does not count."""
    rows = arithmetic.pairs()[:10]
    for row in rows[::3]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    c = config()
    changes = dict(every=3, source=str(tmp_path / "held_out.jsonl"), convert="", problems=100, function="preference")
    c.eval = ConfigDict(changes | dict(patience=0))
    before, *_, after = list(sft.steps(c, tmp_path / "run"))
    assert (before["step"], before["eval/problems"]) == (0, 10)
    assert after["eval/accuracy"] == pytest.approx(preferred_by_hand(tmp_path / "run" / "hf", rows))
    assert 0 < after["eval/accuracy"] < 1
    monkeypatch.setattr(sys, "argv", ["evaluate", "--run", str(tmp_path / "run")])
    with refused("--task", "--function"):
        evaluate.main()


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_model_without_them(tmp_path):
    c = config(num_steps=2)
    c.adapters = ConfigDict(dict(name="lora", rank=4, alpha=8.0, rs=False, targets="_proj", base_dtype="", path=""))
    c.optim.learning_rate = 1e-2
    with sft.build(c, tmp_path / "run") as (session, parts):
        assert parts.learning.reference is None
        first, second = list(sft.train(session, parts))
        assert set(session.run_state.states) == {"policy"}
    assert first["reward/margin"] == pytest.approx(0, abs=1e-4) and second["reward/margin"] != 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.rejected_column", ""), ("aggregate.mode", "token_mean"), ("model.path", ""), ("loss.beta", 0.0),
        ("loss.label_smoothing", 0.7),
        *(("loss", {"name": name}) for name in ("cross_entropy", "ppo_clip", "test_preferences.scored")),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_is_refused_for(field, value, refused):
    c = config()
    if field == "loss":
        c.loss = ConfigDict(value)
    else:
        c.update_from_flattened_dict({field: value})
    with refused("loss" if field == "loss" else field):
        recipes.read_sft(c)


def scored(logprobs, batch, entropy):
    return entropy, {}


def test_pairs_and_their_losses_are_for_sft_with_pairs_alone(refused):
    for name, read in (("sft", recipes.read_sft), ("grpo", recipes.read)):
        c = load(ROOT / "configs" / f"{name}.py")
        c.eval.function = "preference"
        with refused("eval.function = 'preference'"):
            read(c)
    c = load(ROOT / "configs" / "grpo.py")
    c.loss = ConfigDict(dict(name="jaxrl_llm.algorithms.supervised.simpo"))
    with refused("simpo", "jaxrl sft"):
        recipes.read(c)


def test_the_pairs_of_the_task_have_a_right_answer_and_a_wrong_one():
    rows = arithmetic.pairs()
    scores = [arithmetic.accuracy([row[name] for row in rows], [row["answer"] for row in rows])
              for name in ("chosen", "rejected")]  # fmt: skip
    assert set(scores[0]) == {1.0} and set(scores[1]) == {0.0} and len(rows) > 8000
