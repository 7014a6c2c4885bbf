"""Translates a config of another trainer: `jaxrl translate FILE [--to mine.py]`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from jaxrl_llm.errors import Parser, UserError, printable, run_main
from jaxrl_llm.machine import disk
from jaxrl_llm.tools.translate import images, readers, writer
from jaxrl_llm.tools.translate.outcome import KINDS, Translation, translate
from jaxrl_llm.tools.translate.table import SENTENCES


def main() -> None:
    parser = Parser("jaxrl_llm.tools.translate", description=SENTENCES["DESCRIPTION"])
    parser.add_argument("file", type=Path, metavar="FILE", help="the config or script")
    parser.add_argument("--to", type=Path, metavar="FILE", help="a new file, in any folder (default: print the config)")
    parser.add_argument("--rows", type=int, default=0, help="number of training rows, which makes steps of epochs")
    parser.add_argument("--processes", type=int, default=0, help="processes of TRL, which multiply its batch")
    args = parser.parse_args()
    if min(args.rows, args.processes) < 0:
        raise UserError("--rows and --processes must be 0 (unknown) or more")
    sys.exit(run(args.file, args.to, args.rows, args.processes))


def run(file: Path, to: Path | None, rows: int, processes: int) -> int:
    """Translates a file, writes or prints the config, and prints what became of its keys. Returns the exit code."""
    if to and to.suffix != ".py":
        raise UserError(f"--to {to}: must be a new file that ends with .py")
    disk.check_output("--to", to)
    source = readers.read(file)
    if processes and not source.table.name.startswith("TRL"):
        raise UserError(
            f"--processes {processes} has no effect, because the batch of {source.table.name} counts all processes: "
            "leave --processes out"
        )
    translation = translate(
        source.table, source.keys, rows=rows, processes=processes, referred=source.referred, pinned=source.pinned
    )
    text = writer.source(translation, file, to or Path(f"{file.stem}.py"), source.lost)
    written = ""
    if to:
        with disk.writing_output("--to", to), to.open("x", encoding="utf-8") as config:
            config.write(text)
        written = f"{to} is written{' and complete' * (not translation.unknown())}; "
    else:
        print(text)
    refusal = images.refusal(source.keys)
    # The output is a config alone if it has one, so that it can be sent to a file.
    with redirect_stdout(sys.stdout if to else sys.stderr):
        print_first(source, translation, refusal)
        print_keys(translation, file)
        print_tasks(translation)
        # The checks import JAX, which takes longer than the translation that is printed above.
        from jaxrl_llm.tools.translate import lint

        subject = f"{written}the checks {'of all but the model ' if refusal else ''}"
        passes = lint.check(text, translation.user_tasks(), subject)
    # A task such as moving a function does not count, because `train` refuses the config until it is done.
    return int(bool(not passes or refusal or source.lost or translation.unknown()))


def print_first(source: readers.ForeignConfig, translation: Translation, refusal: str) -> None:
    """Prints the version of the file, why the run may be another one, and notes on its values."""
    table = translation.table
    lines = [f"version: {note}" for note in translation.notes]
    lines += [f"not supported: {refusal}: train refuses the config"] if refusal else []
    lines += [f"not read as a setting: {line}" for line in source.lost]
    lines += [f"note: {note}" for note in (*source.notes, images.note(source.keys)) if note]
    if table.releases.history and not translation.notes:
        lines.append(f"version: the file shows none, so the defaults are those of {table.version}{table.releases.hint}")
    for line in lines:
        _say(line)


def print_keys(translation: Translation, file: Path) -> None:
    """Prints the keys that are mapped, changed, unsupported and without effect."""
    _say(f"{file.name}: {len(translation.outcomes)} keys of {translation.table.name} ({translation.table.version})")
    for kind in KINDS:
        outcomes = translation.with_kind(kind)
        if kind in ("mapped", "changed"):
            lines = [f"{key} -> {', '.join(outcome.fields) or 'nothing to set'}" for key, outcome in outcomes.items()]
        else:
            lines = writer.reason_lines({key: outcome.reason for key, outcome in outcomes.items()})
        _say("\n  ".join([f"{kind}: {len(outcomes)}", *lines]))


def print_tasks(translation: Translation) -> None:
    """Prints what is left to the user."""
    fields, tasks = translation.fields(), translation.user_tasks()
    for reason, names in writer.names_by_reason(tasks).items():
        is_key = names[0] in (translation.outcomes.keys() | translation.table.rules.keys()) - fields.keys()
        _say(f"{'may change the run' if is_key else 'yours to set'}: {', '.join(names)}: {reason}")


def _say(text: str) -> None:
    """Prints a line of a text that a file may contain, without characters that control the terminal."""
    print(printable(text))


if __name__ == "__main__":
    run_main(main)
