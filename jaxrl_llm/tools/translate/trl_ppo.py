"""The table of TRL's PPO: PPOConfig of trl.experimental 0.29, with the keys that GRPOConfig has too."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers, ours
from jaxrl_llm.tools.translate.family import divisors, unknown_steps
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Idle, Keys, Outcome, Rule, System, off, only_if, to, unsupported
from jaxrl_llm.tools.translate.trl import BOTH, IDLE, OPEN_DEFAULTS, OPEN_RULES, RENAMED, SHARED
from jaxrl_llm.tools.translate.trl_counts import NO_WARMUP, completions_per_update, never_warms_up, processes
from jaxrl_llm.tools.translate.trl_rules import JUDGE, if_not_given, model


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns PPO's batch fields: one completion for each prompt."""
    update = completions_per_update(keys)
    # In TRL num_mini_batches multiplies the rollout; it does not divide it.
    rollout = update * int(keys["num_mini_batches"])
    reason = (
        f"an optimizer step has per_device_train_batch_size x gradient_accumulation_steps x processes = {update} "
        f"episodes, a rollout num_mini_batches times as many; each is one completion of a prompt"
    )
    return {"prompts_per_step": rollout, "prompts_per_update": update, "group_size": 1}, reason


def micro(value: Any, keys: Keys) -> Outcome:
    """The episodes of a device, which are also a word of the batch."""
    fields, reason = batch(keys)
    limit = int(value) * processes(keys)
    microbatch = max(x for x in divisors(fields["prompts_per_update"]) if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason)


def part_of_batch(*names: str) -> Rule:
    """A word of the batch that per_device_train_batch_size explains. names: the fields that it changes."""
    return lambda value, keys: Outcome(
        "changed", {name: batch(keys)[0][name] for name in names}, "a factor of the batch, as said above"
    )


def episodes(value: Any, keys: Keys) -> Outcome:
    """All episodes of a run, or the passes over the data."""
    total = keys["total_episodes"] or float(keys["num_train_epochs"]) * keys.rows
    if not total:
        return unknown_steps(f"num_train_epochs = {keys['num_train_epochs']}: so many x rows / prompts_per_step")
    # Rounded up, as TRL does it: the last rollout is a whole one.
    num_steps = math.ceil(total / batch(keys)[0]["prompts_per_step"])
    return Outcome(
        "changed", {"num_steps": num_steps}, f"{total:g} episodes, here rollouts of prompts_per_step of them"
    )


def warmup(value: Any, keys: Keys) -> Outcome:
    """The schedule steps once in a rollout."""
    if not value:
        return Outcome("no effect", reason="not set")
    if never_warms_up(keys):
        return NO_WARMUP
    per_rollout = int(keys["num_mini_batches"]) * int(keys["num_ppo_epochs"])
    # TRL's PPO calls the scheduler once after all updates on a rollout; here every optimizer step counts.
    fields = {"optim.warmup_steps": int(value) * per_rollout, "optim.warmup_ratio": 0.0}
    return Outcome("changed", fields, f"counts rollouts: {value} x {per_rollout} optimizer steps")


def with_critic(rule: Rule) -> Rule:
    """Applies a rule of the one optimizer of TRL's PPO to that of the critic too."""

    def both(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        # One optimizer holds policy and critic there, so both have its rate and limits here.
        critic_fields = {f"critic.{name}": x for name, x in outcome.fields.items() if name.startswith("optim.")}
        return Outcome(outcome.kind, outcome.fields | critic_fields, outcome.reason, outcome.yours)

    return both


def reward_model(value: Any, keys: Keys) -> Outcome:
    """A learned reward, which TRL's scripts also begin the value model with."""
    reason = "it reads prompt and completion as the policy does, and the critic begins as the same model"
    outcome = ours.reward_model(str(value), reason)
    yours = {"eval.function": JUDGE}
    # TRL's script loads value_model from reward_model_path.
    fields = {"critic.path": str(value), "reward.functions": (), "reward.weights": ()}
    return Outcome(outcome.kind, outcome.fields | fields, outcome.reason, yours)


OPTIMIZER = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)
PPO_RULES: dict[str, Rule] = {key: with_critic(SHARED[key]) for key in OPTIMIZER} | {
    "warmup_steps": with_critic(warmup),
    "per_device_train_batch_size": micro,
    "gradient_accumulation_steps": part_of_batch("prompts_per_update"),
    "num_mini_batches": part_of_batch("prompts_per_step"),
    "num_processes": part_of_batch(),
    **dict.fromkeys(launchers.COUNTS, part_of_batch()),
    "world_size": part_of_batch(),
    "num_total_batches": off("TRL computes it from total_episodes"),
    **{
        key: off("TRL computes it from the other batch words")
        for key in ("micro_batch_size", "local_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size")
    },
    "num_ppo_epochs": to("epochs", int),
    "total_episodes": episodes,
    "num_train_epochs": only_if(lambda keys: not keys["total_episodes"], episodes, "total_episodes is set"),
    "max_steps": off("total_episodes decides", -1),
    "response_length": to("rollout.max_completion_tokens", int),
    "temperature": to("rollout.temperature", float),
    "stop_token": off("stop tokens are the model's: generation_config.json", "eos"),
    "stop_token_id": off("stop tokens are the model's: generation_config.json"),
    "missing_eos_penalty": off("mask.truncated leaves such completions out; reward.overlong_tokens punishes them"),
    "sft_model_path": model_path,
    "model_name_or_path": lambda value, keys: (
        model(value, keys)
        if "sft_model_path" not in keys
        else Outcome("no effect", reason="sft_model_path is the policy; this is the tokenizer's")
    ),
    "reward_model_path": reward_model,
    "model_adapter_name": off("one adapter, and its base is the reference"),
    "ref_adapter_name": off("one adapter, and its base is the reference"),
    "kl_coef": lambda value, keys: Outcome(
        "mapped", {"kl.placement": "reward", "kl.coef": float(value), "kl.estimator": str(keys["kl_estimator"])}
    ),
    "kl_estimator": lambda value, keys: Outcome("mapped", {"kl.estimator": str(value)}),
    "cliprange": lambda value, keys: Outcome(
        "mapped",
        {"loss.name": "ppo_clip", "loss.clip_low": float(value), "loss.clip_high": float(value), "loss.delta": 0.0},
    ),
    "cliprange_value": to("critic.clip", float),
    "vf_coef": lambda value, keys: Outcome(
        "unsupported", reason="the critic has its own AdamW, which a factor of its loss does not change"
    ),
    "whiten_rewards": off("advantages are whitened, rewards are not"),
    "gamma": lambda value, keys: Outcome("mapped", {"advantage.gamma": float(value), "critic.gamma": float(value)}),
    "lam": lambda value, keys: Outcome("mapped", {"advantage.lam": float(value), "critic.lam": float(value)}),
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] != "no", unsupported("TRL's PPO samples completions then"), "no evaluation"
    ),
    "eval_strategy": lambda value, keys: Outcome(
        "changed" if value not in ("no", None) else "mapped",
        ours.NO_EVALUATION,
        "TRL's PPO only logs samples: set eval.every and eval.source for an accuracy" * (value not in ("no", None)),
    ),
    "(critic)": lambda value, keys: Outcome("mapped", {"critic.warmup_steps": 0}),
    "save_steps": only_if(lambda keys: keys["save_strategy"] == "steps", to("checkpoint.every", int), "not by steps"),
}
DEFAULTS = (
    BOTH
    | OPEN_DEFAULTS
    | {
        "learning_rate": 3e-6,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "total_episodes": None,
        "response_length": 53,
        "temperature": 0.7,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
        "reward_model_path": "EleutherAI/pythia-160m",
        "(critic)": None,
    }
)
OPEN = OPEN_RULES | {
    "(model)": if_not_given(model, "model_name_or_path", "trainer.model", "sft_model_path"),
    "(rewards)": Idle("reward_model_path"),
}
# A key of PPO's own table wins over the one that GRPO has too.
REST = {key: rule for key, rule in (SHARED | IDLE | OPEN).items() if key not in PPO_RULES}
PPO = System("TRL's PPO", "0.29.0", PPO_RULES | REST, DEFAULTS, lambda keys: "ppo", renamed=RENAMED)
