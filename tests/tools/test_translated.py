"""`jaxrl translate` on files in the forms that third parties publish: what every field of ours must be.

translated/ has the files, written for this test; expected.yaml says what each must become, and how that is known.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from test_translate import hub_installed  # noqa: F401 (a fixture)

from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import __main__ as program
from jaxrl_llm.tools.translate.outcome import Translation

FILES = Path(__file__).parent / "translated"
EXPECTED = {
    str(table.parent.relative_to(FILES) / name): expected
    for table in sorted(FILES.rglob("expected.yaml"))
    for name, expected in yaml.safe_load(table.read_text()).items()
}


class Translated(NamedTuple):
    """What the program makes of a file. said: without the keys that are mapped or have no effect."""

    code: int
    said: str
    config: dict[str, Any]
    yours: dict[str, str]


@pytest.fixture
def translated(tmp_path, monkeypatch, capsys):
    results: list[Translation] = []
    translate = program.translate

    def kept(*args: Any, **more: Any) -> Translation:
        results.append(translate(*args, **more))
        return results[-1]

    def run(file: str, processes: int) -> Translated:
        # Without the repository above it, whose files a script may seem to name.
        shutil.copytree((FILES / file).parent, tmp_path / "files")
        to = tmp_path / "mine.py"
        try:
            code = program.run(tmp_path / "files" / Path(file).name, to, 0, processes)
        except UserError as error:
            return Translated(2, str(error), {}, {})
        keys = results[0].with_kind("changed") | results[0].with_kind("unsupported")
        said = "\n".join([capsys.readouterr().out, *(f"{key}: {each.reason}" for key, each in keys.items())])
        return Translated(code, said, flatten(load(to)), results[0].user_tasks())

    monkeypatch.setattr(program, "translate", kept)
    monkeypatch.setattr(program, "print_keys", lambda *args: None)
    return run


@pytest.mark.parametrize("file", EXPECTED)
def test_a_file_of_a_third_party_becomes_its_own_run(file, translated):
    expected = EXPECTED[file]
    lines = differences(expected, translated(file, expected.get("processes", 0)))
    assert not lines, "\n".join(["", *lines])


def differences(expected: dict[str, Any], actual: Translated) -> list[str]:
    """Returns a line for each thing that is not as expected."""
    fields, yours = expected.get("fields", {}), expected.get("yours", [])
    values = {name: actual.config.get(name, "absent") for name in fields}
    # A section is the user's if one of its fields is.
    missing = [name for name in yours if not any(f"{each}.".startswith(f"{name}.") for each in actual.yours)]
    return [
        *([f"exit {actual.code}, not {expected['exit']}"] if actual.code != expected["exit"] else []),
        *(f"{name} = {x!r}, not {fields[name]!r}" for name, x in values.items() if not equal(x, fields[name])),
        *(f"{name} is the user's to set, and nothing says so" for name in missing),
        *(f"{name} is known, and left to the user" for name in fields if name in actual.yours and name not in yours),
        *(f"{text!r} is lost, and nothing says so" for text in expected.get("lost", []) if text not in actual.said),
    ]


def equal(value: Any, expected: Any) -> bool:
    if isinstance(value, float) and isinstance(expected, float | int):
        return math.isclose(value, expected, rel_tol=1e-9)
    return (list(value) if isinstance(value, tuple) else value) == expected
