"""The sections `data` and `eval` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """The problems that measure the accuracy, and how often."""

    every: MayChange[AtLeastOne]
    source: MayChange[str]
    convert: MayChange[str]
    function: str
    problems: MayChange[AtLeastOne]
    patience: MayChange[Count]

    @property
    def functions(self) -> tuple[str, ...]:
        """The function that judges sampled completions; (): nothing is sampled, pairs are compared."""
        return () if self.function == PREFERENCE else (self.function,)
