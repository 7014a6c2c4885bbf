"""What TRL counts, in the words here: completions, optimizer steps, passes over the data and shares of a run.

`num_generations` is a key of GRPO and RLOO alone, `num_mini_batches` of PPO; without both a trainer learns from pairs.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers
from jaxrl_llm.tools.translate.family import divisors, unknown_steps
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule
from jaxrl_llm.tools.translate.table import Row

BROKEN = "TRL refuses a rollout that is not of whole groups; in 0.14 the keys counted prompts"
UNNAMED = "The file names no number of processes: --processes N does"


def processes(keys: Keys) -> int:
    """Processes that train, which multiply a batch."""
    return keys.processes or launchers.count(keys) or 1


def group(keys: Keys) -> int:
    """Completions of a prompt."""
    return int(keys["num_generations"]) if "num_generations" in keys.defaults else 1


def per_device(keys: Keys) -> int:
    """Completions, or pairs, of a process in a forward pass."""
    count = int(keys["per_device_train_batch_size"])
    # In TRL 0.14 each process takes prompts. Unsloth makes the batch a whole group.
    if keys.defaults.get("(per_device_counts)") == "prompts":
        return count * group(keys)
    return group(keys) if "trainer.model.unsloth" in keys and count % group(keys) else count


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns the batch fields, and how TRL's words make them."""
    size, count = group(keys), processes(keys)
    per_update = per_device(keys) * int(keys["gradient_accumulation_steps"]) * count
    words = "per_device_train_batch_size x gradient_accumulation_steps x processes"
    product = f"{per_device(keys)} x {keys['gradient_accumulation_steps']} x {count} = {per_update}"
    unnamed = "" if keys.processes or launchers.count(keys) else f". {UNNAMED}"
    if "num_mini_batches" in keys.defaults:
        # In TRL num_mini_batches multiplies the rollout; it does not divide it.
        rollout = per_update * int(keys["num_mini_batches"])
        reason = f"an optimizer step has {words} = {per_update} episodes, a rollout num_mini_batches times as many"
        reason += f"; each is one completion of a prompt{unnamed}"
        return {"prompts_per_step": rollout, "prompts_per_update": per_update, "group_size": 1}, reason
    if "num_generations" not in keys.defaults:
        return {"prompts_per_step": per_update}, f"{words} counts pairs: {product} of a step{unnamed}"
    # TRL refuses generation_batch_size and steps_per_generation in one file. Without both it learns once.
    every = int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])
    rollout = int(keys["generation_batch_size"] or per_device(keys) * every * count)
    # Here an optimizer step never has more than a rollout, and a rollout has whole groups.
    rollout = max(rollout, per_update)
    prompts = max(1, round(rollout / size))
    # The learner splits a rollout into equal updates, so the prompts of an update divide those of a rollout.
    update = min(divisors(prompts), key=lambda x: abs(x - per_update / size))
    reason = f"{words} counts completions: {product} of an optimizer step, {rollout} of a rollout; here prompts, with "
    reason += f"{size} completions each{unnamed}"
    if prompts * size != rollout:
        reason += f". {BROKEN}"
    elif update * size != per_update:
        reason += f". They are not whole groups: {prompts} and {update} are the nearest that fit"
    return {"prompts_per_step": prompts, "prompts_per_update": update, "group_size": size}, reason


def micro(value: Any, keys: Keys) -> Outcome:
    """The completions of a device, which are also a word of the batch."""
    fields, reason = batch(keys)
    # Rounded down to whole groups: more of them would need more memory than the file allows.
    limit = max(1, int(value) * processes(keys) // group(keys))
    update_sizes = divisors(fields.get("prompts_per_update", fields["prompts_per_step"]))
    # A config alone is for a launcher, and so is what one of these starts.
    launched = any(key.startswith(("accelerate.", "deepspeed.", "srun.", "mpi")) for key in keys.values)
    launched = launched or keys.values.get("num_processes", 1) is None
    why = UNNAMED if launched and UNNAMED in reason else BROKEN if BROKEN in reason else ""
    unknown = dict.fromkeys(fields.keys() - {"group_size"}, why) if why else {}
    microbatch = max(x for x in update_sizes if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason, unknown=unknown)


def part_of_batch(row: Row) -> Rule:
    """A word of the batch that per_device_train_batch_size explains."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None:
            return Outcome("no effect", reason="not set")
        fields, _ = batch(keys)
        shown = {name: fields[name] for name in row.fields.split() if name in fields}
        return Outcome("changed", shown, "a factor of the batch, as said above")

    return rule


def updates(keys: Keys) -> int:
    """Optimizer steps of TRL's counter on a rollout: in PPO it counts rollouts."""
    if "num_generations" not in keys.defaults:
        return 1
    fields, _ = batch(keys)
    return fields["prompts_per_step"] // fields["prompts_per_update"] * int(keys["num_iterations"])


def rollouts(keys: Keys) -> int:
    """Steps of the run, as here; 0: the file does not say them."""
    prompts = batch(keys)[0]["prompts_per_step"]
    if "num_mini_batches" in keys.defaults:
        # Rounded up, as TRL does it: the last rollout is a whole one.
        return math.ceil((keys["total_episodes"] or float(keys["num_train_epochs"]) * keys.rows) / prompts)
    # transformers counts optimizer steps, of which a rollout has several.
    if (steps := int(keys["max_steps"] or 0)) > 0:
        return max(1, steps // updates(keys))
    if "num_generations" not in keys.defaults:
        return math.ceil(float(keys["num_train_epochs"]) * keys.rows / prompts)
    # A pass of GRPO drops its last, smaller batch, so the division is of whole steps.
    return max(1, math.ceil(float(keys["num_train_epochs"]) * (keys.rows // prompts))) if keys.rows else 0


def epochs(value: Any, keys: Keys) -> Outcome:
    """Passes over the data, or all episodes of PPO."""
    if "num_mini_batches" not in keys.defaults and int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    prompts = batch(keys)[0]["prompts_per_step"]
    if num_steps := rollouts(keys):
        by_episodes = "num_mini_batches" in keys.defaults and keys["total_episodes"]
        passes = f"{keys['num_train_epochs']} passes over {keys.rows} rows"
        amount = f"{keys['total_episodes']} episodes" if by_episodes else passes
        return Outcome("changed", {"num_steps": num_steps}, f"{amount}, {prompts} in a step")
    passes = keys["num_train_epochs"]
    return unknown_steps(f"num_train_epochs = {passes}: {passes} x rows // prompts_per_step")


def in_rollouts(name: str, value: Any, keys: Keys) -> Outcome:
    """Returns what a number of optimizer steps, or a share of the run below 1, becomes as a number of rollouts."""
    per_rollout = updates(keys)
    # transformers takes a number below 1 for a share of all steps.
    if value >= 1:
        reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" * (per_rollout > 1)
        return Outcome("changed" if reason else "mapped", {name: max(1, int(value) // per_rollout)}, reason)
    if total := rollouts(keys):
        reason = f"a share of the run: {value} x {total} steps"
        return Outcome("changed", {name: max(1, math.ceil(value * total))}, reason)
    why = f"{value} of all steps (give --rows, or max_steps in the file); 25 is a placeholder"
    return Outcome("changed", {name: 25}, "a share of the run", unknown={name: why})


def every(row: Row) -> Rule:
    """A number of optimizer steps becomes one of rollouts."""
    return lambda value, keys: (
        in_rollouts(row.field, value, keys) if value and value > 0 else Outcome("no effect", reason="not set")
    )


def warmup(value: Any, keys: Keys) -> Outcome:
    """Optimizer steps, or from TRL 1 on also a share."""
    if not value:
        return Outcome("no effect", reason="not set")
    if keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    # transformers 5 has one key for both: below 1 it is a share.
    if value < 1:
        return Outcome("mapped", {"optim.warmup_ratio": float(value), "optim.warmup_steps": 0})
    fields = {"optim.warmup_steps": int(value), "optim.warmup_ratio": 0.0}
    if "num_mini_batches" not in keys.defaults:
        return Outcome("mapped", fields, "optimizer steps, as here")
    # TRL's PPO calls the scheduler once after all updates on a rollout; here every optimizer step counts.
    per_rollout = int(keys["num_mini_batches"]) * int(keys["num_ppo_epochs"])
    reason = f"counts rollouts: {value} x {per_rollout} optimizer steps"
    return Outcome("changed", fields | {"optim.warmup_steps": int(value) * per_rollout}, reason)


def warmup_ratio(value: Any, keys: Keys) -> Outcome:
    """A share of the optimizer steps."""
    if value and keys["lr_scheduler_type"] == "constant":
        return NO_WARMUP
    if keys.explicit.get("warmup_steps"):
        return Outcome("no effect", reason="warmup_steps is set")
    return Outcome("mapped", {"optim.warmup_ratio": float(value or 0), "optim.warmup_steps": 0})


NO_WARMUP = Outcome(  # transformers' "constant" ignores the warm-up, "constant_with_warmup" does not
    "mapped",
    {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0},
    "lr_scheduler_type constant has no warm-up, whatever this key says",
)
