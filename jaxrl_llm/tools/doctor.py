"""Finds problems of a run: `jaxrl doctor --config FILE` before the run, `--run DIR` during the run or after it."""

from __future__ import annotations

import ast
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import build
from jaxrl_llm.config.load import config_parser, flatten, load, parse_config
from jaxrl_llm.data.rows import check_exists
from jaxrl_llm.errors import MissingHere, UserError, printable, run_main
from jaxrl_llm.health.doctor import EXIT_CODES, LOG_KINDS, add_output_flags, diagnose_log, exit_code
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.machine import bucket
from jaxrl_llm.recipe import advice
from jaxrl_llm.recipe.advice import print_config
from jaxrl_llm.recipe.missing import collected, tried
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.self_test import CheckReport
from jaxrl_llm.structs import Config

DESCRIPTION = (
    "Finds problems of a config (with --selftest also of its run at step 0), or of a run in its log: "
    f"{LOG_KINDS}. {EXIT_CODES} "
    "3: no such finding, but this machine lacks a package, file or model that the config names; the rest was checked."
)
MISSING_EXIT_CODE = 3  # exit code if this machine lacks something that the config names
# Fields, or beginnings of fields, that do not change the measured result of a run.
FIELDS_WITHOUT_EFFECT = (
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


def main() -> None:
    """Judges a config, or the log of a run, and prints the findings."""
    parser = config_parser("jaxrl_llm.tools.doctor", DESCRIPTION, required=False)
    help_of_run = "a work directory, or the log of another trainer; records of several files are joined by their steps"
    parser.add_argument("--run", type=Path, nargs="+", metavar="LOG", help=help_of_run)
    parser.add_argument(
        "--selftest", action="store_true", help="also build the run of the config, and run its self-test at step 0"
    )
    add_output_flags(parser)
    args, overrides = parser.parse_known_args()
    if (args.config is None) == (args.run is None) or (args.run and (overrides or args.selftest)):
        raise UserError("use either --config FILE, with --config.FIELD=VALUE and --selftest, or --run LOG alone")
    # The log of a run is judged by the health rules, and a config by the rules for settings.
    if args.run:
        folders = [bucket.fetch_run(path, "--run") for path in args.run]
        run = bucket.address(args.run[0]) or str(args.run[0])
        sys.exit(exit_code(diagnose_log(folders, args.json, run), args.fail_on))
    findings, missing = look_at_config(*parse_config(parser))
    sys.exit(exit_code(findings, args.fail_on) or MISSING_EXIT_CODE * bool(missing))


def look_at_config(config: Config, args: Namespace) -> tuple[list[Finding], list[str]]:
    """Applies the rules for settings to a config. Prints and returns the findings, and what this machine lacks.

    The rules use no device, but --selftest runs the self-test on the devices. Raises: UserError, for a wrong config.
    """
    with collected() as missing:
        recipe = recipes.read_either(config)
        width = find_inputs(recipe)
    # A config file may record a measured result, which does not hold for a run with other values.
    changed = tuple(overrides(flatten(config), Path(args.config)))
    settings = advice.RunSettings(recipe, width, changed=changed)
    findings, blind = advice.findings(settings), advice.blind(settings)
    self_tests = self_test_of(config, quiet=args.json) if args.selftest else []
    findings += [finding for checked in self_tests for finding in checked.findings]
    if args.json:
        report: dict[str, Any] = {
            "missing": missing,
            "totals": recipe.sizes.totals(),
            "findings": [finding.record() for finding in findings],
        }
        report |= {"rules": len(advice.RULES), "could_not_look": blind}
        report |= {"self_test": [checked.record() for checked in self_tests if checked.id]} if self_tests else {}
        print(json.dumps(report, indent=2))
    else:
        print_config(recipe.sizes, findings, blind)
        for line in missing:
            print(printable(f"missing on this machine, so not checked: {line}"))
    return findings, missing


def find_inputs(recipe: Recipe | SftRecipe) -> int | None:
    """Checks that the files of rows and the model exist. Returns the policy's width, None without its config.json."""
    sections: dict[str, Any] = {f"data.mixture.{name}": part for name, part in recipe.data.mixture.items()}
    sections = (sections or {"data": recipe.data}) | recipe.eval_sets
    for name, section in sections.items():
        with tried():
            check_exists(f"config.{name}.source", section.source)
    width = None
    with tried():
        width = advice.width_of(recipe)
        if not width:
            path = recipe.model.path
            raise MissingHere(
                f"config.model.path = {path!r} is not in the cache of the hub, so its width is unknown: run "
                f"hf download {path} config.json"
            )
    return width


def overrides(fields: Mapping[str, Any], file: Path) -> list[str]:
    """Returns the fields of a config that differ from its file, as ["epochs = 4"]; [] if the file has no result."""
    if "Measured" not in (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""):
        return []
    measured = flatten(load(file))
    changed = {name: value for name, value in fields.items() if value != measured.get(name)}
    return [f"{name} = {value!r}" for name, value in changed.items() if not name.startswith(FIELDS_WITHOUT_EFFECT)]


def self_test_of(config: Config, *, quiet: bool) -> list[CheckReport]:
    """Runs the self-test of a config's run in a temporary workdir. Prints a line for each check, unless quiet.

    Raises: UserError, if the run cannot be built.
    """
    if recipes.read_either(config).program != "train":
        raise UserError("--selftest needs a config of `train`, because supervised fine-tuning has no self-test")
    with config.unlocked():  # the self-test saves few checkpoints and uses no logger
        config.checkpoint.keep, config.checkpoint.keep_best = 1, 0
        config.log.to, config.log.project = (), ""
    with ExitStack() as resources:
        # Standard output must have nothing but the JSON of --json.
        if quiet:
            resources.enter_context(redirect_stdout(sys.stderr))
        workdir = Path(resources.enter_context(TemporaryDirectory()))
        session, parts = resources.enter_context(build(config, workdir))
        session.restore()
        checks_run = []
        for checked in self_test.all_reports(parts, session.run_state.states, full=True):
            print(printable(checked.line()), flush=True)
            checks_run.append(checked)
        parts.wait_until_idle()
    return checks_run


if __name__ == "__main__":
    run_main(main)
