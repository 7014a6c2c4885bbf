"""The fields of the config section `model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The initial model of a run. configs/grpo.py explains each field."""

    path: MayChange[str]  # may change on resume, because a fingerprint checks that the files are the same
    """Model folder or hub id."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of activations; parameters and optimizer state are always float32."""
    remat: MayChange[Literal["none", "dots", "full"]]
    """Activations that the backward pass recomputes to save memory: none | dots | full."""
    vision: Literal["learns", "frozen"]
    """Whether the vision tower of a vision-language model is trained: learns | frozen."""
    family: str = ""  # dotted name of a user's function that reads config.json; "" = a family of this package
    """Function that reads config.json for a model family that this package lacks, e.g. my.module.function
    (docs/models.md). "": model_type in config.json names a family of this package.
    """

    row_parts: int = field(default=1, init=False)


@dataclass(frozen=True, kw_only=True)
class GroupModelSettings(ModelSettings):
    """The initial model of a run that scores, and learns from, several completions of a prompt."""

    row_parts: MayChange[AtLeastOne] = field()
    """Parts in which the completions of a prompt are scored and learned from, one after the other. More parts need less
    memory and one more forward pass. The number of parts changes no gradient.
    """


@dataclass(frozen=True, kw_only=True)
class TowerSettings:
    """Sizes of the vision tower of a new model, named as in `vision_config` of a config.json."""

    depth: AtLeastOne
    hidden_size: AtLeastOne
    num_heads: AtLeastOne
    intermediate_size: AtLeastOne


@dataclass(frozen=True, kw_only=True)
class NewModelSettings(ModelSettings):
    """The initial model of `sft`. With path = "" it is a new model of these sizes, named as in a config.json."""

    hidden_size: AtLeastOne
    num_hidden_layers: AtLeastOne
    num_attention_heads: AtLeastOne
    num_key_value_heads: AtLeastOne
    intermediate_size: AtLeastOne
    vocabulary: Count
    vision_config: TowerSettings | None = None
