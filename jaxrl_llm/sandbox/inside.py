"""The program inside a sandbox: it sets the limits of its process, and then runs the code of a file descriptor.

Its text is given to the interpreter, which sees no file of this package. It imports little, because it starts once for
each program.
"""

import builtins
import os
import resource
import sys

FILE_SIZE = 16 * 2**20  # bytes of a file
OPEN_FILES = 64


def limit(memory, seconds):
    """Limits this process for ever. memory: MiB; seconds: of the CPU."""
    limits = {
        # Of the addresses: Linux has not kept a limit of the resident memory (RLIMIT_RSS) since 2.4.30.
        resource.RLIMIT_AS: memory * 2**20,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard_limit = resource.getrlimit(kind)[1]
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        # The hard limit too: a program may raise the soft one up to it.
        resource.setrlimit(kind, (value, value))


def main():
    memory, seconds, program, ready, alone = map(int, sys.argv[1:])
    if alone and sys.platform == "linux":
        # Without bubblewrap: end with the parent (PR_SET_PDEATHSIG).
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    limit(memory, seconds)
    # Only now: the trainer takes it as proof that the limits hold.
    os.write(ready, b"1")
    os.close(ready)
    with open(program, encoding="utf-8") as file:
        code = file.read()
    sys.argv = [""]
    # The module `site` makes these names, and the interpreter starts without it.
    builtins.exit = builtins.quit = sys.exit
    # A module of its own: the program finds none of this text's names.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "program", "exec"), module.__dict__)
    except Exception as error:
        import traceback

        # Without this text's own line.
        shown = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.stderr.write("".join(shown))
        sys.exit(1)


if __name__ == "__main__":
    main()
