"""What is said of a run's settings before its first step."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as config
from jaxrl_llm.learner.optim import make_optimizer
from jaxrl_llm.recipe.advice import RULES, RunSettings, blind, findings
from jaxrl_llm.session.checkpoint import beginning, open_workdir

ROOT = Path(__file__).parent.parent
SMALL, QWEN = 128, 896  # widths of the model inside the package and of Qwen2.5-0.5B


def said(name: str, width=SMALL, platform="cpu", **changes: object) -> list[str]:
    c = config.load(ROOT / "configs" / f"{name}.py")
    for field, value in changes.items():
        config.override(c, field.replace("__", "."), str(value))
    for teacher in c.get("teachers", {}).values():
        teacher.path = "somewhere"
    return [finding.line() for finding in findings(RunSettings(recipes.read_either(c.lock()), width, platform))]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_nothing_is_said_of_the_configs_that_come_with_the_package(file, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engines.check_python", lambda python, name: None)
    assert said(file.stem) == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_nothing_is_said_of_the_recipes(file, monkeypatch):
    for folder in (file.parent, file.parent.parent):  # as `train` does: a recipe may name its own functions
        monkeypatch.syspath_prepend(folder)
    known = {"qwen2_5_3b_tinyzero": "small_updates"}  # it was published so
    rules = [line.rpartition("[")[2].partition(",")[0] for line in said(f"recipes/{file.stem}", QWEN, "gpu")]
    assert rules == ([known[file.stem]] if file.stem in known else [])


@pytest.mark.parametrize(
    ("name", "width", "rate", "warned"),
    [
        ("grpo", SMALL, 1.0, True),
        ("grpo", SMALL, 3e-3, True),  # ruined it, measured
        ("grpo", SMALL, 1e-4, False),
        ("grpo", 1024, 5e-5, True),  # ruined Qwen3-0.6B, published
        ("grpo", QWEN, 1e-4, True),
        ("grpo", QWEN, 1e-6, False),
        ("grpo", QWEN, 1e-5, False),
        ("sft", SMALL, 1.0, True),
        ("sft", QWEN, 1e-4, False),
        ("sft", QWEN, 1e-3, True),
        ("dpo", QWEN, 1e-5, False),
        ("dpo", QWEN, 1e-4, True),
    ],
)
def test_a_rate_is_high_by_the_models_width_and_by_what_is_learned(name, width, rate, warned):
    lines = said(name, width, optim__learning_rate=rate)
    assert [line.startswith(f"warning: optim.learning_rate = {rate:g} is ") for line in lines] == [True] * warned


def test_an_evaluation_of_other_problems_than_those_trained_on_is_told():
    problems = "warning: eval.source = 'arithmetic.held_out' has other problems than "
    for name in ("grpo", "sft"):
        (line,) = said(name, data__source="fixed.jsonl")
        assert line.startswith(f"{problems}data.source = 'fixed.jsonl': ")
        assert "set eval.source and eval.function (now arithmetic.accuracy), or eval = None" in line
    (line,) = said("grpo", data__source="countdown.train")
    assert line.startswith(problems)
    quiet = [dict(data__source="fixed.jsonl", eval__source="exam.jsonl"), dict(data__source="arithmetic.held_out")]
    quiet += [dict(data__source="fixed.jsonl", eval=None, checkpoint__keep_best=0)]
    assert [said("grpo", **changes) for changes in quiet] == [[], [], []]
    c = config.load("grpo")
    parts = [ConfigDict(dict(source=source, convert="", weight=1.0)) for source in ("a.jsonl", "arithmetic.train")]
    c.data.source, c.data.mixture.a, c.data.mixture.b = "", *parts
    assert findings(RunSettings(recipes.read(c), SMALL)) == []
    c.data.mixture.b.source = "b.jsonl"
    (found,) = findings(RunSettings(recipes.read(c), SMALL))
    assert found.line().startswith(f"{problems}data.mixture: ")


def test_a_rule_that_cannot_look_is_silent_and_told_with_its_reason():
    c = config.load(ROOT / "configs" / "grpo.py")
    c.optim.learning_rate, c.deterministic, c.model.path = 1.0, True, "org/model"
    given = RunSettings(recipes.read(c), None)
    assert findings(given) == []
    assert blind(given) == {"learning_rate": "no config.json of org/model here", "deterministic": "no device is asked"}
    assert [x.id for x in findings(given._replace(width=SMALL, platform="cpu"))] == ["learning_rate", "deterministic"]
    c = config.load(ROOT / "configs" / "sft.py")
    assert len(blind(RunSettings(recipes.read_sft(c), SMALL, "cpu"))) == sum("rl" in needs for needs in RULES.values())


def test_a_critics_rate_is_looked_at_too():
    (line,) = said("ppo", critic__optim__learning_rate=1.0)
    assert line.startswith("warning: critic.optim.learning_rate = 1 is 0.004 or more")


@pytest.mark.parametrize(
    ("name", "each", "epochs", "words"),
    [
        ("grpo", 1, 40, "warning: 2,560 optimizer steps on a rollout, more than 4: "),
        ("grpo", 16, 2, "warning: 8 optimizer steps on a rollout, more than 4: "),
        ("grpo", 16, 1, ""),
        ("ppo", 64, 4, ""),
        ("ppo", 16, 2, "warning: 32 optimizer steps on a rollout, more than 16: "),
    ],
)
def test_many_updates_on_a_rollout_are_warned_of(name, each, epochs, words):
    lines = [line for line in said(name, prompts_per_update=each, epochs=epochs) if "an optimizer step has" not in line]
    assert [line[: len(words)] for line in lines] == [words] * bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(prompts_per_update=4), ["an optimizer step has 32 of the rollout's 512 sequences"]),
        (dict(entropy__coef=0.001), ["entropy.coef = 0.001 without entropy.adaptive"]),
        (dict(entropy__coef=0.001, entropy__adaptive={"target": 0.1, "step": 1e-4, "most": 0.1}), []),
        (dict(optim__warmup_ratio=0.95, optim__warmup_steps=0), ["the warm-up takes 95 of 100 optimizer steps"]),
        (
            dict(kl=None, epochs=4, num_steps=3000, model__dtype="bfloat16"),
            ["12,000 optimizer steps, 4 on a rollout, without KL penalty and correction"],
        ),
        (dict(kl=None, epochs=4, num_steps=300, model__dtype="bfloat16"), []),
        (dict(epochs=4, num_steps=3000, model__dtype="bfloat16"), []),
    ],
)
def test_settings_of_published_failures_are_told(changes, words):
    lines = [line for line in said("grpo", **changes) if "on a rollout, more than" not in line]
    assert [line.split(": ")[1] for line in lines] == words


@pytest.mark.parametrize(
    ("name", "changes", "warned"),
    [
        ("grpo", dict(prompts_per_step=32, prompts_per_update=8), True),  # EasyR1 #24: 64 sequences
        ("grpo", dict(prompts_per_step=32, prompts_per_update=16), False),
        ("grpo", dict(prompts_per_step=8, prompts_per_update=8), False),  # the whole rollout
        ("ppo", dict(prompts_per_update=128), True),  # half of Search-R1's: 128
        ("ppo", dict(prompts_per_step=512, prompts_per_update=256), False),
    ],
)
def test_few_sequences_in_an_update_are_warned_of(name, changes, warned):
    assert [line.startswith("warning: an optimizer step has ") for line in said(name, **changes)] == [True] * warned


def test_a_clip_that_clips_nothing_is_noted_where_it_was_changed():
    (line,) = said("grpo", loss__clip_high=0.28)
    assert line.startswith(
        "note: with one optimizer step on a rollout the ratio is 1, so that loss.clip_high = 0.28 has no"
    )
    assert said("dapo") == []  # it has several, and the same clip
    assert said("gspo", prompts_per_update=64) == []  # its clips are the loss's own
    assert said("gspo", prompts_per_update=64, loss__level="token") == []  # which has an effect on a gradient


def test_what_has_no_effect_without_evaluation_or_a_gpu_is_noted():
    assert said("grpo", eval=None)[0].startswith("note: checkpoint.keep_best keeps nothing: there is no section eval")
    assert said("grpo", eval=None, checkpoint__keep_best=0) == []
    assert said("grpo", deterministic=True) == ["note: deterministic = True has no effect on a cpu: it is for GPUs"]
    assert said("sft", platform="gpu", deterministic=True) == []


def test_a_run_that_is_resumed_with_more_steps_keeps_its_schedule_and_says_so(tmp_path):
    """The rate at the seam, and after it, is that of the run as it began."""
    fixed = dict(optim__end=1e-6, num_steps=100)
    begun, longer = (config.load(ROOT / "configs" / "grpo.py") for _ in range(2))
    for c, steps in ((begun, 100), (longer, 300)):
        for field, value in (fixed | {"num_steps": steps}).items():
            config.override(c, field.replace("__", "."), str(value))
        c.update_from_flattened_dict(beginning(tmp_path, config.flatten(c)))
        open_workdir(tmp_path, c.to_dict())
    recipe = recipes.read(longer)
    before, after = recipes.read(begun).sizes, recipe.sizes
    assert (after.updates, after.scheduled_updates, after.warmup_steps) == (300, 100, before.warmup_steps)
    rates = [make_optimizer(t.scheduled_updates, **begun.optim).coefficients["learning_rate"] for t in (before, after)]
    for step in (0, 50, 99, 100, 250):
        assert rates[0].value(jnp.float32(step)) == rates[1].value(jnp.float32(step))
    [line] = [finding.line() for finding in findings(RunSettings(recipe, SMALL, "cpu"))]
    assert "laid out for 100 steps" in line and "it now has 300" in line and "the learning rate 1e-06" in line
