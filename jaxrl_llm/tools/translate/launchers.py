"""Reads the flags of launchers such as torchrun, accelerate and srun in front of a TRL training command.

The flags become keys such as torchrun.nnodes. They say the number of processes, by which TRL multiplies its batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.translate import arguments
from jaxrl_llm.tools.translate.arguments import Value
from jaxrl_llm.tools.translate.documents import find_file, read_document
from jaxrl_llm.tools.translate.outcome import Keys

# Launchers of torch, and of MPI.
TORCH = ("accelerate", "torchrun", "deepspeed")
MPI = ("mpirun", "mpiexec")
# torch's launchers come first, because they decide the number of processes inside srun or mpirun.
LAUNCHERS = (*TORCH, "srun", *MPI)
# Keys that count all processes. accelerate's number is for all machines together.
TOTALS = ("accelerate.num_processes", "num_processes", "world_size", *(f"{name}.np" for name in MPI), "srun.ntasks")
# {launcher: key of the processes of a machine, key of the machines}
PRODUCTS = {
    "srun": ("srun.ntasks_per_node", "srun.nodes"),
    "torchrun": ("torchrun.nproc_per_node", "torchrun.nnodes"),
    "deepspeed": ("deepspeed.num_gpus", "deepspeed.num_nodes"),
}
# All keys that count processes.
COUNTS = {*TOTALS, *(key for pair in PRODUCTS.values() for key in pair), "deepspeed.include"}
# {launcher: {short option that counts processes: long option}}
SHORT = {"srun": {"n": "ntasks", "N": "nodes"}} | {name: {"n": "np", "np": "np", "c": "np"} for name in MPI}
# A line of a batch script with options of Slurm.
DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)", re.MULTILINE)


def allocation(text: str) -> list[Value]:
    """Returns the options of the #SBATCH lines of a script, which srun takes over."""
    return [Value(word) for line in DIRECTIVE.findall(text) for word in line.split(" #")[0].split()]


def flags(
    path: Path, values: Sequence[Value], files: Mapping[str, str], allocated: Sequence[Value] = ()
) -> dict[str, Any]:
    """Returns the flags of a launcher as keys, such as torchrun.nnodes, with those of its file.

    values: words before the script; files: {name: text} of the files that the shell script writes; allocated: options
    of #SBATCH lines.
    """
    names = [value.text.rpartition("/")[2] for value in values]
    names = ["torchrun" if name.startswith("torch.distributed") else name.split(".")[0] for name in names]
    launcher = next((name for name in LAUNCHERS if name in names), "")
    if not launcher:
        return {}
    keys = _numbers(launcher, values)
    # Options of accelerate's config file or of #SBATCH lines, of which names that begin with `inherited_names` apply.
    inherited: dict[str, Any] = {}
    inherited_names: tuple[str, ...] = ()
    if launcher == "accelerate" and isinstance(name := keys.get("config_file"), str):
        file = find_file(path, name, files)
        keys["config_file"] = name if file else None
        inherited = read_document(*file).values if file else {}
        inherited_names = ("num_processes", "num_machines")
    if launcher == "srun":
        # srun inherits nodes and tasks from the #SBATCH lines, but a number of tasks of its own replaces both.
        has_tasks = any(key.startswith("ntasks") for key in keys)
        inherited_names = ("nodes",) if has_tasks else ("nodes", "nt")
        inherited = _numbers(launcher, allocated)
    inherited = {key: value for key, value in inherited.items() if key.startswith(inherited_names)}
    return {f"{launcher}.{key}": value for key, value in (inherited | keys).items()}


def _numbers(launcher: str, values: Sequence[Value]) -> dict[str, Any]:
    """Returns the flags of a launcher with their values. A flag has the one word after it as its value."""
    options, _ = arguments.flags([_long(launcher, value) for value in values])
    first_words = {key: value[0] if isinstance(value, list) else value for key, value in options.items()}

    def parse_number(text: str) -> int | str:
        """Returns a whole number, or the text: YAML would read torchrun's 1:4 as a number."""
        return int(text) if text.isdigit() else text

    return {key: arguments.value_of(word, parse_number) for key, word in first_words.items()}


def _long(launcher: str, value: Value) -> Value:
    """Returns a short option in its long form, such as --ntasks=4 for srun's -n4."""
    match = re.fullmatch(r"--?([A-Za-z]+)=?(\d*)", value.text)
    name = SHORT.get(launcher, {}).get(match[1]) if match else None
    return Value(f"--{name}={match[2]}".rstrip("="), value.places) if match and name else value


def count(keys: Keys) -> int:
    """Returns the number of processes that the file starts; 0 if the file does not say it."""
    explicit = keys.explicit
    present = explicit.keys() | keys.unread
    if total := next((explicit[key] for key in TOTALS if key in present and explicit.get(key)), 0):
        return int(total) if str(total).isdigit() else 0
    launcher = next((name for name in PRODUCTS if any(key.startswith(f"{name}.") for key in present)), "")
    per_machine, machines = PRODUCTS.get(launcher, ("", ""))
    # Only the cluster knows the total of options such as --ntasks-per-gpu.
    if any(key.startswith("srun.nt") and key != per_machine for key in present):
        return 0
    # deepspeed takes all GPUs of a machine, or a list such as worker-0:0,1@worker-1:0,1.
    if launcher == "deepspeed" and per_machine not in present:
        included = str(explicit.get("deepspeed.include", ""))
        return sum(len(part.partition(":")[2].split(",")) for part in included.split("@") if ":" in part)
    # srun runs one task on each node if their number is not set.
    if not launcher or (launcher == "srun" and present.isdisjoint((per_machine, machines))):
        return 0
    # If one factor is unknown, the file does not say the product.
    counts = [explicit.get(key, 0 if key in keys.unread else 1) for key in (per_machine, machines)]
    return math.prod(counts) if all(isinstance(number, int) for number in counts) else 0
