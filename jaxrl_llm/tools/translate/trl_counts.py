"""The rules of TRL's counts: completions, optimizer steps, passes over the data and shares of a run.

`num_generations` is a key of GRPO and RLOO alone, `num_mini_batches` of PPO and of RLOO until 0.21; without both a
trainer learns from pairs.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers
from jaxrl_llm.tools.translate.family import divisors, unknown_steps
from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import Row

BROKEN = "TRL refuses a rollout that is not of whole groups; in 0.14 the keys counted prompts"
UNNAMED = "The file names no number of processes: --processes N does"
# The schedule "constant" of transformers ignores the warm-up, and "constant_with_warmup" does not.
NO_WARMUP = Outcome(
    "mapped",
    {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0},
    "lr_scheduler_type constant has no warm-up, whatever this key says",
)
NOT_SET = Outcome("no effect", reason="not set")


def counts_rollouts(keys: Keys) -> bool:
    """Whether the trainer counts rollouts as steps, and splits them into mini-batches."""
    return "num_mini_batches" in keys.defaults


def learns_pairs(keys: Keys) -> bool:
    return "num_generations" not in keys.defaults and not counts_rollouts(keys)


def processes(keys: Keys) -> int:
    """Number of training processes, which multiplies the batch."""
    return keys.processes or launchers.count(keys) or 1


def group_size(keys: Keys) -> int:
    """Number of completions of a prompt."""
    return int(keys["num_generations"]) if "num_generations" in keys.defaults else 1


def device_completions(keys: Keys) -> int:
    """Number of completions, or of pairs, of a process in a forward pass."""
    count = int(keys["per_device_train_batch_size"])
    # TRL 0.14 counts the prompts of a process. Unsloth makes the batch a whole group.
    if keys.defaults.get("(per_device_counts)") == "prompts":
        return count * group_size(keys)
    return group_size(keys) if "trainer.model.unsloth" in keys and count % group_size(keys) else count


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns the fields of the batch, and the sentence that explains them."""
    completions, process_count = group_size(keys), processes(keys)
    per_update = device_completions(keys) * int(keys["gradient_accumulation_steps"]) * process_count
    product = f"{device_completions(keys)} x {keys['gradient_accumulation_steps']} x {process_count} = {per_update}"
    factors = "per_device_train_batch_size x gradient_accumulation_steps x processes counts"
    process_note = "" if keys.processes or launchers.count(keys) else f". {UNNAMED}"
    if learns_pairs(keys):
        return {"prompts_per_step": per_update}, f"{factors} pairs: {product} of a step{process_note}"
    if counts_rollouts(keys):
        # num_mini_batches multiplies the rollout in TRL, and does not divide it.
        rollout = per_update * int(keys["num_mini_batches"])
    else:
        # TRL refuses both keys in one file. Without either key a rollout is for one optimizer step.
        steps_per_rollout = int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])
        rollout = int(keys["generation_batch_size"] or device_completions(keys) * steps_per_rollout * process_count)
    # In jaxrl_llm an optimizer step has at most the completions of a rollout, which has whole groups.
    rollout = max(rollout, per_update)
    prompts = max(1, round(rollout / completions))
    # The learner splits a rollout into equal updates, so the prompts of an update divide those of a rollout.
    update_prompts = min(divisors(prompts), key=lambda x: abs(x - per_update / completions))
    reason = f"{factors} completions: {product} of an optimizer step, {rollout} of a rollout; here prompts, with "
    reason += f"{completions} completions each{process_note}"
    if prompts * completions != rollout:
        reason += f". {BROKEN}"
    elif update_prompts * completions != per_update:
        reason += f". They are not whole groups: {prompts} and {update_prompts} are the nearest that fit"
    return {"prompts_per_step": prompts, "prompts_per_update": update_prompts, "group_size": completions}, reason


def micro(value: Any, keys: Keys) -> Outcome:
    """The completions of a device in a forward pass, which are a factor of the batch."""
    fields, reason = batch(keys)
    # The limit is rounded down to whole groups, because more groups would need more memory than the file allows.
    limit = max(1, int(value) * processes(keys) // group_size(keys))
    update_sizes = divisors(fields.get("prompts_per_update", fields["prompts_per_step"]))
    # A launcher starts several processes, and their number multiplies the batch.
    launched = any(key.startswith(("accelerate.", "deepspeed.", "srun.", "mpi")) for key in keys.values)
    launched = launched or keys.values.get("num_processes", 1) is None
    cause = UNNAMED if launched and UNNAMED in reason else BROKEN if BROKEN in reason else ""
    unknown = {name: cause for name in fields if name != "group_size"} if cause else {}
    microbatch = max(x for x in update_sizes if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason, unknown=unknown)


def part_of_batch(row: Row, value: Any, keys: Keys) -> Outcome:
    """A factor of the batch, which the key per_device_train_batch_size explains."""
    if value is None:
        return NOT_SET
    fields, _ = batch(keys)
    shown_fields = {name: fields[name] for name in row.fields.split() if name in fields}
    return Outcome("changed", shown_fields, "a factor of the batch, as said above")


def optimizer_steps(keys: Keys) -> int:
    """Number of optimizer steps on a rollout."""
    if learns_pairs(keys):
        return 1
    passes = int(keys["num_ppo_epochs" if "num_ppo_epochs" in keys.defaults else "num_iterations"])
    if counts_rollouts(keys):
        return passes * int(keys["num_mini_batches"])
    # Without these keys a rollout is for one optimizer step, whatever the batch is.
    if not keys["steps_per_generation"] and not keys["generation_batch_size"]:
        return passes
    fields, _ = batch(keys)
    return fields["prompts_per_step"] // fields["prompts_per_update"] * passes


def updates(keys: Keys) -> int:
    """Number of steps that TRL counts for a rollout."""
    return 1 if counts_rollouts(keys) else optimizer_steps(keys)


def rollouts(keys: Keys) -> int:
    """Steps of the run, which are rollouts; 0 if the file does not say them."""
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
    # A pass of GRPO drops its last, smaller batch, so the division is of whole steps.
    return max(1, math.ceil(passes * (keys.rows // prompts))) if keys.rows else 0


def epochs(value: Any, keys: Keys) -> Outcome:
    """The length of a run in passes over the data, or in episodes for PPO."""
    if not counts_rollouts(keys) and int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    passes, prompts = keys["num_train_epochs"], batch(keys)[0]["prompts_per_step"]
    if num_steps := rollouts(keys):
        by_episodes = counts_rollouts(keys) and keys["total_episodes"]
        amount = f"{keys['total_episodes']} episodes" if by_episodes else f"{passes} passes over {keys.rows} rows"
        return Outcome("changed", {"num_steps": num_steps}, f"{amount}, {prompts} prompts in a step")
    # Until 0.21 RLOO counted a completion as an episode, and as many episodes as rows.
    share = " // group_size" * (counts_rollouts(keys) and group_size(keys) > 1)
    return unknown_steps(f"num_train_epochs = {passes}: {passes} x rows // prompts_per_step{share}")


def in_rollouts(name: str, value: Any, keys: Keys) -> Outcome:
    """Returns a field in rollouts for a number of optimizer steps, or for a share of the run below 1."""
    per_rollout = updates(keys)
    # transformers takes a number below 1 for a share of all steps.
    if value >= 1:
        reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" * (per_rollout > 1)
        return Outcome("changed" if reason else "mapped", {name: max(1, int(value) // per_rollout)}, reason)
    if total := rollouts(keys):
        reason = f"a share of the run: {value} x {total} steps"
        return Outcome("changed", {name: max(1, math.ceil(value * total))}, reason)
    task = f"{value} of all steps (give --rows, or max_steps in the file); 25 is a placeholder"
    return Outcome("changed", {name: 25}, "a share of the run", unknown={name: task})


def every(row: Row, value: Any, keys: Keys) -> Outcome:
    """A number of optimizer steps, which becomes a number of rollouts."""
    return in_rollouts(row.field, value, keys) if value and value > 0 else NOT_SET


def warmup(value: Any, keys: Keys) -> Outcome:
    """The warm-up in optimizer steps. In TRL 1 a number below 1 is a share of the run."""
    if not value:
        return NOT_SET
    if keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    # transformers 5 has one key for both: below 1 it is a share.
    if value < 1:
        return Outcome("mapped", {"optim.warmup_ratio": float(value), "optim.warmup_steps": 0})
    fields = {"optim.warmup_steps": int(value), "optim.warmup_ratio": 0.0}
    if not counts_rollouts(keys):
        return Outcome("mapped", fields, "optimizer steps, as here")
    # TRL steps the scheduler once after all updates on a rollout, and jaxrl_llm after each update.
    per_rollout = optimizer_steps(keys)
    reason = f"counts rollouts: {value} x {per_rollout} optimizer steps"
    return Outcome("changed", fields | {"optim.warmup_steps": int(value) * per_rollout}, reason)


def warmup_ratio(value: Any, keys: Keys) -> Outcome:
    """The warm-up as a share of the optimizer steps."""
    if value and keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    if keys.explicit.get("warmup_steps"):
        return Outcome("no effect", reason="warmup_steps is set")
    return Outcome("mapped", {"optim.warmup_ratio": float(value or 0), "optim.warmup_steps": 0})
