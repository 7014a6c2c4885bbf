"""Renders a page about an evaluation: its tables, and the first problems with their completions and scores."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

import jaxrl_llm
from jaxrl_llm.data.image_columns import chat_text, printable_value
from jaxrl_llm.data.image_rows import thumbnail
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.scores import Measurements, channel_text, result_lines
from jaxrl_llm.tools.report.completions import cut
from jaxrl_llm.tools.report.templates import template

MAX_PROBLEMS = 100  # problems on the page
MAX_COMPLETIONS = 8  # completions of a problem on the page


class ShownTurn(NamedTuple):
    """A turn of an episode; of a completion without an environment the whole text, with the role ""."""

    role: str
    text: str


class ScoredCompletion(NamedTuple):
    """A completion on the page, with its scores."""

    score: float  # weighted sum of the reward functions
    channels: str  # all scores, in a line
    turns: list[ShownTurn]


class Problem(NamedTuple):
    """A prompt of the evaluation on the page, with its first completions."""

    number: int  # number of the prompt in the data set, from 1
    prompt: str
    images: list[tuple[str, str]]  # name and data URL of each
    columns: str  # the other columns of the row, as text
    solved: int  # number of right completions
    of: int  # number of completions, also those that are not shown
    shown: list[ScoredCompletion]


def render(title: str, measured: Measurements, graded: GradedCompletions, dataset: Dataset) -> str:
    """Returns the page of an evaluation, with the first completions of each problem."""
    groups_by = measured.get("by")
    # The parts may have different lines, because a part with one problem or without a verdict lacks measurements.
    # The columns of the table are the lines of all parts, in the order of the part with the most lines.
    values = {value: dict(result_lines(part)) for value, part in groups_by["values"].items()} if groups_by else {}
    column_names = dict.fromkeys(chain(*sorted(values.values(), key=len, reverse=True)))
    return template("samples.html").render(
        title=title,
        version=jaxrl_llm.__version__,
        lines=result_lines(measured),
        channels=[(name, channel_text(channel)) for name, channel in measured["channels"].items()],
        column=groups_by["column"] if groups_by else "",
        head=list(column_names),
        values=values,
        problems=[problem(i, graded, dataset) for i in range(min(len(dataset.rows), MAX_PROBLEMS))],
        of=len(dataset.rows),
    )


def problem(row_index: int, graded: GradedCompletions, dataset: Dataset) -> Problem:
    """Returns what the page shows of a problem."""
    scores, row = graded.rewards.total[row_index], dataset.rows[row_index]
    images = [(image.name, thumbnail(image)) for image in (dataset.images.rows[row_index] if dataset.images else ())]
    columns = ", ".join(f"{key}: {printable_value(value)}" for key, value in row.items() if key != "prompt")
    shown = [completion(row_index, i, graded) for i in range(min(len(scores), MAX_COMPLETIONS))]
    # A completion is right with a score of 1 or more, as pass@k counts.
    solved = int((scores >= 1).sum())
    return Problem(
        number=row_index + 1,
        prompt=cut(chat_text(row["prompt"])),
        images=images,
        columns=cut(columns),
        solved=solved,
        of=len(scores),
        shown=shown,
    )


def completion(row_index: int, i: int, graded: GradedCompletions) -> ScoredCompletion:
    """Returns what the page shows of completion i of a problem: its text, or the turns of its episode."""
    score = float(np.nan_to_num(graded.rewards.total[row_index, i]))
    values = {name: float(x[row_index, i]) for name, x in graded.rewards.channels.items()}
    text = ", ".join(f"{name} {'–' if np.isnan(x) else f'{x:.4g}'}" for name, x in values.items())
    if graded.turns:
        turns = [ShownTurn(turn["role"], cut(turn["content"])) for turn in graded.turns[row_index][i]]
    else:
        turns = [ShownTurn("", cut(graded.texts[row_index][i]))]
    return ScoredCompletion(score, text, turns)
