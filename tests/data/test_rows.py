"""Files of rows as people have them: what is read, and the line that says what is wrong with one."""

from __future__ import annotations

import gzip
import json
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from ml_collections import ConfigDict
from test_recipes import write_qwen

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import load
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.rows import check_source, load_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.sizes import sizes_of
from jaxrl_llm.rollout.reward_calls import call_reward
from jaxrl_llm.session.banner import model_and_data_table, models_table, problems_table, shapes_table, truncation_table
from jaxrl_llm.tasks import verl

ROOT = Path(__file__).parents[2]
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
    "lines called .json": ("x.json", LINE + b"\n" + LINE, [ROW, ROW]),
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


REFUSED = {  # -> the place that the line names
    "no JSON": ("x.jsonl", LINE + b"\n{'a': 1}", "x.jsonl line 2, column 2"),
    "brackets without end": ("x.jsonl", b"[" * 100_000, "x.jsonl line 1"),
    "a number of too many digits": ("x.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "x.jsonl line 1"),
    "a line that is a list": ("x.jsonl", b"\n[1]\n", "x.jsonl line 2"),
    "nothing": ("x.jsonl", b"\n \n", "x.jsonl"),
    "text in another encoding": ("x.jsonl", '{"prompt": "é"}'.encode("latin-1"), "x.jsonl line 1"),
    "an object over several lines": ("x.json", b'{\n"prompt": "a"}', "x.json line 1, column 2"),
    "a torn array": ("x.json", b"[" + LINE, "x.json line 1"),
    "an array of text": ("x.json", b'["a"]', "x.json element 1"),
    "an empty array": ("x.json", b"[]", "x.json"),
    "a torn archive": ("x.jsonl.gz", gzip.compress(LINE, mtime=0)[:-9], "x.jsonl.gz"),
    "no archive": ("x.jsonl.gz", LINE, "x.jsonl.gz"),
    "no Parquet": ("x.parquet", b"PAR1 and no more", "x.parquet"),
    "a table with a value too many": ("x.csv", b"prompt\n1,2\n", "x.csv row 1"),
    "a table in another encoding": ("x.csv", "prompt\na".encode("utf-16"), "x.csv"),
    "an image": ("x.jsonl", row(prompt=[{"role": "user", "content": [{"type": "image"}]}]), "x.jsonl row 1"),
    "no prompt": ("x.jsonl", row(prompt=None), "x.jsonl row 1"),
    "an empty prompt": ("x.jsonl", row(prompt=""), "x.jsonl row 1"),
    "a message of no role": ("x.jsonl", row(prompt=[{"content": "1"}]), "x.jsonl row 1"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_is_refused_that_holds(place, refused, name, content, words):
    (place / name).write_bytes(content)
    with refused(words):
        load_rows(name)


@pytest.mark.parametrize(("text", "word"), {
    "return open('nowhere')": "own_rows.py:3",
    "return []": "own_rows.rows",
    "return ['1+1']": "own_rows.rows row 1",
}.items())  # fmt: skip
def test_a_function_of_rows_is_refused(place, monkeypatch, refused, text, word):
    (place / "own_rows.py").write_text(f"import sys\ndef rows():\n    {text}\n")
    monkeypatch.syspath_prepend(place)
    with refused(word):
        load_rows("own_rows.rows")
    del sys.modules["own_rows"]


SOURCES = {
    "a folder": (".", "data.source = '.'"),
    "a split of a file": ("x.parquet@test", "'x.parquet'"),
    "a data set of the hub that cannot be had":
        pytest.param("openai/gsm8k:main@test", "openai/gsm8k:main@test", marks=pytest.mark.needs("datasets")),
    "another kind of file": ("rows.tsv", "'rows.tsv'"),
    "a pattern of nothing": ("y-*.jsonl", "y-*.jsonl"),
    "a file in a folder that is not there": ("nowhere/x.csv", "nowhere/x.csv"),
    "a file in the home folder that is not there": ("~/no.jsonl", "/no.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "word"), SOURCES.values(), ids=SOURCES.keys())
def test_a_source_is_refused_that_is(place, monkeypatch, refused, source, word):
    monkeypatch.setenv("HOME", str(place / "home"))
    for i in range(7):
        (place / f"{i}.jsonl").touch()
    with refused(word):
        (check_source("data.source", source), load_rows(source))


FOLDERS = {  # files of a folder -> what the line offers
    "a.jsonl b.jsonl": ("a.jsonl", "d/*.jsonl"),
    "train-0.parquet train-1.parquet test-0.parquet x.md": ("train-0.parquet", "d/train*.parquet"),
    "train.jsonl test.jsonl": ("d/train.jsonl",),
    "rows.csv.gz x.txt": ("d/rows.csv.gz",),
    "a.json.gz b.json.gz": ("d/*.json.gz",),
    "data/a.parquet data/b.parquet dataset_infos.txt": ("a.parquet", "d/data/*.parquet"),
    "x.arrow": (".jsonl",),
}


def test_a_folder_as_a_source_is_refused_with_the_files_that_it_has(place, refused):
    for i, (files, offered) in enumerate(FOLDERS.items()):
        for file in files.split():
            (place / str(i) / "d" / file).parent.mkdir(parents=True, exist_ok=True)
            (place / str(i) / "d" / file).touch()
        with refused(*offered):
            check_source("data.source", str(place / str(i) / "d"))


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


def test_rows_in_memory_are_a_source(refused):
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2 + 2 =", "answer": "4"}]

    class Dataset:
        """As datasets.Dataset: a length, and rows as it is looped over."""

        def __len__(self):
            return 2

        def __iter__(self):
            return iter(rows)

    c = load("grpo")
    for source in (rows, tuple(rows), Dataset()):
        c.data.source = source
        assert load_rows(c.data.source).rows == rows
        check_source("config.data.source", c.data.source)
    c.eval.source = rows[:1]
    assert load_rows(c.eval.source).rows == rows[:1] and len(load_rows(c.data.source).rows) == 2
    for source in ([], iter(rows), ["1 + 1 ="], 7):
        with refused("config.data.source"):
            c.data.source = source
    for splits in ({"train": rows}, ConfigDict(dict(train="a"))):
        with refused("config.data.source", type(splits).__name__):
            c.data.source = splits
    with refused("config.data.source", "def"):
        c.data.source = lambda: rows
    with refused("config.data.source = 'memory.rows_99'"):
        check_source("config.data.source", "memory.rows_99")
    with pytest.raises(UserError) as error:
        c.optim.learning_rate = rows * 1000
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("prompt", ["\ud83d", [{"role": "user", "content": None}]], ids=["half", "nothing"])
def test_a_prompt_is_refused_that_cannot_be_encoded(tokenizer, refused, prompt):
    with refused("here row 1"):
        encode([prompt], tokenizer, "here")


# ---- converted


def test_train_and_exam_are_converted_each_by_its_own_function(place, monkeypatch, refused, tokenizer):
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
    with refused("exam.jsonl row 1", "'prompt'", "eval.convert"):
        held_out(config, tokenizer)


def test_a_convert_function_may_drop_rows_which_are_counted(place, monkeypatch, refused, tokenizer):
    """The numbers of other rows stay as they are."""
    text = "def odd(row):\n    return row if len(row['prompt']) % 2 else None\ndef bad(row):\n    1 / 0\n"
    (place / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(place)
    (place / "x.jsonl").write_bytes(b"\n".join(row(prompt="a" * i) for i in (1, 2, 3, 4, 5)))
    kept = data.read("x.jsonl", tokenizer, convert="mine.odd", max_prompt_tokens=99, overlong="drop", problems=2)
    assert (len(kept.rows), kept.refused, kept.dropped, kept.numbers) == (2, 2, 0, [1, 3])
    with refused("x.jsonl row 5", "max_prompt_tokens"):
        data.read("x.jsonl", tokenizer, convert="mine.odd", max_prompt_tokens=4, overlong="error")
    (place / "x.jsonl").write_bytes(row(prompt="ab"))
    with refused("x.jsonl", "mine.odd", "eval.convert"):
        load_rows("x.jsonl", "mine.odd", "eval.convert")
    with refused("x.jsonl row 1", "mine.bad", "mine.py:4"):
        load_rows("x.jsonl", "mine.bad")


def held_out(config, tokenizer) -> data.Dataset:
    recipe = recipes.read(config)
    return data.load_held_out(recipe.eval, recipe.data, tokenizer)


@pytest.fixture(scope="module")
def table_of():
    """Returns the banner of a run whose problems are its prompts."""
    config = load("grpo")
    model, mesh = hf.load_model(Path(config.model.path)).cfg, meshes.make_mesh(data=1, fsdp=1, tensor=1)

    def table(rows: data.Dataset, **changes) -> list:
        c = config.copy_and_resolve_references()
        c.update_from_flattened_dict(changes)
        recipe = recipes.read(c)
        first = model_and_data_table(recipe.model.path, mesh, model, recipe.sizes, recipe.data, rows)
        return first + problems_table(recipe.eval_sets, dict.fromkeys(recipe.eval_sets, rows))

    return table


def test_the_banner_says_where_an_order_by_a_column_ends(table_of):
    ids, numbers = [np.arange(3, dtype=np.int32)] * 9, list(range(9))
    made = data.Dataset(ids, [{"prompt": "a"}] * 9, 0, 3, numbers, order_values=np.arange(9.0))
    sizes = {"num_steps": 2, "schedule_steps": 2, "prompts_per_step": 2, "prompts_per_update": 2, "microbatch": 0}

    def line(**changes) -> str:
        return next(line for _, line in table_of(made, **sizes | changes) if "each epoch by" in str(line))

    assert "4 prompts, and ends at 3" in line()
    assert "above" not in line()
    # A replaced group takes the next prompt, which is harder.
    assert line(**{"rollout.resample_rounds": 2}).endswith("ends at 3 or above")
    assert "ends" not in line(num_steps=5, schedule_steps=5)


def test_the_banner_counts_dropped_rows_and_tells_when_a_step_needs_more(table_of):
    def shown(count: int, refused: int, **changes) -> list:
        ids = [np.arange(i, i + 3, dtype=np.int32) for i in range(count)]
        made = data.Dataset(ids, [{"prompt": "a"}] * count, 4, 3, list(range(count)), refused)
        return [row for row in table_of(made, **changes) if row[0] in ("prompts", "problems", "")]

    assert shown(9000, 12) == [
        ("prompts", "9,000 of at most 3 tokens, 3 on average, 12 dropped by data.convert, 4 over-long dropped"),
        ("problems", "9,000 of at most 3 tokens, 3 on average, 12 dropped by eval.convert"),
        ("", "from arithmetic.held_out, judged by arithmetic.accuracy"),
    ]
    assert [name for name, _ in shown(63, 0)] == ["prompts", "", "problems", ""]
    assert shown(64, 0, eval=None) == [("prompts", "64 of at most 3 tokens, 3 on average, 4 over-long dropped")]


def test_the_banner_says_which_rows_lack_a_column_and_which_prompts_are_equal(table_of):
    ids = [np.array([i // 2], np.int32) for i in range(80)]
    made = data.Dataset(ids, [{"prompt": "a"}] * 80, 0, 1, list(range(1, 81)), notes=("3 of 80 rows have no 'answer'",))
    equal = ("", "40 of 80 prompts repeat an earlier prompt; the first of them is row 2, which equals row 1")
    lacking = ("", "3 of 80 rows have no 'answer'")
    judge = ("", "from arithmetic.held_out, judged by arithmetic.accuracy")
    assert [row for row in table_of(made) if not row[0]] == [lacking, equal, judge, lacking, equal]


def test_the_banner_names_models_with_what_they_give_and_shapes(wording):
    scorers = {"reference": SimpleNamespace(columns=("ref_logprobs",))}
    learners = {"critic": SimpleNamespace(frozen_steps=0), "policy": SimpleNamespace(frozen_steps=5)}
    sizes = sizes_of(64, 8, 16, 28)
    for table, words in (
        (models_table(scorers, learners), ("reference (ref_logprobs)", "critic, policy (from step 6)")),
        (shapes_table(sizes, [(4, 24), (2, 24)]), ("512 completions", "512 pages", "4 rows of 24", "3 shapes")),
        (shapes_table(None, [(1, 24)]), ("1 row of 24",)),
    ):
        text = "\n".join(f"{name}: {value}" for name, value in table)
        assert [word for word in words if word not in text] == []
        wording(text)


@pytest.mark.parametrize(
    ("sampling", "shown"),
    [(Sampling(), ""), (Sampling(top_p=0.9), "top_p 0.9"), (Sampling(top_k=5, top_p=0.9), "top_k 5, top_p 0.9")],
)
def test_the_banner_says_that_a_kl_is_of_truncated_distributions(sampling, shown):
    assert truncation_table(sampling, []) == []
    rows = truncation_table(sampling, ["KL", "importance weights"])
    assert [name for name, _ in rows] == ["KL and importance weights"] * bool(shown)
    assert all(shown in value for _, value in rows)


def test_verl_rows_give_math_and_countdown_what_they_ask_for(place, refused):
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
    with refused("x.jsonl row 1", "'reward_model'", "verl.convert"):
        load_rows("x.jsonl", "verl.convert")


# ---- an answer that the prompt began


def test_rewards_see_an_answer_whole_that_the_prompt_began():
    seen = {}

    def judge(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    begun = [*ASKED, {"role": "assistant", "content": "<think>"}]
    call_reward("judge", judge, [{"prompt": begun}, {"prompt": ASKED}], ["2", "2"], [[1], [1]])
    assert seen["prompts"] == [ASKED, ASKED]
    assert [c[0]["content"] for c in seen["completions"]] == ["<think>2", "2"]
    assert len(begun) == 2


def test_dates_and_nothing_in_parquet_reach_the_reward_as_they_are(place):
    rows = [{"prompt": "a", "when": datetime(2026, 1, 1), "x": [1.5]}, {"prompt": "b", "when": None, "x": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "x.parquet")
    assert load_rows("x.parquet").rows == rows
