"""Says what is wrong with a run: `jaxrl doctor --config FILE` before it, `--run DIR` during or after."""

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
from jaxrl_llm.data.rows import check_there
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
    f"Looks at a config (with --selftest also at its run, at step 0), or at the log of a run: {LOG_KINDS}. "
    f"{EXIT_CODES} "
    "3: none is, but this machine lacks a package, file or model that the config names, and all else was judged."
)
LACKS = 3  # the exit code
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


def main() -> None:
    parser = config_parser("jaxrl_llm.tools.doctor", DESCRIPTION, required=False)
    help_of_run = "a workdir, or the log of another trainer; several files are joined by their steps"
    parser.add_argument("--run", type=Path, nargs="+", metavar="LOG", help=help_of_run)
    parser.add_argument(
        "--selftest", action="store_true", help="also build the run of the config, and check what must hold at step 0"
    )
    add_output_flags(parser)
    args, rest = parser.parse_known_args()
    if (args.config is None) == (args.run is None) or (args.run and (rest or args.selftest)):
        raise UserError("give --config FILE, with --config.field=value, or --run LOG alone")
    if args.run:
        args.run = [bucket.fetch_run(path, "--run") for path in args.run]
        sys.exit(exit_code(diagnose_log(args.run, args.json), args.fail_on))
    findings, missing = look_at_config(*parse_config(parser))
    sys.exit(exit_code(findings, args.fail_on) or LACKS * bool(missing))


def look_at_config(config: Config, args: Namespace) -> tuple[list[Finding], list[str]]:
    """Applies the rules over settings to a config. Prints and returns the findings, and what this machine lacks.

    Uses no device. With --selftest, it also runs the self-test, on the devices. Raises: UserError, if the config is
    wrong.
    """
    with collected() as missing:
        recipe = recipes.read_either(config)
        width = look_around(recipe)
    changed = tuple(overrides(flatten(config), Path(args.config)))
    judged = advice.RunSettings(recipe, width, changed=changed)
    findings, blind = advice.findings(judged), advice.blind(judged)
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
            print(printable(f"not here, and not looked at: {line}"))
    return findings, missing


def look_around(recipe: Recipe | SftRecipe) -> int | None:
    """Looks for the files of rows and the model. Returns the policy's width; None: its config.json is not here."""
    sections: dict[str, Any] = {f"data.mixture.{name}": part for name, part in recipe.data.mixture.items()}
    sections = (sections or {"data": recipe.data}) | recipe.eval_sets
    for name, section in sections.items():
        with tried():
            check_there(f"config.{name}.source", section.source)
    width = None
    with tried():
        width = advice.width_of(recipe)
        if not width:
            path = recipe.model.path
            raise MissingHere(
                f"config.model.path = {path!r} is not in the hub's cache: fetch its width (hf download {path} "
                "config.json)"
            )
    return width


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


if __name__ == "__main__":
    run_main(main)
