"""Rules that find settings which may ruin a run, or which have no effect. They need no device and no weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from rich.console import Console

from jaxrl_llm import tasks
from jaxrl_llm.algorithms import losses
from jaxrl_llm.config.names import is_ours, own_name, resolve, split_call
from jaxrl_llm.config.records import Call
from jaxrl_llm.data.rows import is_task
from jaxrl_llm.errors import printable
from jaxrl_llm.health.doctor import summarize_judging
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.models import hf
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.session.banner import totals_table
from jaxrl_llm.structs import Sizes

# Full fine-tuning of Qwen3-0.6B (width 1024) was stable at rate 1e-6 and ruined the model at 5e-5. The embedded model
# (width 128) is stable at 4e-4, oscillates at 1e-3 and is ruined at 3e-3 (docs/health.md). The bound is proportional
# to 1 / width, as Adam's rate for a matrix should be (arXiv 2203.03466).
RUINOUS_RATE, RUINED_WIDTH = 5e-5, 1024  # learning rate that ruined a model, and the width of this model
# Factor of the bound for adapters, because the embedded model is stable at 4e-3 and ruined at 1e-2 (docs/lora.md).
ADAPTER_FACTOR = 10
# Factor of the bound for fixed targets (sft, and a critic), because configs/sft.py learns with 2e-3 at width 128.
SUPERVISED_FACTOR = 10
UPDATES, UPDATES_WITH_CRITIC = 4, 16  # most optimizer steps on one rollout without a warning
# Up to this number of sequences per optimizer step, a published reward stayed flat (with a critic: it swung).
SEQUENCES, SEQUENCES_WITH_CRITIC = 64, 128
ENVIRONMENT_REWARD = "environment.reward"  # reward function that reads what an environment computes
LONG_RUN = 10_000  # optimizer steps after which a published gradient norm climbed


class RunSettings(NamedTuple):
    """The settings of a run that the rules judge, and what follows from them."""

    recipe: Recipe | SftRecipe
    width: int | None  # width of the policy; None if its config.json is not on this machine
    platform: str = ""  # platform of the devices, "cpu", "gpu" or "tpu"; "" if unknown
    changed: tuple[str, ...] = ()  # fields that differ from the config file, if the file has a measured result

    @property
    def rl(self) -> Recipe | None:
        """The recipe if the program is `train`; None if it is `sft`."""
        return self.recipe.rl


SettingsRule: TypeAlias = Callable[[RunSettings], Iterator[Finding]]


def findings(settings: RunSettings) -> list[Finding]:
    """Returns the findings of all rules whose inputs are known."""
    without_input = blind(settings)
    applicable = [rule for rule in RULES if rule.__name__ not in without_input]
    return [replace(finding, id=rule.__name__) for rule in applicable for finding in rule(settings)]


def blind(settings: RunSettings) -> dict[str, str]:
    """Returns {name of a rule that cannot be applied, because an input is unknown: the reason}."""
    reasons = {
        "width": f"config.json of {settings.recipe.model.path} is not on this machine",
        "rl": "sft has no rollouts",
        "platform": "the platform of the devices is unknown",
    }
    missing = {name: reason for name, reason in reasons.items() if not getattr(settings, name)}
    return {rule.__name__: missing[name] for rule, inputs in RULES.items() for name in inputs if name in missing}


def width_of(recipe: Recipe | SftRecipe) -> int | None:
    """Returns the width of the policy; None if its model is a hub id that is not on this machine.

    Raises: UserError, for a folder without a model.
    """
    if recipe.new_width:
        return recipe.new_width
    folder = hf.find_local_checkpoint(recipe.model.path)
    return hf.load_model(folder, family=recipe.model.family).cfg.width if folder else None


def learning_rate(settings: RunSettings) -> Iterator[Finding]:
    """F9: finds a learning rate that may ruin a model of this width."""
    recipe, width = settings.recipe, settings.width
    assert width  # RULES lists width among the inputs of this rule
    adapter_factor = ADAPTER_FACTOR if recipe.adapters else 1
    # Preference pairs are no fixed targets, because they compare completions, as rewards do.
    has_targets = not settings.rl and not recipe.data.rejected_column
    # Each entry has the section of an optimizer, its learning rate, and the factor of the bound of this rate.
    rates = [("optim", recipe.optim.learning_rate, adapter_factor * (SUPERVISED_FACTOR if has_targets else 1))]
    if critic := settings.rl and settings.rl.critic:
        factor = SUPERVISED_FACTOR * (1 if critic.path else adapter_factor)
        rates.append(("critic.optim", critic.optim.learning_rate, factor))
    for section, rate, factor in rates:
        bound = factor * RUINOUS_RATE * RUINED_WIDTH / width
        if rate >= bound:
            yield Finding(
                "warning",
                f"{section}.learning_rate = {rate:g} is {bound:.1g} or more",
                f"this rate may ruin a model of width {width}",
                "lower the rate if the reward or the accuracy falls",
                "docs/health.md",
            )


def many_updates(settings: RunSettings) -> Iterator[Finding]:
    """F2: finds many optimizer steps on one rollout."""
    bound = UPDATES_WITH_CRITIC if settings.rl and settings.rl.critic else UPDATES
    updates = settings.recipe.sizes.updates_per_rollout
    if updates > bound:
        yield Finding(
            "warning",
            f"{updates:,} optimizer steps per rollout, more than {bound}",
            "the policy may move too far from the sampled completions, and collapse",
            "raise prompts_per_update, or lower epochs",
            "Search-R1: 10 steps per rollout collapsed, 2 did not",
        )


def small_updates(settings: RunSettings) -> Iterator[Finding]:
    """F1: finds few sequences in an optimizer step, for example after prompts_per_update was lowered to save memory."""
    bound = SEQUENCES_WITH_CRITIC if settings.rl and settings.rl.critic else SEQUENCES
    sizes = settings.recipe.sizes
    if sizes.sequences_per_update <= bound and sizes.sequences_per_update < sizes.sequences_per_step:
        yield Finding(
            "warning",
            f"an optimizer step has {sizes.sequences_per_update} of the rollout's {sizes.sequences_per_step:,} "
            "sequences",
            "its gradient may be mostly noise, so that the reward stays flat",
            "raise prompts_per_update; to save memory, lower microbatch, which never changes the gradient",
            "EasyR1 #24, Search-R1 #97",
        )


def entropy_bonus(settings: RunSettings) -> Iterator[Finding]:
    """F1c: finds a constant entropy bonus."""
    assert settings.rl  # RULES lists rl among the inputs of this rule
    entropy = settings.rl.entropy
    if entropy and entropy.coef > 0 and not entropy.adaptive:
        yield Finding(
            "warning",
            f"entropy.coef = {entropy.coef:g} without entropy.adaptive",
            "a constant bonus may raise the entropy until the text is noise",
            "remove the section entropy, or set entropy.adaptive",
            "Search-R1 #162",
        )


def no_anchor(settings: RunSettings) -> Iterator[Finding]:
    """F6: finds a long run with several updates per rollout, without KL penalty and importance weights."""
    recipe = settings.rl
    assert recipe  # RULES lists rl among the inputs of this rule
    sizes = recipe.sizes
    if recipe.kl or sizes.updates_per_rollout == 1 or sizes.updates < LONG_RUN:
        return
    if not recipe.weighs and not (recipe.chosen_engine.in_trainer and recipe.model.dtype == "float32"):
        yield Finding(
            "warning",
            f"{sizes.updates:,} optimizer steps, {sizes.updates_per_rollout} per rollout, "
            "without KL penalty and importance weights",
            "the gradient norm may climb for thousands of steps",
            "try in this order: importance.action = 'truncate', epochs = 1, a small kl.coef with placement = 'loss'",
            "TRL #2980",
        )


def long_warmup(settings: RunSettings) -> Iterator[Finding]:
    """F28: finds a warm-up that takes most of the run."""
    warmup, total = settings.recipe.sizes.warmup_steps, settings.recipe.sizes.scheduled_updates
    if warmup > total / 2:
        yield Finding(
            "note",
            f"the warm-up takes {warmup:,} of {total:,} optimizer steps",
            "the full learning rate is reached late",
            "lower optim.warmup_steps or optim.warmup_ratio, unless this is intended",
            "docs/failures.md F28",
        )


def schedule(settings: RunSettings) -> Iterator[Finding]:
    """Finds schedules that end before or after the run."""
    recipe = settings.recipe
    if recipe.num_steps == recipe.scheduled_steps:
        return
    final_rate = recipe.optim.learning_rate if recipe.optim.decay == "constant" else recipe.optim.end
    run_is_longer = recipe.num_steps > recipe.schedule_steps
    yield Finding(
        "note",
        f"warm-up and decay cover {recipe.schedule_steps} steps (config.schedule_steps), but num_steps is "
        f"{recipe.num_steps}",
        f"later steps have the learning rate {final_rate:g}" if run_is_longer else "the run ends before the decay does",
    )


def idle_clip(settings: RunSettings) -> Iterator[Finding]:
    """Finds changed clip settings that have no effect."""
    assert settings.rl  # RULES lists rl among the inputs of this rule
    if settings.rl.updates_per_rollout == 1 and (changed := _changed_arguments(settings.rl.loss)):
        yield Finding(
            "note",
            f"with one optimizer step per rollout the importance ratio is 1, so {', '.join(changed)} has no effect",
            fix="lower prompts_per_update or raise epochs for more optimizer steps",
        )


def _changed_arguments(loss: Call) -> list[str]:
    """Returns the arguments of a built-in loss that act on its ratio and differ from their defaults, as text."""
    defaults = inspect.signature(loss.function).parameters if own_name(loss.function, losses) else {}
    return [
        f"loss.{name} = {value!r}"
        for name, value in loss.arguments.items()
        if name in defaults and name != "level" and value != defaults[name].default
    ]


def published(settings: RunSettings) -> Iterator[Finding]:
    """F33: finds a config file whose measured result belongs to other settings."""
    if settings.changed:
        yield Finding(
            "note",
            f"the result in the config file was measured without {', '.join(settings.changed)}",
            "this run may reach another result",
            reference="TRL #3406",
        )


def other_problems(settings: RunSettings) -> Iterator[Finding]:
    """F34: finds an evaluation on a task of this package that no training prompt comes from."""
    recipe = settings.recipe
    sources = [part.source for part in recipe.data.mixture.values()] or [recipe.data.source]
    # eval.extra_sets are not judged, because they show what training does to other problems.
    evaluation = recipe.eval
    eval_task = _task(evaluation.source) if evaluation else ""
    if evaluation and eval_task and eval_task not in map(_task, sources):
        training_source = f"data.source = {sources[0]!r}" if len(sources) == 1 else "data.mixture"
        yield Finding(
            "warning",
            f"eval.source = {evaluation.source!r} has other problems than {training_source}",
            "the accuracy does not measure the trained task",
            f"set eval.source and eval.function (now {evaluation.function}), or eval = None",
            "docs/failures.md F34",
        )


def _task(source: str) -> str:
    """Returns the module of the task that a source names; "" if it names no task of this package."""
    if not is_task(source):
        return ""
    function = resolve(split_call(source)[0], tasks.SOURCES)
    return function.__module__ if is_ours(function, tasks.SOURCES) else ""


def unread_reward(settings: RunSettings) -> Iterator[Finding]:
    """Finds an environment whose own reward no reward function reads."""
    assert settings.rl  # RULES lists rl among the inputs of this rule
    functions = [split_call(text)[0] for text in settings.rl.reward.functions]
    for section, env in settings.rl.episodes.calls.items():
        if hasattr(env.function, "finish") and ENVIRONMENT_REWARD not in functions:
            yield Finding(
                "note",
                f"reward.functions = {', '.join(functions)} lacks {ENVIRONMENT_REWARD}",
                f"the run ignores rewards that {section}.name = {env.name!r} computes itself",
            )


def keeps_nothing(settings: RunSettings) -> Iterator[Finding]:
    """Finds a run that is to keep its best checkpoint, but has no evaluation."""
    if not settings.recipe.eval and settings.recipe.checkpoint.keep_best:
        reason = "without the section eval, no checkpoint is the best"
        yield Finding("note", "checkpoint.keep_best keeps nothing", reason)


def deterministic(settings: RunSettings) -> Iterator[Finding]:
    """Finds an option of GPUs on another device."""
    if settings.recipe.deterministic and settings.platform != "gpu":
        evidence = f"deterministic = True has no effect on a {settings.platform}"
        yield Finding("note", evidence, "this option is for GPUs")


RULES: dict[SettingsRule, tuple[str, ...]] = {  # each rule, with the fields of RunSettings that it needs
    learning_rate: ("width",),
    many_updates: ("rl",),
    small_updates: ("rl",),
    entropy_bonus: ("rl",),
    no_anchor: ("rl",),
    long_warmup: (),
    schedule: (),
    idle_clip: ("rl",),
    published: (),
    other_problems: (),
    unread_reward: ("rl",),
    keeps_nothing: (),
    deterministic: ("platform",),
}


def print_config(sizes: Sizes, findings: list[Finding], blind: dict[str, str]) -> None:
    """Prints the totals of a config, the findings, and which rules were applied.

    sizes: sizes of a step; blind: {name of a rule that was not applied: the reason}.
    """
    console = Console(highlight=False, soft_wrap=True)
    for name, value in totals_table(sizes):
        console.print(f"  {name:<28}  {value:,}", markup=False)
    for finding in findings:
        console.print(printable(finding.line()), markup=False)
    if not findings:
        console.print("no findings")
    for line in summarize_judging(len(RULES), blind):
        console.print(printable(line), markup=False)
