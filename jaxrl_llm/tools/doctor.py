"""Says what is wrong with a run: `jaxrl doctor --config FILE` before it, `--run DIR` during or after."""

from __future__ import annotations

import ast
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import build
from jaxrl_llm.config.load import config_parser, flatten, load, parse_config
from jaxrl_llm.errors import UserError, printable, run_main
from jaxrl_llm.health import rules
from jaxrl_llm.health.finding import SEVERITIES, Finding, LogRecord
from jaxrl_llm.health.history import History
from jaxrl_llm.recipe import advice
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.self_test import CheckReport
from jaxrl_llm.session.banner import totals_table
from jaxrl_llm.structs import Config, Sizes
from jaxrl_llm.tools import logs

DESCRIPTION = (
    "Looks at a config (with --selftest also at its run, at step 0), or at the log of a run: a workdir of ours; "
    "TensorBoard's folder, JSON lines, a CSV file of W&B or a trainer_state.json of TRL, veRL or EasyR1. "
    "Exit code 0: no error is found; 1: one is; 2: it could not look."
)
SAME_RESULT = (
    "microbatch",
    "model.row_parts",
    "model.remat",
    "host_memory.",
    "mesh.",
    "engine.devices",
    "health.",
    "checkpoint.",
    "log.",
)
REASONS = 3  # why rules could not look, in a line
FOREIGN_BOUNDS = {"max_skipped": 0}  # for logs of other trainers, which do not count skipped updates


class Spell(NamedTuple):
    """A finding, and when it was there."""

    finding: Finding  # the last one
    first: int
    last: int
    steps: int  # in which it was there
    lapses: int = 0  # times that it had gone and came back

    def record(self) -> dict[str, Any]:
        return self.finding.record() | {"first_step": self.first, "last_step": self.last, "steps": self.steps}


def main() -> None:
    parser = config_parser("jaxrl_llm.tools.doctor", DESCRIPTION, required=False)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a workdir, or the log of another trainer")
    parser.add_argument(
        "--selftest", action="store_true", help="also build the run of the config, and check what must hold at step 0"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args, rest = parser.parse_known_args()
    if (args.config is None) == (args.run is None) or (args.run and (rest or args.selftest)):
        raise UserError("give --config FILE, with --config.field=value, or --run DIR alone")
    findings = look_at_run(args.run, args.json) if args.run else look_at_config(*parse_config(parser))
    sys.exit(int(any(finding.severity == "error" for finding in findings)))


def look_at_run(path: Path, as_json: bool) -> list[Finding]:
    """Applies the rules over records to a log, prints what they find, and returns it. Raises: UserError."""
    records = logs.read(path)
    spells = judge(records, logs.bounds(path) or FOREIGN_BOUNDS, logs.initial_findings(path))
    if as_json:
        spell_records = [spell.record() for spell in spells]
        report = {"findings": spell_records, "rules": len(rules.RULES), "could_not_look": rules.blind(records)}
        print(json.dumps(report, indent=2))
    else:
        print_spells(spells, records)
    return [spell.finding for spell in spells]


def look_at_config(config: Config, args: Namespace) -> list[Finding]:
    """Applies the rules over settings to a config, prints what they find, and returns it. Uses no device.

    With --selftest, it also runs the self-test, on the devices. Raises: UserError, if the config is wrong.
    """
    recipe = recipes.read_either(config)
    changed = tuple(overrides(flatten(config), Path(args.config)))
    judged = advice.RunSettings(recipe, advice.width_of(recipe), changed=changed)
    findings, blind = advice.findings(judged), advice.blind(judged)
    self_tests = self_test_of(config, quiet=args.json) if args.selftest else []
    findings += [finding for checked in self_tests for finding in checked.findings]
    if args.json:
        report = {"totals": recipe.sizes.totals(), "findings": [finding.record() for finding in findings]}
        report |= {"rules": len(advice.RULES), "could_not_look": blind}
        report |= {"self_test": [checked.record() for checked in self_tests if checked.id]} if self_tests else {}
        print(json.dumps(report, indent=2))
    else:
        print_config(recipe.sizes, findings, blind)
    return findings


def overrides(fields: Mapping[str, Any], file: Path) -> list[str]:
    """Returns which fields of a config differ from its file, if the file says what it measured: ["epochs = 4", ...]."""
    if "Measured" not in (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""):
        return []
    measured = flatten(load(file))
    changed = {name: value for name, value in fields.items() if value != measured.get(name)}
    return [f"{name} = {value!r}" for name, value in changed.items() if not name.startswith(SAME_RESULT)]


def self_test_of(config: Config, *, quiet: bool) -> list[CheckReport]:
    """Runs the self-test of a config's run in a temporary workdir. Prints a line for each check, unless quiet.

    Raises: UserError, if the run cannot be built.
    """
    if recipes.read_either(config).program != "train":
        raise UserError("--selftest: supervised fine-tuning has no self-test; give the config of a run of `train`")
    with config.unlocked():  # it saves and logs nothing
        config.checkpoint.keep, config.checkpoint.keep_best = 1, 0
        config.log.to, config.log.project = (), ""
    with ExitStack() as resources:
        # Standard output is for the JSON alone.
        if quiet:
            resources.enter_context(redirect_stdout(sys.stderr))
        workdir = Path(resources.enter_context(TemporaryDirectory()))
        session, parts = resources.enter_context(build(config, workdir))
        session.restore()
        checks_run = []
        for checked in self_test.check(parts, session.at.states, full=True):
            print(printable(checked.line()), flush=True)
            checks_run.append(checked)
        parts.rest()
    return checks_run


def judge(records: Iterable[LogRecord], bounds: dict[str, Any], before: Iterable[Finding] = ()) -> list[Spell]:
    """Applies the rules after every record, as a run does, and returns what they find, the worst first.

    before: findings of step 0, which no record shows.
    """
    judge = Judge(bounds, before)
    for record in records:
        judge.add(record)
    return judge.spells()


class Judge:
    """Applies the rules to records one by one. before: findings of step 0, which no record shows."""

    def __init__(self, bounds: dict[str, Any], before: Iterable[Finding] = ()):
        self._bounds, self._history = bounds, History()
        self._spells = {finding.id: Spell(finding, 0, 0, 1) for finding in before}
        self._at = 0  # step of the last record

    def add(self, record: LogRecord) -> None:
        """Adds the next record."""
        self._history.add(record)
        for finding in rules.findings(self._history, self._bounds):
            last = self._spells.get(finding.id)
            at = record.get("at", record["step"])
            first, steps, lapses = (last.first, last.steps, last.lapses) if last else (at, 0, 0)
            # It was not found at the last record, so it had gone and comes back.
            lapses += last is not None and last.last != self._at
            self._spells[finding.id] = Spell(finding, first, at, steps + 1, lapses)
        self._at = record.get("at", record["step"])

    def spells(self) -> list[Spell]:
        """Returns what the rules have found, the worst first."""
        return sorted(self._spells.values(), key=lambda x: (-SEVERITIES.index(x.finding.severity), x.first))


def print_spells(spells: list[Spell], records: list[LogRecord]) -> None:
    """Prints the findings of a run."""
    console = Console(highlight=False, soft_wrap=True)
    first, last = (record.get("at", record["step"]) for record in (records[0], records[-1]))
    console.print(f"{len(records):,} records, of steps {first:,} to {last:,}", markup=False)
    for spell in spells:
        when = f"steps {spell.first:,} to {spell.last:,}" if spell.last > spell.first else f"step {spell.first:,}"
        when = f"{spell.steps:,} of the {when}" if spell.lapses else when
        console.print(printable(f"{when}: {spell.finding.line()}"), markup=False)
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


def print_config(sizes: Sizes, findings: list[Finding], blind: dict[str, str]) -> None:
    """Prints what follows from a config, its findings, and which rules could look; blind: {rule: why it could not}."""
    console = Console(highlight=False, soft_wrap=True)
    for name, value in totals_table(sizes):
        console.print(f"  {name:<28}  {value:,}", markup=False)
    for finding in findings:
        console.print(printable(finding.line()), markup=False)
    if not findings:
        console.print("no rule finds anything")
    for line in could_look(len(advice.RULES), blind):
        console.print(printable(line), markup=False)


if __name__ == "__main__":
    run_main(main)
