"""Translates a config of another trainer: `jaxrl translate FILE [--to mine.py]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxrl_llm.doctor import print_config
from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.terminal import printable
from jaxrl_llm.translate import images, lint, readers, writer
from jaxrl_llm.translate.outcome import KINDS, Translation, translate

DESCRIPTION = (
    "Translates a config of TRL (JSON, YAML, a command line, or a Python script, which is not run), veRL, EasyR1 or "
    "Search-R1 (YAML or a shell script, which is not run) into a config of this package, names every key that has no "
    "counterpart, and checks the result. Exit code 0: the checks pass; 1: they do not, or the run is another one here: "
    "it has images, or lines of the file belong to no key; 2: the file is no such config."
)


def main() -> None:
    parser = Parser("jaxrl_llm.translate", description=DESCRIPTION)
    parser.add_argument("file", type=Path, metavar="FILE", help="the config or script")
    parser.add_argument("--to", type=Path, metavar="FILE", help="a new file, in any folder (default: print the config)")
    parser.add_argument("--rows", type=int, default=0, help="of the training data: makes steps of epochs")
    parser.add_argument("--processes", type=int, default=0, help="that TRL is launched with, which multiply its batch")
    args = parser.parse_args()
    if min(args.rows, args.processes) < 0:
        raise UserError("--rows and --processes count something: give 1 or more")
    sys.exit(run(args.file, args.to, args.rows, args.processes))


def run(file: Path, to: Path | None, rows: int, processes: int) -> int:
    """Translates a file, writes or prints the config, and prints what became of its keys. Returns the exit code."""
    found = readers.read(file)
    if processes and not found.system.name.startswith("TRL"):
        raise UserError(f"--processes: the batch of {found.system.name} does not depend on it; leave it out")
    if to and (to.suffix != ".py" or to.exists()):
        raise UserError(f"--to {to}: give a new file that ends with .py" + (", this one is there" * to.exists()))
    if to and not to.parent.is_dir():
        raise UserError(f"--to {to}: there is no folder {to.parent}: make it first")
    made = translate(found.system, found.keys, rows=rows, processes=processes, referred=found.referred)
    text = writer.source(made, file, to or Path(f"{file.stem}.py"), found.lost)
    checked = lint.lint(lint.load_text(text), set(made.yours()))
    if to:
        try:
            to.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--to {to} cannot be written ({error.strerror}): name a file in another folder") from None
    else:
        print(text)
    pictures = images.evidence(found.keys)
    print_first(found, pictures)
    print_keys(made, file)
    print_checks(
        made, checked, f"{to} is written and complete; " if to else "", "of all but the images " * bool(pictures)
    )
    return int(bool(checked.refused or pictures or found.lost))


def print_first(found: readers.Source, pictures: str) -> None:
    """Prints what makes the run another one here, and what the file says only with a default."""
    if pictures:
        _say(f"not supported: this run has images ({pictures}), and no model here takes them: train refuses the config")
    for line in found.lost:
        _say(f"belongs to no key of the training command: {line}")
    for note in found.notes:
        _say(f"note: {note}")


def print_keys(made: Translation, file: Path) -> None:
    """Prints how many keys are mapped, changed, unsupported and without effect, and which."""
    table = Table(title=f"{file.name}: {len(made.outcomes)} keys of {made.system.name} ({made.system.version})")
    table.add_column("", no_wrap=True)
    table.add_column("keys", justify="right")
    table.add_column("which")
    for kind in KINDS:
        outcomes = made.of_kind(kind)
        if kind in ("mapped", "changed"):
            told = [f"{key} -> {', '.join(one.fields) or 'nothing to set'}" for key, one in outcomes.items()]
        else:
            told = [f"{', '.join(keys)}: {said}" for said, keys in writer.by_reason(outcomes).items()]
        table.add_row(kind, str(len(outcomes)), printable("\n".join(told)))
    Console(highlight=False, markup=False, width=120).print(table)


def print_checks(made: Translation, checked: lint.Linted, written: str, of: str) -> None:
    """Prints what the checks and the rules of the doctor say, and what is left to the user.

    written: that the file is there; of: what the checks look at.
    """
    for name, why in made.yours().items():
        _say(f"yours to set: {name}: {why}")
    if checked.totals:
        _say(f"{written}the checks {of}pass" + (", with stand-ins for what is yours to set" if made.yours() else ""))
        print_config(checked.totals, checked.findings, checked.blind)
    else:
        _say(f"{written}the checks refuse it: {checked.refused}")
    if checked.missing:
        _say(checked.missing)


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True, markup=False).print(printable(text))


if __name__ == "__main__":
    run_main(main)
