"""The notebook, run from top to bottom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"


def outputs(notebook: Path) -> tuple[str, int]:
    """All that the cells printed, and how many figures they drew."""
    printed = [out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", [])]
    assert not [out for out in printed if out["output_type"] == "error"]
    text = "".join("".join(out.get("text", "")) for out in printed)
    return text, sum("image/png" in out.get("data", {}) for out in printed)


def test_the_notebook_is_kept_with_its_outputs():
    text, figures = outputs(NOTEBOOK)
    assert "accuracy" in text
    assert figures == 1


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_model_learn(tmp_path):
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "--output-dir", str(tmp_path)]
    environment = os.environ | {
        "WORKDIR": str(tmp_path / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run([*command, str(NOTEBOOK)], env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    text, figures = outputs(tmp_path / NOTEBOOK.name)
    assert figures == 1
    final = [line for line in text.splitlines() if "accuracy" in line][-1]
    assert float(final.split("accuracy ")[1].split("%")[0]) >= 90, final
