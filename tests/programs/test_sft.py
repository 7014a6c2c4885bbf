"""Supervised fine-tuning on episodes: what an environment said is read, and never learned."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm import sft
from jaxrl_llm.config.load import load
from jaxrl_llm.data import columns, examples
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.meshes import make_mesh
from jaxrl_llm.models import hf, new_model
from jaxrl_llm.structs import Prompt
from jaxrl_llm.tasks import encyclopedia

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jaxrl_llm" / "assets" / "encyclopedia"
EPISODE = [
    {"role": "assistant", "content": "<think> I look it up </think> <search> Kelun </search>"},
    {"role": "environment", "content": "\n\n<information>Doc 1</information>\n\n"},
    {"role": "assistant", "content": "<answer> Kelun </answer>"},
]


def config(source: str = "rows.jsonl", **changes):
    c = load(ROOT / "configs" / "search_sft.py")
    c.data.source = source
    c.update_from_flattened_dict(changes)
    return c


def dataset(rows: list[dict]) -> data.Dataset:
    return data.tokenize(rows, hf.load_tokenizer(FOLDER), max_prompt_tokens=32, overlong="error")


def test_each_turn_is_encoded_alone_and_the_environments_are_not_learned():
    tokenizer = hf.load_tokenizer(FOLDER)
    rows = [{"prompt": "Who ?", "completion": EPISODE}, {"prompt": "Who ?", "completion": "Kelun"}]
    recipe = recipes.read_sft(config())
    answers = examples.tokenize_answers(dataset(rows), tokenizer, recipe.data, recipe.rollout.max_completion_tokens, ())
    parts = [tokenizer(turn["content"], add_special_tokens=False)["input_ids"] for turn in EPISODE]
    assert answers[0][0].tokens == [*parts[0], *parts[1], *parts[2], tokenizer.eos_token_id]
    assert answers[0][0].learned == [True] * len(parts[0]) + [False] * len(parts[1]) + [True] * (len(parts[2]) + 1)
    assert all(answers[1][0].learned)
    batch = examples.make_batch(
        dataset(rows), answers, [0, 1], kept_rows=[0, 1], length=64, pad_id=tokenizer.pad_token_id
    )
    assert batch.completion_mask.sum() == sum(len(answer.tokens) for (answer,) in answers)
    assert (batch.completion_mask & ~batch.loss_mask).sum() == len(parts[1])


@pytest.mark.parametrize(
    "completion",
    [3, None, [], [{"role": "user", "content": "x"}], [{"content": "x"}], [{"role": "assistant", "content": 3}]],
)
def test_what_is_neither_text_nor_turns_is_refused(completion, refused):
    rows = [{"prompt": "Who ?", "completion": EPISODE}, {"prompt": "Who ?", "completion": completion}]
    with refused("rows.jsonl row 2", "'completion'"):
        columns.check_completions(dataset(rows), "completion", "rows.jsonl")


def test_the_loss_is_that_of_the_policys_tokens_and_a_run_compiles_one_update(tmp_path, monkeypatch):
    """What an environment says is read, and has no gradient of its own."""
    rows = [{"prompt": "Who ?", "completion": EPISODE}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "model.path": str(FOLDER), "num_steps": 2, "prompts_per_step": 8, "optim.warmup_steps": 0, "mesh.fsdp": 1,
        "log.to": (), "model.vocabulary": 0,
    }  # fmt: skip
    compiled, compile = [], Program.compile
    monkeypatch.setattr(Program, "compile", lambda program: compiled.append(program.name) or compile(program))
    records = list(sft.steps(config(str(tmp_path / "rows.jsonl"), **small), tmp_path / "run"))
    assert compiled == ["the update"]
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    model, tokenizer = hf.load_model(FOLDER, mesh), hf.load_tokenizer(FOLDER)
    recipe = recipes.read_sft(config())
    ((answer,),) = examples.tokenize_answers(
        dataset(rows[:1]), tokenizer, recipe.data, recipe.rollout.max_completion_tokens, ()
    )
    prompt = dataset(rows[:1]).ids[0].tolist()
    tokens = np.array([prompt + answer.tokens], np.int32)
    params = hf.load_params(FOLDER, model, mesh)

    @jax.jit
    def logprobs(params):
        return jax.nn.log_softmax(model.logits(params, model.prefill(params, Prompt(tokens, tokens >= 0))[0]))

    chosen = np.take_along_axis(np.asarray(logprobs(params))[0, :-1], tokens[0, 1:, None], axis=1)[:, 0]
    learned = np.array([False] * (len(prompt) - 1) + answer.learned)
    first = next(record for record in records if record["step"] == 1)
    assert first["loss/sft"] == pytest.approx(-chosen[learned].mean(), rel=1e-4)


@pytest.mark.slow
def test_a_new_tokenizer_learns_words_and_reads_alike_beside_the_models_config(tmp_path):
    rows = encyclopedia.demonstrations()[:200]
    new_model.write_folder(tmp_path, dict.fromkeys(new_model.SIZE_KEYS, 8) | {"vocabulary": 300}, rows, "completion")
    tokenizer = hf.load_tokenizer(tmp_path)  # as a Qwen2Tokenizer, because of config.json
    assert len(tokenizer) == 300
    for row in rows[:50]:
        turns = row["completion"]
        for text in [turns] if isinstance(turns, str) else [turn["content"] for turn in turns]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) < len(text) / 2


@pytest.mark.slow
def test_held_out_people_and_towns_are_in_no_question_to_learn_from():
    learned, judged = encyclopedia.train() + encyclopedia.two_hops(), encyclopedia.held_out()
    names = [row["prompt"][0]["content"] for row in judged] + [
        row["prompt"][0]["content"] for row in encyclopedia.two_hops_held_out()
    ]
    known = "\n".join(row["prompt"][0]["content"] + "\n" + row["answer"] for row in learned)
    for text in names:
        name = " ".join([word for word in text.split() if word[0].isupper()][-2:])
        assert name not in known
    demonstrated = json.dumps([row for row in encyclopedia.demonstrations() if not isinstance(row["completion"], str)])
    assert not any(row["prompt"][0]["content"] in demonstrated for row in judged)
