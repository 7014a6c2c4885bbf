"""The commands of the pages: the parser of each program reads them, and what they name is there.

The slow test at the end runs the blocks of README and of the tutorials.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from conftest import QUICK
from fake_cloud import LAUNCH
from test_distributed import free_port

from jaxrl_llm import configs
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load
from jaxrl_llm.recipe import missing
from jaxrl_llm.tools.__main__ import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"]
PAGES += [ROOT / "doctor" / "README.md"]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("sh", "bash", "shell", "console")  # languages of blocks
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)  # within a line of text
COMMAND = re.compile(r"(jaxrl|jaxrl-doctor|pytest|pip|sbatch|launch/\w+\.\w+) |python [-\w]|--config\.[a-z]")
# Of a reader's own: what the commands of the pages name.
OWN = {"rules.py": "def polite(completions, **columns): ...\n", "math.jinja": "{{ content }}"}
OF_SYSTEM = {"curl", "docker", "gcloud", "pre-commit"}  # programs that these tests do not know
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Yields the words of each command, and whether it stands in a block, as a whole command does."""
    text = page.read_text()
    for language, block in FENCED.findall(text):
        lines = block.replace("\\\n", " ").splitlines() if language in SHELLS else ()
        for line in lines:
            yield from ((words, True) for words in split(line))
    for _, span in CODE.findall(FENCED.sub("", text)):
        if COMMAND.match(span):
            yield from ((words, False) for words in split(span))


def split(line: str) -> Iterator[list[str]]:
    """Yields the commands of a line of shell."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    for word in [*reader, ";"]:
        if word not in ("&&", ";", "&", "|"):
            words.append(word)
        elif words:
            yield words
            words = []


@pytest.fixture(name="parser_of")
def make_parser_of(monkeypatch):
    """Returns the parser of a main function, which is not run any further."""

    class Parses(Exception):
        pass

    def parse(self, *_):
        raise Parses(self)

    def parser_of(main):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["jaxrl x"])
            patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
            with pytest.raises(Parses) as caught:
                main()
        return caught.value.args[0]

    return parser_of


def check_program(parser: argparse.ArgumentParser, words: list[str], whole: bool) -> None:
    """Checks the words after a program's name."""
    if "--help" in words:
        return
    if not whole:  # a part of a command, in which a capital word stands for something
        check_flags(words, parser._option_string_actions)
        return
    known, rest = parser.parse_known_args(load._join_values(words))
    if "--config" not in parser._option_string_actions or not known.config:
        assert rest == []
        return
    config = load.load(known.config)
    for word in rest:
        load.override(config, *word.removeprefix("--config.").split("=", 1))
    with missing.collected():
        recipes.read_either(config.lock())


def check_flags(words: list[str], known) -> None:
    """Checks that each flag is known, and each field is one of a shipped config."""
    for flag in [word.partition("=")[0] for word in words if word.startswith("--")]:
        field = flag.removeprefix("--config.")
        assert field in ({*fields(), "a.b"} if field != flag else known), flag


@cache
def fields() -> set[str]:
    """Returns the fields and the sections of the shipped configs."""
    names = {name for config in configs.names() for name in load.flatten(load.load(config))}
    return {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}


def check_python(words: list[str], whole: bool, parser_of) -> None:
    """Checks the words after `python`."""
    programs = {module.removesuffix(".__main__"): module for module, _ in PROGRAMS.values()}
    match words:
        case ["-c", text]:
            compile(text, "docs", "exec")
        case ["-m", "venv", _]:
            pass
        case [file] if Path(file).is_file():  # in a copy of ROOT that has the files of the page too
            pass
        case ["-m", module, *rest] if module in programs:
            check_program(parser_of(import_module(programs[module]).main), rest, whole)
        case ["-m", module, *_] if module.startswith("benchmarks"):
            file = ROOT / module.replace(".", "/")  # the slow test below has the options of benchmarks
            assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module
        case _:
            raise AssertionError(words)


def check_pytest(words: list[str]) -> None:
    """Checks files, markers, and that a test has each word of -k."""
    files = [ROOT / word for word in words if word.startswith("tests/")] or [*(ROOT / "tests").rglob("test_*.py")]
    text = "".join(file.read_text() for file in files)
    options = dict(pairwise(words))
    markers = {line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(re.findall(r"\w+", options.get("-m", ""))) - {"not", "or", "and"} <= markers
    assert all(word in text for word in re.findall(r"\w+", options.get("-k", "")) if word not in ("not", "or", "and"))


def check_pip(words: list[str]) -> None:
    """Checks that this package has each extra."""
    extras = {*PYPROJECT["project"]["optional-dependencies"]}
    for names in re.findall(r"(?:^\.|jaxrl_llm)\[(.*)\]$", "\n".join(words), re.MULTILINE):
        assert {*names.split(",")} <= extras, names


def check_launch(script: Path, words: list[str]) -> None:
    """Checks options of a launch script: by a dry run, if it has one."""
    text = script.read_text()
    if "--name" in words or script.suffix == ".sbatch":
        done = subprocess.run([script, "--dry-run", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert all(word.partition("=")[0] in text for word in words if word.startswith("--") and word != "--help"), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_command_that_its_program_refuses(page, parser_of, tmp_path, monkeypatch):
    for file in ROOT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL)
    for name, text in [*OWN.items(), *blocks]:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for words, whole in commands(page):
        try:
            check(words, whole, parser_of)
        except Exception as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}: {error}") from error
    for name in OWN:
        sys.modules.pop(Path(name).stem, None)


def check(words: list[str], whole: bool, parser_of) -> None:
    """Checks a command. Raises what the parser or a check raises."""
    for path in re.findall(r"(?:^|[ =])((?:configs|benchmarks|tests|launch|jaxrl_llm)/[\w./-]+)", " ".join(words)):
        assert (ROOT / path).exists() or "NAME" in path, path
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    match program:
        case "jaxrl":
            if rest != ["--help"]:
                check_program(parser_of(import_module(PROGRAMS[rest[0]][0]).main), rest[1:], whole)
        case "jaxrl-doctor":
            check_program(parser_of(import_module("jaxrl_llm.health.doctor").main), rest, whole)
        case "python" | "python3":
            check_python(rest, whole, parser_of)
        case "pytest":
            check_pytest(rest)
        case "pip":
            check_pip(rest)
        case "sbatch":
            check_launch(ROOT / rest[1], rest[2:])
        case _ if program.startswith("launch/"):
            check_launch(LAUNCH / Path(program).name, rest)
        case _ if program.startswith("--config."):
            check_flags(words, ())
        case _:
            assert program in OF_SYSTEM, program


# Commands in text of any form, such as a docstring, where a place may stand for the reader's own value.
SOURCES = [file for folder in ("configs", "benchmarks", "jaxrl_llm") for file in (ROOT / folder).rglob("*.py")]
SOURCES += [file for file in LAUNCH.iterdir() if file.is_file()]
SHOWN = re.compile(
    r"(?:python3? -m (?P<module>(?:jaxrl_llm|benchmarks)(?:\.\w+)+)|\bjaxrl (?P<tool>[a-z][\w-]+))(?P<rest>[^`\n]*)"
)
PLACE = re.compile(r"[A-Z]+|value\W*|.*\.\.\.")


def shown_commands() -> list[tuple[str, str, str]]:
    """Returns (page, module, arguments) of every command of a page or a source file."""
    shown = set()
    for page in [*PAGES, *SOURCES]:
        text = re.sub(r"\\+\n\s*(?:# )?", " ", page.read_text())  # one that goes on in the next line
        for match in SHOWN.finditer(text):
            module = match["module"] or PROGRAMS[match["tool"]][0]
            shown.add((str(page.relative_to(ROOT)), module, match["rest"].split(" # ")[0].strip()))
    return sorted(shown)


def test_every_program_is_shown():
    assert {match["tool"] for page in PAGES for match in SHOWN.finditer(page.read_text())} >= set(PROGRAMS)


@pytest.mark.slow
def test_a_command_of_a_source_file_or_benchmark_is_one_that_it_accepts(parser_of):
    peers = ("trl_logs", "trl_real_logs", "peer_trl", "peer_tunix")  # import what is not installed here
    count = 0
    for page, name, rest in shown_commands():
        on_page = page.endswith(".md") and name.startswith("jaxrl_llm")  # for the test of pages
        if on_page or name.endswith(peers):
            continue
        count += 1
        module = import_module(name)
        main = module.main if hasattr(module, "main") else import_module(f"{name}.__main__").main
        file = re.search(r"configs/[\w/]+\.py", rest)
        config = load.load(ROOT / file[0] if file and (ROOT / file[0]).is_file() else "grpo")
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]*(?:\.[\w.]+=(?:'[^']*'|\S*))?", rest):
            flag, _, value = word.partition("=")
            if flag == "--config." or not flag.startswith("--config."):
                assert flag.rstrip(".") in parser_of(main)._option_string_actions, (page, name, flag)
            elif not PLACE.fullmatch(value):
                load.override(config, flag.removeprefix("--config."), value.strip("'"))
        if "translate" not in name:
            paths = re.findall(r"(?:--config |^)(configs/[\w/]+\.py)", rest)
            assert [path for path in paths if not (ROOT / path).is_file()] == [], page
    assert count > 100


# Names of other trainers, which pages set beside ours, and fields that no shipped config has.
OF_OTHERS = {"optim.lr", "data.train_batch_size", "data.rollout_batch_size", "rollout.n", "rollout.n_agent"}
IN_NO_CONFIG = {"data.mixture", "env.functions", "eval.extra_sets"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_field_that_a_page_names_is_in_a_config(page):
    tops = {field.partition(".")[0] for field in fields() if "." in field}
    left_out = {field for field, value in load.flatten(load.load("grpo")).items() if value is None}
    text = FENCED.sub("", page.read_text())
    if page.stem == "coming_from":  # the first column of its tables has the keys of other trainers
        text = re.sub(r"^\|[^|]*", "", text, flags=re.MULTILINE)
    spans = [span for _, span in CODE.findall(text)]
    matches = [re.match(r"(?:config\.|c\.)?([a-z_]+(?:\.[a-z_]+)+)(?= =|$)", span) for span in spans]
    named = {match[1] for match in matches if match and match[1].partition(".")[0] in tops}
    unknown = {name for name in named - fields() if name.rpartition(".")[0] not in left_out}
    assert {name for name in unknown if Path(name).suffix not in (".json", ".jsonl", ".py")} <= OF_OTHERS | IN_NO_CONFIG


# Commands of README and of the tutorials that no test can run here: they need the network, the TPU compiler or Google
# Cloud. The test of pages has parsed them too, and .ci/run runs README's installations.
NOT_RUN = re.compile(r"python3 -m venv|(\.venv/bin/)?pip install|jaxrl plan|gcloud|launch/tpu_pod(?!.*--dry-run)")
LEFT_FILES = {
    "README": ("runs/sums/hf", "runs/sums/report.html", "best", "mine.py"),
    "start_tpu": ("runs/rehearsal/hf",),
}
# Fields that make the runs of the pages short, and the `jaxrl` of the pages: this checkout, with these fields.
SHORT = (
    "num_steps=2 prompts_per_step=4 prompts_per_update=4 group_size=2 eval.problems=8 eval.every=1 kl=none "
    "optim.warmup_steps=0 rollout.max_completion_tokens=4 reward.timeout=0.0 health.self_test=False"
)
JAXRL = f"""#!/bin/sh
[ "$1" != train ] || set -- "$@" {" ".join(f"--config.{field}" for field in SHORT.split())}
exec {sys.executable} -m jaxrl_llm.tools "$@"
"""


@pytest.mark.slow
def test_the_shell_blocks_of_readme_and_the_tutorials_run(tmp_path):
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("start_*.md")):
        folder = tmp_path / page.stem
        (folder / "bin").mkdir(parents=True)
        for file in ROOT.iterdir():
            if file.name not in (".venv", "runs"):
                (folder / file.name).symlink_to(file)
        (folder / "run.sh").write_text((ROOT / "tests/tools/translated/search_r1_grpo.sh").read_text())
        (folder / "bin" / "jaxrl").write_text(JAXRL)
        (folder / "bin" / "jaxrl").chmod(0o755)
        environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "XLA_FLAGS": QUICK}
        environment["PYTHONPATH"] = str(ROOT)
        text = "".join(block for language, block in FENCED.findall(page.read_text()) if language in SHELLS)
        lines = [" ".join(line.split("#")[0].split()) for line in text.replace("\\\n", " ").splitlines()]
        script = "\n".join(line for line in lines if not NOT_RUN.match(line))
        script = script.replace(":9000,", f":{free_port()},") + "\nwait"
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", script], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [name for name in LEFT_FILES.get(page.stem, ()) if not (folder / name).exists()] == []
