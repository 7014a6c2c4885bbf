"""The commands of the pages: the parser of each program reads them, and what they name is there. Nothing is run."""

from __future__ import annotations

import argparse
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
from fake_cloud import LAUNCH

from jaxrl_llm import configs
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load
from jaxrl_llm.recipe import missing
from jaxrl_llm.tools.__main__ import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"]
PAGES += [ROOT / "doctor" / "README.md"]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
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
        lines = block.replace("\\\n", " ").splitlines() if language in ("sh", "bash", "shell", "console") else ()
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
            file = ROOT / module.replace(".", "/")  # test_published has the options of benchmarks
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
