"""The rules of TRL's objectives: losses of a policy or of pairs, the KL penalty, advantages and entropy."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import ours
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, not_here
from jaxrl_llm.tools.translate.table import Row
from jaxrl_llm.tools.translate.trl_counts import optimizer_steps

# {loss: (loss of jaxrl_llm, its aggregation, difference)}. dapo divides by the tokens of an optimizer step, and bnpo by
# those of a micro-batch. jaxrl_llm has only the first kind, because a micro-batch must not change a gradient.
LOSSES = {
    "grpo": ("ppo_clip", "sequence_mean", ""),
    "dapo": ("ppo_clip", "token_mean", ""),
    "bnpo": ("ppo_clip", "token_mean", "TRL divides by the tokens of a micro-batch, here by those of the whole step"),
    "dr_grpo": ("ppo_clip", "constant", ""),
    "luspo": ("gspo", "sequence_sum", ""),
    "cispo": ("cispo", "token_mean", "epsilon_high is the upper bound of the ratio there, 1 + clip_high here"),
    "sapo": ("sapo", "sequence_mean", ""),
    "vespo": ("vespo", "token_mean", ""),
}
# TRL's CISPO has no lower bound of the ratio, which is 1 - clip_low = 0.
CONSTANTS = {"gspo": {"loss.level": "sequence"}, "cispo": {"loss.clip_low": 1.0}}
OF_PAIRS = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}
RATIO = "a ratio for each token here; there one for a completion, the product of them"
NLL = "TRL divides by the tokens of all chosen completions of a micro-batch, here by those of each completion"


def loss_name(value: Any, keys: Keys) -> str:
    """Returns the name of a policy loss in jaxrl_llm; "" if it has none."""
    name = LOSSES[value][0] if value in LOSSES else ""
    # GSPO is a level of the clipped loss in TRL, and a loss of its own in jaxrl_llm.
    return "gspo" if name == "ppo_clip" and keys["importance_sampling_level"] == "sequence" else name


def loss(value: Any, keys: Keys) -> Outcome:
    """The policy loss and its aggregation. Its arguments have their own rows."""
    if value not in LOSSES:
        return not_here("loss.name", f"there is no loss {value!r}: {', '.join(LOSSES)}; this config keeps ppo_clip")
    name, (listed, mode, reason) = loss_name(value, keys), LOSSES[value]
    # A mean of tokens would weigh the one ratio of a completion by its length.
    if name != listed and mode == "token_mean":
        mode, reason = "sequence_mean", "one ratio for a completion: the mean of completions, as GSPO's paper"
    # Dr. GRPO divides by the limit of a completion.
    length = int(keys["max_completion_length"]) if mode == "constant" else 0
    fields = {"loss.name": name, "aggregate.mode": mode, "aggregate.constant_length": length}
    return Outcome("changed" if reason else "mapped", fields | CONSTANTS.get(name, {}), reason)


def level(value: Any, keys: Keys) -> Outcome:
    """The level of the importance ratio, which decides the name of the loss."""
    return Outcome("mapped", {"loss.name": loss_name(keys["loss_type"], keys) or "ppo_clip"})


def clip_high(value: Any, keys: Keys) -> Outcome:
    """The upper side of the clip, by default `epsilon`. For cispo the key is the bound of the ratio itself."""
    high = float(keys["epsilon"] if value is None else value)
    return Outcome("mapped", {"loss.clip_high": max(high - 1.0, 0.0) if keys["loss_type"] == "cispo" else high})


def delta(value: Any, keys: Keys) -> Outcome:
    """The bound of the ratio of tokens with A < 0."""
    return Outcome("mapped", {"loss.delta": float(value or 0.0)})


def rloo_clip(row: Row, value: Any, keys: Keys) -> Outcome:
    """A side of RLOO's clip of the ratio."""
    once = optimizer_steps(keys) == 1
    # The ratio of a single update is 1, so a product of ratios has the gradient of their sum.
    reason = "one update on a rollout: the ratio is 1, and nothing is clipped" if once else RATIO
    return Outcome(
        "mapped" if once else "changed", {row.field: float(keys["epsilon"] if value is None else value)}, reason
    )


def kl(value: Any, keys: Keys) -> Outcome:
    """The coefficient of the KL penalty, which is in the loss, or for RLOO in the reward."""
    if not value:
        return Outcome("mapped", {"kl": None})
    if "use_bias_correction_kl" in keys.defaults:
        return Outcome("mapped", {"kl.placement": "loss", "kl.coef": float(value)}, "k3 in the loss")
    return Outcome("mapped", {"kl.placement": "reward", "kl.coef": float(value), "kl.estimator": "k1"})


def kl_estimator(value: Any, keys: Keys) -> Outcome:
    """Whether the KL of a token is multiplied by its ratio."""
    return Outcome("mapped", {"kl.estimator": "k3_weighted" if value else "k3"})


def scaling(value: Any, keys: Keys) -> Outcome:
    """The deviation by which advantages are divided."""
    if keys["multi_objective_aggregation"] == "normalize_then_sum":
        return Outcome("no effect", reason="multi_objective_aggregation normalizes each reward")
    # Older versions have True and False.
    normal = {True: "group", False: "none"}.get(value, value)
    fields = {"advantage.name": "grpo", "advantage.normalize": normal, "advantage.epsilon": 1e-4}
    return Outcome("mapped", fields, "a deviation has ddof = 1 and epsilon = 1e-4 there and here")


def objectives(value: Any, keys: Keys) -> Outcome:
    """Whether each reward is normalized before they are added."""
    normalizes = value == "normalize_then_sum"
    return Outcome("mapped", {"advantage.name": "gdpo", "advantage.epsilon": 1e-4} if normalizes else {})


def entropy_bonus(value: Any, keys: Keys) -> Outcome:
    """The coefficient of an entropy bonus, which may begin at 0 and adapt."""
    adapts = keys["use_adaptive_entropy"]
    return Outcome("mapped", {"entropy.coef": float(value)}) if adapts else ours.entropy_bonus(value, keys)


def truncated(value: Any, keys: Keys) -> Outcome:
    """Whether completions that the limit cut are left out."""
    # These four divide by a number of completions. All other losses divide by trained tokens.
    by_tokens = "loss_type" in keys.defaults and keys["loss_type"] not in ("grpo", "dr_grpo", "sapo", "luspo")
    is_same = not value or by_tokens
    reason = "TRL still divides the loss by the number of all completions, here by that of those with a trained token"
    return Outcome("mapped" if is_same else "changed", {"mask.truncated": bool(value)}, "" if is_same else reason)


def top_entropy(value: Any, keys: Keys) -> Outcome:
    """The share of tokens with the highest entropy that learn."""
    reason = "the quantile of the whole rollout here, of a micro-batch there"
    return Outcome("changed" if value < 1 else "mapped", {"mask.top_entropy": float(value)}, reason * (value < 1))


def dpo(value: Any, keys: Keys) -> Outcome:
    """The loss of DPO, alone or with the cross-entropy of the chosen completion."""
    names = value if isinstance(value, list) else str(value).split(",")
    weights = dict(zip(names, keys.explicit.get("loss_weights") or [1.0] * len(names), strict=True))
    if not weights.keys() <= {"sigmoid", "sft"} or not weights.get("sigmoid"):
        reason = f"there is sigmoid, alone or with sft, not {' + '.join(names)}; this config keeps dpo"
        return not_here("loss.name", reason)
    # Older versions have the weight of the second loss in a key of its own.
    nll = weights.get("sft", 0.0) / weights["sigmoid"] or float(keys.explicit.get("rpo_alpha") or 0.0)
    scale = f"the whole loss is divided by {weights['sigmoid']:g}, which AdamW does not see"
    reason = "; ".join([NLL] * bool(nll) + [scale] * (weights["sigmoid"] != 1))
    return Outcome("changed" if reason else "mapped", {"loss.name": "dpo", "loss.nll_coef": nll} | OF_PAIRS, reason)


def nll_coef(value: Any, keys: Keys) -> Outcome:
    """The weight of the cross-entropy in the loss of DPO."""
    fields = dpo(keys["loss_type"], keys).fields
    return Outcome("mapped", {name: x for name, x in fields.items() if name == "loss.nll_coef"})


def simpo(value: Any, keys: Keys) -> Outcome:
    """The loss of SimPO in CPOConfig or in SimPO's own trainer, with the cross-entropy of the chosen completion."""
    is_simpo_trainer = "gamma_beta_ratio" in keys.defaults
    if value != ("sigmoid" if is_simpo_trainer else "simpo"):
        return not_here("loss.name", f"of CPOConfig there is simpo, not {value}; this config keeps simpo")
    nll = keys["sft_weight" if is_simpo_trainer else "cpo_alpha"]
    reason = f"{NLL}; TRL's also counts the prompt" * bool(nll)
    return Outcome("changed" if nll else "mapped", {"loss.name": "simpo"} | OF_PAIRS, reason)


def margin(value: Any, keys: Keys) -> Outcome:
    """The margin of SimPO's own trainer, as a share of beta."""
    return Outcome("mapped", {"loss.gamma": float(keys["beta"]) * float(value)})
