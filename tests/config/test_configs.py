"""Every config of configs/ says what the checks allow, and docs/algorithms.md knows it."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxrl_llm import configs
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as config
from jaxrl_llm.config import suggestions
from jaxrl_llm.config.load import with_names
from jaxrl_llm.configs import grpo, ppo
from jaxrl_llm.structs import Sizes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs"
OTHERS = ("sft", "search_sft", "pictures_sft", "dpo", "simpo", "grpo_vllm", "agent", "agent_search")
LONG = ("grpo", "search_grpo")  # they explain the fields of all others


def test_each_config_names_its_command_and_is_measured():
    """tests/recipe/test_settings.py reads and checks each of them."""
    for file in FOLDER.rglob("*.py"):
        if file.stem not in OTHERS and file.name != "__init__.py":
            assert f"--config configs/{file.relative_to(FOLDER)}" in file.read_text(), file
    measured = (ROOT / "docs" / "algorithms.md").read_text().split("## Measured")[1].split("\n## ")[0]
    benchmarks = (ROOT / "benchmarks" / "health" / "algorithms.py").read_text()
    for file in FOLDER.glob("*.py"):
        if file.stem not in (*OTHERS, "__init__"):
            assert file.stem in LONG or len(file.read_text().splitlines()) <= 35, file
            assert f'"{file.stem}"' in benchmarks, file
            assert f"| `{file.stem}` |" in measured, file


def checked(name: str, **changes: object) -> Sizes:
    c = config.load(name)
    for field, value in changes.items():
        config.override(c, field.replace("__", "."), str(value))
    return recipes.read_either(c.lock()).sizes


@pytest.mark.parametrize(("name", "changes"), [
    ("grpo", dict(eval=None)), ("grpo", dict(optim__decay="constant")), ("grpo", dict(importance__action="none")),
    ("grpo", dict(importance__action="auto", rollout__max_lag=2, importance__level="sequence")),
    ("grpo", dict(importance__action="truncate", model__dtype="bfloat16", importance__high="3.0")),
    ("grpo", dict(kl=None)), ("reinforce", dict(rollout__max_lag=1)), ("gspo_token", dict(mask__top_entropy=0.5)),
    ("grpo", dict(kl__refresh__every=1, epochs=2)), ("grpo", dict(kl__refresh__every=2)),
    ("luspo", dict(rollout__max_lag=1)), ("sft", dict(eval=None)), ("sft", dict(model__path="somewhere")),
])  # fmt: skip
def test_a_setting_that_does_something_or_was_left_as_it_is_passes(name, changes):
    checked(name, **changes)


def test_a_word_of_another_trainer_leads_to_a_field_that_is_there():
    there = {name for shipped in ("grpo", "ppo") for name in config.flatten(config.load(shipped))}
    meant = {field for field in suggestions.ALIASES.values() if not field.startswith("--")}
    assert all(field in there or field.rpartition(".")[0] in there for field in meant)
    assert not there & set(suggestions.ALIASES)


@pytest.mark.parametrize(("name", "meant"), [
    ("optim.lr", "optim.learning_rate"), ("critic.optim.lr", "critic.optim.learning_rate"),
    ("actor.entropy_coeff", "entropy.coef"), ("train.beta", "kl.coef"), ("rollout.n", "group_size"),
    ("epsilon_high", "loss.clip_high"), ("output_dir", "--workdir"), ("optim.learning_rat", "optim.learning_rate"),
    ("rolout.top_p", "rollout.top_p"), ("data.sorce", "data.source"), ("optim.xyz", ""), ("kl.epochs_", "epochs"),
])  # fmt: skip
def test_the_nearest_name_is_a_near_name(name, meant):
    assert suggestions.nearest(name, config.flatten(config.load("ppo"))) == meant


@pytest.mark.parametrize(("text", "value"), [
    ("a.f,b.g", ("a.f", "b.g")), ("a.f, b.g,", ("a.f", "b.g")), ("(a.f,b.g)", ("a.f", "b.g")),
    ("('a.f','b.g')", ("a.f", "b.g")), ("['a.f']", ("a.f",)), ("", ()), ("()", ()),
    ("a.f(size=3,way='x'),b.g", ("a.f(size=3,way='x')", "b.g")),
])  # fmt: skip
def test_several_values_are_given_on_the_command_line(text, value):
    c = config.load("grpo")
    config.override(c, "reward.functions", text)
    config.override(c, "reward.weights", "1.0,0.5")
    config.override(c, "log.to", "")
    assert (c.reward.functions, c.reward.weights, c.log.to) == (value, (1.0, 0.5), ())


def test_a_field_and_its_value_may_be_two_words_of_a_command(monkeypatch):
    words = "--config grpo --config.num_steps 7 --config.kl.coef=1 --config.optim.end -1.5 --workdir run"
    given = config.parse_arguments("test", "", words.split())
    assert (given.config.num_steps, given.config.kl.coef, given.config.optim.end) == (7, 1.0, -1.5)
    assert given.workdir == Path("run")


def test_a_shipped_config_is_loaded_by_its_name_and_is_a_module_of_the_package():
    names = configs.names()
    assert {"grpo", "ppo", "sft", "recipes/qwen2_5_7b_math"} <= set(names)
    assert len(names) == len(list((ROOT / "configs").rglob("*.py")))
    made = {name: importlib.import_module(f"jaxrl_llm.configs.{name.replace('/', '.')}").get_config() for name in names}
    for name in ("grpo", "search_ppo", "recipes/qwen2_5_7b_math"):
        assert made[name].to_dict() == config.load(name).to_dict()


def test_a_config_in_any_folder_builds_on_a_shipped_one_or_is_told_how(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    # A config that an earlier test has parsed leaves its folder there.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder).is_relative_to(FOLDER)])
    body = "\n\ndef get_config():\n    c = {0}.get_config()\n    c.seed = 9\n    return c\n"
    for name, module in {"dapo": "jaxrl_llm.configs", "qwen2_5_7b_math": "jaxrl_llm.configs.recipes"}.items():
        Path("mine.py").write_text(f"from {module} import {name}" + body.format(name))
        assert config.load("mine.py").seed == 9
        Path("mine.py").write_text(f"import {name}" + body.format(name))
        with refused("mine.py:1", f"from {module} import {name}"):
            config.load("mine.py")


def test_the_page_about_configs_has_a_config_and_commands_that_pass_the_checks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "configs.md").read_text()
    file, script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    Path("mine.py").write_text(file)
    Path("rules.py").write_text("def polite(completions, **columns):\n    return [0.0] * len(completions)\n")
    commands = re.findall(r"^jaxrl train (.*?)(?: *#.*)?$", text, re.MULTILINE)
    assert len(commands) == 9
    for command in commands:
        given = config.parse_arguments("test", "", shlex.split(command)).config
        recipes.read(given)
        if "--config.reward.weights" in command:
            assert given.reward.functions == ("math.accuracy", "rules.polite")
    ran = []
    monkeypatch.setattr("jaxrl_llm.train.steps", lambda c, workdir: ran.append((with_names(c), workdir)) or ())
    exec(script, {})
    ((c, workdir),) = ran
    recipes.read(c)
    assert (c.reward.functions[0], workdir) == ("arithmetic.accuracy", "runs/polite")


def test_a_program_gets_the_file_of_a_shipped_config(monkeypatch):
    _, known = config.parse_config(config.config_parser("test", ""), ["--config", "dapo"])
    assert Path(known.config) == ROOT / "configs" / "dapo.py"
    assert config.parse_arguments("test", "", ["--config", "dapo"]).workdir.name.startswith("dapo-2")


@pytest.mark.parametrize(("section", "name", "value"), [
    ("", "num_steps", "three"), ("optim", "end", "x"), ("model", "dtype", 16), ("data", "convert", 16),
    ("health", "self_test", "no"), ("kl", "coef", ConfigDict()), ("", "mesh", 8), ("model", "row_parts", "x"),
    ("loss", "name", json.loads), ("rollout", "partial", True), ("rollout", "partial", False),
])  # fmt: skip
def test_a_value_of_another_type_is_refused_where_a_script_sets_it(refused, section, name, value):
    c = grpo.get_config() if section else config.load("grpo")
    c.optim.learning_rate, c.log.to, c.loss = 1e-4, ["tensorboard"], ConfigDict(dict(name="topr"))  # what fits
    with refused(f"config.{section}.{name}".replace("..", ".")):
        (c[section] if section else c)[name] = value
    recipes.read(c.copy_and_resolve_references().lock())


def test_none_for_a_section_that_is_not_there_changes_nothing(refused):
    c = config.load("grpo")
    before = c.to_json()
    config.override(c, "adapters", "none")
    assert c.to_json() == before
    with refused("config.adaptors"):
        config.override(c, "adaptors", "none")


def test_fields_are_checked_where_a_script_updates_a_section(refused):
    with refused("config.kl.coef"):
        grpo.get_config().update(dict(kl=dict(coef="x")))
    for change in (dict(mesh=8), dict(mesh="x", num_steps=3)):
        with refused("config.mesh "):
            grpo.get_config().update(change)
    c = grpo.get_config()
    c.update(dict(eval=None, kl=dict(coef=0.5)), num_steps=3)
    assert (c.eval, c.kl.coef, c.num_steps) == (None, 0.5, 3)


def test_a_moved_or_copied_section_names_its_new_place(refused):
    c = ppo.get_config()
    c.teachers = dict(first=dict(path="", inner=dict(size=1)))
    for copied in (c, copy.deepcopy(c), c.copy_and_resolve_references()):
        for section, name, path in (
            (copied.critic.optim, "b1", "critic.optim.b1"),
            (copied.teachers.first.inner, "size", "teachers.first.inner.size"),
        ):
            with refused(f"config.{path} "):
                section[name] = "x"


def test_one_value_is_a_tuple_of_one(refused):
    c = grpo.get_config()
    c.reward.functions, c.reward.weights, c.log.to = "math.accuracy", 1.0, "tensorboard"
    assert (c.reward.functions, c.reward.weights, c.log.to) == (("math.accuracy",), (1.0,), ("tensorboard",))
    recipes.read(c.lock())
    c.reward.functions = 3
    with refused("config.reward.functions"):
        recipes.read(c)


def test_an_override_moves_a_field_that_refers_to_another(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.configs import grpo\n\ndef get_config():\n    c = grpo.get_config()\n"
        "    c.prompts_per_update = c.get_oneway_ref('prompts_per_step')\n"
        "    c.critic = grpo.ConfigDict(dict(warmup_steps=c.get_ref('num_steps')))\n    return c\n"
    )
    c = config.load(tmp_path / "mine.py")
    config.override(c, "prompts_per_step", "7")
    config.override(c, "num_steps", "5")
    assert (c.prompts_per_update, c.critic.warmup_steps) == (7, 5)
