"""Rules that translate TRL's keys of the objective: losses of GRPO, RLOO, DPO and SimPO, KL, advantages, entropy.

Each rule is called with the value of its key in the user's TRL config and with all `Keys` of that config. It returns
the `Outcome`: fields of a jaxrl_llm config, and why they differ. The tables trl*.tsv name the rule of each key.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import conversions
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, unsupported
from jaxrl_llm.tools.translate.table import SENTENCES, Row, read_names
from jaxrl_llm.tools.translate.trl_counts import optimizer_steps

# {loss_type of TRL: (loss of jaxrl_llm, mode of its aggregation, difference)}. TRL's dapo divides by the tokens of an
# optimizer step, and bnpo by the tokens of a micro-batch. jaxrl_llm always divides by the tokens of the optimizer step,
# because a micro-batch must not change a gradient.
LOSSES = read_names("trl_losses")
# {loss of jaxrl_llm: fields that TRL has no key for}. TRL's CISPO has no lower bound of the ratio: 1 - clip_low = 0.
LOSS_CONSTANTS = {"gspo": {"loss.level": "sequence"}, "cispo": {"loss.clip_low": 1.0}}
# Fields of every loss over preference pairs: the loss is the mean over the pairs.
PAIR_AGGREGATION = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}


def loss_name(value: Any, keys: Keys) -> str:
    """Returns the jaxrl_llm loss for TRL's `loss_type` (`value`) at its ratio level; "" if jaxrl_llm has none."""
    name = LOSSES[value][0] if value in LOSSES else ""
    # GSPO is a level of the clipped loss in TRL, and a loss of its own in jaxrl_llm.
    return "gspo" if name == "ppo_clip" and keys["importance_sampling_level"] == "sequence" else name


def loss(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `loss_type` to `loss.name` and `aggregate`. The loss's other arguments have their own keys."""
    if value not in LOSSES:
        return unsupported("loss.name", f"there is no loss {value!r}: {', '.join(LOSSES)}; this config keeps ppo_clip")
    name, (listed, mode, reason) = loss_name(value, keys), LOSSES[value]
    # A mean of tokens would weigh the one ratio of a completion by its length.
    if name != listed and mode == "token_mean":
        mode, reason = "sequence_mean", "one ratio for a completion: the mean of completions, as GSPO's paper"
    # Dr. GRPO divides by the longest possible completion.
    length = int(keys["max_completion_length"]) if mode == "constant" else 0
    fields = {"loss.name": name, "aggregate.mode": mode, "aggregate.constant_length": length}
    return Outcome("changed" if reason else "mapped", fields | LOSS_CONSTANTS.get(name, {}), reason)


def clip_high(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `epsilon_high` to `loss.clip_high`; None means `epsilon`. CISPO's key is the ratio's bound."""
    high = float(keys["epsilon"] if value is None else value)
    return Outcome("mapped", {"loss.clip_high": max(high - 1.0, 0.0) if keys["loss_type"] == "cispo" else high})


def rloo_clip(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates `epsilon` or `epsilon_high` of TRL's RLOO to a side of the clip: `loss.clip_low` or `clip_high`."""
    has_one_update = optimizer_steps(keys) == 1
    # The ratio of a single update is 1, so a product of ratios has the gradient of their sum.
    reason = SENTENCES["ONE_UPDATE" if has_one_update else "TOKEN_RATIOS"]
    clip_range = float(keys["epsilon"] if value is None else value)
    return Outcome("mapped" if has_one_update else "changed", {row.field: clip_range}, reason)


def kl(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `beta` to the section `kl`: a penalty in the loss for GRPO, in the reward for RLOO."""
    if not value:
        return Outcome("mapped", {"kl": None})
    if "use_bias_correction_kl" in keys.defaults:
        return Outcome("mapped", {"kl.placement": "loss", "kl.coef": float(value)}, "k3 in the loss")
    return Outcome("mapped", {"kl.placement": "reward", "kl.coef": float(value), "kl.estimator": "k1"})


def kl_estimator(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `use_bias_correction_kl`: whether the KL of a token is multiplied by its ratio."""
    return Outcome("mapped", {"kl.estimator": "k3_weighted" if value else "k3"})


def entropy_bonus(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `entropy_coef` to `entropy.coef`, also at 0 if `use_adaptive_entropy` adapts the coefficient."""
    adapts = keys["use_adaptive_entropy"]
    return Outcome("mapped", {"entropy.coef": float(value)}) if adapts else conversions.entropy_bonus(value, keys)


def truncated(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `mask_truncated_completions` to `mask.truncated`: completions cut by the limit do not learn."""
    # TRL's losses grpo, dr_grpo, sapo and luspo divide by the number of completions, all other losses by the number
    # of trained tokens, which does not count truncated completions.
    divides_by_tokens = "loss_type" in keys.defaults and keys["loss_type"] not in ("grpo", "dr_grpo", "sapo", "luspo")
    is_same = not value or divides_by_tokens
    reason = "TRL divides the loss by the number of all completions, jaxrl_llm by the number of those that learn"
    return Outcome("mapped" if is_same else "changed", {"mask.truncated": bool(value)}, "" if is_same else reason)


def dpo(value: Any, keys: Keys) -> Outcome:
    """Translates `loss_type` of TRL's DPO to `loss.name` and `loss.nll_coef`, the weight of a cross-entropy."""
    names = value if isinstance(value, list) else str(value).split(",")
    weights = dict(zip(names, keys.get("loss_weights") or [1.0] * len(names), strict=True))
    if not weights.keys() <= {"sigmoid", "sft"} or not weights.get("sigmoid"):
        reason = f"DPO has the loss sigmoid, alone or with sft, not {' + '.join(names)}; this config keeps dpo"
        return unsupported("loss.name", reason)
    # Older versions of TRL have the weight of the cross-entropy in the key rpo_alpha.
    nll_coef = weights.get("sft", 0.0) / weights["sigmoid"] or float(keys.get("rpo_alpha") or 0.0)
    scale = f"the whole loss is divided by {weights['sigmoid']:g}, which AdamW does not see"
    reason = "; ".join([SENTENCES["NLL_DIVISOR"]] * bool(nll_coef) + [scale] * (weights["sigmoid"] != 1))
    fields = {"loss.name": "dpo", "loss.nll_coef": nll_coef}
    return Outcome("changed" if reason else "mapped", fields | PAIR_AGGREGATION, reason)


def simpo(value: Any, keys: Keys) -> Outcome:
    """Translates `loss_type` of TRL's CPOConfig, or of SimPO's own trainer, to the loss `simpo` over pairs."""
    is_simpo_trainer = "gamma_beta_ratio" in keys.defaults
    if value != ("sigmoid" if is_simpo_trainer else "simpo"):
        return unsupported("loss.name", f"jaxrl_llm has CPOConfig's loss simpo, not {value}; this config keeps simpo")
    nll_coef = keys["sft_weight" if is_simpo_trainer else "cpo_alpha"]
    reason = f"{SENTENCES['NLL_DIVISOR']}; TRL's cross-entropy also counts the prompt" * bool(nll_coef)
    return Outcome("changed" if nll_coef else "mapped", {"loss.name": "simpo"} | PAIR_AGGREGATION, reason)


def margin(value: Any, keys: Keys) -> Outcome:
    """Translates `gamma_beta_ratio` of SimPO's own trainer, its margin as a share of `beta`, to `loss.gamma`."""
    return Outcome("mapped", {"loss.gamma": float(keys["beta"]) * float(value)})
