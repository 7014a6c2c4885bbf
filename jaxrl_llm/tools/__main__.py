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

# {NAME of `jaxrl NAME`: module whose function `main` is the program, and its line in --help}
PROGRAMS = {
    "train": ("jaxrl_llm.train", "reinforcement learning"),
    "sft": ("jaxrl_llm.sft", "supervised fine-tuning, also on preferences: DPO, SimPO"),
    "evaluate": ("jaxrl_llm.evaluate", "the accuracy of a model or of a run"),
    "doctor": ("jaxrl_llm.tools.doctor", "finds problems of a config or of a run"),
    "report": ("jaxrl_llm.tools.report.__main__", "an HTML page about runs"),
    "replay": ("jaxrl_llm.tools.replay.__main__", "makes a step of a run again, and shows what is in it"),
    "log": ("jaxrl_llm.tools.log", "sends the log of a run to a tracker later"),
    "plan": ("jaxrl_llm.tools.plan.__main__", "checks whether a run fits a TPU slice or GPUs; runs on a CPU"),
    "export": ("jaxrl_llm.tools.export", "a checkpoint as a Hugging Face folder"),
    "translate": ("jaxrl_llm.tools.translate.__main__", "a config of TRL, veRL, EasyR1 or Search-R1 as one of ours"),
    "serve": ("jaxrl_llm.tools.serve.__main__", "an OpenAI-compatible server of the in-JAX engine"),
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
    """Imports a program, and returns its main function. Raises: UserError, for an unknown name."""
    if name not in PROGRAMS:
        suggestions = difflib.get_close_matches(name.lower().replace("_", "-"), PROGRAMS, n=1)
        hint = f"did you mean jaxrl {suggestions[0]}?" if suggestions else f"known programs: {', '.join(PROGRAMS)}"
        raise UserError(f"jaxrl {name}: unknown program; {hint}")
    return import_module(PROGRAMS[name][0]).main


def main() -> None:
    """Runs the program that the command line names. Raises: UserError."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(usage())
    if name == "--version":
        return print(f"jaxrl_llm {__version__}")
    sys.argv = [f"jaxrl {name}", *arguments]  # --help shows this name
    program(name)()


def run() -> NoReturn:
    """Runs the installed command `jaxrl`, and exits."""
    if not sys.flags.safe_path:
        # The current folder comes first, as for `python -m`, so that a config can name functions in it.
        sys.path[0] = os.getcwd()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the imports ends the command without a traceback, as for `python -m`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_main(main)


if __name__ == "__main__":
    run()
