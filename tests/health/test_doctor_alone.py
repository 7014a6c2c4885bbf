"""The distribution `doctor/`: a part of the package that is installed without JAX, under a name of its own."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor import REAL, rows_of, told
from test_house import imported_from

import jaxrl_llm
from jaxrl_llm.health import doctor, logs
from jaxrl_llm.health.judge import judge_records
from jaxrl_llm.health.trl import DoctorCallback

ROOT = Path(__file__).parents[2]
ALONE = tomllib.loads((ROOT / "doctor" / "pyproject.toml").read_text())
MAIN = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "jaxrl_llm"
ROOM = [*(PACKAGE / "health").rglob("*.py")]
FILES = [*ROOM, PACKAGE / "__init__.py", PACKAGE / "errors.py"]


def test_all_of_the_room_is_packaged_and_only_errors_besides():
    folders = {".".join(("jaxrl_doctor", *file.parent.relative_to(PACKAGE).parts)) for file in ROOM}
    packaged = ALONE["tool"]["setuptools"]
    assert (set(packaged["packages"]), packaged["py-modules"]) == (folders, ["jaxrl_doctor.errors"])


def test_what_is_packaged_imports_itself_and_packages_installed_with_it():
    imported = {"rich": "rich", "numpy": "numpy", "scipy": "scipy", "tensorboardX": "tensorboardX"}
    imported |= {"google": "tensorboardX"}  # protobuf, which it needs
    required = {requirement.split(">=")[0] for requirement in ALONE["project"]["dependencies"]}
    assert required == set(imported.values())
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                source = imported_from(node, file.relative_to(ROOT))
                inside = [ROOT / Path(*f"{source}.{name.name}".split(".")) for name in node.names]
                inside.append(ROOT / Path(*source.split(".")))
                assert {x.with_suffix(".py") for x in inside} & set(FILES) or inside[-1] / "__init__.py" in FILES, file
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                for name in {str(name).split(".")[0] for name in names} - sys.stdlib_module_names:
                    assert name in imported or (file.name, name) == ("trl.py", "transformers"), (file, name)


def test_its_bounds_of_versions_are_no_tighter_than_those_of_the_package():
    main = {x.split(">=")[0]: x.split(">=")[1].split(" ")[0] for x in MAIN["project"]["dependencies"] if ">=" in x}
    for requirement in ALONE["project"]["dependencies"]:
        name, _, least = requirement.partition(">=")
        assert name == "numpy" or [int(x) for x in least.split(".")] <= [int(x) for x in main[name].split(".")], name


def test_the_package_does_not_import_the_doctor_under_its_other_name():
    for file in PACKAGE.rglob("*.py"):
        assert "import jaxrl_doctor" not in file.read_text() and "from jaxrl_doctor" not in file.read_text(), file


def follow(name: str, *, resumed_at: int = 0, steps: int | None = None, first: bool = True) -> None:
    """Calls the callback as TRL's trainer does with the rows of a log. first: whether this is process 0."""
    rows = rows_of(name)[:steps]
    callback, state = DoctorCallback(), SimpleNamespace(log_history=[], global_step=0, is_world_process_zero=first)
    state.log_history = rows[:resumed_at]
    callback.on_train_begin(None, state, None)
    for row in rows[resumed_at:]:
        state.global_step = row["step"]
        callback.on_log(None, state, None, logs=row)
    callback.on_train_end(None, state, None)


@pytest.mark.parametrize("name", ["many_epochs", "never_stops", "healthy_4_epochs"])
def test_the_callback_says_what_the_doctor_says_of_the_whole_log(name, monkeypatch, capsys):
    _, found = told(REAL / f"{name}.json", monkeypatch, capsys)
    follow(name)
    lines = capsys.readouterr().out.splitlines()
    expected = {f"jaxrl-doctor, step {one['first_step']}: {one['severity']}: " for one in found.values()}
    assert {next((x for x in expected if line.startswith(x)), line) for line in lines} == expected
    assert len(lines) == len(found)


def test_the_callback_of_a_resumed_run_knows_the_start_and_judges_the_end(capsys):
    for part in (dict(resumed_at=6), dict(steps=8)):
        follow("never_stops", **part)
        assert "step 8: error: " in capsys.readouterr().out


def test_the_callback_is_silent_on_other_processes(capsys):
    follow("never_stops", first=False)
    assert not capsys.readouterr().out


def test_the_exit_code_of_a_warning_or_an_error(monkeypatch, capsys, wording):
    runs = {("never_stops.json",): 1, ("never_stops.json", "--fail-on", "never"): 0, ("nowhere.json",): 2}
    for (name, *flag), code in runs.items():
        monkeypatch.setattr(sys, "argv", ["jaxrl-doctor", str(REAL / name), *flag])
        with pytest.raises(SystemExit) as ended:
            doctor.run_installed_command()
        assert ended.value.code == code
    wording(capsys.readouterr().err)


@pytest.mark.slow
def test_it_is_installed_without_jax_beside_the_package_and_judges_a_log(tmp_path):
    # A copy: setuptools builds in the folder, and takes what an older build has left there.
    for folder in ("doctor", "jaxrl_llm"):
        left = shutil.ignore_patterns("build", "*.egg-info", "assets", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    constraints = ["-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "install", "--quiet", tmp_path / "doctor", *constraints], check=True, capture_output=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True).stdout
    packages = {one["name"].lower(): one["version"] for one in json.loads(listed)}
    packages = {name: x for name, x in packages.items() if name not in ("pip", "setuptools")}
    assert packages["jaxrl-doctor"] == jaxrl_llm.__version__
    assert len(packages) <= 15 and not {"jax", "flax", "transformers", "torch", "jaxrl-llm"} & packages.keys()
    (record,) = (tmp_path / "venv").rglob("jaxrl_doctor-*.dist-info/RECORD")
    tops = {Path(line.split(",")[0]).parts[0] for line in record.read_text().splitlines()}
    assert tops == {"jaxrl_doctor", record.parent.name, ".."}  # the last one has the command
    for name, code in (("never_stops", 1), ("healthy", 0)):
        command = [python.parent / "jaxrl-doctor", REAL / f"{name}.json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, "")
        found = judge_records(logs.read(REAL / f"{name}.json"), logs.OTHER_TRAINER_BOUNDS)
        assert all(span.finding.line() in done.stdout for span in found) and len(found) == 2 * code
