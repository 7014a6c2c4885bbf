"""GRPO on images of digits: which is the largest, or the smallest? It starts from a small model inside the package.

pip install -e '.[vision]'
jaxrl train --config configs/pictures.py

Measured, greedy accuracy on 1,000 held-out problems: 22.9 % before, 98.4 %, 99.0 % and 98.3 % after (seeds 0, 1 and 2).
Given the images of the next problem (`python -m benchmarks.health.rolled_pictures WORKDIR/hf`): 12.4, 12.2 and 12.2 %.
"""

from pathlib import Path

from ml_collections import ConfigDict

import jaxrl_llm
from jaxrl_llm.configs import grpo  # configs/grpo.py explains the fields


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps, c.prompts_per_step, c.prompts_per_update = 40, 32, 32
    # The vision-language model that configs/pictures_sft.py made. It can read all digits, but mostly answers with the
    # first.
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "pictures")
    c.data.source, c.eval.source = "digits_in_pictures.train", "digits_in_pictures.held_out"
    c.eval.function = "digits_in_pictures.accuracy"
    c.reward.functions, c.reward.weights = ("digits_in_pictures.accuracy",), (1.0,)
    c.rollout.max_completion_tokens = 16
    return c
