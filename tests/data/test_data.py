"""Tasks, files, tokenizing, and the iterator that resumes."""

from __future__ import annotations

import json
import math
import time
from copy import deepcopy
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.config.names import resolve
from jaxrl_llm.data import order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.prompt_sizes import smaller_sizes
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.machine.distributed import processes
from jaxrl_llm.models import hf, new_model
from jaxrl_llm.tasks import REWARDS, SOURCES, arithmetic, countdown, gsm8k

ROOT = Path(__file__).parents[2]
EMBEDDED = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load_tokenizer(EMBEDDED)


@pytest.mark.parametrize("task", [arithmetic, countdown])
def test_no_held_out_problem_is_trained_on_and_both_splits_are_large_and_stable(task):
    train, held_out = ({json.dumps(row["prompt"]) for row in split()} for split in (task.train, task.held_out))
    assert not train & held_out
    assert len(held_out) >= 500
    assert len(train) > 5_000
    assert task.train() == task.train()


def test_countdown_splits_share_no_problem_in_another_order_of_numbers():
    keys = [
        {(tuple(sorted(r["numbers"])), r["target"]) for r in split()} for split in (countdown.train, countdown.held_out)
    ]
    assert not keys[0] & keys[1]


def test_a_demonstration_that_thinks_is_right_and_a_quick_one_is_within_five():
    for row in arithmetic.demonstrations():
        said = int(row["completion"].split(">")[-1])
        total = row["a"] + row["b"]
        assert said == total if row["completion"].startswith("<") else abs(said - total) <= 5


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_the_reward_of_a_right_answer_is_the_highest_of_an_empty_one_the_lowest(task):
    judge = resolve(f"{task}.accuracy", REWARDS)
    rows = resolve(f"{task}.train", SOURCES)()[:50]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    good = [[{"role": "assistant", "content": row["answer"]}] for row in rows]
    empty = [[{"role": "assistant", "content": ""}] for _ in rows]
    assert set(judge(completions=good, **columns)) == {1.0}
    assert set(judge(completions=empty, **columns)) == {0.0}


def test_gsm8k_rows_become_chats_with_the_result_alone_as_answer():
    row = gsm8k.convert({"question": "How many?", "answer": "Add <<1+1=2>>.\n#### 1,234"})
    assert row["answer"] == "1234"
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]


def test_prompts_end_with_the_generation_prompt_and_decode_to_what_was_asked(tokenizer):
    dataset = data.tokenize(arithmetic.train()[:4], tokenizer, max_prompt_tokens=16, overlong="error")
    for ids, row in zip(dataset.ids, dataset.rows, strict=True):
        assert tokenizer.convert_ids_to_tokens(ids)[-1] == "<|assistant|>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["prompt"][-1]["content"]


def test_over_long_prompts_are_dropped_and_counted_never_cut(tokenizer, refused):
    rows = [{"prompt": "1+1"}, {"prompt": "10+10"}, {"prompt": "2+2"}]
    dataset = data.tokenize(rows, tokenizer, max_prompt_tokens=3, overlong="drop")
    assert (len(dataset.rows), dataset.dropped, dataset.width) == (2, 1, 3)
    with refused("max_prompt_tokens"):
        data.tokenize(rows, tokenizer, max_prompt_tokens=2, overlong="drop")


def test_a_new_tokenizer_keeps_newlines_and_refuses_what_it_has_no_token_for(tmp_path, refused):
    rows = [{"prompt": "a\n\nb", "completion": "c"}]
    new_model.write_folder(tmp_path, dict.fromkeys(new_model.SIZE_KEYS, 8), rows, "completion")
    tokenizer = hf.load_tokenizer(tmp_path)
    (ids,) = encode(["a\n\nb"], tokenizer, "here")
    assert tokenizer.decode(ids) == "a\n\nb"
    with refused("here row 2", "'a*b'"):
        encode(["ab", "a*b"], tokenizer, "here")


def test_the_embedded_models_folder_is_the_one_that_the_sft_config_writes(tmp_path):
    config = load("sft")
    rows = load_rows(config.data.source).rows
    new_model.write_folder(tmp_path, config.model, rows, config.data.completion_column)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (EMBEDDED / file.name).read_bytes(), file.name


def test_held_out_problems_are_never_dropped(tokenizer, tmp_path, refused):
    (tmp_path / "exam.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": "11+11"}\n')
    config = load("grpo")
    config.data.max_prompt_tokens, config.eval.source = 3, str(tmp_path / "exam.jsonl")
    recipe = recipes.read(config)
    with refused("exam.jsonl row 2"):
        data.load_held_out(recipe.eval, recipe.data, tokenizer)


def dataset_of(tokenizer, **columns):
    rows = [{"prompt": "1+1", **columns}, {"prompt": "2+2", "answer": "4"}]
    return data.tokenize(rows, tokenizer, max_prompt_tokens=9, overlong="error")


class Odd:
    """What a function of rows may put into one."""

    def __init__(self, x):
        self.x = x


COLUMNS = [
    {"answer": "2"}, {"answer": "3"}, {"answer": 2}, {"answer": 2.5}, {"answer": math.nan}, {"answer": None}, {},
    {"answer": np.arange(3)}, {"answer": np.arange(4)}, {"answer": np.float32(0.1)}, {"answer": [1, [2, {"a": None}]]},
    {"answer": datetime(2026, 1, 2)}, {"answer": datetime(2026, 1, 3)}, {"answer": date(2026, 1, 2)},
    {"answer": Decimal("1.50")}, {"answer": b"2"}, {"answer": {1, "a"}}, {"answer": {(1, 2): "x", "y": 1}},
    {"answer": Odd(1)}, {"answer": Odd(2)}, {"answer": np.arange(2000)},
    {"answer": np.arange(2000) * (np.arange(2000) != 900)},
    {"reply": "2"}, {"answer": "2", "difficulty": 1}, {"answer": str.lower}, {"answer": Odd},
]  # fmt: skip


def test_the_fingerprint_tells_apart_all_that_a_reward_can_see(tokenizer):
    found = [dataset_of(tokenizer, **columns).fingerprint() for columns in COLUMNS]
    assert len(set(found)) == len(COLUMNS)
    assert found == [dataset_of(tokenizer, **deepcopy(columns)).fingerprint() for columns in COLUMNS]


def test_the_fingerprint_knows_the_order_of_rows_and_not_that_of_columns(tokenizer):
    one, two = {"prompt": "1+1", "answer": "2", "id": 1}, {"prompt": "2+2", "answer": "4", "id": 2}
    made = lambda *rows: data.tokenize(rows, tokenizer, max_prompt_tokens=9, overlong="drop").fingerprint()  # noqa: E731
    assert made(one, two) == made(dict(reversed(one.items())), two)
    assert made(one, two) != made(two, one)


def test_the_fingerprint_of_20_000_rows_is_soon_made():
    ids = [np.arange(i, i + 165, dtype=np.int32) for i in range(20_000)]
    rows = [{"prompt": [{"role": "user", "content": "word " * 140}], "answer": str(i)} for i in range(20_000)]
    dataset, before = data.Dataset(ids, rows, 0, 165, list(range(20_000))), time.process_time()
    dataset.fingerprint()
    assert time.process_time() - before < 1  # 0.2 s on two idle cores


def test_prompts_are_padded_on_the_left(tokenizer):
    dataset = data.tokenize([{"prompt": "1+1"}, {"prompt": "10+10"}], tokenizer, max_prompt_tokens=9, overlong="drop")
    prompts = data.make_prompts(dataset, [0, 1], pad_id=0)
    np.testing.assert_array_equal(prompts.mask, [[False, False, True, True, True], [True] * 5])
    np.testing.assert_array_equal(prompts.tokens[0, 2:], dataset.ids[0])


def test_every_epoch_sees_every_row_once_in_another_order():
    iterator = order.iterate(8, 4, seed=0, collate=list)
    epochs = [[*next(iterator), *next(iterator)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_evaluate_each_row_once_and_fill_the_last_part(tokenizer, monkeypatch, count):
    dataset = data.tokenize([{"prompt": str(i)} for i in range(5)], tokenizer, max_prompt_tokens=4, overlong="drop")
    monkeypatch.setattr(processes.global_state, "num_processes", count)
    rows = []
    for process in range(count):
        monkeypatch.setattr(processes.global_state, "process_id", process)
        rows += [row["prompt"] for row in data.all_prompts(dataset, 0).rows]
    assert rows == ["0", "1", "2", "3", "4", "4"][: 5 if count == 1 else 6]


def test_smaller_sizes_hold_many_prompts_and_are_clearly_smaller():
    tokens, patches = [300] * 6 + [500] * 3 + [2000], [256] * 6 + [256, 1024, 1024] + [4096]
    assert smaller_sizes(tokens, patches) == ((500, 1024), (300, 256))
    # One size for all, and sizes that save too little.
    assert smaller_sizes([300] * 10, [256] * 10) == ()
    assert smaller_sizes([300] * 9 + [400], [256] * 9 + [300]) == ()
    assert smaller_sizes([8] * 9 + [32], [0] * 10) == ()
    # One long prompt in many, and at most two smaller sizes.
    assert smaller_sizes([8] * 399 + [256], [0] * 400) == ((8, 0),)
    assert smaller_sizes([100] * 110 + [200] * 75 + [400] * 14 + [900], [0] * 200) == ((400, 0), (200, 0))
