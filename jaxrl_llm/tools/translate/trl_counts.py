"""What TRL counts, in the words here: completions, optimizer steps, passes over the data and shares of a run."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers, ours
from jaxrl_llm.tools.translate.family import divisors, unknown_steps
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, only_if


def processes(keys: Keys) -> int:
    """Processes that train, which multiply a batch."""
    return keys.processes or launchers.count(keys) or 1


def unnamed(keys: Keys) -> str:
    """Returns the sentence that the number of processes is missing; "": it is known."""
    known = keys.processes or launchers.count(keys)
    return "" if known else ". The file names no number of processes: --processes N does"


def completions_per_update(keys: Keys) -> int:
    """Completions of an optimizer step."""
    per_process = int(keys["per_device_train_batch_size"]) * int(keys["gradient_accumulation_steps"])
    return per_process * processes(keys)


def completions_per_rollout(keys: Keys) -> int:
    """Completions of a rollout."""
    # TRL refuses both this and steps_per_generation in one file.
    if keys["generation_batch_size"]:
        return int(keys["generation_batch_size"])
    # Without the key TRL takes gradient_accumulation_steps: one optimizer step on a rollout.
    every = int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])
    return int(keys["per_device_train_batch_size"]) * every * processes(keys)


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns the batch fields, and how TRL's words make them."""
    group = int(keys["num_generations"])
    per_update = completions_per_update(keys)
    # Here an optimizer step never has more than a rollout.
    rollout = max(completions_per_rollout(keys), per_update)
    # A rollout of TRL may end within a group; here it has whole ones.
    prompts = max(1, round(rollout / group))
    # The learner splits a rollout into equal updates, so the prompts of an update divide those of a rollout.
    update = min(divisors(prompts), key=lambda x: abs(x - per_update / group))
    count = processes(keys)
    product = f"{keys['per_device_train_batch_size']} x {keys['gradient_accumulation_steps']} x {count}"
    reason = (
        f"per_device_train_batch_size x gradient_accumulation_steps x processes counts completions: {product} = "
        f"{per_update} of an optimizer step, {rollout} of a rollout; here prompts, with {group} completions each"
    )
    reason += unnamed(keys)
    if prompts * group != rollout or update * group != per_update:
        reason += f". They are not whole groups: {prompts} and {update} are the nearest that fit"
    return {"prompts_per_step": prompts, "prompts_per_update": update, "group_size": group}, reason


def part_of_batch(*names: str) -> Rule:
    """A word of the batch that per_device_train_batch_size explains. names: the fields that it changes."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None:
            return Outcome("no effect", reason="not set")
        fields, _ = batch(keys)
        return Outcome("changed", {name: fields[name] for name in names}, "a factor of the batch, as said above")

    return rule


def updates(keys: Keys) -> int:
    """Optimizer steps on a rollout."""
    fields, _ = batch(keys)
    return fields["prompts_per_step"] // fields["prompts_per_update"] * int(keys["num_iterations"])


def micro(value: Any, keys: Keys) -> Outcome:
    """The completions of a device, which are also a word of the batch."""
    fields, reason = batch(keys)
    # Rounded down to whole groups: more of them would need more memory than the file allows.
    limit = max(1, int(value) * processes(keys) // fields["group_size"])
    microbatch = max(x for x in divisors(fields["prompts_per_update"]) if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason)


def rollouts(keys: Keys) -> int:
    """Steps of the run, as here; 0: the file does not say them."""
    # transformers counts optimizer steps, of which a rollout has several.
    if (steps := int(keys["max_steps"] or 0)) > 0:
        return max(1, steps // updates(keys))
    # A pass drops its last, smaller batch, so the division is of whole steps.
    passes = float(keys["num_train_epochs"]) * (keys.rows // batch(keys)[0]["prompts_per_step"])
    return max(1, math.ceil(passes)) if keys.rows else 0


def epochs(value: Any, keys: Keys) -> Outcome:
    """Passes over the data."""
    if int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    prompts = batch(keys)[0]["prompts_per_step"]
    if num_steps := rollouts(keys):
        return Outcome(
            "changed", {"num_steps": num_steps}, f"{value} passes over {keys.rows} rows, {prompts} in a step"
        )
    return unknown_steps(f"num_train_epochs = {value}: {value} x rows // prompts_per_step")


def in_rollouts(name: str, value: Any, keys: Keys) -> Outcome:
    """Returns what a number of optimizer steps, or a share of the run below 1, becomes as a number of rollouts."""
    return counted(name, value, updates(keys), rollouts(keys) if value < 1 else 0)


def counted(name: str, value: Any, per_rollout: int, total: int) -> Outcome:
    """Returns the same for a run of `total` steps (0: not known), with so many optimizer steps on a rollout."""
    # transformers takes a number below 1 for a share of all steps.
    if value >= 1:
        reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" * (per_rollout > 1)
        return Outcome("changed" if reason else "mapped", {name: max(1, int(value) // per_rollout)}, reason)
    if total:
        reason = f"a share of the run: {value} x {total} steps"
        return Outcome("changed", {name: max(1, math.ceil(value * total))}, reason)
    why = f"{value} of all steps (give --rows, or max_steps in the file); 25 is a placeholder"
    return Outcome("changed", {name: 25}, "a share of the run", unknown={name: why})


def counts_updates(name: str, what: str) -> Rule:
    """A number of optimizer steps becomes one of rollouts."""

    def rule(value: Any, keys: Keys) -> Outcome:
        return in_rollouts(name, value, keys) if value and value > 0 else Outcome("no effect", reason="not set")

    return only_if(lambda keys: not what or keys[what] == "steps", rule, f"{what} is not steps")


def saving(value: Any, keys: Keys) -> Outcome:
    """When checkpoints are saved."""
    if value == "steps":
        return Outcome("mapped", {})
    reasons = {"no": "a run here always can resume", "epoch": "here in steps: checkpoint.every"}
    return Outcome("changed", {"checkpoint.every": 25}, reasons.get(str(value), "here every checkpoint.every steps"))


def evaluating(value: Any, keys: Keys) -> Outcome:
    """When evaluations are made. A config does not say the problems: the script does."""
    if value in ("no", None, False):
        return Outcome("mapped", ours.NO_EVALUATION)
    # transformers takes logging_steps where eval_steps is not set.
    every = in_rollouts("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    fields = every.fields | {"eval.source": "data/test.parquet", "eval.convert": ""}
    unknown = every.unknown | {"eval.source": "the file with the problems; this name is a placeholder"}
    reason = "one greedy completion for each problem, judged by eval.function"
    return Outcome("changed", fields, reason, unknown=unknown)


def never_warms_up(keys: Keys) -> bool:
    """Whether the schedule ignores the warm-up: transformers' "constant" does, "constant_with_warmup" does not."""
    return keys["lr_scheduler_type"] == "constant"


NO_WARMUP = Outcome(
    "mapped",
    {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0},
    "lr_scheduler_type constant has no warm-up, whatever this key says",
)


def warmup(value: Any, keys: Keys) -> Outcome:
    """Optimizer steps, or from TRL 1 on also a share."""
    if not value:
        return Outcome("no effect", reason="not set")
    if never_warms_up(keys):
        return NO_WARMUP
    # transformers 5 has one key for both: below 1 it is a share.
    if value < 1:
        return Outcome("mapped", {"optim.warmup_ratio": float(value), "optim.warmup_steps": 0})
    return Outcome("mapped", {"optim.warmup_steps": int(value), "optim.warmup_ratio": 0.0}, "optimizer steps, as here")


def warmup_ratio(value: Any, keys: Keys) -> Outcome:
    """A share of the optimizer steps."""
    if value and never_warms_up(keys):
        return NO_WARMUP
    if keys.explicit.get("warmup_steps"):
        return Outcome("no effect", reason="warmup_steps is set")
    return Outcome("mapped", {"optim.warmup_ratio": float(value or 0), "optim.warmup_steps": 0})
