"""Mutation testing: how many small faults, drawn by a seed from the whole package, do the tests find?

    pip install cosmic-ray
    LINES_FOLDER=runs/lines PYTHONPATH=tests pytest -p lines    # Python 3.12 or newer; the tests that run each line
    python tests/mutants.py runs/lines runs/mutants.jsonl       # an hour; the same command continues

Run both in a clone of its own, because the second changes the files of jaxrl_llm while it runs. For each mutant it runs
the tests that run its line, the quickest first. A mutant survives if all pass; it is "late" if they take longer than
--seconds. With `-m slow` in the first command, and --slow in the second, the slow tests try what is left.
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
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, islice
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
SECONDS: dict[str, float] = {}  # of each test
NO_FAULT = re.compile(r"\s*(\*,|@dataclass|if __name__ ==)")  # lines whose mutants behave alike


def mutants(file: str) -> list[tuple[str, int, int, str]]:
    """Returns file, line, occurrence and operator of each mutant of a file."""
    nodes, found = list(ast_nodes(get_ast_from_path(Path(file)))), []
    lines = Path(file).read_text().splitlines()
    for name in OPERATORS:
        places = (place for node in nodes for place in get_operator(name)().mutation_positions(node))
        found += [(file, start[0], occurrence, name) for occurrence, (start, _) in enumerate(places)]
    return [mutant for mutant in found if not NO_FAULT.match(lines[mutant[1] - 1])]


def parses(mutant: tuple[str, int, int, str]) -> bool:
    file, _, occurrence, name = mutant
    try:
        ast.parse(mutate_code(Path(file).read_text(), get_operator(name)(), occurrence))
    except SyntaxError:
        return False
    return True


def draw(seed: int) -> Iterator[tuple[str, int, int, str]]:
    """Yields mutants without end: a file by its number of lines, a line of the file, a mutant of the line."""
    source, by_file = random.Random(seed), {}
    files = [str(file) for file in sorted(Path("jaxrl_llm").rglob("*.py")) if file.name != "receive.py"]
    sizes = [len(Path(file).read_text().splitlines()) * (1 + bool(DRAWN_TWICE.search(file))) for file in files]
    while True:
        (file,) = source.choices(files, sizes)
        if every := by_file.setdefault(file, mutants(file)):
            line = source.choice(sorted({mutant[1] for mutant in every}))
            mutant = source.choice([mutant for mutant in every if mutant[1] == line])
            if parses(mutant):
                yield mutant


def read_lines(folder: Path) -> dict[str, dict[int, set[str]]]:
    """Returns the tests by file and line, as tests/lines.py wrote them, and fills SECONDS."""
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    records = {record.stem: json.loads(record.read_text()) for record in folder.glob("*.json")}
    for started in folder.glob("*.*[0-9]"):  # processes of tests; the record of a test that was interrupted is missing
        records.get(started.stem, {"lines": []})["lines"].extend(started.read_text().split())
    for record in records.values():
        SECONDS[record["test"]] = record["seconds"]
        for place in record["lines"]:
            file, _, line = place.rpartition(":")
            tests[file][int(line)].add(record["test"])
    return tests


def tests_of(file: str, line: int, lines: dict[int, set[str]]) -> list[str]:
    """Returns the tests that run a statement, the quickest first; of one that an import runs, those of its file."""
    enclosing = [node for node in ast.walk(ast.parse(Path(file).read_text())) if _has(node, line)]
    statement = max((node for node in enclosing if isinstance(node, ast.stmt)), key=lambda node: node.lineno)
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    found = set().union(*(lines[i] for i in range(statement.lineno, max(last, line) + 1) if i in lines))
    if not any(isinstance(node, ast.FunctionDef) and node is not statement for node in enclosing):
        found = set().union(*lines.values())
    if not lines:  # constants alone, or code that runs in the sandbox, which records nothing: the tests of the room
        found = {test for test in SECONDS if test.startswith(f"tests/{Path(file).parts[1]}/")}
    return sorted(found, key=SECONDS.__getitem__)


def _has(node: ast.AST, line: int) -> bool:
    first = min((decorator.lineno for decorator in getattr(node, "decorator_list", ())), default=line + 1)
    return min(getattr(node, "lineno", line + 1), first) <= line <= getattr(node, "end_lineno", 0)


def found_by(tests: list[str], seconds: int, *options: str) -> str:
    """Returns the first test that fails, "" if all pass, or "late" if none of those that these seconds hold fails."""
    timed = list(accumulate(SECONDS[test] for test in tests))
    chosen = [test for test, end in zip(tests, timed, strict=True) if end <= seconds] or tests[:1]
    ids = Path(tempfile.gettempdir(), f"mutants.{os.getpid()}")
    ids.write_text("\n".join(chosen))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *options, f"@{ids}"]
    limits = dict(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (3 * seconds, 3 * seconds)), start_new_session=True
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
    if process.returncode == 0:
        return "" if len(chosen) == len(tests) else "late"
    functions = sorted({test.partition("[")[0] for test in tests})
    if "ERROR: not found" in output and functions != tests:  # the mutant changed a value that names the cases of a test
        SECONDS.update({function: SECONDS.get(function, 0.0) for function in functions})
        return found_by(functions, seconds, *options)
    assert process.returncode in (1, 2) or "ERROR collecting" in output, output[-2000:]
    return (failed or [output[-300:]])[0]


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
    parser.add_argument("lines", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="K N: every Nth mutant, from the Kth (0 1)")
    parser.add_argument("--seconds", type=int, default=60, help="for the tests of a mutant")
    parser.add_argument(
        "--slow", action="store_true", help="run the slow tests for what the default tests did not find"
    )
    options = parser.parse_args()
    rows = [json.loads(row) for row in options.results.read_text().splitlines()] if options.results.exists() else []
    lines = read_lines(options.lines)
    for index, mutant in enumerate(islice(draw(options.seed), options.part[0], options.count, options.part[1])):
        tests = tests_of(mutant[0], mutant[1], lines[mutant[0]])
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
