"""Columns that reward functions ask of rows: what no row has is an error, what some lack is told, both at the start."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.data import columns
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.columns import check, check_completions, column_requirements
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.rollout import reward_calls
from jaxrl_llm.tasks import is_empty
from jaxrl_llm.tasks.signatures import bound

MINE = """
def plain(completions, answer, **columns):
    return [0.0] * len(completions)

def easy(completions, answer=None, *, scale=1.0, **columns):
    return [0.0] * len(completions)

def of_trl(completions, trainer_state):
    return [0.0] * len(completions)

def of_openrlhf(queries, prompts, labels):
    return {"rewards": queries}

def hard(prompts, completions, completion_ids, log_metric, answer, level, *, scale):
    return [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "columns_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def dataset_of(rows: list[dict], **more) -> data.Dataset:
    ids = [np.array([i], np.int32) for i in range(len(rows))]
    return data.Dataset(ids, [{"prompt": "1+1"} | row for row in rows], 0, 1, list(range(1, len(rows) + 1)), **more)


def test_a_signature_says_which_columns_a_function_asks_for():
    names = lambda *functions, **k: [(a.function, a.columns, a.abstains) for a in column_requirements(functions, **k)]  # noqa: E731
    cases = {
        "columns_mine.plain": [("answer",)], "columns_mine.easy": [],  # it says itself that it can do without
        "columns_mine.hard(scale=2)": [("answer",), ("level",)], "columns_mine.plain(answer=7)": [],
        "columns_mine.hard": [("answer",), ("level",), ("scale",)], "math.accuracy": [("answer",)],
        "math.accuracy(after='</think>')": [("answer",)], "math.is_boxed": [], "length.penalty(free=1, scale=2)": [],
        "verl.score": [("answer",), ("data_source",)], "countdown.accuracy": [("numbers",), ("target",)],
        "code.accuracy": [("tests", "answer", "inputs", "outputs", "fn_name")], "search.answered": [],
        "easyr1.math(format_weight=0.3)": [("answer",)], "repetition.penalty": [],
    }  # fmt: skip
    wrong = {text: names(text, episodes=False) for text, wanted in cases.items()
             if [x[1] for x in names(text, episodes=False)] != wanted}  # fmt: skip
    assert wrong == {}
    assert names("search.with_format", episodes=True) == [("search.with_format", ("answer",), True)]
    assert names("search.with_format", episodes=False)[1:] == [("search.with_format", ("turns",), True)]
    assert names("environment.reward", episodes=False) == [("environment.reward", ("episode",), True)]
    assert [requirement.abstains for requirement in column_requirements(["columns_mine.plain"], episodes=False)] == [
        False
    ]


def test_the_columns_in_the_template_of_a_judge_are_asked_for(tmp_path, refused):
    (tmp_path / "judge.txt").write_text("{prompt} {completion} {answer} {rubric}")
    judge = f"judge.score(url='http://x', model='m', template={str(tmp_path / 'judge.txt')!r})"
    rows = [{"answer": "1", "rubric": x} for x in ("short", None)]
    told = check(dataset_of(rows), [judge], "data").notes
    assert told == ("1 of 2 rows has no 'rubric', the first is row 2: judge.score gets None",)
    with refused("judge.score", "'rubric'"):
        check(dataset_of([{"answer": "1"}]), [judge], "data")
    assert check(dataset_of([{}]), ["judge.score(url='http://x', model='m')"], "data").notes == ()


def test_nothing_is_none_nan_and_blank_and_no_number_or_truth():
    empty = [None, math.nan, np.float32("nan"), Decimal("NaN"), Decimal("sNaN"), "", " \n", [], (), {}]
    full = [0, 0.0, False, True, Decimal(0), "0", "nan", [0], {"target": None}, np.zeros(0), np.float64(1), "None"]
    assert [value for value in empty if not is_empty(value)] == []
    assert [value for value in full if is_empty(value)] == []


ROWS = [{"answer": x} for x in ("2", None, math.nan, "", "5")] + [{}]


def test_rows_without_a_column_are_counted_and_the_first_is_named():
    made = check(dataset_of(ROWS), ["math.accuracy", "columns_mine.plain"], "data")
    assert made.notes == (
        "4 of 6 rows have no 'answer', the first is row 2: math.accuracy abstains, columns_mine.plain gets None",
    )
    assert check(dataset_of(ROWS[:1]), ["math.accuracy"], "data").notes == ()
    all_null = dataset_of([{"answer": None}] * 3)
    assert check(all_null, ["columns_mine.plain"], "data").notes == (
        "no row has 'answer': columns_mine.plain gets None",
    )
    numbers = data.Dataset(*list(vars(dataset_of(ROWS)).values())[:4], [7, 9, 11, 13, 15, 17])  # some rows were dropped
    assert "the first is row 9:" in check(numbers, ["math.accuracy"], "data").notes[0]


UNREADABLE = {
    "gsm8k.accuracy": "12 eggs", "math.accuracy": {"value": 2}, "easyr1.math": [2], "choice.accuracy": "none of these",
    "length.cosine(max_tokens=4)": True + 1j, "search.exact_match": {"target": ["Ann"]},
}  # fmt: skip


@pytest.mark.parametrize(("function", "value"), UNREADABLE.items(), ids=UNREADABLE.keys())
def test_an_answer_that_a_reward_cannot_judge_is_refused_with_its_row(function, value, refused):
    rows = [{"answer": x} for x in (1, None, value, value)]
    name = function.partition("(")[0]
    with refused("data.source row 3", name, "'answer'", "2 of 4 rows"):
        check(dataset_of(rows), [function], "data")
    with refused("code row 3", name, "'answer'"):
        check(data.join({"sums": dataset_of(rows[:1]), "code": dataset_of(rows[:3])}), [function], "data")
    more = [] if "choice" in function else ["-2", 2.5, Decimal(3), "1,000"]
    check(dataset_of([{"answer": x} for x in (1, None, math.nan, " ", *more)]), [function], "data")


def test_a_data_source_without_a_rule_is_refused_before_the_run(refused):
    rows = [{"answer": "1", "data_source": x} for x in ("gsm8k", None, "lab/other")]
    with refused("data.source row 3", "verl.score", "'lab/other'"):
        check(dataset_of(rows), ["verl.score"], "data")


ABSTAIN = (
    "math.accuracy", "gsm8k.accuracy", "choice.accuracy", "arithmetic.accuracy", "search.exact_match", "search.f1",
    "easyr1.math", "easyr1.r1v", "length.cosine(max_tokens=4)", "verl.score", "code.accuracy", "countdown.accuracy",
)  # fmt: skip


def test_the_rewards_of_the_package_have_no_verdict_where_a_row_says_nothing():
    completions = [[{"role": "assistant", "content": "```python\nx = 1\n``` #### 1 \\boxed{1}"}]] * 7
    empty, wrong = [None, math.nan, "", " ", [], Decimal("NaN"), {}], {}
    for function in ABSTAIN:
        columns = column_requirements([function], episodes=False)[0].columns
        usual = {"prompt": "1", "answer": None if "code" in function else "1"}
        usual |= {"data_source": "gsm8k", "numbers": [1], "target": 1, "tests": None, "inputs": None, "outputs": None}
        for column in columns[:2]:
            rows = [usual | {column: x} for x in empty]
            values = reward_calls.call_reward(function, bound(function), rows, completions, [[1]] * 7).values
            if not np.isnan(values).all():
                wrong[function, column] = values
    assert wrong == {}


def test_answers_of_any_type_of_number_are_judged():
    said = ["#### 2 <answer>2</answer> \\boxed{2}", "#### 2 <answer>C</answer>", "2"]
    whole, any_kind, wrong = [2, np.int64(2)], [2, 2.0, np.float64(2), Decimal(2), np.int64(2)], {}
    functions = {
        "math.accuracy": (0, any_kind), "gsm8k.accuracy": (0, any_kind), "choice.accuracy": (1, any_kind),
        "search.exact_match": (0, whole), "arithmetic.accuracy": (2, whole),
    }  # fmt: skip
    for function, (i, kinds) in functions.items():
        rows = [{"prompt": "1", "answer": x} for x in kinds]
        completions = [[{"role": "assistant", "content": said[i]}]] * len(rows)
        values = reward_calls.call_reward(function, bound(function), rows, completions, [[1]] * len(rows)).values
        if values != [1.0] * len(rows):
            wrong[function] = values
    assert wrong == {}


def test_each_source_of_a_mixture_is_counted_for_itself():
    parts = {"sums": dataset_of(ROWS), "code": dataset_of([{"tests": ["assert 1"]}, {"tests": []}, {"tests": None}])}
    made = check(data.join(parts), ["math.accuracy", "code.accuracy"], "data")
    assert made.notes == (
        "sums: 4 of 6 rows have no 'answer', the first is row 2: math.accuracy abstains",
        "code: no row has 'answer': math.accuracy abstains",
        "sums: 4 of 6 rows have no 'tests', 'answer', 'inputs', 'outputs' or 'fn_name', the first is row 2: "
        "code.accuracy abstains",
        "code: 2 of 3 rows have no 'tests', 'answer', 'inputs', 'outputs' or 'fn_name', the first is row 2: "
        "code.accuracy abstains",
    )


REFUSED = {  # -> rows, function, section, convert, and what the line names
    "the name of another data set":
        ([{"solution": "2"}], "math.accuracy", "data", "", ("'answer'", "data.source", "data.answer_column")),
    "a command line": ([{"solution": "2"}], "math.accuracy", "", "", ("--answer-column = 'solution'", "--convert")),
    "an unusual name": ([{"x": "2"}], "math.accuracy", "eval", "", ("eval.source", "data.answer_column")),
    "no other column": ([{}], "math.accuracy", "data", "", ("data.answer_column",)),
    "a convert function": ([{"x": "2"}], "math.accuracy", "data", "me.f", ("data.convert = 'me.f'",)),
    "another column": ([{"answer": "2"}], "verl.score", "data", "", ("'data_source'", "data.source")),
    "empty answers": ([{"answer": ""}, {"answer": None}], "gsm8k.accuracy", "data", "", ("'answer'", "2 rows")),
    "empty answers beside full solutions":
        ([{"answer": None, "solution": "2"}] * 2, "gsm8k.accuracy", "data", "", ("data.answer_column = 'solution'",)),
    "another column that is empty":
        ([{"numbers": None, "target": 1}] * 2, "countdown.accuracy", "data", "", ("'numbers'", "2 rows")),
    "an episode": ([{"answer": "2"}], "environment.reward", "data", "", ("environment.reward",)),
    "tests": ([{"x": 1}], "code.accuracy", "data", "", ("'tests'", "'fn_name'")),
    "a function of one's own": ([{"x": 1}], "columns_mine.plain", "data", "", ("columns_mine.plain", "'answer'")),
    "OpenRLHF's arguments": ([{"answer": 1}], "columns_mine.of_openrlhf", "data", "", ("'queries'", "OpenRLHF")),
    "the state of TRL's trainer": ([{"answer": 1}], "columns_mine.of_trl", "data", "", ("'trainer_state'",)),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "function", "section", "convert", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_column_that_no_row_has_is_refused_with(rows, function, section, convert, words, refused):
    with refused(*words):
        check(dataset_of(rows), [function], section, convert=convert)


def test_a_named_answer_column_may_be_missing_in_some_rows_and_not_in_all(tmp_path, refused):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "1", "n": 1}\n{"prompt": "2"}\n')
    rows = load_rows(str(file), columns=Columns(answer_column="n")).rows
    assert [row["answer"] for row in rows] == [1, None]
    with refused("x.jsonl", "'m'", "data.answer_column"):
        load_rows(str(file), columns=Columns(answer_column="m"))


def test_completions_to_learn_are_counted_and_blank_ones_are_told(refused):
    said = [{"completion": x} for x in ("2", " ", [{"role": "assistant", "content": ""}])]
    made = check_completions(dataset_of(said), "completion", "x.jsonl")
    assert "2 of 3" in made.notes[0] and "row 2" in made.notes[0] and len(made.notes) == 1
    rows = [*said[:1], {"completion": None}, {}, {"completion": [{"role": "user", "content": "?"}]}]
    with refused("x.jsonl row 2", "'completion'", "3 of 4 rows"):
        check_completions(dataset_of(rows), "completion", "x.jsonl")
    with refused("x.jsonl", "'text'"):
        check_completions(dataset_of(said), "text", "x.jsonl")


def test_equal_prompts_are_counted_with_the_first_of_them():
    ids = [np.array(x, np.int32) for x in ([1, 2], [1], [2], [1, 2], [1], [1, 2])]
    made = data.Dataset(ids, [{"prompt": "x"}] * 6, 0, 2, [1, 2, 4, 6, 7, 9])
    assert made.repeated() == (3, 6, 1)
    assert dataset_of(ROWS).repeated() == (0, 0, 0)


def test_a_column_is_looked_at_once_however_many_functions_ask_for_it(monkeypatch):
    row, count, looked = {"prompt": "1+1", "answer": "2", "data_source": "gsm8k"}, 10**4, []
    made = data.Dataset([np.arange(20, dtype=np.int32)] * count, [row] * count, 0, 20, list(range(count)))
    monkeypatch.setattr(columns, "is_empty", lambda value: looked.append(value) or is_empty(value))
    check(made, ["verl.score", "math.accuracy", "gsm8k.accuracy"], "data")
    assert len(looked) == 2 * count
