"""Files of rows as people have them: what is read, and the line that says what is wrong with one."""

from __future__ import annotations

import gzip
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_recipes import write_qwen

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.rows import check_source, load_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.grading import call
from jaxrl_llm.rollout.jax.sizes import sizes_of
from jaxrl_llm.session.banner import model_and_data_table, models_table, problems_table, shapes_table
from jaxrl_llm.tasks import verl

ROOT = Path(__file__).parent.parent
ASKED = [{"role": "user", "content": "1+1"}]
ROW = {"prompt": ASKED, "answer": "2"}
LINE = json.dumps(ROW).encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder)
    return hf.load_tokenizer(folder)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row(**columns) -> bytes:
    return json.dumps(columns).encode()


FILES = {
    "with a byte-order mark": ("x.jsonl", b"\xef\xbb\xbf" + LINE, [ROW]),
    "with Windows line ends and empty lines": ("x.jsonl", b"\r\n" + LINE + b"\r\n\r\n" + LINE + b"\r\n", [ROW, ROW]),
    "with a line separator inside of a text":
        ("x.jsonl", '{"prompt": "a\u2028b"}\n'.encode(), [{"prompt": "a\u2028b"}]),
    "compressed": ("x.jsonl.gz", gzip.compress(LINE), [ROW]),
    "an array": ("x.json", b" [\n" + LINE + b",\n" + LINE + b"]", [ROW, ROW]),
    "an array, compressed": ("x.json.gz", gzip.compress(b"[" + LINE + b"]"), [ROW]),
    "lines called .json": ("x.json", LINE + b"\n" + LINE, [ROW, ROW]),
    "a table, compressed": ("x.csv.gz", gzip.compress(b"prompt\na\n"), [{"prompt": "a"}]),
    "a table": ("x.csv", b'\xef\xbb\xbfprompt,answer\r\n"1, 2\n3?",007\r\n', [{"prompt": "1, 2\n3?", "answer": "007"}]),
    "with a content of parts":
        ("x.jsonl", row(prompt=[{"role": "user", "content": [{"type": "text", "text": "1"}, {"text": "+1"}]}]),
         [{"prompt": ASKED}]),
    "with a message that calls a tool and has no content":
        ("x.jsonl", row(prompt=[*ASKED, {"role": "assistant", "tool_calls": []}]),
         [{"prompt": [*ASKED, {"role": "assistant", "tool_calls": [], "content": None}]}]),
    "with a huge number": ("x.jsonl", row(prompt="a", answer=10**400), [{"prompt": "a", "answer": 10**400}]),
    "with rows of several columns": ("x.jsonl", LINE + b"\n" + row(prompt="a", b=1), [ROW, {"prompt": "a", "b": 1}]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "rows"), FILES.values(), ids=FILES.keys())
def test_a_file_is_read(place, name, content, rows):
    (place / name).write_bytes(content)
    check_source("data.source", name)
    assert load_rows(name).rows == rows


REFUSED = {
    "no JSON": ("x.jsonl", LINE + b"\n{'a': 1}", "x.jsonl line 2, column 2 is no JSON .*: every line must be one"),
    "brackets without end": ("x.jsonl", b"[" * 100_000, "x.jsonl line 1 cannot be read .maximum recursion .* one"),
    "a number of too many digits": ("x.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1 cannot be read .Exceeds the"),
    "an object over several lines": ("x.json", b'{\n"prompt": "a"}', "line 1, column 2 is no JSON .*, or the file an"),
    "a torn array": ("x.json", b"[" + LINE, "x.json line 1, column .* is no JSON .*: the file must be one"),
    "an array of text": ("x.json", b'["a"]', "x.json element 1 is str"),
    "an empty array": ("x.json", b"[]", "x.json holds no rows"),
    "a torn archive": ("x.jsonl.gz", gzip.compress(LINE)[:-9], "x.jsonl.gz cannot be read .*: give a file"),
    "no archive": ("x.jsonl.gz", LINE, "x.jsonl.gz cannot be read .*Not a gzipped file"),
    "a table with a value too many": ("x.csv", b"prompt\n1,2\n", "x.csv row 1 has not one value for each name"),
    "a table in another encoding": ("x.csv", "prompt\na".encode("utf-16"), "x.csv cannot be read as CSV in UTF-8"),
    "an image": ("x.jsonl", row(prompt=[{"role": "user", "content": [{"type": "image"}]}]),
                 "x.jsonl row 1: a message has the part {'type': 'image'}: give parts of text alone"),
    "no prompt": ("x.jsonl", row(prompt=None), "x.jsonl row 1: prompt is None: give text, or a list"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_is_refused_that_holds(place, name, content, line):
    (place / name).write_bytes(content)
    with pytest.raises(UserError, match=line):
        load_rows(name)


SOURCES = {
    "a folder": (".", r"data.source = '.' is a folder: it has no file of rows .*: give one"),
    "a split of a file": ("x.parquet@test", "a file has no splits such as 'test': give 'x.parquet'"),
    "a data set of the hub that cannot be had": (
        "openai/gsm8k:main@test",
        "data set openai/gsm8k:main@test cannot be loaded .*: check the name .owner/name:con",
    ),
    "another kind of file": ("rows.tsv", "'rows.tsv': a file must be .json, .csv, .jsonl or .parquet: write it as one"),
    "a pattern of nothing": ("y-*.jsonl", r"data file y-\*.jsonl does not exist"),
    "a file that is not there": ("~/no.jsonl", "data file /.*/no.jsonl does not exist"),
}


@pytest.mark.parametrize(("source", "line"), SOURCES.values(), ids=SOURCES.keys())
def test_a_source_is_refused_that_is(place, source, line):
    with pytest.raises(UserError, match=line):
        (check_source("data.source", source), load_rows(source))


FOLDERS = {  # files of a folder -> what the line says of them
    "a.jsonl b.jsonl": "give a file of it, such as a.jsonl, or the pattern 'd/*.jsonl'",
    "train-0.parquet train-1.parquet test-0.parquet x.md": "train-0.parquet, or the pattern 'd/train*.parquet'",
    "train.jsonl test.jsonl": "give its file 'd/train.jsonl'",
    "rows.csv.gz x.txt": "give its file 'd/rows.csv.gz'",
    "a.json.gz b.json.gz": "or the pattern 'd/*.json.gz'",
    "data/a.parquet data/b.parquet dataset_infos.txt": "such as a.parquet, or the pattern 'd/data/*.parquet'",
    "x.arrow": "it has no file of rows (.json, .csv, .jsonl or .parquet): give one",
}


def test_a_folder_as_a_source_is_refused_with_the_files_that_it_has(place):
    wrong = {}
    for i, (files, line) in enumerate(FOLDERS.items()):
        for file in files.split():
            (place / str(i) / "d" / file).parent.mkdir(parents=True, exist_ok=True)
            (place / str(i) / "d" / file).touch()
        with pytest.raises(UserError) as refused:
            check_source("data.source", str(place / str(i) / "d"))
        if line not in (said := str(refused.value).replace(f"{place / str(i)}/", "")):
            wrong[files] = said
    assert wrong == {}


def test_a_file_that_does_not_exist_is_refused_with_those_that_do(place):
    for i in range(7):
        (place / f"{i}.jsonl").touch()
    line = (
        r"config.data.source: data file .*train-\*.parquet does not exist; the folder .* has 0.jsonl, .* and 2 more: "
    )
    with pytest.raises(UserError, match=line):
        load_rows(str(place / "train-*.parquet"))
    with pytest.raises(
        UserError, match=r"nowhere/x.csv does not exist; there is no folder .*nowhere: give the path of one that does"
    ):
        load_rows(str(place / "nowhere" / "x.csv"))


def test_a_pattern_is_all_of_its_files_by_name(place):
    (place / "split=train").mkdir()
    for i in (1, 0):
        table = pyarrow.Table.from_pylist([{"prompt": str(i)}])
        pyarrow.parquet.write_table(table, place / "split=train" / f"train-{i}.parquet")
    assert load_rows("split=train/train-*.parquet").rows == [{"prompt": "0"}, {"prompt": "1"}]
    assert load_rows("split=train/train-1.parquet").rows == [{"prompt": "1"}]  # and no column "split"


def test_rows_of_a_function_may_hold_arrays(monkeypatch, tokenizer):
    made = [{"prompt": np.array(ASKED), "x": np.arange(3)}, {"prompt": tuple(ASKED), "x": None}]
    monkeypatch.setattr("jaxrl_llm.tasks.arithmetic.train", lambda: made)
    rows = load_rows("arithmetic.train").rows
    assert [r["prompt"] for r in rows] == [ASKED, ASKED]
    first, second = (x.tolist() for x in encode([r["prompt"] for r in rows], tokenizer, "here"))
    assert first == second


@pytest.mark.parametrize(("prompt", "line"), {
    "\ud83d": "row 1: '.ud83d' holds half of a character: mend the row",
    "user": "row 1: the chat template does not take the prompt: .*; mend one of them",
}.items())  # fmt: skip
def test_a_prompt_is_refused_that_cannot_be_encoded(tokenizer, prompt, line):
    chat = [{"role": "user", "content": None}] if prompt == "user" else prompt
    with pytest.raises(UserError, match=line):
        encode([chat], tokenizer, "here")


# ---- converted


def test_train_and_exam_are_converted_each_by_its_own_function(place, monkeypatch, tokenizer):
    (place / "mine.py").write_text("def words(row):\n    return {'prompt': row['text'], 'answer': 'w'}\n")
    monkeypatch.syspath_prepend(place)
    (place / "train.jsonl").write_bytes(row(text="How many words?"))
    (place / "exam.jsonl").write_bytes(row(question="How many?", answer="#### 7"))
    config = load(ROOT / "configs" / "grpo.py")
    config.data.source, config.data.convert, config.data.max_prompt_tokens = "train.jsonl", "mine.words", 999
    config.eval.source, config.eval.convert = "exam.jsonl", "gsm8k.convert"
    assert data.load(recipes.read(config).data, tokenizer).rows == [{"prompt": "How many words?", "answer": "w"}]
    assert [r["answer"] for r in held_out(config, tokenizer).rows] == ["7"]
    config.eval.convert = ""
    with pytest.raises(UserError, match=r"exam.jsonl row 1 has no column 'prompt' .* \(eval.convert for the problems"):
        held_out(config, tokenizer)


def test_a_convert_function_may_drop_rows_which_are_counted_and_leave_the_numbers_of_others(
    place, monkeypatch, tokenizer
):
    (place / "mine.py").write_text("def odd(row):\n    return row if len(row['prompt']) % 2 else None\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    (place / "x.jsonl").write_bytes(b"\n".join(row(prompt="a" * i) for i in (1, 2, 3, 4, 5)))
    kept = data.read("x.jsonl", tokenizer, convert="mine.odd", max_prompt_tokens=99, overlong="drop", problems=2)
    assert (len(kept.rows), kept.refused, kept.dropped, kept.numbers) == (2, 2, 0, [1, 3])
    with pytest.raises(UserError, match=r"x.jsonl row 5: the prompt has 5 tokens"):
        data.read("x.jsonl", tokenizer, convert="mine.odd", max_prompt_tokens=4, overlong="error")
    (place / "x.jsonl").write_bytes(row(prompt="ab"))
    with pytest.raises(UserError, match=r"x.jsonl: mine.odd returned None for all 1 rows: set eval.convert to another"):
        load_rows("x.jsonl", "mine.odd", "eval.convert")


def held_out(config, tokenizer) -> data.Dataset:
    recipe = recipes.read(config)
    return data.load_held_out(recipe.eval, recipe.data, tokenizer)


def table_of(config, mesh, model, rows: data.Dataset) -> list:
    """The banner of a run whose problems are its prompts."""
    recipe = recipes.read(config)
    table = model_and_data_table(recipe.model.path, mesh, model, recipe.sizes, recipe.data, rows)
    return table + problems_table(recipe.eval, rows)


def test_the_banner_counts_what_was_dropped_and_says_when_rows_are_fewer_than_a_step(tokenizer):
    config = load(ROOT / "configs" / "grpo.py")
    model = hf.load_model(Path(config.model.path)).cfg
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)

    def shown(count: int, refused: int) -> list:
        ids = [np.arange(i, i + 3, dtype=np.int32) for i in range(count)]
        made = data.Dataset(ids, [{"prompt": "a"}] * count, 4, 3, list(range(count)), refused)
        return [row for row in table_of(config, mesh, model, made) if row[0] in ("prompts", "problems", "")]

    assert shown(9000, 12) == [
        ("prompts", "9,000 of at most 3 tokens, 12 dropped by data.convert, 4 over-long dropped"),
        ("problems", "9,000 of at most 3 tokens, 12 dropped by eval.convert"),
        ("", "of arithmetic.held_out, judged by arithmetic.accuracy"),
    ]
    assert [name for name, _ in shown(63, 0)] == ["prompts", "", "problems", ""]
    config.eval = None
    assert shown(64, 0) == [("prompts", "64 of at most 3 tokens, 4 over-long dropped")]


def test_the_banner_says_which_rows_lack_a_column_and_which_prompts_are_equal():
    config = load(ROOT / "configs" / "grpo.py")
    model, mesh = hf.load_model(Path(config.model.path)).cfg, sharding.make_mesh(data=1, fsdp=1, tensor=1)
    ids = [np.array([i // 2], np.int32) for i in range(80)]
    made = data.Dataset(ids, [{"prompt": "a"}] * 80, 0, 1, list(range(1, 81)), notes=("3 of 80 rows have no 'answer'",))
    table = table_of(config, mesh, model, made)
    equal = ("", "40 of 80 prompts equal an earlier one, the first is row 2 (as 1)")
    lacking = ("", "3 of 80 rows have no 'answer'")
    judge = ("", "of arithmetic.held_out, judged by arithmetic.accuracy")
    assert [row for row in table if not row[0]] == [lacking, equal, judge, lacking, equal]  # of prompts, of problems


def test_the_banner_names_models_with_what_they_give_and_shapes():
    scorers = {"reference": SimpleNamespace(columns=("ref_logprobs",))}
    learners = {"critic": SimpleNamespace(frozen_steps=0), "policy": SimpleNamespace(frozen_steps=5)}
    assert models_table(scorers, learners) == [
        ("models that score", "reference (ref_logprobs)"),
        ("models that learn", "critic, policy (from step 6)"),
    ]
    learning = "4 rows of 24 completion tokens for a prompt; up to 3 shapes, none larger than the first batch needs"
    sizes = sizes_of(64, 8, 16, 28)
    assert shapes_table(sizes, [(4, 24), (2, 24)]) == [
        ("decoding, on a device", "512 completions at once, 512 pages of 32 tokens"),
        ("learning, largest shape", learning),
    ]
    assert shapes_table(None, [(1, 24)]) == [("learning, largest shape", "1 row of 24 completion tokens for a prompt")]


def test_verl_rows_give_math_and_countdown_what_they_ask_for(place):
    shared = {"data_source": "openai/gsm8k", "ability": "math", "extra_info": {"index": 0, "answer": None}}
    truths = ["72", 72, ["72"], {"target": 24, "numbers": [2, 3, 4]}]
    rows = [shared | {"prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": t}} for t in truths[:1]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "train.parquet")
    (found,) = load_rows("train.parquet", "verl.convert").rows
    assert found == rows[0] | {"answer": "72"}
    made = [verl.convert(rows[0] | {"reward_model": {"ground_truth": t}}) for t in truths]
    assert [m.get("answer") for m in made] == ["72", "72", "72", None]
    assert (made[3]["target"], made[3]["numbers"]) == (24, [2, 3, 4])
    (place / "x.jsonl").write_bytes(LINE)
    with pytest.raises(UserError, match=r"row 1 has no column 'reward_model' for verl.convert .*: add it"):
        load_rows("x.jsonl", "verl.convert")


# ---- an answer that the prompt began


def test_rewards_see_an_answer_whole_that_the_prompt_began():
    seen = {}

    def judge(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    begun = [*ASKED, {"role": "assistant", "content": "<think>"}]
    call("judge", judge, [{"prompt": begun}, {"prompt": ASKED}], ["2", "2"], [[1], [1]])
    assert seen["prompts"] == [ASKED, ASKED]
    assert [c[0]["content"] for c in seen["completions"]] == ["<think>2", "2"]
    assert len(begun) == 2


def test_dates_and_nothing_in_parquet_reach_the_reward_as_they_are(place):
    rows = [{"prompt": "a", "when": datetime(2026, 1, 1), "x": [1.5]}, {"prompt": "b", "when": None, "x": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "x.parquet")
    assert load_rows("x.parquet").rows == rows
