"""Settings of the sections `data` and `eval` of a config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange, Positive
from jaxrl_llm.data.formats import Columns

PREFERENCE = "preference"  # value of eval.function that measures the share of pairs whose chosen completion wins


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source of a mixture. A resumed run may change source and convert, because a fingerprint checks the rows."""

    source: MayChange[str]
    convert: MayChange[str]
    weight: Positive


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The section `data`: the rows of a run, and how they become prompts."""

    source: MayChange[str]
    """Source of prompts: a task of the package, a .jsonl, .json, .csv or .parquet file, a data set of the hub
    (owner/name@split), or my.module.function.
    """
    convert: MayChange[str]
    """Function from a row to a row with a column "prompt", e.g. gsm8k.convert; it drops a row by returning None. "":
    use rows as they are.
    """
    prompt_column: MayChange[str]
    """Column with the prompt."""
    answer_column: MayChange[str]
    """Column that reward functions get as "answer"."""
    format_prompt: MayChange[str]
    """Jinja template of the user's message, or a file with one; {{ content }} is the prompt's text. "": no template."""
    chat_template_args: dict[str, Any]
    """Arguments of the model's chat template, e.g. enable_thinking = False."""
    today: MayChange[str]
    """Date for a chat template that asks for today's date, e.g. 2026-11-25. "": the day on which the run was started,
    also after a resume.
    """
    max_prompt_tokens: AtLeastOne
    """Limit of a prompt in tokens; a longer prompt is never cut (see data.overlong)."""
    overlong: Literal["drop", "error"]
    """Prompts above the limit: drop (leave them out and count them) | error (stop the run)."""
    image_column: MayChange[str]
    """Column with the images; "": images, or image."""
    image_folder: MayChange[str]
    """Folder that must contain the image files, and that their paths start from; "": any file."""
    min_pixels: Count
    """Smallest number of pixels of an image; a smaller image is enlarged. 0: the model's own limit."""
    max_pixels: Count
    """Largest number of pixels of an image; a larger image is reduced. 0: the model's own limit. The tokens of an image
    count as prompt tokens.
    """

    mixture: dict[str, SourceSettings] = field(default_factory=dict, init=False)
    completion_column: str = field(default="", init=False)  # column of the text that `sft` learns
    rejected_column: str = field(default="", init=False)  # column of the worse completion of a preference pair
    order_column: str = field(default="", init=False)  # column of numbers by which `train` sorts an epoch

    @property
    def skip(self) -> float:
        """Probability that a curriculum skips a prompt without signal; 0 if the run has no curriculum."""
        return 0.0

    @property
    def columns(self) -> Columns:
        """Settings for reading rows without a convert function."""
        return Columns(
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            format_prompt=self.format_prompt,
            image_column=self.image_column,
            image_folder=self.image_folder,
            pair=(self.completion_column, self.rejected_column) if self.rejected_column else (),
        )

    @property
    def completion_columns(self) -> tuple[str, ...]:
        """Columns of the G completions of a prompt that `sft` learns from, the chosen one first."""
        return tuple(filter(None, (self.completion_column, self.rejected_column)))

    def template_args(self, tools: Any = ()) -> dict[str, Any]:
        """Returns the arguments of the chat template. tools: JSON schemas of functions that the template describes."""
        return self.chat_template_args | ({"tools": list(tools)} if tools else {})


EVAL = "eval"  # the section with the evaluation set that decides which checkpoint is best
EXTRA_SETS = "eval.extra_sets."  # prefix of the sections of further evaluation sets


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """An evaluation set: problems, and the function that judges their completions."""

    source: MayChange[str]
    """Source of the evaluation problems, as for data.source."""
    convert: MayChange[str]
    """Convert function of the evaluation problems, as for data.convert; "": none."""
    function: str
    """Reward function whose mean is eval/accuracy, as in reward.functions."""
    problems: MayChange[AtLeastOne]
    """Number of problems: the first of the source, with one greedy completion each."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The function that judges sampled completions; () if preference pairs are compared and nothing is sampled."""
        return () if self.function == PREFERENCE else (self.function,)


@dataclass(frozen=True, kw_only=True)
class EvalSettings(EvalSet):
    """The section `eval`: the set that decides which checkpoint is best, how often it is measured, and further sets."""

    every: MayChange[AtLeastOne]
    """Steps between evaluations; a run also evaluates before its first step and at its end."""
    patience: MayChange[Count]
    """Evaluations in a row without a new best accuracy that end the run early; 0: never."""
    extra_sets: dict[str, EvalSet] = field(default_factory=dict)
    """Further evaluation sets, each with a name: c.eval.extra_sets.code = ConfigDict(dict(source="code.jsonl",
    convert="", function="code.accuracy", problems=500)) is logged as eval/code/accuracy. Only the set of eval.source
    decides which checkpoint is best, and when eval.patience ends the run.
    """

    @property
    def sets(self) -> dict[str, EvalSet]:
        """All evaluation sets, by their sections of the config."""
        return {EVAL: self, **{EXTRA_SETS + name: extra_set for name, extra_set in self.extra_sets.items()}}


def set_name(section: str) -> str:
    """Returns the name of the evaluation set of a section; "" for the set that decides which checkpoint is best."""
    return "" if section == EVAL else section.removeprefix(EXTRA_SETS)


def accuracies_of(fields: Iterable[str]) -> dict[str, str]:
    """Returns {section of an evaluation set: its accuracy metric}; the set that decides on the best comes first.

    fields: paths of the fields of a config.
    """
    sections = [path.removesuffix(".function") for path in fields if re.fullmatch(r"eval\.(.+\.)?function", path)]
    return {section: f"{_prefix(section)}/accuracy" for section in sorted(sections)}


def metrics_of(section: str, accuracy: float, problems: int) -> dict[str, float]:
    """Returns the metrics of an evaluation set, as eval/accuracy, or as eval/NAME/accuracy for a further set."""
    return {f"{_prefix(section)}/accuracy": accuracy, f"{_prefix(section)}/problems": problems}


def _prefix(section: str) -> str:
    """Returns the prefix of the metrics of an evaluation set."""
    return f"{EVAL}/{set_name(section)}".rstrip("/")
