"""The exception for an error that the user can fix, and its report. Any other exception is a bug."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import site
import sys
import sysconfig
import traceback
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
STDOUT = 1  # its file descriptor
READER_GONE = 128 + signal.SIGPIPE
CELL = re.compile(r".*(?:ipykernel_\d|ipython-input-)")  # the file of the code of a notebook's cell


class UserError(Exception):
    """An error in config, data, checkpoint or reward. Its message is one line that names the error and the fix."""

    exit_code: ClassVar[int] = 2  # the same command fails again: a launcher does not start it


class PeerLost(UserError):
    """Another process, a server or a bucket has ended or does not answer."""

    exit_code = os.EX_TEMPFAIL  # 75, "try again": the launchers start the run again


class StoppedByHealth(UserError):
    """A health rule has stopped the run."""

    exit_code = 3


class MissingHere(UserError):
    """This machine lacks what a check looks at, such as a package or a file. The config may be right."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises a one-line `UserError` for a wrong command line."""

    def __init__(self, program: str, **options: Any):
        """program: module that the usage shows, unless `jaxrl NAME` was typed. options: arguments of ArgumentParser."""
        typed = sys.argv[0].startswith(("jaxrl ", "jaxrl-"))
        super().__init__(prog=sys.argv[0] if typed else f"python -m {program}", **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def check_local(field: str, path: str) -> None:
    """Raises: UserError, if a path is in a store that is not read, such as az://b/x, or no text in this locale.

    A `Path` has one slash of the two.
    """
    if any("\udc80" <= character <= "\udcff" for character in path):  # bytes of a name that are no text here
        name = os.fsencode(path)
        raise UserError(f"{field} = {name!r} is no text in this locale: set PYTHONUTF8=1 or LC_ALL=C.UTF-8")
    if re.match(r"(az|abfss?|hdfs):/+", path):
        raise UserError(
            f"{field} = {path!r} is neither on a disk nor in a bucket of gs:// or s3://: mount its store, and give the "
            "folder where it is mounted"
        )


def briefly(error: BaseException) -> str:
    """Describes an exception without the place in a file, for example as "ValueError: bad row"."""
    return printable(f"{type(error).__name__}: {error}")


def describe(error: BaseException, within: str = "") -> str:
    """Describes an exception of the user's code, for example as "ValueError: bad row (rewards.py:7)".

    within: the file to name with its line, if it is on the stack. Otherwise it names the innermost file of the user, or
    "cell" in a notebook; without one, the innermost file.
    """
    message = briefly(error)
    if isinstance(error, SyntaxError):
        return message  # its message has the file and line, which are not on the stack
    return f"{message} ({place(error, within)})"


def place(error: BaseException, within: str = "") -> str:
    """Returns file and line of an exception, such as "rewards.py:7"; within: argument of `describe`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    frames = [f for f in frames if f.filename == within] or [f for f in frames if is_users(f.filename)] or frames
    file = "cell" if CELL.match(frames[-1].filename) else frames[-1].filename
    return f"{file}:{frames[-1].lineno}"


def is_users(file: str) -> bool:
    """Returns whether a file of code belongs to the user, and neither to an installed package nor to this one."""
    others = (*INSTALLED, Path(__file__).parent)
    return bool(CELL.match(file)) or not (file.startswith("<") or any(map(Path(file).is_relative_to, others)))


def report(error: BaseException) -> int:
    """Prints the error that ended the program to stderr, a `UserError` in one line, and returns the exit code.

    That of the error that ended the run, or of the one before it if this was raised while closing.
    """
    if not isinstance(error, UserError):
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return 1
    lines, code = list[str](), error.exit_code  # first the error that ended the run, then errors while closing
    link: BaseException | None = error  # of the chain of errors, the last one first
    while link:
        line = f"error: {' '.join(str(link).split())}"
        if isinstance(link, UserError) and line not in lines:
            lines.insert(0, line)
            code = link.exit_code
        link = link.__context__ if not link.__suppress_context__ or link.__cause__ else None
    print(printable("\n".join(lines)), file=sys.stderr)
    return code


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs an entry point and exits. A `UserError` becomes one line on stderr and its exit code.

    So does a `sys.exit` in the user's code, which would end the program without a word. If the reader of standard
    output has gone, as in `| head`, the program ends quietly, with the exit code of one that SIGPIPE ends.
    """
    try:
        code = _exit_code(main)
        # Now, and not while Python ends: there, nothing could catch the error.
        print(end="", flush=True)
    except BrokenPipeError:
        code = READER_GONE
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what is still in its buffer
    sys.exit(code)


def _exit_code(main: Callable[[], None]) -> Any:
    """Runs an entry point, and returns its exit code. Raises: BrokenPipeError, if the reader of its output has gone."""
    try:
        main()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # from a console of rich
            return READER_GONE
        if _of_user(error):
            return report(UserError(f"{describe(error)} ended the program: let this code return or raise"))
        return error.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            raise
        return report(error)
    return 0


def _reader_gone() -> bool:
    """Returns whether standard output is a pipe that nobody reads. Other pipes can break too."""
    output = select.poll()
    output.register(STDOUT, 0)
    return bool(output.poll(0))


def _of_user(error: SystemExit) -> bool:
    """Returns whether the user's code has ended the program, such as a function that makes rows."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return not Path(file).is_relative_to(Path(__file__).parent) and file != argparse.__file__


def printable(text: str) -> str:
    """Returns text of a model or of data for a terminal: no character of it may move the cursor or reach the clipboard.

    It has escapes such as \\x1b for all characters that cannot be seen, but newlines and tabs."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
