"""Rules over a run's settings, which may ruin it or have no effect. They need no device and no weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from rich.console import Console

from jaxrl_llm import tasks
from jaxrl_llm.algorithms import losses
from jaxrl_llm.config.names import is_ours, own_name, resolve
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
RATE, WIDTH = 5e-5, 1024
# Factor for adapters: the embedded model is stable at 4e-3 and ruined at 1e-2 (docs/lora.md).
ADAPTERS = 10
SUPERVISED = 10  # factor for fixed targets, in sft and for a critic: configs/sft.py has 2e-3 at width 128
UPDATES, UPDATES_WITH_CRITIC = 4, 16  # per rollout; more give a warning
# Sequences of an update with which a published reward stayed flat, and the reward of a run with a critic swung.
SEQUENCES, SEQUENCES_WITH_CRITIC = 64, 128
LONG = 10_000  # updates, after which a published gradient norm climbed


class RunSettings(NamedTuple):
    """The settings of a run that the rules judge, and what follows from them."""

    recipe: Recipe | SftRecipe
    width: int | None  # of the policy; None: its config.json is not here
    platform: str = ""  # of the devices, "cpu", "gpu" or "tpu"; "": not known
    changed: tuple[str, ...] = ()  # fields that differ from the config file, if it says what it measured

    @property
    def rl(self) -> Recipe | None:
        """The recipe of `train`; None: it is one of `sft`."""
        return self.recipe.rl


SettingsRule: TypeAlias = Callable[[RunSettings], Iterator[Finding]]


def findings(settings: RunSettings) -> list[Finding]:
    """Applies all rules that can look."""
    unable = blind(settings)
    able = [rule for rule in RULES if rule.__name__ not in unable]
    return [replace(finding, id=rule.__name__) for rule in able for finding in rule(settings)]


def blind(settings: RunSettings) -> dict[str, str]:
    """Returns {rule: why it cannot look}."""
    lacks = {
        "width": f"no config.json of {settings.recipe.model.path} here",
        "rl": "sft has no rollouts",
        "platform": "no device is asked",
    }
    missing = {name: why for name, why in lacks.items() if not getattr(settings, name)}
    return {rule.__name__: missing[name] for rule, needs in RULES.items() for name in needs if name in missing}


def width_of(recipe: Recipe | SftRecipe) -> int | None:
    """Returns the width of the policy; None: its model is a hub id that is not on this machine.

    Raises: UserError, for a folder that is no model.
    """
    if recipe.new_width:
        return recipe.new_width
    folder = hf.find_local_checkpoint(recipe.model.path)
    return hf.load_model(folder, family=recipe.model.family).cfg.width if folder else None


def learning_rate(settings: RunSettings) -> Iterator[Finding]:
    """F9: a rate that ruins a model of this width."""
    recipe, width = settings.recipe, settings.width
    assert width  # RULES says that the rule needs it
    adapters = ADAPTERS if recipe.adapters else 1
    # Pairs say which of two is better, as rewards do, and not what to say.
    target = not settings.rl and not recipe.data.rejected_column
    rates = [("optim", recipe.optim.learning_rate, adapters * (SUPERVISED if target else 1))]
    if critic := settings.rl and settings.rl.critic:
        factor = SUPERVISED * (1 if critic.path else adapters)
        rates.append(("critic.optim", critic.optim.learning_rate, factor))
    for section, rate, factor in rates:
        bound = factor * RATE * WIDTH / width
        if rate >= bound:
            yield Finding(
                "warning",
                f"{section}.learning_rate = {rate:g} is {bound:.1g} or more",
                f"it may ruin a model of width {width}",
                "lower it if the reward or the accuracy falls",
                "docs/health.md",
            )


def many_updates(settings: RunSettings) -> Iterator[Finding]:
    """F2: many optimizer steps on one rollout."""
    bound = UPDATES_WITH_CRITIC if settings.rl and settings.rl.critic else UPDATES
    updates = settings.recipe.sizes.updates_per_rollout
    if updates > bound:
        yield Finding(
            "warning",
            f"{updates:,} optimizer steps on a rollout, more than {bound}",
            "the policy may leave what was sampled, and collapse",
            "raise prompts_per_update, or lower epochs",
            "Search-R1: 10 of them collapsed, 2 did not",
        )


def small_updates(settings: RunSettings) -> Iterator[Finding]:
    """F1: few sequences in an optimizer step, as after a cut that was meant to save memory."""
    bound = SEQUENCES_WITH_CRITIC if settings.rl and settings.rl.critic else SEQUENCES
    sizes = settings.recipe.sizes
    if sizes.sequences_per_update <= bound and sizes.sequences_per_update < sizes.sequences_per_step:
        yield Finding(
            "warning",
            f"an optimizer step has {sizes.sequences_per_update} of the rollout's {sizes.sequences_per_step:,} "
            "sequences",
            "its gradient may be noise, and the reward stay flat",
            "raise prompts_per_update; to save memory, lower microbatch, which never changes the gradient",
            "EasyR1 #24, Search-R1 #97",
        )


def entropy_bonus(settings: RunSettings) -> Iterator[Finding]:
    """F1c: a constant entropy bonus."""
    assert settings.rl  # RULES says that the rule needs it
    entropy = settings.rl.entropy
    if entropy and entropy.coef > 0 and not entropy.adaptive:
        yield Finding(
            "warning",
            f"entropy.coef = {entropy.coef:g} without entropy.adaptive",
            "a constant bonus lets the entropy only rise, until the text is noise",
            "leave the section out, or give entropy.adaptive",
            "Search-R1 #162",
        )


def no_anchor(settings: RunSettings) -> Iterator[Finding]:
    """F6: a long run with several updates on a rollout, no KL penalty and no importance weights."""
    recipe = settings.rl
    assert recipe  # RULES says that the rule needs it
    sizes = recipe.sizes
    if recipe.kl or sizes.updates_per_rollout == 1 or sizes.updates < LONG:
        return
    if not recipe.weighs and not (recipe.chosen_engine.in_trainer and recipe.model.dtype == "float32"):
        yield Finding(
            "warning",
            f"{sizes.updates:,} optimizer steps, {sizes.updates_per_rollout} on a rollout, "
            "without KL penalty and correction",
            "the norm of the gradient may climb for thousands of steps",
            "in this order: set importance.action = 'truncate', epochs = 1, or a small kl.coef in the loss",
            "TRL #2980",
        )


def long_warmup(settings: RunSettings) -> Iterator[Finding]:
    """F28: most of the run is a warm-up."""
    warmup, total = settings.recipe.sizes.warmup_steps, settings.recipe.sizes.scheduled_updates
    if warmup > total / 2:
        yield Finding(
            "note",
            f"the warm-up takes {warmup:,} of {total:,} optimizer steps",
            "the learning rate is reached late",
            "lower optim.warmup_steps or optim.warmup_ratio, unless it is meant",
            "docs/failures.md F28",
        )


def schedule(settings: RunSettings) -> Iterator[Finding]:
    """The schedules end before or after the run."""
    recipe = settings.recipe
    if recipe.num_steps == recipe.scheduled_steps:
        return
    rate = recipe.optim.learning_rate if recipe.optim.decay == "constant" else recipe.optim.end
    longer = recipe.num_steps > recipe.schedule_steps
    yield Finding(
        "note",
        f"warm-up and decay are laid out for {recipe.schedule_steps} steps, as the run began, and it now has "
        f"{recipe.num_steps}",
        f"the steps after them have the learning rate {rate:g}" if longer else "it ends before they do",
    )


def idle_clip(settings: RunSettings) -> Iterator[Finding]:
    """A clip that was changed, and clips nothing."""
    assert settings.rl  # RULES says that the rule needs it
    if settings.rl.updates_per_rollout == 1 and (changed := _changed(settings.rl.loss)):
        yield Finding(
            "note",
            f"with one optimizer step on a rollout the ratio is 1, so that {', '.join(changed)} has no effect",
            fix="lower prompts_per_update or raise epochs for more of them",
        )


def _changed(loss: Call) -> list[str]:
    """Lists the arguments of a built-in loss that act on its ratio and differ from their defaults."""
    defaults = inspect.signature(loss.function).parameters if own_name(loss.function, losses) else {}
    return [
        f"loss.{name} = {value!r}"
        for name, value in loss.arguments.items()
        if name in defaults and name != "level" and value != defaults[name].default
    ]


def published(settings: RunSettings) -> Iterator[Finding]:
    """F33: the config file says what it measured, but with other settings."""
    if settings.changed:
        yield Finding(
            "note",
            f"the result in the config file was measured without {', '.join(settings.changed)}",
            "this run may end elsewhere",
            reference="TRL #3406",
        )


def other_problems(settings: RunSettings) -> Iterator[Finding]:
    """F34: the evaluation has the problems of a task of this package, from which no training prompt comes."""
    recipe = settings.recipe
    sources = [part.source for part in recipe.data.mixture.values()] or [recipe.data.source]
    # Further sets may well have other problems: they are there to show what training does to them.
    evaluation = recipe.eval
    judged = _task(evaluation.source) if evaluation else ""
    if evaluation and judged and judged not in map(_task, sources):
        trained = f"data.source = {sources[0]!r}" if len(sources) == 1 else "data.mixture"
        yield Finding(
            "warning",
            f"eval.source = {evaluation.source!r} has other problems than {trained}",
            "the accuracy is not that of what is trained",
            f"set eval.source and eval.function (now {evaluation.function}), or eval = None",
            "docs/failures.md F34",
        )


def _task(source: str) -> str:
    """Returns the module of a task of this package, which a source names; "": another source."""
    if not is_task(source):
        return ""
    function = resolve(source, tasks.SOURCES)
    return function.__module__ if is_ours(function, tasks.SOURCES) else ""


def keeps_nothing(settings: RunSettings) -> Iterator[Finding]:
    """The best checkpoint of a run without evaluation."""
    if not settings.recipe.eval and settings.recipe.checkpoint.keep_best:
        why = "there is no section eval, and nothing says which is best"
        yield Finding("note", "checkpoint.keep_best keeps nothing", why)


def deterministic(settings: RunSettings) -> Iterator[Finding]:
    """An option of GPUs on another device."""
    if settings.recipe.deterministic and settings.platform != "gpu":
        evidence = f"deterministic = True has no effect on a {settings.platform}"
        yield Finding("note", evidence, "it is for GPUs")


RULES: dict[SettingsRule, tuple[str, ...]] = {  # and what each needs to know of the settings
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
    keeps_nothing: (),
    deterministic: ("platform",),
}


def print_config(sizes: Sizes, findings: list[Finding], blind: dict[str, str]) -> None:
    """Prints what follows from a config, its findings, and which rules could look; blind: {rule: why it could not}."""
    console = Console(highlight=False, soft_wrap=True)
    for name, value in totals_table(sizes):
        console.print(f"  {name:<28}  {value:,}", markup=False)
    for finding in findings:
        console.print(printable(finding.line()), markup=False)
    if not findings:
        console.print("no rule finds anything")
    for line in summarize_judging(len(RULES), blind):
        console.print(printable(line), markup=False)
