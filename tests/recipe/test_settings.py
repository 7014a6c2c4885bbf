"""What is said of a run's settings before its first step."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from jaxrl_llm import configs
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as config
from jaxrl_llm.learner.optim import make_optimizer
from jaxrl_llm.recipe.advice import RULES, RunSettings, blind, findings
from jaxrl_llm.session.banner import shortened_warmups
from jaxrl_llm.session.workdir import initial_values, write_config

ROOT = Path(__file__).parents[2]
SMALL, QWEN = 128, 896  # widths of the model inside the package and of Qwen2.5-0.5B


def said(name: str, width=SMALL, platform="cpu", **changes: object) -> list[str]:
    c = config.load(configs.FOLDER / f"{name}.py")
    for field, value in changes.items():
        config.override(c, field.replace("__", "."), str(value))
    for teacher in c.get("teachers", {}).values():
        teacher.path = "somewhere"
    return [finding.line() for finding in findings(RunSettings(recipes.read_either(c.lock()), width, platform))]


@pytest.mark.parametrize("name", configs.names())
def test_a_config_of_the_package_passes_the_checks_without_a_warning(name, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engines.check_python", lambda python, name: None)
    for folder in (configs.FOLDER, configs.FOLDER / "recipes"):  # as `train` does: a recipe may name its own functions
        monkeypatch.syspath_prepend(folder)
    known = {"recipes/qwen2_5_3b_tinyzero": ["small_updates"]}  # it was published so
    lines = said(name, QWEN, "gpu") if name.startswith("recipes/") else said(name)
    assert [line.rpartition("[")[2].partition(",")[0] for line in lines] == known.get(name, [])


@pytest.mark.parametrize(("name", "width", "rate", "warned"), [
    ("grpo", SMALL, 3e-3, True),  # ruined it, measured
    ("grpo", 1024, 5e-5, True),  # ruined Qwen3-0.6B, published
    ("grpo", SMALL, 1e-4, False), ("grpo", QWEN, 1e-4, True), ("grpo", QWEN, 1e-5, False),
    ("sft", SMALL, 1.0, True), ("sft", QWEN, 1e-4, False), ("sft", QWEN, 1e-3, True),
    ("dpo", QWEN, 1e-5, False), ("dpo", QWEN, 1e-4, True),
])  # fmt: skip
def test_a_rate_is_high_by_the_models_width_and_by_what_is_learned(name, width, rate, warned):
    lines = said(name, width, optim__learning_rate=rate)
    assert [line.startswith("warning: optim.learning_rate = ") for line in lines] == [True] * warned


def test_an_evaluation_of_other_problems_than_those_trained_on_is_told(wording):
    for name, source in (("grpo", "fixed.jsonl"), ("sft", "fixed.jsonl"), ("grpo", "countdown.train")):
        (line,) = said(name, data__source=source)
        assert line.startswith("warning: eval.source = ")
        wording(line)
    quiet = [dict(data__source="fixed.jsonl", eval__source="exam.jsonl"), dict(data__source="arithmetic.held_out")]
    quiet += [dict(data__source="fixed.jsonl", eval=None, checkpoint__keep_best=0)]
    assert [said("grpo", **changes) for changes in quiet] == [[], [], []]
    c = config.load("grpo")
    parts = [ConfigDict(dict(source=source, convert="", weight=1.0)) for source in ("a.jsonl", "arithmetic.train")]
    c.data.source, c.data.mixture.a, c.data.mixture.b = "", *parts
    assert findings(RunSettings(recipes.read(c), SMALL)) == []
    c.data.mixture.b.source = "b.jsonl"
    (found,) = findings(RunSettings(recipes.read(c), SMALL))
    assert "data.mixture" in found.line()
    wording(found.line())


def test_a_rule_that_cannot_look_is_silent_and_told_with_its_reason():
    c = config.load("grpo")
    c.optim.learning_rate, c.deterministic, c.model.path = 1.0, True, "org/model"
    given = RunSettings(recipes.read(c), None)
    assert findings(given) == []
    assert blind(given).keys() == {"learning_rate", "deterministic"} and all(blind(given).values())
    assert [x.id for x in findings(given._replace(width=SMALL, platform="cpu"))] == ["learning_rate", "deterministic"]
    c = config.load("sft")
    assert len(blind(RunSettings(recipes.read_sft(c), SMALL, "cpu"))) == sum("rl" in needs for needs in RULES.values())


def test_a_critics_rate_is_looked_at_too(wording):
    (line,) = said("ppo", critic__optim__learning_rate=1.0)
    assert line.startswith("warning: critic.optim.learning_rate = 1 ")
    wording(line)


ADAPTIVE = {"target": 0.1, "step": 1e-4, "most": 0.1}
LONG = dict(kl=None, epochs=4, num_steps=3000, model__dtype="bfloat16")


@pytest.mark.parametrize(("name", "changes", "rules"), [
    ("grpo", dict(prompts_per_update=1, epochs=40), "many_updates small_updates"),
    ("grpo", dict(prompts_per_update=16, epochs=2), "many_updates"),
    ("grpo", dict(prompts_per_update=16), ""),
    ("ppo", dict(prompts_per_update=64, epochs=4), "small_updates"),
    ("ppo", dict(prompts_per_update=16, epochs=2), "many_updates small_updates"),
    ("grpo", dict(prompts_per_update=4), "many_updates small_updates"),
    ("grpo", dict(entropy__coef=0.001), "entropy_bonus"),
    ("grpo", dict(entropy__coef=0.001, entropy__adaptive={"target": 0.1, "step": 1e-4, "most": 0.1}), ""),
    ("grpo", dict(optim__warmup_ratio=0.95, optim__warmup_steps=0), "long_warmup"),
    ("grpo", LONG, "no_anchor"),
    ("grpo", LONG | dict(num_steps=300), ""),
    ("grpo", dict(epochs=4, num_steps=3000, model__dtype="bfloat16"), ""),
    ("grpo", dict(prompts_per_step=32, prompts_per_update=8), "small_updates"),  # EasyR1 #24: 64 sequences
    ("grpo", dict(prompts_per_step=32, prompts_per_update=16), ""),
    ("grpo", dict(prompts_per_step=8, prompts_per_update=8), ""),  # the whole rollout
    ("ppo", dict(prompts_per_update=128), "small_updates"),  # half of Search-R1's: 128
    ("ppo", dict(prompts_per_step=512, prompts_per_update=256), ""),
])  # fmt: skip
def test_settings_of_published_failures_are_told(name, changes, rules, wording):
    lines = said(name, **changes)
    assert [line.rpartition("[")[2].partition(",")[0] for line in lines] == rules.split()
    wording("\n".join(lines))


@pytest.mark.parametrize(("function", "ids"), [("search.exact_match", ["unread_reward"]), ("environment.reward", [])])
def test_a_reward_of_an_environment_that_nobody_reads_is_noted(function, ids):
    c = config.load(configs.FOLDER / "search_grpo.py")
    c.env = ConfigDict({"name": "trl.Environments", "factory": "mine.Board"})
    c.reward.functions, c.reward.weights = (function,), (1.0,)
    assert [finding.id for finding in findings(RunSettings(recipes.read_either(c.lock()), SMALL, "cpu"))] == ids


def test_a_clip_that_clips_nothing_is_noted_where_it_was_changed(wording):
    (line,) = said("grpo", loss__clip_high=0.28)
    assert line.startswith("note: ") and "loss.clip_high = 0.28" in line
    wording(line)
    assert said("dapo") == []  # it has several, and the same clip
    assert said("gspo", prompts_per_update=64) == []  # its clips are the loss's own
    assert said("gspo", prompts_per_update=64, loss__level="token") == []  # which has an effect on a gradient


def test_what_has_no_effect_without_evaluation_or_a_gpu_is_noted(wording):
    for changes, field in ((dict(eval=None), "checkpoint.keep_best"), (dict(deterministic=True), "deterministic")):
        line = said("grpo", **changes)[0]
        assert line.startswith(f"note: {field} ")
        wording(line)
    assert said("grpo", eval=None, checkpoint__keep_best=0) == []
    assert said("sft", platform="gpu", deterministic=True) == []


@pytest.mark.parametrize("steps", [1, 3, 5, 6, 100])
def test_a_warm_up_that_does_not_fit_takes_half_of_a_short_run(steps):
    c = config.load("ppo")
    c.num_steps = steps
    recipe = recipes.read(c)
    sizes, policy, critic = recipe.sizes, recipe.optim.warmup_steps, recipe.critic.warmup_steps
    assert sizes.critic_steps == (critic if critic < steps else steps // 2)
    assert sizes.warmup_steps == (policy if policy < sizes.updates else sizes.updates // 2)
    told = "".join(shortened_warmups(recipe.warmups()))
    assert ("config.critic.warmup_steps" in told) == (sizes.critic_steps < critic)
    assert ("config.optim.warmup_steps" in told) == (sizes.warmup_steps < policy)


def test_a_run_that_is_resumed_with_more_steps_keeps_its_schedule_and_says_so(tmp_path, wording):
    """The learning rate before and after the resume is that of the run as it began."""
    begun, longer, file = config.load("grpo"), config.load("grpo"), tmp_path / "config.json"
    for c, steps in ((begun, 100), (longer, 300)):
        c.optim.end, c.num_steps = 1e-6, steps
        c.update_from_flattened_dict(
            initial_values(lambda: file.read_text() if file.exists() else "", config.flatten(c))
        )
        write_config(tmp_path, c.to_dict())
    recipe = recipes.read(longer)
    before, after = recipes.read(begun).sizes, recipe.sizes
    assert (after.updates, after.scheduled_updates, after.warmup_steps) == (300, 100, before.warmup_steps)
    rates = [make_optimizer(t.scheduled_updates, **begun.optim).coefficients["learning_rate"] for t in (before, after)]
    for step in (0, 50, 99, 100, 250):
        assert rates[0].value(jnp.float32(step)) == rates[1].value(jnp.float32(step))
    [line] = [finding.line() for finding in findings(RunSettings(recipe, SMALL, "cpu"))]
    assert "100" in line and "300" in line and "1e-06" in line
    wording(line)
