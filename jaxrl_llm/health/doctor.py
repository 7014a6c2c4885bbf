"""Diagnoses a run from its log: the commands `jaxrl-doctor LOG`, which needs no JAX, and `jaxrl doctor --run LOG`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from ..errors import Parser, UserError, printable, run_main
from . import logs, rules
from .finding import SEVERITIES, Finding, LogRecord
from .judge import FindingSpan, judge_records
from .settings import translated

LOG_KINDS = (
    "a work directory of jaxrl_llm, or a log of TRL, veRL, EasyR1, prime-rl or SkyRL: trainer_state.json, a "
    "TensorBoard folder, JSON lines, a CSV or .wandb file of W&B, or the console output"
)
EXIT_CODES = (
    "Exit code 0: no finding is as severe as --fail-on; 1: at least one is; 2: the log cannot be read, or the "
    "command is wrong."
)
LISTED_REASONS = 3  # number of reasons that are printed for rules without a judgment


def main() -> None:
    parser = Parser("jaxrl_doctor.health.doctor", description=f"Diagnoses the log of a run: {LOG_KINDS}. {EXIT_CODES}")
    log_help = "a file or folder; several files, such as CSV files of W&B panels, are joined by step"
    parser.add_argument("log", type=Path, nargs="+", metavar="LOG", help=log_help)
    add_output_flags(parser)
    args = parser.parse_args()
    sys.exit(exit_code(diagnose_log(args.log, args.json), args.fail_on))


def add_output_flags(parser: ArgumentParser) -> None:
    """Adds the flags --json and --fail-on."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--fail-on",
        choices=("warning", "error", "never"),
        default="error",
        help="lowest severity of a finding that makes the exit code 1 (default: error)",
    )


def exit_code(findings: Iterable[Finding], fail_on: str) -> int:
    """Returns 1 if a finding is at least as severe as `fail_on`, else 0; always 0 for "never"."""
    severe = SEVERITIES[SEVERITIES.index(fail_on) :] if fail_on in SEVERITIES else ()
    return int(any(finding.severity in severe for finding in findings))


def diagnose_log(paths: list[Path], as_json: bool, run: str = "") -> list[Finding]:
    """Applies the health rules to a log, prints the findings, and returns them.

    paths: files or folders of one run's log. as_json: whether to print JSON. run: work directory or address of the run
    whose steps `jaxrl replay` can open, "" = the run of `paths`. Raises: UserError, if the log cannot be read.
    """
    records = logs.read(*paths)
    if not records:
        raise UserError(f"{paths[0]} has no record yet: wait for its first step, or name another log")
    spans = judge_records(
        records, logs.read_health_section(paths[0]) or logs.OTHER_TRAINER_BOUNDS, logs.initial_findings(paths[0])
    )
    run = (run or str(paths[0])) if logs.is_run_of_train(paths[0]) else ""
    if as_json:
        commands = [{"replay": span.replay_command(run)} if run else {} for span in spans]
        finding_records = [span.record() | command for span, command in zip(spans, commands, strict=True)]
        report = {
            "findings": finding_records,
            "rules": len(rules.RULES),
            "could_not_look": rules.unjudged_rules(records),
        }
        print(json.dumps(report, indent=2))
    else:
        print_findings(spans, records, run)
    return [span.finding for span in spans]


def print_findings(spans: list[FindingSpan], records: list[LogRecord], run: str = "") -> None:
    """Prints the findings of a run, and how many rules could judge it.

    run: run whose steps `jaxrl replay` can open, "" = none.
    """
    console = Console(highlight=False, soft_wrap=True)
    first_step, last_step = (record.get("at", record["step"]) for record in (records[0], records[-1]))
    console.print(f"{len(records):,} records, of steps {first_step:,} to {last_step:,}", markup=False)
    for span in spans:
        steps_text = f"steps {span.first:,} to {span.last:,}" if span.last > span.first else f"step {span.first:,}"
        steps_text = f"{span.steps:,} of the {steps_text}" if span.lapses else steps_text
        console.print(printable(f"{steps_text}: {span.finding.line()}"), markup=False)
        if run and (command := span.replay_command(run)):
            console.print(printable(f"  open the step: {command}"), markup=False)
    if "at" in records[0]:
        for line in translated(span.finding for span in spans):
            console.print(f"  {line}", markup=False)
    if not spans:
        console.print("no rule has a finding")
    for line in summarize_judging(len(rules.RULES), rules.unjudged_rules(records)):
        console.print(line, markup=False)


def summarize_judging(count: int, blind: dict[str, str]) -> list[str]:
    """Returns lines that tell how many rules could judge a run, and the most frequent reasons why others could not.

    count: number of all rules. blind: {rule: reason} of the rules that could not judge.
    """
    reasons: dict[str, list[str]] = {}
    for rule, reason in blind.items():
        reasons.setdefault(reason, []).append(rule)
    by_frequency = sorted(reasons, key=lambda reason: -len(reasons[reason]))
    listed_reasons = ", ".join(f"{', '.join(reasons[reason])} ({reason})" for reason in by_frequency[:LISTED_REASONS])
    unlisted_count = sum(len(reasons[reason]) for reason in by_frequency[LISTED_REASONS:])
    more_text = f", and {unlisted_count} more (--json lists all)" if unlisted_count else ""
    return [
        f"{count - len(blind)} of {count} rules could judge",
        *([f"could not judge: {listed_reasons}{more_text}"] if listed_reasons else []),
    ]


def run_installed_command() -> NoReturn:
    """Runs the installed command `jaxrl-doctor`, and exits."""
    sys.argv[0] = "jaxrl-doctor"  # --help shows this name.
    run_main(main)


if __name__ == "__main__":
    run_installed_command()
