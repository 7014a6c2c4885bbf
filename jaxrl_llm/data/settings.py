"""The sections `data` and `eval` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange, Positive
from jaxrl_llm.data.formats import Columns

PREFERENCE = "preference"  # as eval.function: the share of pairs whose chosen completion the policy prefers


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source of a mixture. What names and reads rows may change: a fingerprint checks the rows."""

    source: MayChange[str]
    convert: MayChange[str]
    weight: Positive


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The rows of a run, and how they become prompts."""

    source: MayChange[str]
    convert: MayChange[str]
    prompt_column: MayChange[str]
    answer_column: MayChange[str]
    format_prompt: MayChange[str]
    chat_template_args: dict[str, Any]
    today: MayChange[str]
    max_prompt_tokens: AtLeastOne
    overlong: Literal["drop", "error"]
    image_column: MayChange[str]
    image_folder: MayChange[str]
    min_pixels: Count
    max_pixels: Count

    mixture: ClassVar[dict[str, SourceSettings]] = {}
    completion_column: ClassVar[str] = ""  # with the text that `sft` learns
    rejected_column: ClassVar[str] = ""  # with a worse completion of the same prompt, which `sft` compares it with
    skip: ClassVar[float] = 0.0  # probability with which a curriculum passes over a prompt
    order_column: ClassVar[str] = ""  # with the numbers by which each epoch is sorted; "": it is shuffled

    @property
    def columns(self) -> Columns:
        """How rows are read that no convert function makes."""
        text = self.prompt_column, self.answer_column, self.format_prompt
        pair = (self.completion_column, self.rejected_column) if self.rejected_column else ()
        return Columns(*text, self.image_column, self.image_folder, pair=pair)

    @property
    def completion_columns(self) -> tuple[str, ...]:
        """Columns with the G completions of a prompt, in their order, from which `sft` learns."""
        return tuple(filter(None, (self.completion_column, self.rejected_column)))

    def template_args(self, tools: Any = ()) -> dict[str, Any]:
        """Returns the arguments of the chat template; tools: schemas that it describes."""
        return self.chat_template_args | ({"tools": list(tools)} if tools else {})


EVAL = "eval"  # the section with the evaluation set that decides which checkpoint is best
EXTRA_SETS = "eval.extra_sets."  # begins the paths of the sections with further sets


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Problems, and the function that judges their completions."""

    source: MayChange[str]
    convert: MayChange[str]
    function: str
    problems: MayChange[AtLeastOne]

    @property
    def functions(self) -> tuple[str, ...]:
        """The function that judges sampled completions; (): nothing is sampled, pairs are compared."""
        return () if self.function == PREFERENCE else (self.function,)


@dataclass(frozen=True, kw_only=True)
class EvalSettings(EvalSet):
    """The problems that measure the accuracy, how often, and further sets, which decide nothing."""

    every: MayChange[AtLeastOne]
    patience: MayChange[Count]
    extra_sets: dict[str, EvalSet] = field(default_factory=dict)

    @property
    def sets(self) -> dict[str, EvalSet]:
        """All sets, by their sections of the config."""
        return {EVAL: self, **{EXTRA_SETS + name: each for name, each in self.extra_sets.items()}}


def set_name(section: str) -> str:
    """Returns the name of the evaluation set of a section; "": of the one that decides which checkpoint is best."""
    return "" if section == EVAL else section.removeprefix(EXTRA_SETS)


def accuracies_of(fields: Iterable[str]) -> dict[str, str]:
    """Returns the section and the accuracy's metric of each evaluation set; the set that decides comes first.

    fields: paths of the fields of a config.
    """
    sections = [path.removesuffix(".function") for path in fields if re.fullmatch(r"eval\.(.+\.)?function", path)]
    return {section: f"{_prefix(section)}/accuracy" for section in sorted(sections)}


def metrics_of(section: str, accuracy: float, problems: int) -> dict[str, float]:
    """Returns the metrics of an evaluation set: eval/accuracy, or eval/NAME/accuracy of a further one."""
    return {f"{_prefix(section)}/accuracy": accuracy, f"{_prefix(section)}/problems": problems}


def _prefix(section: str) -> str:
    """Returns how the metrics of an evaluation set begin."""
    return f"{EVAL}/{set_name(section)}".rstrip("/")
