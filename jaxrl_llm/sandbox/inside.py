"""The launcher inside a sandbox: sets the limits of its process, then runs the untrusted code from a file descriptor.

The interpreter gets the text of this file, because the sandbox has no file of this package. It imports little, because
it starts once for each program.
"""

import builtins
import os
import resource
import sys

FILE_SIZE = 16 * 2**20  # largest number of bytes of a file
OPEN_FILES = 64  # most files that the program may have open


def limit(memory, seconds):
    """Sets limits of this process that it cannot raise again. memory: MiB. seconds: CPU time."""
    limits = {
        # The address space is limited, because Linux ignores the limit of resident memory (RLIMIT_RSS) since 2.4.30.
        resource.RLIMIT_AS: memory * 2**20,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for resource_limit, value in limits.items():
        hard_limit = resource.getrlimit(resource_limit)[1]
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        # The hard limit is lowered too, because a program may raise the soft limit up to the hard one.
        resource.setrlimit(resource_limit, (value, value))


def main():
    memory, seconds, program_descriptor, ready_descriptor, unconfined = map(int, sys.argv[1:])
    if unconfined and sys.platform == "linux":
        # PR_SET_PDEATHSIG ends this process with its parent, because without a sandbox no bubblewrap does so.
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    limit(memory, seconds)
    # The byte is written after the limits are set, because the trainer takes the byte as proof of the limits.
    os.write(ready_descriptor, b"1")
    os.close(ready_descriptor)
    with open(program_descriptor, encoding="utf-8") as file:
        code = file.read()
    sys.argv = [""]
    # These names are usually defined by the module `site`, without which the interpreter starts.
    builtins.exit = builtins.quit = sys.exit
    # The code runs in a new module, so that it does not see the names of this file.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "program", "exec"), module.__dict__)
    except Exception as error:
        import traceback

        # `tb_next` leaves out the frame of this file.
        traceback_lines = traceback.format_exception(
            type(error), error, error.__traceback__ and error.__traceback__.tb_next
        )
        sys.stderr.write("".join(traceback_lines))
        sys.exit(1)


if __name__ == "__main__":
    main()
