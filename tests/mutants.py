"""Mutation testing: how many small faults, drawn by a seed from the whole package, do the tests find?

    pip install cosmic-ray
    python tests/mutants.py runs/mutants.jsonl    # one to three hours; the same command continues

Run it in a clone of its own, because it changes the files of jaxrl_llm while it runs. For each mutant the default tests
run that can reach its file by imports, the nearest first. With --slow, the slow tests run for the mutants that were not
found. A mutant survives if no test fails within the limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

OPERATOR = re.compile(
    r"core/(AddNot|ExceptionReplacer|NumberReplacer|RemoveDecorator|ReplaceAndWithOr|ReplaceOrWithAnd"
    r"|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop"
    r"|.+Operator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq"
    r"|NotEq_Eq|Is_IsNot|IsNot_Is|Delete_Not|Delete_USub))"
)
OPERATORS = [name for name in operator_names() if OPERATOR.fullmatch(name)]
DRAWN_TWICE = re.compile(r"algorithms/|attention|packing|scheduler|pages|sampl|checkpoint|lock|reward|health/")
MISSED = {"", "late"}
NO_FAULT = re.compile(r"\s*(\*,|@dataclass|if __name__ ==)")  # lines whose mutants behave alike


def mutants(file: str) -> list[tuple[str, int, int, str]]:
    """Returns file, line, occurrence and operator of each mutant of a file."""
    nodes, found = list(ast_nodes(get_ast_from_path(Path(file)))), []
    lines = Path(file).read_text().splitlines()
    for name in OPERATORS:
        places = (place for node in nodes for place in get_operator(name)().mutation_positions(node))
        found += [(file, start[0], occurrence, name) for occurrence, (start, _) in enumerate(places)]
    return [mutant for mutant in found if not NO_FAULT.match(lines[mutant[1] - 1])]


def draw(seed: int) -> Iterator[tuple[str, int, int, str]]:
    """Yields mutants without end: a file by its number of lines, a line of the file, a mutant of the line."""
    source, by_file = random.Random(seed), {}
    files = [str(file) for file in sorted(Path("jaxrl_llm").rglob("*.py")) if file.name != "receive.py"]
    sizes = [len(Path(file).read_text().splitlines()) * (1 + bool(DRAWN_TWICE.search(file))) for file in files]
    while True:
        (file,) = source.choices(files, sizes)
        if every := by_file.setdefault(file, mutants(file)):
            line = source.choice(sorted({mutant[1] for mutant in every}))
            yield source.choice([mutant for mutant in every if mutant[1] == line])


def imported(file: str) -> set[str]:
    """Returns the files of this repository that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = name.replace(".", "/")
            found |= {f for f in (f"{path}.py", f"{path}/__init__.py") if Path(f).exists()}
            found |= {str(f) for f in Path("tests").rglob(f"{path}.py")}
    return found


def reaching(file: str, line: int, graph: dict[str, set[str]]) -> list[str]:
    """Returns the files of tests that import a file or name it: first those named alike, then the nearest ones."""
    distance, front = {file: 0}, {file}
    while front:
        front = {f for f, targets in graph.items() if targets & front} - distance.keys()
        distance |= dict.fromkeys(front, max(distance.values()) + 1)
    body = ast.parse(Path(file).read_text()).body
    named = [node.name for node in body if hasattr(node, "name") and node.lineno <= line <= (node.end_lineno or line)]
    words = set(re.split(r"[/_.]", file)) - {"jaxrl", "llm", "py", "test"}
    texts = {f: Path(f).read_text() for f in graph if Path(f).name.startswith("test_")}
    ranks = {}
    for f, text in texts.items():
        if f in distance or re.search(rf"\b{Path(file).stem}\b", text):
            alike = len(words & set(re.split(r"[/_.]", f)))
            mentions = sum(len(re.findall(rf"\b{name}\b", text)) for name in named)
            ranks[f] = (-alike, distance.get(f, 99), -mentions, len(text))
    return sorted(ranks, key=ranks.__getitem__)


def found_by(tests: list[str], seconds: int, *options: str) -> str:
    """Returns the first test that fails, "" if all pass, or "late" if none failed within these seconds of a core."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *options, *tests]
    limits = dict(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)), start_new_session=True
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **limits) as process:
        try:
            output = process.communicate(timeout=10 * seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:  # a test that waits for what never comes
            os.killpg(process.pid, signal.SIGKILL)
            return "a test that hangs"
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    if process.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return "late"
    return "" if process.returncode in (0, 5) else (failed or [output[-300:]])[0]


def try_mutant(mutant: tuple[str, int, int, str], tests: list[str], seconds: int, *options: str) -> dict[str, str]:
    """Changes the file, runs the tests with these options of pytest, and restores the file."""
    file, line, occurrence, name = mutant
    code = Path(file).read_text()
    changed = mutate_code(code, get_operator(name)(), occurrence)
    Path(file).write_text(changed)
    try:
        found = found_by(tests, seconds, *options) if tests else ""
    finally:
        Path(file).write_text(code)
    diff = [pair for pair in zip(code.splitlines(), changed.splitlines(), strict=False) if pair[0] != pair[1]]
    before, after = (text.strip() for text in (diff or [("", "")])[0])
    return {"place": f"{file}:{line}", "before": before, "after": after, "slow" if options else "default": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="K N: every Nth mutant, from the Kth (0 1)")
    parser.add_argument("--seconds", type=int, default=60, help="of a core, for the tests of a mutant")
    parser.add_argument(
        "--slow", action="store_true", help="run the slow tests for what the default tests did not find"
    )
    options = parser.parse_args()
    rows = [json.loads(row) for row in options.results.read_text().splitlines()] if options.results.exists() else []
    graph = {str(f): imported(str(f)) for folder in ("jaxrl_llm", "tests") for f in Path(folder).rglob("*.py")}
    for index, mutant in enumerate(islice(draw(options.seed), options.part[0], options.count, options.part[1])):
        tests = reaching(mutant[0], mutant[1], graph)
        if index == len(rows):
            rows.append(try_mutant(mutant, tests, options.seconds))
        elif options.slow and rows[index]["default"] in MISSED and "slow" not in rows[index]:
            rows[index] |= try_mutant(mutant, tests, options.seconds, "-m", "slow")
        options.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    default, all_tests = (
        sum(any(row.get(kind, "") not in MISSED for kind in kinds) for row in rows)
        for kinds in (["default"], ["default", "slow"])
    )
    print(*(row for row in rows if {row["default"], row.get("slow", "")} <= MISSED), sep="\n")
    print(f"{len(rows)} mutants: the default tests found {default}, and with the slow ones {all_tests}")


if __name__ == "__main__":
    main()
