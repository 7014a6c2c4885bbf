"""Reads the flags of torchrun, accelerate and deepspeed in front of a TRL training command.

The flags become keys such as torchrun.nnodes. They say the number of processes, by which TRL multiplies its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.translate import arguments
from jaxrl_llm.tools.translate.documents import find_file, read_document, value_of
from jaxrl_llm.tools.translate.outcome import Keys
from jaxrl_llm.tools.translate.table import WORDS

LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
# Programs that start several processes if no flag of a launcher says their number: Slurm's and MPI's are not read.
STARTERS = {"accelerate", "deepspeed", "trl", "srun", "mpirun", "mpiexec"}
# Keys that count all processes. accelerate's number is for all machines together.
TOTALS = ("accelerate.num_processes", "num_processes", "world_size")
# {launcher: key of the processes of a machine, key of the machines}
PRODUCTS = {launcher: WORDS[f"{launcher}_counts"] for launcher in ("torchrun", "deepspeed")}
# All keys that count processes.
COUNTS = {*TOTALS, *(key for pair in PRODUCTS.values() for key in pair), "deepspeed.include"}


def flags(path: Path, words: Sequence[str], files: Mapping[str, str]) -> dict[str, Any]:
    """Returns the flags of a launcher as keys, such as torchrun.nnodes, with accelerate's numbers in its config file.

    words: words up to the program of the training; files: {name: text} of files that the shell script writes.
    """
    names = [word.rpartition("/")[2] for word in words]
    names = ["torchrun" if name.startswith("torch.distributed") else name.split(".")[0] for name in names]
    launcher = next((name for name in LAUNCHERS if name in names), "")
    if not launcher:
        # None is an unknown number.
        return {} if STARTERS.isdisjoint(names) else {"num_processes": None}
    options, _ = arguments.flags(words[:-1])
    # A flag has the one word after it as its value.
    keys = {key: value_of(x[0] if isinstance(x, list) else x, parse_number) for key, x in options.items()}
    if launcher == "accelerate" and isinstance(name := keys.get("config_file"), str):
        file = find_file(path, name, files)
        keys["config_file"] = name if file else None
        inherited = read_document(*file).keys if file else {}
        keys = {key: inherited[key] for key in ("num_processes", "num_machines") if key in inherited} | keys
    keys = {f"{launcher}.{key}": value for key, value in keys.items()}
    is_counted = launcher == "torchrun" or not COUNTS.isdisjoint(keys)
    return keys if is_counted else {"num_processes": None} | keys


def parse_number(text: str) -> int | str:
    """Returns a whole number, or the text: YAML would read torchrun's 1:4 as a number."""
    return int(text) if text.isdigit() else text


def count(keys: Keys) -> int:
    """Returns the number of processes that the file starts; 0 if the file does not say it."""
    if total := next((keys.get(key) for key in TOTALS if keys.get(key)), 0):
        return int(total) if str(total).isdigit() else 0
    launcher = next((name for name in PRODUCTS if any(key.startswith(f"{name}.") for key in keys.values)), "")
    if not launcher:
        return 0
    per_machine, machines = PRODUCTS[launcher]
    # deepspeed takes all GPUs of a machine, or a list such as worker-0:0,1@worker-1:0,1.
    if launcher == "deepspeed" and per_machine not in keys.values:
        included = str(keys.get("deepspeed.include", ""))
        return sum(len(part.partition(":")[2].split(",")) for part in included.split("@") if ":" in part)
    # If one factor is unknown, the file does not say the product.
    counts = [keys.get(key, 0 if key in keys.values else 1) for key in (per_machine, machines)]
    return math.prod(counts) if all(isinstance(number, int) for number in counts) else 0
