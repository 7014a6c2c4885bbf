"""Rules that translate what TRL counts: the batch, optimizer steps, epochs and the warm-up.

TRL counts completions of one device, and optimizer steps. jaxrl_llm counts prompts of all devices, and rollouts. Each
rule gets the value of its key and all `Keys` of the user's file, and returns the `Outcome`. A default shows which
trainer the file is for: `num_generations` is a key of GRPO and RLOO alone, `num_mini_batches` of PPO and of RLOO until
0.21. A trainer without both learns from pairs.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers
from jaxrl_llm.tools.translate.family import divisors, unknown_steps
from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import Row

# Reasons that a translation prints. `batch` adds the first two to its reason, where `device_batch_size` looks for them.
NO_WHOLE_GROUPS = "TRL refuses a rollout that is not of whole groups; in 0.14 the keys counted prompts"
UNKNOWN_PROCESSES = "The file does not say the number of processes: add --processes N"
UNSLOTH_GROUPS = "Unsloth until autumn 2025 made a batch of a process whole groups"
# Outcome of a warm-up with the schedule "constant" of transformers, which ignores it, unlike "constant_with_warmup".
NO_WARMUP_FIELDS = {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0}
NO_WARMUP = Outcome("mapped", NO_WARMUP_FIELDS, "lr_scheduler_type constant has no warm-up, whatever this key says")


def counts_rollouts(keys: Keys) -> bool:
    """Whether the TRL trainer counts rollouts as steps, and splits them into mini-batches: PPO, and RLOO until 0.21."""
    return "num_mini_batches" in keys.defaults


def learns_pairs(keys: Keys) -> bool:
    """Whether the TRL trainer learns from preference pairs, as DPO and CPO do."""
    return "num_generations" not in keys.defaults and not counts_rollouts(keys)


# Condition of keys that count optimizer steps, and the reason if the trainer does not read them.
COUNTS_STEPS = (lambda keys: not counts_rollouts(keys), "total_episodes and num_train_epochs decide")


def processes(keys: Keys) -> int:
    """Returns the number of training processes, by which TRL multiplies its batch; 1 if it is unknown."""
    return keys.processes or launchers.count(keys) or 1


def group_size(keys: Keys) -> int:
    """Returns the number of completions per prompt: TRL's `num_generations`, or 1 for PPO and for pairs."""
    return int(keys["num_generations"]) if "num_generations" in keys.defaults else 1


def device_completions(keys: Keys) -> int:
    """Returns how many completions, or pairs, one process has in a forward pass of TRL."""
    count = int(keys["per_device_train_batch_size"])
    # TRL 0.14 counts the prompts of a process.
    if keys["(per_device_counts)"] == "prompts":
        return count * group_size(keys)
    # Unsloth makes a batch without whole groups one group.
    product = count * int(keys["gradient_accumulation_steps"]) * processes(keys)
    return group_size(keys) if product % group_size(keys) and "unsloth" in keys else count


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns jaxrl_llm's fields of the batch for all batch keys of TRL, and the sentence that explains them.

    For example, 8 completions x 4 accumulations x 2 processes are 64 completions of an optimizer step. With 16
    completions of each prompt and one step on a rollout, both `prompts_per_step` and `prompts_per_update` are 4.
    """
    completions, process_count = group_size(keys), processes(keys)
    per_update = device_completions(keys) * int(keys["gradient_accumulation_steps"]) * process_count
    product = f"{device_completions(keys)} x {keys['gradient_accumulation_steps']} x {process_count} = {per_update}"
    factors = "per_device_train_batch_size x gradient_accumulation_steps x processes counts"
    process_note = "" if keys.processes or launchers.count(keys) else f". {UNKNOWN_PROCESSES}"
    if learns_pairs(keys):
        return {"prompts_per_step": per_update}, f"{factors} pairs: {product} of a step{process_note}"
    if counts_rollouts(keys):
        # num_mini_batches multiplies the rollout in TRL, and does not divide it.
        rollout = per_update * int(keys["num_mini_batches"])
    else:
        # TRL refuses both keys in one file. Without either key a rollout is for one optimizer step.
        steps_per_rollout = int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])
        rollout = int(keys["generation_batch_size"] or device_completions(keys) * steps_per_rollout * process_count)
    # An optimizer step of jaxrl_llm has at most the completions of one rollout, which has whole groups.
    rollout = max(rollout, per_update)
    prompts = max(1, round(rollout / completions))
    # The learner splits a rollout into equal updates, so the prompts of an update divide those of a rollout.
    update_prompts = min(divisors(prompts), key=lambda x: abs(x - per_update / completions))
    reason = f"{factors} completions: {product} of an optimizer step, {rollout} of a rollout; jaxrl_llm counts "
    reason += f"prompts, with {completions} completions each{process_note}"
    if prompts * completions != rollout:
        reason += f". {NO_WHOLE_GROUPS}"
    elif update_prompts * completions != per_update:
        reason += f". They are not whole groups: {prompts} and {update_prompts} prompts are the nearest that fit"
    return {"prompts_per_step": prompts, "prompts_per_update": update_prompts, "group_size": completions}, reason


def device_batch_size(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `per_device_train_batch_size`: it sets all batch fields, because it is a factor of each."""
    fields, reason = batch(keys)
    # The limit is rounded down to whole groups, because more groups would need more memory than the file allows.
    limit = max(1, int(value) * processes(keys) // group_size(keys))
    update_sizes = divisors(fields.get("prompts_per_update", fields["prompts_per_step"]))
    # A launcher such as accelerate starts several processes, and their number multiplies the batch. The reader of
    # a TRL document sets num_processes to None, because a launcher whose arguments are not in the file starts the run.
    has_launcher = any(key.startswith(("accelerate.", "deepspeed.")) for key in keys.values)
    has_launcher = has_launcher or keys.values.get("num_processes", 1) is None
    # Only an older Unsloth made a batch without whole groups one group, and the file does not say the version.
    depends_on_unsloth = "unsloth" in keys and int(value) % group_size(keys) and int(value) == device_completions(keys)
    doubts = {
        UNKNOWN_PROCESSES: has_launcher and UNKNOWN_PROCESSES in reason,
        NO_WHOLE_GROUPS: NO_WHOLE_GROUPS in reason,
        UNSLOTH_GROUPS: depends_on_unsloth,
    }
    first_doubt = next((doubt for doubt, applies in doubts.items() if applies), "")
    # The group size is known even then, because no number of processes is a factor of it.
    unknown = {name: first_doubt for name in fields if name != "group_size"} if first_doubt else {}
    microbatch = max(x for x in update_sizes if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason, unknown=unknown)


def optimizer_steps(keys: Keys) -> int:
    """Returns the number of optimizer steps that TRL takes on one rollout."""
    if learns_pairs(keys):
        return 1
    passes = int(keys["num_ppo_epochs" if "num_ppo_epochs" in keys.defaults else "num_iterations"])
    if counts_rollouts(keys):
        return passes * int(keys["num_mini_batches"])
    # If these keys are not set, TRL takes one optimizer step per rollout, whatever the batch is.
    if not keys["steps_per_generation"] and not keys["generation_batch_size"]:
        return passes
    fields, _ = batch(keys)
    return fields["prompts_per_step"] // fields["prompts_per_update"] * passes


def updates(keys: Keys) -> int:
    """Returns by how much one rollout advances TRL's step counter, which is 1 for a trainer that counts rollouts."""
    if counts_rollouts(keys):
        return 1 + optimizer_steps(keys) * bool(keys["(counts_updates)"])
    return optimizer_steps(keys)


def clip_norm(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `max_grad_norm` to `optim.clip_norm`: the loops of PPO, and of RLOO until 0.21, do not clip."""
    if counts_rollouts(keys):
        return Outcome("changed", {"optim.clip_norm": 0.0}, "this trainer of TRL never clips gradients")
    return Outcome("mapped", {"optim.clip_norm": float(value)})


def rollouts(keys: Keys) -> int:
    """Returns the number of rollouts of the run, which are jaxrl_llm's steps; 0 if the file does not say it."""
    if counts_rollouts(keys):
        episodes = keys["total_episodes"] or float(keys["num_train_epochs"]) * keys.rows
        # TRL rounds up, because the last rollout is a whole one.
        return math.ceil(episodes / (batch(keys)[0]["prompts_per_step"] * group_size(keys)))
    # transformers counts optimizer steps, of which a rollout has several.
    if (steps := int(keys["max_steps"] or 0)) > 0:
        return max(1, steps // updates(keys))
    passes, prompts = float(keys["num_train_epochs"]), batch(keys)[0]["prompts_per_step"]
    if learns_pairs(keys):
        return math.ceil(passes * keys.rows / prompts)
    # An epoch of GRPO drops its last, smaller batch, so the division rounds down.
    return max(1, math.ceil(passes * (keys.rows // prompts))) if keys.rows else 0


def epochs(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `num_train_epochs`, or `total_episodes` of PPO and RLOO, to `num_steps`."""
    if not counts_rollouts(keys) and int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    passes, prompts = keys["num_train_epochs"], batch(keys)[0]["prompts_per_step"]
    if num_steps := rollouts(keys):
        by_episodes = counts_rollouts(keys) and keys["total_episodes"]
        amount = f"{keys['total_episodes']} episodes" if by_episodes else f"{passes} passes over {keys.rows} rows"
        return Outcome("changed", {"num_steps": num_steps}, f"{amount}, {prompts} prompts in a step")
    # Until 0.21 RLOO counted completions as episodes, and an epoch had as many episodes as rows.
    share = " // group_size" * (counts_rollouts(keys) and group_size(keys) > 1)
    return unknown_steps(f"num_train_epochs = {passes}: {passes} x rows // prompts_per_step{share}")


def in_rollouts(name: str, value: Any, keys: Keys) -> Outcome:
    """Returns the field `name`, which counts rollouts, for a `value` of TRL: optimizer steps, or a share of the run."""
    per_rollout = updates(keys)
    # transformers takes a number below 1 for a share of all steps.
    if value >= 1:
        reason = f"counts optimizer steps; jaxrl_llm counts rollouts, of {per_rollout} steps each" * (per_rollout > 1)
        return Outcome("changed" if reason else "mapped", {name: max(1, int(value) // per_rollout)}, reason)
    if total := rollouts(keys):
        reason = f"a share of the run: {value} x {total} steps"
        return Outcome("changed", {name: max(1, math.ceil(value * total))}, reason)
    task = f"{value} of all steps (give --rows, or max_steps in the file); 25 is a placeholder"
    return Outcome("changed", {name: 25}, "a share of the run", unknown={name: task})


def every(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates a TRL key in steps (`max_steps`, `save_steps`, `eval_steps`) to a field in rollouts."""
    return in_rollouts(row.field, value, keys) if value and value > 0 else Outcome("no effect", reason="not set")


def warmup(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `warmup_steps` to `optim.warmup_steps`, or below 1 to `optim.warmup_ratio`."""
    if keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    # transformers 5 has one key for both: below 1 it is a share.
    if value < 1:
        return Outcome("mapped", NO_WARMUP_FIELDS | {"optim.warmup_ratio": float(value)})
    fields = {"optim.warmup_steps": int(value), "optim.warmup_ratio": 0.0}
    if not counts_rollouts(keys):
        return Outcome("mapped", fields, "optimizer steps, as in jaxrl_llm")
    # A trainer of TRL that counts rollouts steps its scheduler once after all updates on a rollout. jaxrl_llm steps it
    # after each update.
    per_rollout = optimizer_steps(keys)
    reason = f"counts rollouts: {value} x {per_rollout} optimizer steps"
    return Outcome("changed", fields | {"optim.warmup_steps": int(value) * per_rollout}, reason)


def warmup_ratio(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `warmup_ratio`, the warm-up as a share of the optimizer steps, to `optim.warmup_ratio`."""
    if value and keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    return Outcome("mapped", {"optim.warmup_ratio": float(value or 0), "optim.warmup_steps": 0})
