"""Files in the formats of TRL, veRL, Search-R1 and EasyR1, and data sets of the hub, trained on as they are."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from test_encoding import THINKING
from test_recipes import write_qwen
from test_steps import tiny

import jaxrl_llm
from jaxrl_llm import recipe as recipes
from jaxrl_llm.data import formats, hub
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.rows import check_source, is_task, load_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.train import steps

SUM = "1+2"
ASKED = [{"role": "user", "content": SUM}]
SAID = [{"role": "assistant", "content": "3"}]
VERL = {"data_source": "lab/sums", "prompt": ASKED, "ability": "math", "extra_info": {"split": "train", "index": 0}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def of_verl(truth: object) -> dict:
    return VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}


FORMATS = {  # row -> prompt, answer, and what the banner says
    "TRL's prompts": ({"prompt": SUM, "answer": "3"}, SUM, "3", ""),
    "TRL's conversational prompts": ({"prompt": ASKED, "answer": "3"}, ASKED, "3", ""),
    "TRL's prompts with completions": ({"prompt": ASKED, "completion": SAID}, ASKED, None, ""),
    "TRL's preferences": ({"prompt": SUM, "chosen": "3", "rejected": "4"}, SUM, None, ""),
    "TRL's conversational preferences": ({"prompt": ASKED, "chosen": SAID, "rejected": SAID}, ASKED, None, ""),
    "TRL's unpaired preferences": ({"prompt": SUM, "completion": "3", "label": True}, SUM, None, ""),
    "veRL's": (of_verl("3"), ASKED, "3", "'reward_model' holds the answer, as in veRL"),
    "veRL's with a number": (of_verl(3), ASKED, "3", "'reward_model' holds the answer, as in veRL"),
    "veRL's for a reward model": (of_verl(None), ASKED, None, ""),
    "Search-R1's": (of_verl({"target": ["Ann", "Anna"]}), ASKED, ["Ann", "Anna"],
                    "'reward_model' holds the accepted answers, as in Search-R1"),
    "Search-R1's with one answer": (of_verl({"target": "Ann"}), ASKED, ["Ann"],
                                    "'reward_model' holds the accepted answers, as in Search-R1"),
    "EasyR1's without images": ({"problem": SUM, "answer": "3", "images": []}, ASKED, "3",
                                "'problem' is the user's message, as in EasyR1"),
    "EasyR1's": ({"problem": SUM, "answer": "3"}, ASKED, "3", "'problem' is the user's message, as in EasyR1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def arithmetic():
    return hf.load_tokenizer(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "prompt", "answer", "said"), FORMATS.values(), ids=FORMATS.keys())
def test_rows_are_read_as_their_columns_say(tmp_path, arithmetic, kind, row, prompt, answer, said):
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    found = load_rows(str(file))
    (made,) = found.rows
    assert (made["prompt"], made.get("answer"), found.read_as) == (prompt, answer, said)
    assert row.keys() <= made.keys()
    config = tiny(**{"data.source": str(file), "data.overlong": "error", "eval": None})
    dataset = data.load(recipes.read(config).data, arithmetic)
    assert arithmetic.decode(dataset.ids[0].tolist(), skip_special_tokens=True) == SUM
    assert dataset.read_as == said


def test_named_columns_and_a_format_prompt_make_the_message_of_a_user(tmp_path):
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Think first.\n")
    row = {"question": " 1+2 ", "result": 3, "prompt": "not this"}
    for given in (str(tmp_path / "math.jinja"), "{{ content | trim }} Think first."):
        made, said = formats.read(row, Columns("question", "result", given))
        assert made["prompt"] == [{"role": "user", "content": "1+2 Think first."}]
        assert made["answer"] == 3
        assert said == "'question' is the user's message, 'result' is the answer"
    made, _ = formats.read({"prompt": SUM}, Columns(format_prompt="Sum: {{ content }}"))
    assert made["prompt"] == [{"role": "user", "content": "Sum: 1+2"}]


REFUSED = {
    "prompts in the answers": ({"chosen": SAID, "rejected": SAID}, {}, "'chosen' holds .* jaxrl sft splits them"),
    "whole conversations": ({"messages": ASKED + SAID}, {}, "'messages' holds whole conversations: make the messages"),
    "whole texts": ({"text": "1+2=3"}, {}, "'text' holds whole texts: name it in data.prompt_column if"),
    "other columns": ({"question": SUM}, {}, "no column 'prompt' .there is question.: rename one, name one in data"),
    "images": ({"problem": SUM, "images": ["a"]}, {}, "has images, which the model does not read: leave such rows out"),
    "another prompt": ({"prompt": SUM}, dict(prompt_column="question"), "has no column 'question' .there is prompt."),
    "a chat in a format prompt":
        ({"prompt": ASKED}, dict(format_prompt="{{ content }}"), "data.format_prompt does nothing, because the prompt"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "columns", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_a_row_is_refused_that_has(tmp_path, row, columns, line):
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"x.jsonl row 1 .*{line}"):
        load_rows(str(tmp_path / "x.jsonl"), columns=Columns(**columns))


SETTINGS = {
    "format_prompt=nowhere.jinja": "cannot be read .*: give a file with a jinja template",
    "format_prompt={% if": "is no jinja template .*: mend it",
    "format_prompt=Think first.": "reads nothing: write {{ content }} where the prompt is to stand",
    "format_prompt={{ content }}{{ x }}": "reads content, x: write",
    "convert=gsm8k.convert prompt_column=problem": "config.data.prompt_column = 'problem' does nothing: a convert func",
}


@pytest.mark.parametrize(("fields", "line"), SETTINGS.items())
def test_a_setting_is_refused_before_data_is_read(fields, line):
    given = dict(field.split("=", 1) for field in fields.split(" ", 1 if "convert" in fields else 0))
    with pytest.raises(UserError, match=line):
        recipes.read(tiny(**{f"data.{name}": value for name, value in given.items()}))


def test_a_convert_function_wins_over_what_the_columns_say(tmp_path, monkeypatch):
    (tmp_path / "mine_too.py").write_text("def plain(row):\n    return {'prompt': 'x', 'answer': 'mine'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps(of_verl("3")))
    assert load_rows(str(tmp_path / "x.jsonl"), "mine_too.plain").rows == [{"prompt": "x", "answer": "mine"}]


# ---- what rows give their chat template


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder)
    made = hf.load_tokenizer(folder)
    made.chat_template = "{% if tools %}{{ tools[0].function.name }}:{% endif %}" + THINKING
    return made


def texts(tokenizer, rows: list[dict], **more) -> list[str]:
    made = data.tokenize(rows, tokenizer, max_prompt_tokens=99, overlong="error", **more)
    return [tokenizer.decode(ids.tolist()) for ids in made.ids]


def test_tools_and_arguments_of_a_row_reach_its_chat_template_alone(tokenizer):
    rows = [
        {"prompt": ASKED},
        {"prompt": ASKED, "chat_template_kwargs": {"enable_thinking": False, "more": None}, "tools": None},
        {"prompt": ASKED, "tools": [TOOL]},
        {"prompt": ASKED, "tools": json.dumps([TOOL])},
        {"prompt": ASKED, "tools": ["a column of another meaning"]},
    ]
    plain, quiet, tools, as_json, other = texts(tokenizer, rows)
    assert quiet.endswith("<think></think>") and not plain.endswith("<think></think>")
    assert tools == as_json == f"add:{plain}"
    assert other == plain
    last = texts(tokenizer, [rows[1] | {"chat_template_kwargs": {"enable_thinking": True}}],
                 template_args={"enable_thinking": False})  # fmt: skip
    assert last == [plain]
    with pytest.raises(UserError, match="data row 2 has 'effort' for the chat template, which does not read it"):
        texts(tokenizer, [rows[0], {"prompt": ASKED, "chat_template_kwargs": {"effort": 1}}])


def test_kept_token_ids_know_the_arguments_of_rows(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("jaxrl_llm.data.encoding.MIN_CACHED", 1)
    plain, quiet = ({"prompt": ASKED, "chat_template_kwargs": own} for own in ({}, {"enable_thinking": False}))
    first = [texts(tokenizer, [row]) for row in (plain, quiet)]
    monkeypatch.setattr("jaxrl_llm.data.encoding._encode", None)
    assert [texts(tokenizer, [row]) for row in (plain, quiet)] == first
    assert first[0] != first[1]


# ---- the hub, and folders of save_to_disk


@pytest.mark.parametrize(("source", "one"), {
    "openai/gsm8k": True, "lab/Set-1.5:main@test[:10]": False, "lab/Set-1.5:main@test": True, "data/x.parquet": False,
    "./lab/set": False, "arithmetic.train": False, "lab/rows.xlsx": False, "a/b/c": False,
}.items())  # fmt: skip
def test_a_source_is_a_data_set_of_the_hub(source, one):
    assert hub.names_one(source) == one
    assert not (one and is_task(source))


def test_a_saved_folder_and_its_splits_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"problem": SUM, "answer": "3"}, {"problem": "2+2", "answer": "4"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    for source, count in {"one": 2, "both": 2, "both@train": 2, "both@test": 1}.items():
        check_source("data.source", f"{tmp_path}/{source}")
        assert [row["prompt"] for row in load_rows(f"{tmp_path}/{source}").rows][:1] == [ASKED]
        assert len(load_rows(f"{tmp_path}/{source}").rows) == count
    datasets.DatasetDict({"exam": parts["test"]}).save_to_disk(tmp_path / "exam")
    wrong = {
        "both@validation": "the folder has no split 'validation': give {0}/both@train or {0}/both@test",
        "exam": "the folder has no split 'train': give {0}/exam@exam",
        "one@train": "the folder has no splits: give {0}/one",
    }
    for source, line in wrong.items():
        for reads in (load_rows, partial(check_source, "data.source")):
            with pytest.raises(UserError, match=re.escape(line.format(tmp_path))):
                reads(f"{tmp_path}/{source}")


def test_a_data_set_of_the_hub_is_asked_for_by_name_configuration_and_split(monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []

    def load_dataset(*name, split):
        asked.append((*name, split))
        return datasets.Dataset.from_list([{"prompt": SUM}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("lab/sums", "lab/sums@test", "lab/sums:easy@test"):
        assert load_rows(source).rows == [{"prompt": SUM}]
    assert asked == [("lab/sums", None, "train"), ("lab/sums", None, "test"), ("lab/sums", "easy", "test")]


def test_without_the_package_the_line_says_how_to_get_it_or_the_files(monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    line = (
        r"data.source = 'lab/sums@test' needs the package datasets: pip install 'jaxrl_llm\[hub\]', or fetch its files"
    )
    with pytest.raises(UserError, match=line):
        check_source("data.source", "lab/sums@test")


# ---- trained on as they are


def closeness(completions: list, answer: list, **_: object) -> list[float]:
    return [-abs(len(c[0]["content"]) - len(str(a))) for c, a in zip(completions, answer, strict=True)]


def test_a_file_of_verl_and_one_of_easyr1_train_without_a_convert_function(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "test_formats", sys.modules[__name__])
    numbers = [(a, b) for a in range(4) for b in range(4)]
    chats = [[{"role": "user", "content": f"{a}+{b}"}] for a, b in numbers]
    rows = [of_verl(str(a + b)) | {"prompt": chat} for (a, b), chat in zip(numbers, chats, strict=True)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    problems = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a, b in numbers]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(problems), tmp_path / "easyr1.parquet")
    config = tiny(**{
        "data.source": str(tmp_path / "verl.parquet"), "eval.source": str(tmp_path / "easyr1.parquet"),
        "reward.functions": ("arithmetic.accuracy", "test_formats.closeness"), "reward.weights": (1.0, 0.1),
        "reward.timeout": 0.0, "num_steps": 1, "eval.every": 1, "optim.warmup_steps": 0,
    })  # fmt: skip
    records = list(steps(config, tmp_path / "run"))
    assert {"reward/arithmetic.accuracy", "reward/test_formats.closeness", "eval/accuracy"} <= set(records[-1])
    said = capsys.readouterr().out
    assert "'reward_model' holds the answer, as in veRL" in said
    assert "'problem' is the user's message, as in EasyR1" in said
