"""Every config of configs/ says what the checks allow, and docs/algorithms.md knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_llm import checks, config

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("sft", "grpo_vllm"))


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_passes_the_checks_and_names_its_command(file):
    checks.check_train(config.load(file).lock())
    assert f"--config configs/recipes/{file.name}" in file.read_text()


def test_the_config_with_a_server_of_its_own_passes_the_checks(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.combinations.check_python", lambda python, name: None)
    checks.check_train(config.load(ROOT / "configs" / "grpo_vllm.py").lock())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_config_passes_the_checks_names_its_command_and_is_measured(file):
    c = config.load(file)
    if "teacher" in c:
        c.teacher.path = "somewhere"
    checks.check_train(c.lock())
    text = file.read_text()
    assert f"--config configs/{file.name}" in text
    assert file.stem == "grpo" or len(text.splitlines()) <= 30
    assert f'"{file.stem}"' in (ROOT / "benchmarks" / "algorithms.py").read_text()
    measured = (ROOT / "docs" / "algorithms.md").read_text().split("## Measured")[1].split("\n## ")[0]
    assert f"| `{file.stem}` |" in measured
