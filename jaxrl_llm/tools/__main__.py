"""The command `jaxrl NAME …`, also `python -m jaxrl_llm.tools NAME …`: starts one of the programs of this package."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from jaxrl_llm import __version__
from jaxrl_llm.errors import UserError, run_main

PROGRAMS = {
    "train": ("jaxrl_llm.train", "reinforcement learning"),
    "sft": ("jaxrl_llm.sft", "supervised fine-tuning, also on preferences: DPO, SimPO"),
    "evaluate": ("jaxrl_llm.evaluate", "the accuracy of a model or of a run"),
    "doctor": ("jaxrl_llm.tools.doctor", "what is wrong with a config or with a run"),
    "report": ("jaxrl_llm.tools.report.__main__", "an HTML page about runs"),
    "log": ("jaxrl_llm.tools.log", "the log of a run, sent to a tracker later"),
    "plan": ("jaxrl_llm.tools.plan.__main__", "whether a run fits a TPU slice or GPUs, without one"),
    "export": ("jaxrl_llm.tools.export", "a checkpoint as a Hugging Face folder"),
    "translate": ("jaxrl_llm.tools.translate.__main__", "a config of TRL, veRL, EasyR1 or Search-R1 as one of ours"),
    "serve-vllm": ("jaxrl_llm.tools.serve_vllm", "a vLLM server for rollouts"),
    "serve-retriever": ("jaxrl_llm.tools.serve_retriever", "a search server for environments"),
}


def usage() -> str:
    """Returns the text of --help."""
    width = max(map(len, PROGRAMS))
    rows = [f"  {name:{width}}  {text}" for name, (_, text) in PROGRAMS.items()]
    return "\n".join(
        ["usage: jaxrl NAME [arguments]", "", *rows, "", "jaxrl NAME --help has the arguments of a program."]
    )


def program(name: str) -> Callable[[], None]:
    """Imports a program, and returns its main function. Raises: UserError, if there is no such program."""
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), PROGRAMS, n=1)
        hint = f"did you mean jaxrl {near[0]}?" if near else f"give one of {', '.join(PROGRAMS)}"
        raise UserError(f"jaxrl {name}: there is no such program; {hint}")
    return import_module(PROGRAMS[name][0]).main


def main() -> None:
    """Runs the program that the command line names. Raises: UserError."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(usage())
    if name == "--version":
        return print(f"jaxrl_llm {__version__}")
    sys.argv = [f"jaxrl {name}", *arguments]  # the name that --help shows
    program(name)()


def run() -> NoReturn:
    """Runs the installed command `jaxrl`, and exits."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as `python -m` does, so that a config can name functions of this folder
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the imports ends it without a traceback, as the package does for `python -m`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_main(main)


if __name__ == "__main__":
    run()
