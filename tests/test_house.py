"""The house rules that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "jaxrl_llm").rglob("*.py"))


@pytest.mark.parametrize("file", PACKAGE, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_file_of_the_package_is_over_300_lines(file):
    assert len(file.read_text().splitlines()) <= 300


def test_only_models_know_of_flax_and_rewards_losses_and_advantages_of_no_device():
    for file in PACKAGE:
        text = file.read_text()
        assert "flax" not in text or file.parent.name == "models", file
        if file.parent.name == "rewards" or file.name in ("losses.py", "advantages.py", "kl.py"):
            assert not re.search(r"\b(Mesh|jax\.devices|device_put|sharding)\b", text), file


def test_no_config_value_has_a_hidden_default():
    for file in PACKAGE:
        assert not re.search(r"config(\.\w+)*\.get\(", file.read_text()), file


def test_every_file_that_readme_names_is_there_and_it_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "@@" not in text
    tree = text.split("```text\njaxrl_llm/")[1].split("```")[0]
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line)
        for name in re.findall(r"[\w/]+\.py|[\w/]+/(?=\s|$)", names[1] if line.startswith("  ") else ""):
            assert (ROOT / "jaxrl_llm" / name).exists(), name
