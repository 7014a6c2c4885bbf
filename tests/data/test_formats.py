"""Files in the formats of TRL, veRL, Search-R1 and EasyR1, and data sets of the hub, trained on as they are."""

from __future__ import annotations

import dataclasses
import json
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
from jaxrl_llm.data import columns, formats, hub
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.rows import check_source, is_task, load_rows
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout import reward_calls
from jaxrl_llm.session.banner import model_and_data_table, problems_table
from jaxrl_llm.tasks import PREFILL
from jaxrl_llm.tasks.signatures import bound

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
    "TRL's preferences": ({"prompt": SUM, "chosen": "3", "rejected": "4"}, SUM, None, ""),
    "veRL's": (of_verl("3"), ASKED, "3", "'reward_model' holds the answer, as in veRL"),
    "veRL's with a number": (of_verl(3), ASKED, "3", "'reward_model' holds the answer, as in veRL"),
    "veRL's with several answers": (of_verl(["3", "three"]), ASKED, ["3", "three"],
                                    "'reward_model' holds the answer, as in veRL"),
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


@pytest.mark.parametrize(("row", "prompt", "answer", "said"), FORMATS.values(), ids=FORMATS.keys())
def test_rows_are_read_as_their_columns_say(tmp_path, arithmetic, row, prompt, answer, said):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    for kind in ("jsonl", "parquet"):
        file = str(tmp_path / f"rows.{kind}")
        found = load_rows(file)
        (made,) = found.rows
        assert (made["prompt"], made.get("answer"), found.read_as) == (prompt, answer, said)
        assert row.keys() <= made.keys()
        dataset = data.read(file, arithmetic, max_prompt_tokens=16, overlong="error")
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


REFUSED = {  # -> row, columns, and what the line names
    "prompts in the answers": ({"chosen": SAID, "rejected": SAID}, {}, "'chosen'"),
    "whole conversations": ({"messages": ASKED + SAID}, {}, "'messages'"),
    "whole texts": ({"text": "1+2=3"}, {}, "'text'"),
    "other columns": ({"question": SUM}, {}, "'prompt'"),
    "images": ({"problem": SUM, "images": ["a"]}, {}, "images"),
    "another prompt": ({"prompt": SUM}, dict(prompt_column="question"), "'question'"),
    "a chat in a format prompt": ({"prompt": ASKED}, dict(format_prompt="{{ content }}"), "data.format_prompt"),
}


@pytest.mark.parametrize(("row", "columns", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_a_row_is_refused_that_has(tmp_path, refused, row, columns, word):
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with refused("x.jsonl row 1", word):
        load_rows(str(tmp_path / "x.jsonl"), columns=Columns(**columns))


@pytest.mark.parametrize("text", ["nowhere.jinja", "{% if", "Think first.", "{{ content }}{{ x }}"])
def test_a_format_prompt_is_refused_before_data_is_read(refused, text):
    with refused("data.format_prompt"):
        recipes.read(tiny(**{"data.format_prompt": text}))


def test_a_column_that_a_convert_function_makes_is_refused(refused):
    with refused("config.data.prompt_column"):
        recipes.read(tiny(**{"data.convert": "gsm8k.convert", "data.prompt_column": "problem"}))


TRUTHS = ["3", 3, ["Paris", "paris, France"], {"target": 24, "numbers": [2, 3]}, {"target": ["Ann", "Anna"]}]
OF_VERL = """def one(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "length": len(repr(ground_truth))}

def batch(reward_inputs):
    return [{"overall": 1.0, "length": len(repr(x["ground_truth"]))} for x in reward_inputs]
"""


@pytest.mark.parametrize("truth", TRUTHS, ids=map(repr, TRUTHS))
def test_a_function_of_verl_gets_the_ground_truth_with_its_own_type(tmp_path, monkeypatch, arithmetic, truth):
    (tmp_path / "of_verl_truths.py").write_text(OF_VERL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps(of_verl(truth)) + "\n")
    dataset = data.read(str(tmp_path / "x.jsonl"), arithmetic, max_prompt_tokens=16, overlong="error")
    for name in ("of_verl_truths.one", "of_verl_truths.batch"):
        assert columns.check(dataset, [name], "data").notes == ()
        judged = reward_calls.call_reward("f", bound(name), dataset.rows, ["3"], [[1]])
        assert (judged.values, judged.metrics["length"]) == ([1.0], len(repr(truth)))
        # An answer that somebody has named is the ground truth.
        (row,) = load_rows(str(tmp_path / "x.jsonl"), columns=Columns(answer_column="ability")).rows
        assert reward_calls.call_reward("f", bound(name), [row], ["3"], [[1]]).metrics["length"] == len(repr("math"))


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
    made = data.tokenize(rows, tokenizer, max_prompt_tokens=999, overlong="error", **more)
    return [tokenizer.decode(ids.tolist()) for ids in made.ids]


def test_tools_and_arguments_of_a_row_reach_its_chat_template_alone(tokenizer, refused):
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
    with refused("data row 2", "'effort'"):
        texts(tokenizer, [rows[0], {"prompt": ASKED, "chat_template_kwargs": {"effort": 1}}])


def test_a_thought_that_the_prompt_opens_is_a_part_of_the_answer(tokenizer, monkeypatch):
    opening = THINKING + "{% if enable_thinking is not defined %}<think>\n{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", opening)
    rows = [
        {"prompt": ASKED, "answer": "3"},
        {"prompt": ASKED, "answer": "3", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [*ASKED, {"role": "assistant", "content": "<think>"}], "answer": "3"},
        {"prompt": "1+2= <think>", "answer": "3"},
        {"prompt": "1+2= <think> 3 </think> so", "answer": "3"},
    ]
    made = data.tokenize(rows, tokenizer, max_prompt_tokens=99, overlong="error")
    assert [row.get(PREFILL) for row in made.rows] == ["<think>\n", "<think></think>", None, "<think>", None]
    assert sum(PREFILL in note for note in made.notes) == 1
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    assert data.tokenize(rows[:1], tokenizer, max_prompt_tokens=99, overlong="error").notes == ()
    said = ["a</think>\\boxed{3}"] * 5
    judged = lambda name: reward_calls.call_reward("f", bound(name), made.rows, said, [[1]] * 5).values  # noqa: E731
    assert judged("format.think") == [1, 1, 1, 1, 0]
    assert judged("easyr1.math") == pytest.approx([1, 1, 1, 1, 0.9])
    closed = reward_calls.call_reward(
        "f", bound("math.accuracy(after='</think>')"), made.rows[:2], ["\\boxed{3}"] * 2, [[1]] * 2
    )
    assert closed.values == [0, 1]


DRESSED = {  # prompts that are chats in another dress, and a word of the line that says so; "": there is none
    "a chat": (ASKED, ""),
    "a chat formatted before": ([{"role": "user", "content": f"<|im_start|>user\n{SUM}<|im_end|>"}], "special tokens"),
    "the JSON text of a chat": (json.dumps(ASKED), "JSON text"),
    "plain text": (SUM, "data.format_prompt"),
    "formatted text": (f"<|im_start|>user\n{SUM}<|im_end|>\n<|im_start|>assistant\n", ""),
    "a list in brackets": ('["role"]', "data.format_prompt"),
}


@pytest.mark.parametrize(("prompt", "word"), DRESSED.values(), ids=DRESSED.keys())
def test_the_banner_says_of_prompts_that_they_are(tokenizer, wording, prompt, word):
    rows = [{"prompt": ASKED}, {"prompt": prompt}, {"prompt": prompt}]
    notes = data.tokenize(rows, tokenizer, max_prompt_tokens=99, overlong="error", numbers=[1, 3, 5]).notes
    assert len(notes) == bool(word)
    for note in notes:
        assert word in note and "2 of 3" in note and "row 3" in note
        wording(note)
    part = data.tokenize(rows, tokenizer, max_prompt_tokens=99, overlong="error")
    assert data.join({"one": part}).notes == tuple(f"one: {note}" for note in part.notes)


def test_text_for_a_model_without_a_chat_template_needs_no_note(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert data.tokenize([{"prompt": SUM}], tokenizer, max_prompt_tokens=99, overlong="error").notes == ()


def test_the_hash_of_rows_does_not_know_what_their_prompts_open(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING + "<think>")
    made = data.tokenize([{"prompt": ASKED}], tokenizer, max_prompt_tokens=99, overlong="error")
    plain = dataclasses.replace(made, rows=[{"prompt": ASKED}])
    assert PREFILL in made.rows[0] and made.fingerprint() == plain.fingerprint()


CALLS = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
    "name": "search", "arguments": {name: "a"}}}]} for name in ("text", "page")]  # fmt: skip
TOOL_TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "mistral")


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_of_tools_in_a_prompt_read_alike_from_every_file(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", (Path(__file__).parents[1] / f"templates/{name}.jinja").read_text())
    result = {"role": "tool", "content": "b", "tool_call_id": "123456789"}
    for i, call in enumerate(calls := json.loads(json.dumps(CALLS))):
        call["tool_calls"][0]["id"] = f"12345678{i}"
    rows = [{"prompt": [*ASKED, call, result]} for call in calls]
    as_text = json.loads(json.dumps(rows))
    for row in as_text:
        called = row["prompt"][1]["tool_calls"][0]["function"]
        called["arguments"] = json.dumps(called["arguments"])
    made = []
    for i, written in enumerate((rows, as_text)):
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / f"{i}.parquet")
        made += [texts(tokenizer, load_rows(str(tmp_path / f"{i}.{kind}")).rows) for kind in ("jsonl", "parquet")]
    assert '{"text": "a"}' in made[0][0] and "page" not in made[0][0] and "null" not in made[0][0]
    assert all(each == made[0] for each in made)


def test_a_null_that_somebody_wrote_stays_in_the_arguments_of_a_call(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1].tool_calls[0].function.arguments | tojson }}")
    for arguments in ({"text": None}, '{"text": null}', "{}", "no JSON"):
        message = {"role": "user", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": [message]}))
        shown = {"{}": "{}", "no JSON": '"no JSON"'}.get(str(arguments), '{"text": null}')
        assert texts(tokenizer, load_rows(str(tmp_path / "x.jsonl")).rows) == [shown]


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
    assert hub.is_hub_source(source) == one
    assert not (one and is_task(source))


@pytest.mark.needs("datasets")
def test_a_saved_folder_and_its_splits_are_read(tmp_path, refused):
    import datasets

    rows = [{"problem": SUM, "answer": "3"}, {"problem": "2+2", "answer": "4"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    for source, count in {"one": 2, "both": 2, "both@train": 2, "both@test": 1}.items():
        check_source("data.source", f"{tmp_path}/{source}")
        found = load_rows(f"{tmp_path}/{source}").rows
        assert (len(found), found[0]["prompt"]) == (count, ASKED)
    datasets.DatasetDict({"exam": parts["test"]}).save_to_disk(tmp_path / "exam")
    for source, offered in {"both@validation": "both@test", "exam": "exam@exam", "one@train": "/one"}.items():
        for reads in (load_rows, partial(check_source, "data.source")):
            with refused(offered):
                reads(f"{tmp_path}/{source}")


@pytest.mark.needs("datasets")
def test_a_data_set_of_the_hub_is_asked_for_by_name_configuration_and_split(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*name, split):
        asked.append((*name, split))
        return datasets.Dataset.from_list([{"prompt": SUM}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("lab/sums", "lab/sums@test", "lab/sums:easy@test"):
        assert load_rows(source).rows == [{"prompt": SUM}]
    assert asked == [("lab/sums", None, "train"), ("lab/sums", None, "test"), ("lab/sums", "easy", "test")]


def test_without_the_package_the_line_says_how_to_get_it_or_the_files(monkeypatch, refused):
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with refused("data.source = 'lab/sums@test'", "jaxrl_llm[hub]"):
        check_source("data.source", "lab/sums@test")


# ---- used by a run


def test_prompts_of_verl_and_problems_of_easyr1_are_used_as_they_are(tmp_path, arithmetic):
    rows = [of_verl(str(a + 1)) | {"prompt": [{"role": "user", "content": f"{a}+1"}]} for a in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    problems = [{"problem": f"{a}+2", "answer": str(a + 2)} for a in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(problems), tmp_path / "easyr1.parquet")
    config = tiny(**{"data.source": f"{tmp_path}/verl.parquet", "eval.source": f"{tmp_path}/easyr1.parquet"})
    recipe = recipes.read(config)
    problems = {"eval": data.load_held_out(recipe.eval, recipe.data, arithmetic)}
    loaded, functions = (data.load(recipe.data, arithmetic), problems), recipe.reward.functions
    prompts, held_out = columns.check_all(recipe.data, recipe.eval_sets, functions, *loaded, episodes=False)
    for dataset, right in ((prompts, "1"), (held_out["eval"], "2")):
        said = [f"\\boxed{{{right}}}"] * 4  # right for the first row
        judged = reward_calls.call_reward("f", bound("math.accuracy"), dataset.rows, said, [[1]] * 4)
        assert judged.values == [1.0, 0.0, 0.0, 0.0]
    mesh, model = meshes.make_mesh(data=1, fsdp=1, tensor=1), hf.load_model(Path(recipe.model.path)).cfg
    table = model_and_data_table(recipe.model.path, mesh, model, recipe.sizes, recipe.data, prompts)
    assert "'reward_model' holds the answer, as in veRL" in str(table)
    assert "'problem' is the user's message, as in EasyR1" in str(problems_table(recipe.eval_sets, held_out))
