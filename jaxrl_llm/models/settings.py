"""The section `model` of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that a run begins with. configs/grpo.py explains each field."""

    path: MayChange[str]  # a moved folder is fine: a fingerprint checks its files
    """Model folder or hub id."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of activations; parameters and optimizer state are always float32."""
    remat: MayChange[Literal["none", "dots", "full"]]
    """Activations that the backward pass recomputes to save memory: none | dots | full."""
    vision: Literal["learns", "frozen"]
    """Whether the vision tower of a vision-language model is trained: learns | frozen."""
    family: str = ""  # function of the user's that reads config.json; "": a family of this package
    """Function that reads config.json for a model family that this package lacks, e.g. my.module.function
    (docs/models.md). "": model_type in config.json names a family of this package.
    """

    row_parts: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class GroupModelSettings(ModelSettings):
    """The model of a run that scores and learns from several completions of a prompt."""

    row_parts: MayChange[AtLeastOne] = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Parts in which the completions of a prompt are scored and learned from, one after the other. More parts need less
    memory and one more forward pass. The number of parts changes no gradient.
    """


@dataclass(frozen=True, kw_only=True)
class TowerSettings:
    """Sizes of the tower of a new model, with the names of `vision_config` in a config.json."""

    depth: AtLeastOne
    hidden_size: AtLeastOne
    num_heads: AtLeastOne
    intermediate_size: AtLeastOne


@dataclass(frozen=True, kw_only=True)
class NewModelSettings(ModelSettings):
    """The model of `sft`: with path = "", a new one of these sizes, which have the names of a config.json."""

    hidden_size: AtLeastOne
    num_hidden_layers: AtLeastOne
    num_attention_heads: AtLeastOne
    num_key_value_heads: AtLeastOne
    intermediate_size: AtLeastOne
    vocabulary: Count
    vision_config: TowerSettings | None = None
