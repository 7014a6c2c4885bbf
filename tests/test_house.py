"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "jaxrl_llm").rglob("*.py"))


SECTIONS = (
    "optim.py:make_optimizer",
    "engines.py:vllm",
    "engine.py:__init__",
    "code.py:accuracy",
    "judge.py:score",
)  # their arguments are the fields of a config's section, or what a config gives to a reward function
FUNCTIONS = [
    (file, node)
    for file in PACKAGE
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def branches(node: ast.AST) -> int:
    return sum(
        isinstance(x, ast.If | ast.IfExp | ast.For | ast.While | ast.Try | ast.comprehension) for x in ast.walk(node)
    )


def test_a_function_fits_on_a_screen_and_takes_few_arguments():
    long = [f"{file.name}:{node.name}" for file, node in FUNCTIONS if lines(node) > 80]
    wide = [
        f"{file.name}:{node.name}"
        for file, node in FUNCTIONS
        if len([a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg != "self"]) > 8
        and f"{file.name}:{node.name}" not in SECTIONS
    ]
    assert (long, wide) == ([], [])


def test_the_formatter_is_trusted():
    assert sum(len(re.findall(r"# fmt:", file.read_text())) for file in PACKAGE) <= 5


def test_the_loop_reads_like_a_page():
    loop = {node.name: node for file, node in FUNCTIONS if file == ROOT / "jaxrl_llm" / "train.py"}
    assert len((ROOT / "jaxrl_llm" / "train.py").read_text().splitlines()) <= 100
    assert lines(loop["train"]) <= 40
    assert lines(loop["rl_step"]) <= 50
    assert branches(loop["train"]) + branches(loop["rl_step"]) <= 8


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
