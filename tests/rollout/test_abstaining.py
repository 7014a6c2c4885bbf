"""Rewards over mixed rows: None for a row without the column, and docs/data.md's mixture as it is written."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from ml_collections import ConfigDict

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.config.names import bind
from jaxrl_llm.data import prompts as data
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.reward_calls import call_reward
from jaxrl_llm.tasks import REWARDS, search, verl

ROOT = Path(__file__).parents[2]
TURNS = [{"role": "assistant", "content": "<think>x</think><answer>2</answer>"}]

# A function, a right completion, and the columns of a row.
JUDGES = [
    ("math.accuracy", "\\boxed{2}", dict(answer="2")),
    ("gsm8k.accuracy", "#### 2", dict(answer="2")),
    ("gsm8k.accuracy(method='flexible')", "2", dict(answer=2)),
    ("choice.accuracy", "B", dict(answer=1)),
    ("search.exact_match", "<answer>2</answer>", dict(answer=["2"])),
    ("search.f1", "<answer>2</answer>", dict(answer="2")),
    ("search.with_format", "", dict(answer="2", turns=TURNS)),
    ("verl.score", "#### 2", dict(answer="2", data_source="openai/gsm8k")),
    ("verl.accuracy", "Answer: 2", dict(answer="2", data_source="math_dapo")),
    ("easyr1.math", "<think>x</think>\\boxed{2}", dict(answer="2")),
    ("easyr1.r1v", "<think>x</think><answer>2</answer>", dict(answer="2")),
    ("countdown.accuracy", "1+1", dict(numbers=[1, 1], target=2)),
    ("arithmetic.accuracy", "<1>2", dict(answer="2")),
    ("length.cosine(max_tokens=4, right_long=1.0)", "\\boxed{2}", dict(answer="2")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "completion", "columns"), JUDGES)
def test_a_reward_abstains_for_a_row_without_a_column_and_judges_the_others(text, completion, columns):
    rows = [{"prompt": "?"} | columns]
    rows += [rows[0] | {name: None} for name in columns if name != "turns"] + rows
    scores = call_reward(text, bind(text, REWARDS), rows, [completion] * len(rows), [[1]] * len(rows)).values
    np.testing.assert_array_equal(scores, [1.0, *[np.nan] * (len(rows) - 2), 1.0])


def test_a_turn_does_not_close_an_earlier_tag_and_an_empty_answer_is_wrong():
    said = [("assistant", "<answer>A"), ("environment", "<answer>B</answer>"), ("assistant", "C</answer>")]
    turns = [{"role": role, "content": content} for role, content in said]
    closed = [*turns, {"role": "assistant", "content": "<answer>2</answer>"}]
    texts = ["".join(content for _, content in said)] * 2
    assert search.answered(texts, [turns, closed]) == [0, 1]
    assert search.exact_match(texts, ["AC", "2"], [turns, closed]) == [0, 1]
    assert verl.accuracy(texts, ["B", "2"], ["searchR1_nq"] * 2, [turns, closed]) == [0, 1]
    forms = ["<answer></answer>", "<answer>the</answer>", "<answer>A</answer>", "<answer>The Who</answer>", "<answer>x"]
    assert search.exact_match(forms, ["the", "The", "a", "who", "x"]) == [0, 1, 1, 1, 0]
    assert search.exact_match(["<answer>x</answer> y</answer>", "<answer>x</answer> <answer>y"], ["x", "x"]) == [1, 1]
    assert search.f1(forms[:2], ["the", []]) == [0, None]
    assert np.isclose(search.f1(["<answer>a b c</answer>"], [["b c", "c"]])[0], 1.0)


def test_nothing_is_logged_of_a_batch_without_verdicts():
    rows = [{"prompt": "?", "answer": None}] * 2
    assert call_reward("easyr1.math", bind("easyr1.math", REWARDS), rows, ["2"] * 2, [[1]] * 2).metrics == {}


def test_tests_of_programs_are_chosen_for_each_row():
    program, wrong = "```python\ndef f(): return 2\n```", "```python\ndef f(): return 3\n```"
    rows = [
        {"prompt": "?", "tests": tests, "answer": answer}
        for tests, answer in [
            (["assert f() == 2"], None), (None, ["assert f() == 2"]), (None, "assert f() == 2"), (None, "72"),
            (["assert f() == 2"], "72"), (None, ["Paris"]), (None, "\\frac12"), (None, [1, 2]),
        ]
    ]  # fmt: skip
    expected = np.array([1, 1, 1, np.nan, 1, np.nan, np.nan, np.nan])
    for text, scores in ((program, expected), (wrong, expected * 0)):
        given = call_reward("code.accuracy", bind("code.accuracy", REWARDS), rows, [text] * 8, [[1]] * 8).values
        np.testing.assert_array_equal(given, scores)


def test_the_mixture_of_the_documentation_runs_as_it_is_written(tmp_path, monkeypatch):
    sums = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(6)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(sums), tmp_path / "math.parquet")
    programs = [{"task": "1+1", "tests": ["assert f() == 2"]}, {"task": "1+2", "tests": ["assert f() == 3"]}]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in programs))
    (tmp_path / "my_rows.py").write_text("def code(row):\n    return {'prompt': row.pop('task')} | row\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    c = load(ROOT / "configs" / "grpo.py")
    block = (ROOT / "docs" / "data.md").read_text().split("## Mixtures\n\n```python\n")[1].split("```")[0]
    exec(block, {"c": c, "ConfigDict": ConfigDict})
    dataset = data.load(recipes.read(c).data, hf.load_tokenizer(ROOT / "jaxrl_llm" / "assets" / "arithmetic"))
    assert {name: len(part) for name, part in dataset.parts.items()} == {"math": 6, "code": 2}
    rows = [dataset.rows[dataset.parts["math"][i]] for i in (0, 3)]
    rows += [dataset.rows[i] for i in dataset.parts["code"]]
    texts = [["\\boxed{0}", "0"], ["\\boxed{6}", "```python\ndef f(): return 6\n```"]]
    texts += [["```python\ndef f(): return 2\n```", "\\boxed{2}"]] * 2
    with closing(RewardFn(c.reward.functions, c.reward.weights, 0, field="config.reward.timeout")) as judge:
        rewards = judge(rows, texts, [[[1], [1]]] * 4).rewards
    none = [np.nan, np.nan]
    np.testing.assert_array_equal(rewards.channels["math.accuracy"], [[1, 0], [1, 0], none, none])
    np.testing.assert_array_equal(rewards.channels["code.accuracy"], [none, none, [1, 0], [0, 0]])
    np.testing.assert_array_equal(rewards.total, [[1, 0], [1, 0], [1, 0], [0, 0]])
