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
    """Limits this process for ever. memory: MiB; seconds: CPU time."""
    limits = {
        # The address space is limited, because Linux has ignored the limit of resident memory (RLIMIT_RSS) since
        # 2.4.30.
        resource.RLIMIT_AS: memory * 2**20,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard_limit = resource.getrlimit(kind)[1]
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        # The hard limit is lowered too, because a program may raise the soft limit up to the hard one.
        resource.setrlimit(kind, (value, value))


def main():
    memory, seconds, program, ready, alone = map(int, sys.argv[1:])
    if alone and sys.platform == "linux":
        # This process ends with its parent (PR_SET_PDEATHSIG), because no bubblewrap ends it.
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    limit(memory, seconds)
    # The byte is written after the limits are set, because the trainer takes it as proof that they hold.
    os.write(ready, b"1")
    os.close(ready)
    with open(program, encoding="utf-8") as file:
        code = file.read()
    sys.argv = [""]
    # The module `site` makes these names, and the interpreter starts without it.
    builtins.exit = builtins.quit = sys.exit
    # The program runs in a new module, so that it finds none of this text's names.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "program", "exec"), module.__dict__)
    except Exception as error:
        import traceback

        # `tb_next` leaves out the line of this text that ran the program.
        shown = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.stderr.write("".join(shown))
        sys.exit(1)


if __name__ == "__main__":
    main()
