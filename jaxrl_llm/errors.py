"""The exception for errors that the user can fix, and how a program reports it. Any other exception is a bug."""

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

# Folders of Python and of installed packages, whose code is not the user's.
INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
STDOUT = 1  # file descriptor of standard output
READER_GONE = 128 + signal.SIGPIPE  # exit code if the reader of standard output has gone, as in `| head`
CELL = re.compile(r".*(?:ipykernel_\d|ipython-input-)")  # file name of the code in a notebook's cell


class UserError(Exception):
    """An error in config, data, checkpoint or reward. Its message is one line that names the error and the fix."""

    exit_code: ClassVar[int] = 2  # launchers do not restart the run, because the same command would fail again


class PeerLost(UserError):
    """An error because another process, a server or a bucket has ended or does not answer."""

    exit_code = os.EX_TEMPFAIL  # 75, after which launchers restart the run


class StoppedByHealth(UserError):
    """A health rule has stopped the run."""

    exit_code = 3


class MissingHere(UserError):
    """An error because this machine lacks a package or a file that a check needs. The config may be right."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises a one-line `UserError` for a wrong command line."""

    def __init__(self, program: str, **options: Any):
        """program: module name for the usage text, unless `jaxrl NAME` was typed. options: ArgumentParser's options."""
        typed = sys.argv[0].startswith(("jaxrl ", "jaxrl-"))
        super().__init__(prog=sys.argv[0] if typed else f"python -m {program}", **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def check_local(field: str, path: str) -> None:
    """Raises: UserError, if a path is in an unsupported store such as az://b/x, or cannot be decoded in this locale.

    field: flag or field of the path.
    """
    if any("\udc80" <= character <= "\udcff" for character in path):  # bytes that cannot be decoded in this locale
        name = os.fsencode(path)
        raise UserError(
            f"{field} = {name!r} cannot be decoded in this locale: set the environment variable PYTHONUTF8=1 or "
            "LC_ALL=C.UTF-8"
        )
    if re.match(r"(az|abfss?|hdfs):/+", path):
        raise UserError(
            f"{field} = {path!r} is neither on a disk nor in a bucket of gs:// or s3://: mount this store, and use the "
            "folder where it is mounted"
        )


def summarize_error(error: BaseException) -> str:
    """Describes an exception without its place in a file, for example as "ValueError: bad row"."""
    return printable(f"{type(error).__name__}: {error}")


def describe(error: BaseException, preferred_file: str = "") -> str:
    """Describes an exception of the user's code, for example as "ValueError: bad row (rewards.py:7)".

    preferred_file: file whose line is named if it is on the stack; else the innermost file of the user counts ("cell"
    in a notebook), or the innermost file of all.
    """
    message = summarize_error(error)
    if isinstance(error, SyntaxError):
        return message  # the message of a SyntaxError has file and line already
    return f"{message} ({code_location(error, preferred_file)})"


def code_location(error: BaseException, preferred_file: str = "") -> str:
    """Returns file and line of an exception, such as "rewards.py:7".

    preferred_file: file whose line is returned if the traceback has one; "" for none.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    preferred_frames = [f for f in frames if f.filename == preferred_file]
    innermost = (preferred_frames or [f for f in frames if is_users(f.filename)] or frames)[-1]
    file = "cell" if CELL.match(innermost.filename) else innermost.filename
    return f"{file}:{innermost.lineno}"


def is_users(file: str) -> bool:
    """Returns whether a code file belongs to the user instead of Python, an installed package or this package."""
    other_code = (*INSTALLED, Path(__file__).parent)
    return bool(CELL.match(file)) or not (file.startswith("<") or any(map(Path(file).is_relative_to, other_code)))


def report(error: BaseException) -> int:
    """Prints the error that ended the program to stderr, and returns the exit code.

    A `UserError` becomes one line. If closing the run raised further UserErrors, each gets a line, and the exit code is
    that of the first one.
    """
    if not isinstance(error, UserError):
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return 1
    lines, code = list[str](), error.exit_code
    current: BaseException | None = error  # the loop follows the chain of errors from the last one to the first
    while current:
        line = f"error: {' '.join(str(current).split())}"
        if isinstance(current, UserError) and line not in lines:
            lines.insert(0, line)
            code = current.exit_code
        # Only `raise ... from None` ends the chain.
        is_chain_cut = current.__suppress_context__ and not current.__cause__
        current = None if is_chain_cut else current.__context__
    print(printable("\n".join(lines)), file=sys.stderr)
    return code


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs an entry point and exits. A `UserError` becomes one line on stderr, and its exit code is used.

    A `sys.exit` in the user's code is reported in the same way, because it would end the program without a message. If
    the reader of standard output has gone, as in `| head`, the program exits silently with READER_GONE.
    """
    try:
        code = _exit_code(main)
        # The output is flushed here, because an error while Python exits could not be caught.
        print(end="", flush=True)
    except BrokenPipeError:
        code = READER_GONE
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # discards the text that is still in the buffer
    sys.exit(code)


def _exit_code(main: Callable[[], None]) -> Any:
    """Runs an entry point and returns its exit code. Raises: BrokenPipeError, if the reader of the output has gone."""
    try:
        main()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich's console raises SystemExit for a closed pipe
            return READER_GONE
        if _is_from_user_code(error):
            return report(
                UserError(f"{describe(error)} ended the program: this code must return or raise another exception")
            )
        return error.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            raise
        return report(error)
    return 0


def _reader_gone() -> bool:
    """Returns whether standard output is a pipe that nobody reads. A BrokenPipeError may come from another pipe."""
    output = select.poll()
    output.register(STDOUT, 0)
    return bool(output.poll(0))


def _is_from_user_code(error: SystemExit) -> bool:
    """Returns whether the user's code has ended the program, such as a function that makes rows."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return not Path(file).is_relative_to(Path(__file__).parent) and file != argparse.__file__


def printable(text: str) -> str:
    """Makes text of a model or of data safe for a terminal, where control characters could move the cursor.

    Returns the text with escapes such as \\x1b for all invisible characters except newlines and tabs.
    """
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    """Returns a visible character, a newline, a tab or a space as it is, and any other character as an escape."""
    if character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
