"""The command `jaxrl`, the extras, and what a package needs besides its code."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import jaxrl_llm
from jaxrl_llm.errors import PeerLost, StoppedByHealth, UserError, run_main
from jaxrl_llm.retriever import index
from jaxrl_llm.tasks import search
from jaxrl_llm.tools import __main__ as jaxrl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODEL = ROOT / "jaxrl_llm" / "assets" / "arithmetic"


def test_the_licence_is_apache_2_and_all_papers_name_it_and_the_version():
    digest = hashlib.md5((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "3b83ef96387f14655fc854ddc3c6bd57"  # of www.apache.org/licenses/LICENSE-2.0.txt
    citation = (ROOT / "CITATION.cff").read_text()
    assert PROJECT["license"] == re.findall(r"^license: (.*)$", citation, re.MULTILINE)[0] == "Apache-2.0"
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [jaxrl_llm.__version__]
    assert f"## {jaxrl_llm.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_link_of_the_papers_leads_to_a_file():
    for paper in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / paper).read_text()):
            assert (ROOT / link).exists(), (paper, link)


def test_jaxrl_help_lists_the_programs_and_imports_nothing_that_is_slow():
    code = (
        "import sys; from jaxrl_llm.tools.__main__ import main; sys.argv = ['jaxrl', '--help']; main(); "
        "sys.exit(str({'jax', 'numpy', 'transformers', 'rich'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.findall(r"^  ([\w-]+)  ", done.stdout, re.MULTILINE) == list(jaxrl.PROGRAMS), done.stderr
    assert not done.stderr.strip()


HELP = "__import__('argparse').ArgumentParser().parse_args(['--help'])"


@pytest.mark.parametrize(("prints", "unbuffered", "code"), [
    ("print('text')", "", 141),
    ("__import__('rich.console').console.Console().print('text')", "1", 141),
    (HELP, "", 141),
    (HELP, "1", 0),  # argparse itself continues where it cannot print
], ids=["a print", "a console", "help", "help, unbuffered"])  # fmt: skip
def test_a_program_whose_reader_has_gone_ends_quietly(prints, unbuffered, code):
    program = f"from jaxrl_llm.errors import PeerLost, StoppedByHealth, UserError, run_main; run_main(lambda: {prints})"
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, b"")


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError, 2), (StoppedByHealth, 3), (PeerLost, os.EX_TEMPFAIL), (ValueError, 1), (BrokenPipeError, 1)],
)
def test_the_exit_code_tells_a_launcher_whether_to_start_a_run_again(error, code, capsys):
    def ends():
        try:
            raise error("a reason")
        finally:
            raise UserError("nor can it close")

    with pytest.raises(SystemExit) as ended:
        run_main(ends)
    assert ended.value.code == (2 if code == 1 else code)
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: (_ for _ in ()).throw(error("a reason")))
    assert ended.value.code == code
    assert "a reason" in capsys.readouterr().err


@pytest.mark.parametrize("name", jaxrl.PROGRAMS)
def test_each_program_shows_its_arguments_under_the_name_that_was_typed(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrl", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        jaxrl.main()
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: jaxrl {name} ") and "python -m" not in text
    explained = {"train": "grpo", "plan": "grpo", "doctor": "grpo", "sft": "sft"}
    assert re.findall(r"fields are explained in \S+/(\w+)\.py", text) == (
        [explained[name]] if name in explained else []
    )


def test_an_unknown_program_is_answered_by_a_near_name_or_by_all(monkeypatch, refused):
    for name, word in {"serve_vllm": "jaxrl serve-vllm", "trian": "jaxrl train", "x": "train, sft, "}.items():
        monkeypatch.setattr(sys, "argv", ["jaxrl", name])
        with refused(f"jaxrl {name}", word):
            jaxrl.main()


def test_the_installed_command_names_functions_of_the_working_folder(tmp_path, monkeypatch, capsys, wording):
    """As `python -m` does. Python itself puts the folder of the command first in sys.path."""
    assert PROJECT["scripts"]["jaxrl"] == "jaxrl_llm.tools.__main__:run"
    (tmp_path / "nearby.py").write_text(
        "def judge(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])
    words = ["evaluate", "--model", str(MODEL), "--task", "arithmetic", "--function", "nearby.judges"]
    monkeypatch.setattr(sys, "argv", ["jaxrl", *words])
    handlers = dict[int, Any]()
    monkeypatch.setattr(jaxrl.signal, "signal", handlers.__setitem__)
    with pytest.raises(SystemExit) as ended:
        jaxrl.run()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "nearby.judge?" in said.err
    wording(said.err)
    assert handlers == {signal.SIGINT: signal.SIG_DFL}  # Ctrl-C during the imports has no traceback


GRPO = ["train", "--workdir", "run", "--config", "grpo"]
MISSING = {  # -> command, package, extra
    "a page about runs": (["report", "runs/mine"], "plotly", "report"),
    "a page of an evaluation":
        (["evaluate", "--model", "m", "--task", "arithmetic", "--page", "x.html"], "plotly", "report"),
    "rows in Parquet": ([*GRPO, "--config.data.source=rows.parquet"], "pyarrow", "parquet"),
    "a data set of the hub": ([*GRPO, "--config.data.source=me/mine"], "datasets", "hub"),
    "an index of documents": ([*GRPO[:-1], "search_grpo"], "bm25s", "retriever"),
    "a search server": (["serve-retriever", "--corpus", "x.jsonl"], "uvicorn", "retriever"),
    "a tracker": ([*GRPO, "--config.log.to=('wandb',)", "--config.log.project=x"], "wandb", "wandb"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "package", "extra"), MISSING.values(), ids=MISSING)
def test_a_missing_extra_is_named_before_anything_is_written(words, package, extra, tmp_path, monkeypatch, refused):
    for name in [name for name in sys.modules if name.startswith(("jaxrl_llm.tools.report.", "jaxrl_llm.retriever."))]:
        monkeypatch.delitem(sys.modules, name)  # they are imported again, without the package
    for cached in (search._index, index._bm25s):  # as in a process that has made no index yet
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)  # as Python does for a module that is not installed
    monkeypatch.setattr(sys, "argv", ["jaxrl", *words])
    monkeypatch.setattr("jaxrl_llm.models.hf.load_params", lambda *_, **__: pytest.fail("a model is loaded"))
    monkeypatch.chdir(tmp_path)
    with refused(package, f"pip install 'jaxrl_llm[{extra}]'"):
        jaxrl.main()
    assert extra in PROJECT["optional-dependencies"]
    assert not list(tmp_path.rglob("*.*"))


def test_the_tests_need_few_packages_and_each_has_a_version_in_the_constraints():
    constraints = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r"[a-z0-9-]+==[\w.]+(; python_version (<|>=) \"3\.12\")?", line), line
            pin = Requirement(line)
            if not pin.marker or pin.marker.evaluate():
                assert pin.name not in constraints, line
                constraints[pin.name] = pin
    needed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    assert 60 < len(set(installed_for(needed, ("",)))) <= 110
    # README's first command installs at most 80, with pip, setuptools and this package.
    assert len(set(installed_for(PROJECT["dependencies"], ("",)))) + 3 <= 80
    installed = set(installed_for(needed + PROJECT["optional-dependencies"]["ci"], ("",)))
    assert installed <= constraints.keys()
    assert {x for x in installed if (found := version_of(x)) and found not in constraints[x].specifier} == set()


def test_every_package_of_the_tests_installs_on_the_oldest_python():
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    names = installed_for([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]], ("",))
    needs = {name: metadata(name).get("Requires-Python") or "" for name in {*names} if version_of(name)}
    assert {name: python for name, python in needs.items() if not SpecifierSet(python).contains(oldest)} == {}


def version_of(name: str) -> str | None:
    """Returns the version of an installed package; None: an extra that this environment lacks."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_for(requirements: list[str], extras: tuple[str, ...], seen: set[str] | None = None) -> Iterator[str]:
    """Yields the packages of this environment that requirements install, directly or not."""
    seen = set() if seen is None else seen
    for requirement in map(Requirement, requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if f"{name}{requirement.extras}" in seen:
            continue
        seen.add(f"{name}{requirement.extras}")
        if name == "jaxrl-llm":  # of this checkout: what is installed may be of an older one
            ours = [word for extra in requirement.extras for word in PROJECT["optional-dependencies"][extra]]
            yield from installed_for(ours, ("",), seen)
            continue
        yield name
        if version_of(name):
            yield from installed_for(requires(name) or [], ("", *requirement.extras), seen)
