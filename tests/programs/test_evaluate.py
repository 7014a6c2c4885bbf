"""Evaluation: pass@k, majority votes, tables by channel and by column, JSON and the page of samples."""

from __future__ import annotations

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm import evaluate
from jaxrl_llm.data import encoding
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.rollout import scores
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.tools.report import samples

MODEL = Path(evaluate.__file__).parent / "assets" / "arithmetic"


def test_a_step_that_is_refused_is_answered_with_those_that_are_not(tmp_path, refused):
    run = object.__new__(SavedRun)
    run._folder, run._log = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    run._manager = SimpleNamespace(all_steps=lambda: [25, 30])
    for best in False, True:
        log = [
            {"step": 20, "eval/accuracy": 0.9},
            {"step": 25} | ({"eval/accuracy": 0.5} if best else {}),
            {"step": 30},
        ]
        run._log.write_text("".join(json.dumps(record) + "\n" for record in log))
        with refused("--step 7", "25 (50.0%), 30, best, last" if best else "25, 30, last"):
            run.find("7")
        assert run.find("last") == 30
        if best:
            assert run.find("best") == 25
            continue
        with refused("--step best", "25, 30, last"):
            run.find("best")


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k(k):
    drawn = np.random.default_rng(0).integers(0, 2, (7, 5)).astype(np.float32)
    sets = [drawn[:, list(chosen)].max(axis=1) for chosen in combinations(range(5), k)]
    assert scores.pass_at(k, drawn) == pytest.approx(np.mean(sets))


@pytest.mark.parametrize(
    ("k", "solved", "answers", "expected"),
    [
        (4, [1, 1, 0, 0], ["7", "7", "8", None], 1.0),  # two votes against one
        (4, [1, 0, 0, 0], ["7", "8", "8", "9"], 0.0),  # a wrong majority
        (4, [1, 1, 0, 0], ["7", "7", "8", "8"], 0.5),  # a tie
        (4, [1, 0, 0, 0], [None, None, None, None], 0.0),  # nobody votes, and the solution has no answer
        (4, [1, 0, 0, 1], ["7", "8", "8", None], 0.0),  # a solution without an answer does not vote
        (3, [1, 1, 0, 0, 0, 1], ["7", "7", "8", "8", "9", "7"], (1 + 1 / 3) / 2),  # two sets of three
    ],
)
def test_a_majority_vote_by_hand(k, solved, answers, expected):
    assert scores.majority_at(k, np.array([solved], np.float32), [answers]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1,200", "1200.0"), ("Yes", " yes."), ("1/2", "0.5"), ("$ 3", "3"), ("x  + y", "x + y"), ("-0.50", "-1/2"),
     ("1\\,000", "1000"), ("1 1/2", "3/2"), ("-1 1/2", "-1.5"), ("1\\,1/2", "1.5"), ("1 / 2", "0.5"), ("- 3", "-3"),
     ("1 234 567", "1234567"), ("12,345.50", "12345.5"), ("3 125/500", "3.25")],
)  # fmt: skip
def test_two_forms_of_an_answer_are_one_vote(one, other):
    assert scores.normalized(one) == scores.normalized(other)


def test_answers_that_are_mathematically_equal_are_one_vote():
    texts = [
        ["\\frac{1}{2}", "1/3", "\\dfrac12", "1/3", "0.5", "\\frac 1 2"],
        ["x+1", "1+x", "Paris", "paris", "\\Delta", "\\delta"],
        ["", "", "7", "7.0", "8", "\\text{7}"],
    ]
    assert scores.extract_answers(texts, lambda text: text) == [
        ["\\frac{1}{2}", "1/3", "\\frac{1}{2}", "1/3", "\\frac{1}{2}", "\\frac{1}{2}"],
        ["x+1", "x+1", "paris", "paris", "\\Delta", "\\delta"],
        ["", "", "7", "7", "8", "7"],
    ]
    votes = scores.extract_answers([["\\frac12", "1/3", "\\dfrac{1}{2}", "1/3", "1/2"]], lambda text: text)
    assert scores.majority_at(5, np.array([[1, 0, 1, 0, 1]], np.float32), votes) == 1.0


@pytest.mark.parametrize(("one", "other"), [("12", "1.2"), ("1,2", "12"), ("1/0", "0"), ("no", "yes"), ("", "0"),
    ("1 1/2", "11/2"), ("3 1/4", "31/4"), ("1 2", "12"), ("1,2345", "12345"), ("1 2345", "12345"), ("1 1/0", "1"),
])  # fmt: skip
def test_two_answers_are_two_votes(one, other):
    assert scores.normalized(one) != scores.normalized(other)


def test_rows_are_split_by_a_column_and_by_one_within_a_column(refused):
    rows = [{"source": "a", "extra": {"level": 2}}, {"source": "b", "extra": {"level": 1}}, {"source": "a"}]
    assert scores.rows_by_value(rows, "source") == {"a": [0, 2], "b": [1]}
    levels = [{"level": level} for level in (10, 9, None, "x")]
    assert [*scores.rows_by_value(levels, "level")][:2] == ["9", "10"]
    assert scores.rows_by_value(rows, "extra.level") == {"(none)": [2], "1": [1], "2": [0]}
    with refused("--by level", "extra, source"):
        scores.rows_by_value(rows, "level")
    with refused("--by id"):
        scores.rows_by_value([{"id": i} for i in range(101)], "id")


@pytest.fixture
def evaluated(tmp_path, monkeypatch, capfd):
    """Runs the program on a file with two kinds of sums; returns what it prints."""
    rows = [row | {"kind": "small" if row["a"] + row["b"] < 100 else "large"} for row in arithmetic.held_out()[:24]]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judges.py").write_text(
        "def right(completions, answer):\n"
        "    return [float(c[0]['content'].endswith(a)) for c, a in zip(completions, answer)]\n"
        "def short(completions):\n    return [1.0 if len(c[0]['content']) < 4 else None for c in completions]\n"
        "def answer(text):\n    return text.split('>')[-1]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*more: str) -> str:
        argv = ["--model", str(MODEL), "--task", "sums.jsonl", "--function", "judges.right", "judges.short"]
        monkeypatch.setattr(sys, "argv", ["evaluate", *argv, "--timeout", "0", "--max-completion-tokens", "12", *more])
        evaluate.main()
        return capfd.readouterr().out

    return run


def test_an_evaluation_has_tables_json_and_a_page(evaluated, tmp_path):
    sampled = ("--samples", "4", "--temperature", "1", "--by", "kind", "--answer", "math.last_box")
    found = json.loads(evaluated(*sampled, "--json", "--page", "samples.html"))
    assert (found["problems"], found["samples"], set(found["pass"])) == (24, 4, {"2", "4"})
    assert 0 < found["accuracy"] <= found["pass"]["2"] <= found["pass"]["4"] < 1
    assert found["majority"] == {"4": 0.0}  # no completion has a box
    assert found["channels"]["judges.right"] == {"mean": found["accuracy"], "abstained": 0}
    assert found["channels"]["judges.short"]["mean"] == 1.0  # where it gives a verdict
    assert 0 < found["channels"]["judges.short"]["abstained"] < 96
    parts = found["by"]["values"]
    assert set(parts) == {"large", "small"}
    assert sum(part["problems"] for part in parts.values()) == 24
    mean = sum(part["accuracy"] * part["problems"] for part in parts.values()) / 24
    assert mean == pytest.approx(found["accuracy"])
    page = (tmp_path / "samples.html").read_text()
    assert page.count('<article class="group">') == 24
    assert page.count('class="tag healthy"') == round(found["accuracy"] * 96)
    assert f"{found['accuracy']:.1%}" in page
    assert "without a verdict" in page


def test_a_table_by_column_has_each_number_below_its_name_without_a_verdict_too():
    judged = np.array([[1.0, 0.0], [1.0, 1.0], [np.nan, 1.0], [np.nan, np.nan]])
    kinds = ("sure", "sure", "some", "none")
    graded = GradedCompletions([["x"] * 2] * 4, Rewards(judged, {"judge": judged}), [], {})
    rows = [{"prompt": "1+1", "kind": kind} for kind in kinds]
    page = samples.render("t", scores.measure_all(graded, rows, None, "kind"), graded, Dataset([], rows, 0, 1, []))
    table = re.search("<h2>By kind</h2>(.*?)</table>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t", line) for line in re.findall("<tr>.*?</tr>", table[1], re.DOTALL)]
    columns = {name: cell for name, *cell in zip(*cells, strict=True)}
    assert columns["kind"] == ["none", "some", "sure"]
    assert columns["accuracy"] == ["–", "50.0%", "75.0%"]
    assert columns["pass@2"] == ["–", "100.0%", "100.0%"]
    assert columns["standard error"] == ["–", "–", "25.0%"]
    assert columns["judge"] == ["– (2 without a verdict)", "1 (1 without a verdict)", "–"]


def test_a_turn_that_ends_with_no_stop_token_is_noted(evaluated, monkeypatch, capfd, refused):
    monkeypatch.setattr(encoding, "turn_end", lambda tokenizer, template_args: 7)
    with refused("--max-completion-tokens"):  # before anything is sampled
        evaluated("--max-completion-tokens", "100000")
    assert "eos_token_id" in capfd.readouterr().out


def test_majority_votes_need_samples_and_a_flag_that_does_nothing_is_refused(evaluated, refused):
    printed = evaluated("--samples", "4", "--temperature", "1", "--by", "kind")
    assert printed.count("maj@4") == 3 and "kind = large\n" in printed
    for named, arguments in {
        "--answer math.last_box": ("--answer", "math.last_box"),
        "--by kinds": ("--by", "kinds"),
        "--family llama.decoder_config": ("--family", "llama.decoder_config"),
    }.items():
        with refused(named):
            evaluated(*arguments)
