"""Warnings about a run's settings, printed before its first step."""

from __future__ import annotations

import inspect

from jaxrl_llm.algorithms import losses
from jaxrl_llm.config.checks import Totals, scheduled_steps
from jaxrl_llm.config.names import arguments, own_name, resolve
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.structs import Config

# Full fine-tuning of Qwen3-0.6B (width 1024) was stable at rate 1e-6 and ruined the model at 5e-5. The embedded model
# (width 128) is stable at 4e-4, oscillates at 1e-3 and is ruined at 3e-3 (docs/health.md). The bound is proportional
# to 1 / width, as Adam's rate for a matrix should be (arXiv 2203.03466).
RATE, WIDTH = 5e-5, 1024
SUPERVISED = 10  # factor for fixed targets, in sft and for a critic: configs/sft.py has 2e-3 at width 128
UPDATES, UPDATES_WITH_CRITIC = 4, 16  # per rollout; more give a warning


def warnings(config: Config, totals: Totals, model: DecoderConfig, platform: str) -> list[str]:
    """Returns console lines: "warning: ..." if a setting may ruin the run, "note: ..." if it has no effect.

    platform: of the devices, "cpu", "gpu" or "tpu".
    """
    rl = "loss" in config
    lines = _rate("optim", config.optim.learning_rate, model.width, 1 if rl else SUPERVISED)
    if "critic" in config:
        lines += _rate("critic.optim", config.critic.optim.learning_rate, model.width, SUPERVISED)
    bound, updates = UPDATES_WITH_CRITIC if "critic" in config else UPDATES, totals.updates_per_rollout
    if updates > bound:
        lines.append(
            f"warning: {updates:,} updates on a rollout, more than {bound}: the policy may leave what was sampled, and "
            "collapse; raise prompts_per_update, or lower epochs"
        )
    if config.num_steps != scheduled_steps(config):
        lines.append(
            f"note: warm-up and decay are laid out for {config.schedule_steps} steps, as the run began, and it now has "
            f"{config.num_steps}" + _after_the_schedule(config)
        )
    if rl and updates == 1 and (changed := _changed(config)):
        lines.append(
            f"note: with one update on a rollout the ratio is 1, so that {', '.join(changed)} has no effect: "
            "lower prompts_per_update or raise epochs for more of them"
        )
    if not config.eval.every and config.checkpoint.keep_best:
        lines.append("note: checkpoint.keep_best keeps nothing: eval.every is 0, and nothing says which is best")
    if config.deterministic and platform != "gpu":
        lines.append(f"note: deterministic = True has no effect on a {platform}: it is for GPUs")
    return lines


def _after_the_schedule(config: Config) -> str:
    """Describes the learning rate after the end of the schedule; "" if the run has no such steps."""
    if config.num_steps < config.schedule_steps:
        return ""
    rate = config.optim.learning_rate if config.optim.decay == "constant" else config.optim.end
    return f": the steps after them have the learning rate {rate:g}"


def _rate(section: str, rate: float, width: int, factor: int) -> list[str]:
    bound = factor * RATE * WIDTH / width
    if rate < bound:
        return []
    return [
        f"warning: {section}.learning_rate = {rate:g} is {bound:.1g} or more, which may ruin a model of width {width}: "
        "lower it if the reward or the accuracy falls"
    ]


def _changed(config: Config) -> list[str]:
    """Lists the arguments of a built-in loss that act on its ratio and differ from their defaults."""
    loss = resolve(config.loss.name, losses)
    defaults = inspect.signature(loss).parameters if own_name(loss, losses) else {}
    return [
        f"loss.{name} = {value!r}"
        for name, value in arguments(config.loss).items()
        if name in defaults and name != "level" and value != defaults[name].default
    ]
