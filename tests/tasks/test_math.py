"""Answers as models write them, and what each must score."""

from __future__ import annotations

import time
from decimal import Decimal

import numpy as np

from jaxrl_llm.tasks import math

# What the box holds, the answer of the row, what it scores. tests/tasks/test_verdicts.py has many more.
ANSWERS = [
    ("72\\\\", "72", 1), ("**72**", "72", 1), ("\\mathbf{72}", "72", 1), ("9" * 100, "9" * 99, 0),
    ("9" * 9000, "72", 0), ("0.5", "\\frac{1}{2}", 1), ("\\approx 3.14", "3.14", 1), ("0.\\overline{3}", "1/3", 1),
    ("0.\\overline{" + "9" * 6000 + "}", "1", 0), ("1{,}234", "1234", 1), ("1,234,567.5", "1234567.5", 1),
    ("\\frac12", "1/2", 1), ("\\sqrt{8}", "2\\sqrt{2}", 1), ("2π", "2\\pi", 1), ("-∞", "-\\infty", 1),
    ("90^\\circ", "90", 1), ("\\$1,200.00", "1200", 1), ("[1,2]", "[1, 2]", 1), ("(1,2)\\cup(3,4)", "(3,4)∪(1,2)", 1),
    ("\\left\\{1,2\\right\\}", "1,2", 1), ("x=3", "3", 1), ("B", "A", 0), ("\\textbf{(A)}\\ 5", "A", 1),
    ("\\text{no}", "yes", 0), ("12.5\\%", "12.5", 1), ("12.5", "12.5%", 1), ("1,500\\%", "1500", 1), ("€18", "18", 1),
    ("18€", "18", 1), ("18 euros", "81", 0), ("\\text{}", "72", 0),
]  # fmt: skip


def chats(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_every_form_of_an_answer_scores_what_it_must():
    scores = math.accuracy(chats(*(f"So it is $\\boxed{{{box}}}$." for box, *_ in ANSWERS)), [a for _, a, _ in ANSWERS])
    wrong = [(*case, scored) for case, scored in zip(ANSWERS, scores, strict=True) if case[2] != scored]
    assert not wrong


ANCHORED = [  # without a box: what the completion says, and what it scores for 5 with anchors
    ("The final answer is $5$. I hope it is correct.", 1), ("So the answer is: \\(5\\).", 1), ("**Answer:** $$5$$", 1),
    ("Answer: $4$. No, the answer is \\[\\frac{10}{2}\\]", 1), ("The answer is $5$. No, the answer is $4$.", 0),
    ("The answer is 5", 0), ("We get $5$.", 0), ("The answer is $5", 0), ("The answer " + "is " * 20 + "$5$", 0),
    ("The answer is $5$, in a box \\boxed{4}", 0), ("The answer is $5$, in a box \\boxed{5", 0), ("\\boxed{5}", 1),
]  # fmt: skip


def test_a_formula_after_the_word_answer_counts_without_a_box_with_anchors():
    texts, scores = zip(*ANCHORED, strict=True)
    assert math.accuracy(list(texts), ["5"] * len(texts), anchors=True) == list(scores)
    assert math.accuracy(list(texts), ["5"] * len(texts)) == [0] * (len(texts) - 1) + [1]


BOXES = [  # a completion, what it scores for 12, and whether it has a box
    ("I thought \\boxed{10}. It is \\boxed{12}.", 1, 1), ("It is \\boxed{12}. No, \\boxed{10}.", 0, 1),
    ("<think>\\boxed{10}?</think> \\fbox{12}", 1, 1), ("\\boxed {12}", 1, 1),
    ("$\\boxed{\\text{it is } \\boxed{12}}$", 1, 1),
    ("It is $12$. \\boxed{}", 0, 0), ("\\boxed{12} and so \\boxed{}", 0, 0), ("\\boxed{ }", 0, 0),
    ("It is 12.", 0, 0), ("", 0, 0),
    ("\\boxed{12} and so \\boxed{12", 0, 0), ("\\boxed{12", 0, 0), ("\\boxed{\\frac{24}{2}}", 1, 1),
    ("\\boxed{\\left\\{12\\right.}", 0, 1), ("\\boxed{12\\}", 0, 0), ("boxed{12}", 0, 0), ("\\boxed 12", 0, 0),
]  # fmt: skip


def test_the_last_box_is_the_answer_and_it_must_be_closed():
    texts, scores, boxed = zip(*BOXES, strict=True)
    assert math.accuracy(chats(*texts), ["12"] * len(texts)) == list(scores)
    assert math.is_boxed(chats(*texts)) == math.is_boxed(list(texts)) == list(boxed)  # a raw prompt has raw texts


def test_only_what_is_after_the_last_mark_counts_if_a_mark_is_asked_for():
    texts = chats("<think>\\boxed{12}", "<think>\\boxed{10}</think>\\boxed{12}", "<think>\\boxed{12}</think>12")
    assert math.accuracy(texts, ["12"] * 3) == [1, 1, 1]
    assert math.accuracy(texts, ["12"] * 3, after="</think>") == [0, 1, 0]


def test_an_answer_column_may_hold_a_number_a_box_or_gsm8ks_form():
    answers = [72, 72.0, np.int64(72), Decimal("72"), "$72$", "\\boxed{72}", "It is $\\boxed{72}$.", "7.2e1"]
    answers.append("6 * 12 = <<6*12=72>>72\n#### 72")
    assert math.accuracy(chats(*["\\boxed{72}"] * 9, *["\\boxed{71}"] * 9), answers * 2) == [1] * 9 + [0] * 9


def test_an_answer_column_of_anything_else_is_refused(refused):
    for answer in (["72"], {"value": 72}, float("inf"), 72j):
        with refused("'answer'", repr(answer), error=ValueError):
            math.accuracy(chats("\\boxed{72}"), [answer])


def test_what_is_not_judged_in_time_earns_nothing_and_is_counted(monkeypatch, capfd, wording):
    monkeypatch.setattr(math, "ANSWER_SECONDS", 1.5)
    boxes = ["9^{9^{9^{9}}}", "\\sqrt{4}", "\\sqrt{9}"]
    began = time.monotonic()
    assert math.accuracy(chats(*(f"\\boxed{{{box}}}" for box in boxes)), ["2"] * 3) == [0, 1, 0]
    wording(capfd.readouterr().err)
    # A batch ends at its own limit, and at the deadline of the run.
    endless = chats(*(f"\\boxed{{9^{{9^{{9^{{{i}}}}}}}}}" for i in range(9, 12)))
    monkeypatch.setattr(math, "ANSWER_SECONDS", 30.0)
    monkeypatch.setattr(math, "BATCH_SECONDS", 0.2)
    assert math.accuracy(endless, ["2"] * 3) == [0] * 3
    wording(capfd.readouterr().err)
    monkeypatch.setattr(math, "BATCH_SECONDS", 60.0)
    monkeypatch.setattr(math, "deadline", lambda: time.monotonic() + 0.2)
    assert math.accuracy(endless, ["2"] * 3) == [0] * 3
    assert time.monotonic() - began < 40


def test_text_that_is_the_answer_and_integers_need_no_mathematics(monkeypatch):
    monkeypatch.setattr(math, "_pool", None)
    same = ["\\boxed{\\frac{a}{b}}", "\\boxed{1,000}", "\\boxed{7}", "\\boxed{\\text{Yes}}"]
    assert math.accuracy(chats(*same), ["\\frac{a}{b}", "1,000", "8", "Yes"]) == [1, 1, 0, 1]
