"""The one exception for what a person can put right; everything else is a bug."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """Wrong config, data, checkpoint or reward: one line that names it and the remedy."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as for everything else."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def describe(error: Exception, within: str = "") -> str:
    """An exception of a person's own code as "ValueError: bad row (rewards.py:7)".

    within: the file whose line is wanted, if it is on the stack; otherwise the innermost one.
    """
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said  # names its file and line, and was never on the stack
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    frame = ([f for f in frames if f.filename == within] or frames)[-1]
    return f"{said} ({frame.filename}:{frame.lineno})"


def report(error: BaseException) -> int:
    """Says on stderr what ended the program, a `UserError` in one line, and returns the exit code."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        return 1
    lines: list[str] = []  # what ended the run, then what could not be closed after it
    one: BaseException | None = error
    while one:
        line = f"error: {' '.join(str(one).split())}"
        if isinstance(one, UserError) and line not in lines:
            lines.insert(0, line)
        one = one.__context__ if not one.__suppress_context__ or one.__cause__ else None
    print("\n".join(lines), file=sys.stderr)
    return 2


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs an entry point; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        sys.exit(report(error))
    sys.exit(0)
