"""A user's own modules: imported anew for each config, and never taken for ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm import tasks
from jaxrl_llm.config import user_modules
from jaxrl_llm.config.load import load, parse_arguments
from jaxrl_llm.config.names import Kind, offered, resolve
from jaxrl_llm.tasks import CONVERTERS, REWARDS

ROOT = Path(__file__).parents[2]
DELTA = "import grpo\n\ndef get_config():\n    return grpo.get_config()\n"


def a_config(seed: int) -> str:
    return f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict(dict(seed={seed}))\n"


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_each_folder_gives_its_own_complete_file_to_its_delta(tmp_path, monkeypatch):
    for seed, name in enumerate("ab"):
        (tmp_path / name / "recipes").mkdir(parents=True)
        (tmp_path / name / "grpo.py").write_text(a_config(seed))
        for delta in (tmp_path / name / "delta.py", tmp_path / name / "recipes" / "delta.py"):
            delta.write_text(DELTA)
    for seed, name in enumerate("ab"):
        assert load(tmp_path / name / "delta.py").seed == seed
        assert load(tmp_path / name / "recipes" / "delta.py").seed == seed
    assert "grpo" not in sys.modules
    monkeypatch.syspath_prepend(tmp_path / "a")
    before = __import__("grpo")
    assert load(tmp_path / "b" / "delta.py").seed == 1
    assert sys.modules["grpo"] is before


def test_loading_a_config_leaves_installed_modules_and_ours_as_they_were(tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "c.py").write_text("import colorsys\n" + a_config(0))
    sys.modules.pop("colorsys", None)
    before = dict(sys.modules)
    load(tmp_path / "c.py")
    load(ROOT / "configs" / "ppo.py")
    assert "colorsys" in sys.modules
    assert {name for name, module in before.items() if sys.modules.get(name) is not module} == set()


def own(folder: Path, text: str = "def accuracy(completions, **_):\n    return [7.0]\n") -> Path:
    (folder / "arithmetic.py").write_text(text)
    return folder / "arithmetic.py"


def test_a_name_of_ours_and_of_the_users_is_refused_without_running_theirs(tmp_path, monkeypatch, refused):
    file = own(tmp_path, "1 / 0\ndef accuracy(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("reward 'arithmetic.accuracy'", str(file), "'jaxrl_llm.tasks.arithmetic.accuracy'"):
        resolve("arithmetic.accuracy", REWARDS, "reward")
    ours = resolve("jaxrl_llm.tasks.arithmetic.accuracy", REWARDS)
    assert ours.__module__ == "jaxrl_llm.tasks.arithmetic"
    assert resolve("arithmetic.thought", REWARDS).__module__ == "jaxrl_llm.tasks.arithmetic"  # theirs has none
    for text in ("from os import (\n    getpid as accuracy,\n)\n", "from lab import *\n", "def accuracy(:\n"):
        file.write_text(text)
        with refused(str(file)):
            resolve("arithmetic.accuracy", REWARDS, "reward")


def test_a_function_that_only_the_users_module_has_is_found_there(tmp_path, monkeypatch):
    own(tmp_path, "def shorter(completions, **_):\n    return [7.0]\ndef thought():\n    return [{'prompt': 'hm'}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("arithmetic.shorter", REWARDS)([]) == [7.0]
    assert resolve("arithmetic.thought", tasks.SOURCES)() == [{"prompt": "hm"}]  # ours is a reward


def test_a_folder_a_config_and_an_installed_module_of_a_name_are_no_functions(tmp_path, monkeypatch):
    (tmp_path / "math").mkdir()
    (tmp_path / "gsm8k.py").write_text("def get_config():\n    c = {}\n    c['convert'] = 'gsm8k.convert'\n")
    installed = tmp_path / "site"
    installed.mkdir()
    own(installed)
    monkeypatch.setattr(user_modules, "INSTALLED", (*user_modules.INSTALLED, str(installed)))
    for folder in (tmp_path, installed):
        monkeypatch.syspath_prepend(folder)
    assert resolve("math.accuracy", REWARDS).__module__ == "jaxrl_llm.tasks.math"
    assert resolve("gsm8k.convert", CONVERTERS).__module__ == "jaxrl_llm.tasks.gsm8k"
    assert resolve("arithmetic.accuracy", REWARDS).__module__ == "jaxrl_llm.tasks.arithmetic"


@pytest.mark.parametrize(("name", "kind"), [
    ("arithmetic.accuracy", "SOURCES"), ("arithmetic.train", "REWARDS"), ("math.equal", "REWARDS"),
    ("search.f1", "ENVIRONMENTS"), ("gsm8k.accuracy", "CONVERTERS"), ("tools.Tools", "TOOLS"),
    ("encyclopedia.convert", "CONVERTERS"), ("gsm8k.train", "SOURCES"),  # files without this kind
])  # fmt: skip
def test_a_name_of_another_kind_is_refused_and_those_of_the_kind_are_told(refused, name, kind):
    for full in (name, f"jaxrl_llm.tasks.{name}"):
        with refused(f"'{full}' does not exist"):
            resolve(full, getattr(tasks, kind))


def test_each_function_of_a_task_is_offered_as_one_kind():
    kinds = [offered(kind) for kind in list(vars(tasks).values()) if isinstance(kind, Kind)]
    assert min(map(len, kinds)) > 1
    names = [name for kind in kinds for name in kind]
    assert len(names) == len(set(names))


def test_a_reward_beside_the_config_is_found_from_any_working_directory(tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "nearby.py").write_text("def shorter(completions, **_):\n    return [7.0]\n")
    (tmp_path / "lab" / "c.py").write_text("import nearby\n" + a_config(0))
    parse_arguments("test", "", ["--config", str(tmp_path / "lab" / "c.py")])
    assert "nearby" not in sys.modules
    assert resolve("nearby.shorter", REWARDS)([]) == [7.0]


@pytest.mark.parametrize("place", ["the working directory", "the config's folder"])
def test_a_users_module_is_not_replaced_by_ours(tmp_path, monkeypatch, refused, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    file = own(tmp_path if place == "the working directory" else tmp_path / "lab")
    (tmp_path / "lab" / "delta.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'configs')!r})\nimport grpo\n\ndef get_config():\n"
        "    c = grpo.get_config()\n    c.eval = None\n"
        "    c.reward.functions, c.reward.weights = ('arithmetic.accuracy',), (1.0,)\n    return c\n"
    )
    given = parse_arguments("test", "", ["--config", "lab/delta.py"])
    with refused("config.reward.functions 'arithmetic.accuracy'", str(file)):
        recipes.read(given.config)
