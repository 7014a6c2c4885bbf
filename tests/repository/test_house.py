"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "jaxrl_llm").rglob("*.py"))


SECTIONS = (
    "optim.py:make_optimizer",
    "engines.py:vllm",
    "engine.py:__init__",
    "advantages.py:gae_turns",
    "code.py:accuracy",
    "judge.py:score",
)  # their arguments are the fields of a config's section, or what a config gives to a reward function


@cache
def trees() -> dict[Path, ast.Module]:
    """Returns the syntax tree of each file. A function, because each process of the tests imports this module."""
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in PACKAGE}


@cache
def functions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (ROOT / file, node)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def branches(node: ast.AST) -> int:
    return sum(
        isinstance(x, ast.If | ast.IfExp | ast.For | ast.While | ast.Try | ast.comprehension) for x in ast.walk(node)
    )


def test_a_function_fits_on_a_screen_and_takes_few_arguments():
    long = [f"{file.name}:{node.name}" for file, node in functions() if lines(node) > 80]
    wide = [
        f"{file.name}:{node.name}"
        for file, node in functions()
        if len([a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg != "self"]) > 8
        and f"{file.name}:{node.name}" not in SECTIONS
    ]
    assert (long, wide) == ([], [])


def test_the_formatter_is_trusted():
    assert sum(len(re.findall(r"# fmt:", file.read_text())) for file in PACKAGE) <= 5


def test_the_loop_reads_like_a_page():
    loop = {node.name: node for file, node in functions() if file == ROOT / "jaxrl_llm" / "train.py"}
    assert len((ROOT / "jaxrl_llm" / "train.py").read_text().splitlines()) <= 100
    assert lines(loop["train"]) <= 40
    assert lines(loop["rl_step"]) <= 50
    assert branches(loop["train"]) + branches(loop["rl_step"]) <= 8


def test_only_models_know_of_flax_and_tasks_losses_and_advantages_of_no_device():
    for file in PACKAGE:
        text = file.read_text()
        assert "flax" not in text or file.parent.name == "models", file
        if file.parent.name == "tasks" or file.name in ("losses.py", "advantages.py", "kl.py"):
            assert not re.search(r"\b(Mesh|jax\.devices|device_put|sharding)\b", text), file


def test_no_config_value_has_a_hidden_default_and_no_section_is_asked_for():
    for file in PACKAGE:
        text = file.read_text()
        assert not re.search(r"config(\.\w+)*\.get\(", text), file
        assert file.parent.name == "recipe" or not re.search(r"[\"'] (not )?in [\w.]*config", text), file


def test_every_file_that_readme_and_agents_name_is_there_and_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    tree = text.split("```text\njaxrl_llm/")[1].split("```")[0]
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line)
        for name in re.findall(r"[\w/]+\.py|[\w/]+/(?=\s|$)", names[1] if line.startswith("  ") else ""):
            assert (ROOT / "jaxrl_llm" / name).exists(), name
    for name in re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / "AGENTS.md").read_text()):
        assert (ROOT / name).exists() or (ROOT / "jaxrl_llm" / name).exists(), name


LEVELS = (  # of the rooms, the lowest first: imports run down
    "structs errors configs", "config", "machine", "health", "algorithms", "models", "sandbox", "retriever", "tasks",
    "data", "learner", "rollout", "loggers", "selftest", "session", "recipe", "build", "train", "sft", "tools",
    "evaluate",
)  # fmt: skip
CENTRE = ("build.py", "session/session.py", "session/opening.py", "session/loop.py")  # what knows all parts of a run
MODULES = {
    ".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in (f.relative_to(ROOT) for f in PACKAGE)
}


def imported_from(node: ast.ImportFrom, file: Path) -> str:
    """Returns the full name of the module that `from MODULE import` names, also with a relative name."""
    above = ".".join(file.parts[: len(file.parts) - node.level]) if node.level else ""
    return ".".join(name for name in (above, node.module) if name)


def imports() -> set[tuple[str, str]]:
    """Returns the pairs of modules of which the first imports the second, also for types alone."""
    pairs = set()
    for file, tree in trees().items():
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (source := imported_from(node, file)):
                for name in node.names:
                    full = f"{source}.{name.name}"
                    pairs.add((module, full if full in MODULES else source))
    return {(a, b) for a, b in pairs if b in MODULES and "." in a and "." in b}


def room(module: str) -> str:
    return module.split(".")[1]


def test_no_file_imports_itself_by_way_of_others():
    graph: dict[str, set[str]] = {}
    for module, imported in imports():
        graph.setdefault(module, set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_numbers_of_the_house_fall():
    level = {name: i for i, names in enumerate(LEVELS) for name in names.split()}
    pairs = imports()
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    fields = [sum(isinstance(x, ast.AnnAssign) for x in node.body) for node in nodes if isinstance(node, ast.ClassDef)]
    today = {
        "imports that run up": sum(level[room(b)] > level[room(a)] for a, b in pairs),
        "classes with the name of another class": len(classes) - len({*classes}),
        "fields of the largest record": max(fields),
        "modules that build.py imports": len({b for a, b in pairs if a == "jaxrl_llm.build"}),
        "files at the top": sum(len(file.parts) == 2 for file in trees()),
        "branches of the centre": sum(branches(trees()[Path("jaxrl_llm", file)]) for file in CENTRE),
    }
    assert {name: count for name, count in today.items() if count > BOUNDS[name]} == {}, today


BOUNDS = {  # a change may lower them
    "imports that run up": 0,
    "classes with the name of another class": 0,
    "fields of the largest record": 32,  # DecoderConfig
    "modules that build.py imports": 50,
    "files at the top": 7,
    "branches of the centre": 44,
}


def test_only_programs_builder_recipes_tools_and_reader_see_a_config():
    takers = {
        file.relative_to(ROOT / "jaxrl_llm").parts[0]
        for file, node in functions()
        for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if a.annotation and ast.unparse(a.annotation) == "Config"
    }
    assert takers <= {"config", "recipe", "build.py", "train.py", "sft.py", "tools"}


def test_every_stored_message_belongs_to_a_test():
    texts = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    for key in json.loads((ROOT / "tests" / "wording.json").read_text()):
        file, name = key.split("::")
        assert re.search(rf"def {name.split('[')[0]}\(", texts.get(file, "")), key


def test_the_name_of_a_test_has_at_most_70_letters():
    names = [
        node.name.removeprefix("test_")
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 70] == []
