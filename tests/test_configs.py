"""Every config of configs/ says what the checks allow, and docs/algorithms.md knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_llm.config import checks
from jaxrl_llm.config import load as config
from jaxrl_llm.errors import UserError

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("sft", "search_sft", "grpo_vllm"))
LONG = ("grpo", "search_grpo")  # they explain the fields of all others


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_passes_the_checks_and_names_its_command(file, monkeypatch):
    for folder in (file.parent, file.parent.parent):  # a recipe may have functions of its own
        monkeypatch.syspath_prepend(str(folder))
    checks.check_train(config.load(file).lock())
    assert f"--config configs/recipes/{file.name}" in file.read_text()


def test_the_config_that_makes_the_searching_model_passes_the_checks():
    checks.check_sft(config.load(ROOT / "configs" / "search_sft.py").lock())


def test_the_config_with_a_server_of_its_own_passes_the_checks(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engines.check_python", lambda python, name: None)
    checks.check_train(config.load(ROOT / "configs" / "grpo_vllm.py").lock())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_config_passes_the_checks_names_its_command_and_is_measured(file):
    c = config.load(file)
    if "teacher" in c:
        c.teacher.path = "somewhere"
    checks.check_train(c.lock())
    text = file.read_text()
    assert f"--config configs/{file.name}" in text
    assert file.stem in LONG or len(text.splitlines()) <= 35
    assert f'"{file.stem}"' in (ROOT / "benchmarks" / "algorithms.py").read_text()
    measured = (ROOT / "docs" / "algorithms.md").read_text().split("## Measured")[1].split("\n## ")[0]
    assert f"| `{file.stem}` |" in measured


def checked(name: str, **changes: object) -> checks.Totals:
    c = config.load(ROOT / "configs" / f"{name}.py")
    for field, value in changes.items():
        config.override(c, field.replace("__", "."), str(value))
    return (checks.check_sft if name == "sft" else checks.check_train)(c.lock())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", dict(eval__every=0)),
        ("grpo", dict(optim__decay="constant")),
        ("grpo", dict(importance__action="none")),
        ("grpo", dict(importance__action="auto", rollout__max_lag=2, importance__level="sequence")),
        ("grpo", dict(importance__action="truncate", model__dtype="bfloat16", importance__high="3.0")),
        ("grpo", dict(kl__placement="none", kl__coef="0.0")),
        ("reinforce", dict(rollout__max_lag=1)),
        ("gspo_token", dict(mask__top_entropy=0.5)),
        ("luspo", dict(rollout__max_lag=1)),
        ("sft", dict(eval__every=0)),
        ("sft", dict(model__path="somewhere")),
    ],
)
def test_a_setting_that_does_something_or_was_left_as_it_is_passes(name, changes):
    checked(name, **changes)


def test_what_is_left_as_it_is_in_the_config_with_a_server_may_stay_with_servers_of_others():
    c = config.load(ROOT / "configs" / "grpo_vllm.py")
    c.engine.managed, c.engine.servers = False, ("http://127.0.0.1:8000",)
    checks.check_train(c.lock())


def test_a_critics_constant_rate_has_no_end():
    with pytest.raises(UserError, match=r"config.critic.optim.end = 1e-05 does nothing: critic.optim.decay is"):
        checked("ppo", critic__optim__decay="constant", critic__optim__end="1e-5")


@pytest.mark.parametrize("old", config.RENAMED)
def test_a_field_by_an_old_name_is_told_its_new_one_which_is_there(old):
    now = config.RENAMED[old]
    there = config.flatten(config.load(ROOT / "configs" / "grpo_vllm.py"))
    assert now in there
    with pytest.raises(UserError, match=f"renamed to {now}"):
        config.override(config.load(ROOT / "configs" / "grpo_vllm.py"), old, "1")


def test_a_config_file_of_before_is_told_what_its_sections_and_arguments_are_called_now(tmp_path):
    old = tmp_path / "old.py"
    (tmp_path / "grpo.py").write_text((ROOT / "configs" / "grpo.py").read_text())
    lines = "import grpo\nfrom ml_collections import ConfigDict\n"
    body = "def get_config():\n    c = grpo.get_config()\n    {}\n    return c\n"
    old.write_text(lines + body.format("c.hold.update_size = 0.1"))
    with pytest.raises(UserError, match="section hold was renamed to adaptive_warmup"):
        config.load(old)
    for change, words in {
        "c.correction = ConfigDict(dict(level='token'))": "level is not a field: it was renamed to importance",
        "c.advantage = ConfigDict(dict(name='grpo', normalise='none'))": "it was renamed to advantage.normalize",
        "c.reward.functions, c.reward.weights = ('maths.accuracy',), (1.0,)": "did you mean math.accuracy",
    }.items():
        old.write_text(lines + body.format(change))
        with pytest.raises(UserError, match=words):
            checks.check_train(config.load(old).lock())
