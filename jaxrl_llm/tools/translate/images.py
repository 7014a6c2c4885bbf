"""Whether a run of another trainer has images, audio or video, which no model here takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MODELS = (
    "actor_rollout_ref.model.path",
    "worker.actor.model.model_path",
    "model_name_or_path",
    "sft_model_path",
    "trainer.model",
)
ROWS = ("data.train_files", "data.val_files", "dataset_name", "trainer.train_dataset")
SWITCHES = ("freeze_vision_tower", "limit_images", "image_dir")  # the last parts of keys that a run of text leaves off
IMAGE_MODEL = re.compile(
    r"(?<![a-z])(vlm?|vision|llava\w*|internvl\w*|paligemma\w*|pixtral|idefics\w*|smolvlm\w*|mllama|molmo\w*|ovis\w*|"
    r"omni|minicpm-[vo]|glm-4\.\dv)(?![a-z])",
    re.IGNORECASE,
)
IMAGE_ROWS = re.compile(
    r"geometry3k|geo3k|geoqa|multimodal|clevr|vqa|mathvista|mmmu|virl39k|mm[-_]eureka|refcoco", re.IGNORECASE
)


def evidence(keys: Mapping[str, Any]) -> str:
    """Returns the key and value that show it; "": it is a run of text."""
    # The keys of models first: a model's name shows it better than a data set's.
    for key, value in sorted(keys.items(), key=lambda pair: pair[0] not in MODELS):
        text = str(value)
        name = key.rpartition(".")[2]
        shows = (
            (key in MODELS and IMAGE_MODEL.search(text))
            or (key in ROWS and IMAGE_ROWS.search(text))
            or (name in SWITCHES and value not in (None, False, 0, "", "null"))
            or (name.startswith("limit_mm_per_prompt") and value)
        )
        if shows:
            return f"{key} = {text}"
    return ""
