"""The notebooks, run from top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def outputs(notebook: Path) -> tuple[str, int]:
    """All that the cells printed, and how many figures they drew."""
    printed = [out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", [])]
    assert not [out for out in printed if out["output_type"] == "error"]
    text = "".join("".join(out.get("text", "")) for out in printed)
    return text, sum("image/png" in out.get("data", {}) for out in printed)


def last_accuracy(text: str) -> float:
    """The accuracy in percent of the last line that has one."""
    return [float(found) for found in re.findall(r"^step +\d+  (?:accuracy|right) ([\d.]+)%", text, re.MULTILINE)][-1]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_kept_with_its_outputs(notebook):
    text, figures = outputs(notebook)
    assert last_accuracy(text) >= 90
    assert figures == 1


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_and_shows_the_model_learn(notebook, tmp_path):
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "--output-dir", str(tmp_path)]
    environment = os.environ | {
        "WORKDIR": str(tmp_path / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run([*command, str(notebook)], env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    text, figures = outputs(tmp_path / notebook.name)
    assert figures == 1
    assert last_accuracy(text) >= 90
