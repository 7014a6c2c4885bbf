"""Says what is wrong with a run by its log: `jaxrl-doctor LOG`, which needs no JAX, and `jaxrl doctor --run LOG`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from ..errors import Parser, printable, run_main
from . import logs, rules
from .finding import SEVERITIES, Finding, LogRecord
from .judge import Spell, judge
from .settings import translated

LOGS = (
    "a workdir of jaxrl_llm; of TRL, veRL, EasyR1, prime-rl or SkyRL a trainer_state.json, TensorBoard's folder, "
    "JSON lines, a CSV or a .wandb file of W&B, or what was printed"
)
EXIT_CODES = (
    "Exit code 0: no finding is as severe as --fail-on; 1: one is; 2: it could not look, or the command is wrong."
)
REASONS = 3  # why rules could not look, in a line


def main() -> None:
    parser = Parser("jaxrl_doctor.health.doctor", description=f"Looks at the log of a run: {LOGS}. {EXIT_CODES}")
    help_of_log = "a file or folder; several files, such as CSV files of W&B's panels, are joined by their steps"
    parser.add_argument("log", type=Path, nargs="+", metavar="LOG", help=help_of_log)
    add_output_flags(parser)
    args = parser.parse_args()
    sys.exit(exit_code(look_at_run(args.log, args.json), args.fail_on))


def add_output_flags(parser: ArgumentParser) -> None:
    """Adds --json and --fail-on."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--fail-on",
        choices=("warning", "error", "never"),
        default="error",
        help="the least severity of a finding that makes the exit code 1 (default: error)",
    )


def exit_code(findings: Iterable[Finding], fail_on: str) -> int:
    """Returns 1 if one of the findings is as severe as fail_on, and 0 otherwise or for "never"."""
    severe = SEVERITIES[SEVERITIES.index(fail_on) :] if fail_on in SEVERITIES else ()
    return int(any(finding.severity in severe for finding in findings))


def look_at_run(paths: list[Path], as_json: bool) -> list[Finding]:
    """Applies the rules over records to a log, prints what they find, and returns it. Raises: UserError."""
    records = logs.read(*paths)
    spells = judge(records, logs.bounds(paths[0]) or logs.BOUNDS, logs.initial_findings(paths[0]))
    if as_json:
        spell_records = [spell.record() for spell in spells]
        report = {"findings": spell_records, "rules": len(rules.RULES), "could_not_look": rules.blind(records)}
        print(json.dumps(report, indent=2))
    else:
        print_spells(spells, records)
    return [spell.finding for spell in spells]


def print_spells(spells: list[Spell], records: list[LogRecord]) -> None:
    """Prints the findings of a run."""
    console = Console(highlight=False, soft_wrap=True)
    first, last = (record.get("at", record["step"]) for record in (records[0], records[-1]))
    console.print(f"{len(records):,} records, of steps {first:,} to {last:,}", markup=False)
    for spell in spells:
        when = f"steps {spell.first:,} to {spell.last:,}" if spell.last > spell.first else f"step {spell.first:,}"
        when = f"{spell.steps:,} of the {when}" if spell.lapses else when
        console.print(printable(f"{when}: {spell.finding.line()}"), markup=False)
    if "at" in records[0]:
        for line in translated(spell.finding for spell in spells):
            console.print(f"  {line}", markup=False)
    if not spells:
        console.print("no rule finds anything")
    for line in could_look(len(rules.RULES), rules.blind(records)):
        console.print(line, markup=False)


def could_look(count: int, blind: dict[str, str]) -> list[str]:
    """Says how many of `count` rules could look, and the most frequent reasons why others could not: {rule: reason}."""
    reasons: dict[str, list[str]] = {}
    for rule, why in blind.items():
        reasons.setdefault(why, []).append(rule)
    by_frequency = sorted(reasons, key=lambda why: -len(reasons[why]))
    listed = ", ".join(f"{', '.join(reasons[why])} ({why})" for why in by_frequency[:REASONS])
    rest = sum(len(reasons[why]) for why in by_frequency[REASONS:])
    more = f", and {rest} more (--json tells all)" if rest else ""
    return [
        f"{count - len(blind)} of {count} rules could look",
        *([f"could not look: {listed}{more}"] if listed else []),
    ]


def run() -> NoReturn:
    """Runs the installed command `jaxrl-doctor`, and exits."""
    sys.argv[0] = "jaxrl-doctor"  # the name that --help shows
    run_main(main)


if __name__ == "__main__":
    run()
