"""The names of this package that names of other trainers become: rewards, data formats and LoRA."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.translate.outcome import Outcome

ACCURACY = "math.accuracy"  # stands for the answer checks of the four trainers
SEARCH = "search.exact_match"
# Reward functions of TRL and open-r1, by the names that their command lines and scripts use.
REWARDS = {"accuracy": ACCURACY, "accuracy_reward": ACCURACY, "reasoning_accuracy_reward": ACCURACY}
PARQUET = "verl.convert"  # rows of veRL: prompt, reward_model.ground_truth
OF_SEARCH_R1 = "search_r1.convert"
STAND_IN = "arithmetic.accuracy"  # for a reward function of the user, while the rest of a config is checked


def lora(values: dict[str, Any], prefix: str) -> Outcome:
    """Returns what the arguments of an adapter become."""
    return Outcome("unsupported", said=f"there is no LoRA here: {prefix} trains all parameters")


def reward(names: list[str], weights: list[float] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the reward fields for functions by their names in TRL, and the fields that the user must complete."""
    found = tuple(REWARDS.get(name, f"my_rewards.{name}") for name in names)
    fields = {
        "reward.functions": found,
        "reward.weights": tuple(map(float, weights)) if weights else (1.0,) * len(found),
        "eval.function": found[0],
    }
    unknown = [name for name in names if name not in REWARDS]
    if not unknown:
        return fields, {}
    why = f"move {', '.join(unknown)} to a module my_rewards.py beside this file; the signature of TRL is the one here"
    return fields, {"reward.functions": why} | ({"eval.function": "as above"} if names[0] in unknown else {})


def custom_reward(path: str, function: str, signature: str) -> Outcome:
    """Returns what a reward function in a file becomes: the user must adapt it."""
    name = f"my_rewards.{function}"
    why = (
        f"{signature}; here my_rewards.{function}(prompts, completions, **columns) returns a number for each "
        "completion of the batch (docs/rewards.md)"
    )
    fields = {"reward.functions": (name,), "reward.weights": (1.0,), "eval.function": name}
    return Outcome("changed", fields, f"{path} is not read", {"reward.functions": why, "eval.function": "as above"})
