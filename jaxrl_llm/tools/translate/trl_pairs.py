"""The tables of TRL's DPO and SimPO: DPOConfig of version 1.16, CPOConfig of trl.experimental, and older keys."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers, ours
from jaxrl_llm.tools.translate.family import MEMORY, divisors, unknown_steps
from jaxrl_llm.tools.translate.outcome import Idle, Keys, Outcome, Rule, System, not_here, off, only_if, same_rule
from jaxrl_llm.tools.translate.trl import BOTH, IDLE, OPEN_DEFAULTS, OPEN_RULES, RENAMED, SHARED, TRAINER
from jaxrl_llm.tools.translate.trl_counts import completions_per_update as pairs
from jaxrl_llm.tools.translate.trl_counts import counted, processes, unnamed

NLL = "TRL divides by the tokens of all chosen completions of a micro-batch, here by those of each completion"
LOSS = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}
UNLIMITED = 4096  # tokens of prompt and completion, where the file sets no limit


def micro(value: Any, keys: Keys) -> Outcome:
    """The pairs of a device, which are also a word of the batch."""
    count = pairs(keys)
    microbatch = max(x for x in divisors(count) if x <= int(value) * processes(keys))
    product = f"{value} x {keys['gradient_accumulation_steps']} x {processes(keys)} = {count}"
    reason = f"per_device_train_batch_size x gradient_accumulation_steps x processes counts pairs: {product} of a step"
    reason += unnamed(keys)
    return Outcome("changed", {"prompts_per_step": count, "microbatch": microbatch}, reason)


def part_of_batch(value: Any, keys: Keys) -> Outcome:
    """A word of the batch that per_device_train_batch_size explains."""
    return Outcome("changed", reason="a factor of the batch, as said above")


def steps(keys: Keys) -> int:
    """Steps of the run; 0: the file does not say them."""
    if (most := int(keys["max_steps"] or 0)) > 0:
        return most
    return math.ceil(float(keys["num_train_epochs"]) * keys.rows / pairs(keys))


def epochs(value: Any, keys: Keys) -> Outcome:
    """Passes over the pairs."""
    if int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    if count := steps(keys):
        reason = f"{value} passes over {keys.rows} pairs, {pairs(keys)} in a step"
        return Outcome("changed", {"num_steps": count}, reason)
    return unknown_steps(f"num_train_epochs = {value}: {value} x rows / prompts_per_step")


def most_steps(value: Any, keys: Keys) -> Outcome:
    """The steps of the run, if they are set."""
    count = int(value or 0)
    return Outcome("mapped", {"num_steps": count}) if count > 0 else Outcome("no effect", reason="not set")


def every(name: str, value: Any, keys: Keys) -> Outcome:
    """A number of steps, or a share of the run below 1."""
    return counted(name, value, 1, steps(keys) if value < 1 else 0)


def evaluating(value: Any, keys: Keys) -> Outcome:
    """When held-out pairs are compared. In TRL it is a metric beside the loss; here it is the evaluation."""
    if value in ("no", None, False):
        return Outcome("mapped", ours.NO_EVALUATION)
    compared = every("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    fields = compared.fields | {"eval.function": "preference", "eval.convert": ""}
    source, yours, unknown = held_out(keys), {}, compared.unknown
    if source:
        outcome = ours.dataset("eval", source, str(keys.explicit.get("dataset_test_split", "test")))
        fields, yours = fields | outcome.fields, outcome.yours
    else:
        fields |= {"eval.source": "data/test.parquet"}
        unknown = unknown | {"eval.source": "the file with the held-out pairs; this name is a placeholder"}
    return Outcome("changed", fields, "the share of held-out pairs in the right order", yours, unknown)


def held_out(keys: Keys) -> str:
    """Returns the data set with the held-out pairs: the trainer's, or the one with those to learn; "": none."""
    apart, beside = (str(keys.explicit.get(key) or "") for key in ("trainer.eval_dataset", "dataset_name"))
    # A file has no other split.
    name = apart or ("" if beside.endswith(ours.FILES) else beside)
    return name if "/" in name or name.endswith(ours.FILES) else ""


def held_out_given(value: Any, keys: Keys) -> Outcome:
    """The held-out pairs that a script gives to the trainer."""
    if keys["eval_strategy"] in ("no", None):
        return Outcome("no effect", reason="eval_strategy is no")
    if held_out(keys):
        return Outcome("mapped", {"eval.source": evaluating("steps", keys).fields["eval.source"]})
    return Outcome("unsupported", reason="name the held-out pairs in eval.source")


def rows_changed(value: Any, keys: Keys) -> Outcome:
    """What a script does with the rows that it has loaded."""
    why = f"the script calls {value}: a function of a row that does the same, with prompt, chosen and rejected"
    return Outcome("changed", {"data.convert": "my_data.convert"}, "code is not read", {"data.convert": why})


def reference(value: Any, keys: Keys) -> Outcome:
    """The reference, which a script may load by itself."""
    if value in (None, keys.explicit.get("trainer.model"), keys.explicit.get("model_name_or_path")):
        return Outcome("no effect", reason="it is the model that the run begins with, as here")
    return Outcome("unsupported", reason=f"the reference is the model that the run begins with, not {value}")


def lengths(value: Any, keys: Keys) -> Outcome:
    """The limits of a prompt and of a completion, of which the file may say one, two or their sum."""
    whole = int(keys["max_length"] or UNLIMITED)
    prompt = int(keys.explicit.get("max_prompt_length") or whole // 2)
    completion = int(keys.explicit.get("max_completion_length") or max(1, whole - prompt))
    fields = {"data.max_prompt_tokens": prompt, "rollout.max_completion_tokens": completion}
    cut = f"a pair is cut after {whole} tokens there" if keys["max_length"] else "no limit there"
    return Outcome("changed", fields, f"{cut}; here both parts have a limit, and a longer pair is dropped")


def dpo_loss(value: Any, keys: Keys) -> Outcome:
    """The loss of DPO, alone or with the cross-entropy of the chosen completion."""
    names = value if isinstance(value, list) else str(value).split(",")
    weights = dict(zip(names, keys.explicit.get("loss_weights") or [1.0] * len(names), strict=True))
    if not weights.keys() <= {"sigmoid", "sft"} or not weights.get("sigmoid"):
        reason = f"there is sigmoid, alone or with sft, not {' + '.join(names)}; this config keeps dpo"
        return not_here("loss.name", reason)
    # Older files say the second part by a key of its own.
    nll = weights.get("sft", 0.0) / weights["sigmoid"] or float(keys.explicit.get("rpo_alpha") or 0.0)
    fields = {"loss.name": "dpo", "loss.beta": float(keys["beta"]), "loss.nll_coef": float(nll)}
    fields |= {"loss.label_smoothing": float(keys["label_smoothing"])} | LOSS
    reasons = [NLL] * bool(nll)
    if weights["sigmoid"] != 1:
        reasons.append(f"the whole loss is divided by {weights['sigmoid']:g}, which AdamW does not see")
    return Outcome("changed" if reasons else "mapped", fields, "; ".join(reasons))


def simpo_loss(value: Any, keys: Keys) -> Outcome:
    """The loss of SimPO, with the cross-entropy of the chosen completion."""
    if value != "simpo":
        return not_here("loss.name", f"of CPOConfig there is simpo, not {value}; this config keeps simpo")
    nll = float(keys["cpo_alpha"])
    fields = {"loss.name": "simpo", "loss.beta": float(keys["beta"]), "loss.gamma": float(keys["simpo_gamma"])}
    fields |= {"loss.label_smoothing": float(keys["label_smoothing"]), "loss.nll_coef": nll} | LOSS
    return Outcome("changed" if nll else "mapped", fields, f"{NLL}; TRL's also counts the prompt" * bool(nll))


def argument(rule: Rule) -> Rule:
    """An argument of the loss, which the rule of `loss_type` has used."""

    def its_part(value: Any, keys: Keys) -> Outcome:
        outcome = rule(keys["loss_type"], keys)
        fields = {name: x for name, x in outcome.fields.items() if name.startswith("loss.")}
        return Outcome("mapped", fields) if fields else Outcome("no effect", reason="of a loss that is not there")

    return its_part


PAIR_RULES: dict[str, Rule] = {
    "per_device_train_batch_size": micro,
    "gradient_accumulation_steps": part_of_batch,
    "num_processes": part_of_batch,
    "world_size": part_of_batch,
    **dict.fromkeys(launchers.COUNTS, part_of_batch),
    "num_train_epochs": epochs,
    "max_steps": most_steps,
    "save_steps": only_if(
        lambda keys: keys["save_strategy"] == "steps",
        lambda value, keys: every("checkpoint.every", value, keys),
        "save_strategy is not steps",
    ),
    "eval_strategy": evaluating,
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] not in ("no", None) and keys["eval_steps"],
        lambda value, keys: every("eval.every", value, keys),
        "eval_strategy is no, or it is not set",
    ),
    **same_rule(lengths, "max_length max_prompt_length max_completion_length"),
    "(rewards)": Idle("pairs have no reward function"),
    "(prompts)": Idle("max_length says it"),
    "trainer.train_dataset.steps": rows_changed,
    "trainer.eval_dataset": held_out_given,
    "trainer.ref_model": reference,
    "truncation_mode": Idle("a longer pair is dropped"),
    "label_pad_token_id": Idle("of torch's labels"),
    **same_rule(
        Idle(MEMORY),
        """
            precompute_ref_log_probs precompute_ref_batch_size padding_free activation_offloading padding_value
            use_logits_to_keep base_model_attribute_name pad_token
        """,
    ),
    **same_rule(Idle(TRAINER), "is_encoder_decoder generate_during_eval model_adapter_name ref_adapter_name"),
    "ref_model_init_kwargs": off("the reference is the model that the run begins with"),
    "force_use_ref_model": Idle("with adapters the base is the reference"),
    "router_aux_loss_coef": off("no such term", 0.0),
    "tools": off("write them into the prompt"),
}
DPO_RULES: dict[str, Rule] = PAIR_RULES | {
    "loss_type": dpo_loss,
    **same_rule(argument(dpo_loss), "beta label_smoothing loss_weights rpo_alpha"),
    "sync_ref_model": off("the reference of dpo never moves"),
    **same_rule(Idle("sync_ref_model decides"), "ref_model_mixup_alpha ref_model_sync_steps"),
    "ld_alpha": off("all tokens of a completion count alike", 1.0),
    "f_divergence_type": off("the divergence is the reverse one", "reverse_kl"),
    "f_alpha_divergence_coef": Idle("of another f_divergence_type"),
    "use_weighting": off("all pairs count alike"),
    "reference_free": off("simpo has no reference: configs/simpo.py"),
    "discopop_tau": Idle("of another loss_type"),
}
SIMPO_RULES: dict[str, Rule] = PAIR_RULES | {
    "loss_type": simpo_loss,
    **same_rule(argument(simpo_loss), "beta label_smoothing cpo_alpha simpo_gamma"),
    "alpha": off("of AlphaPO, which is not there", 0.0),
}
DEFAULTS = BOTH | OPEN_DEFAULTS | {"learning_rate": 1e-6, "max_steps": -1, "max_length": 1024}
DEFAULTS |= {"beta": 0.1, "label_smoothing": 0.0}
ALL = SHARED | IDLE | OPEN_RULES
OF_DPO = {"loss_type": ["sigmoid"]}
DPO = System("TRL's DPO", "1.16.0", ALL | DPO_RULES, DEFAULTS | OF_DPO, lambda keys: "dpo", renamed=RENAMED)
OF_CPO = {"loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5}
SIMPO = System("TRL's SimPO", "1.16.0", ALL | SIMPO_RULES, DEFAULTS | OF_CPO, lambda keys: "simpo", renamed=RENAMED)
