"""The programs that start the processes of a training: their flags as keys, and how many processes they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.translate import arguments
from jaxrl_llm.tools.translate.arguments import Value
from jaxrl_llm.tools.translate.documents import beside, read_document
from jaxrl_llm.tools.translate.outcome import Keys

TORCH = ("accelerate", "torchrun", "deepspeed")
MPI = ("mpirun", "mpiexec")
# In this order: one of torch inside srun or mpirun says the processes.
LAUNCHERS = (*TORCH, "srun", *MPI)
COUNTS = (  # keys that count processes
    "accelerate.num_processes",
    "torchrun.nproc_per_node",
    "torchrun.nnodes",
    "deepspeed.num_gpus",
    "deepspeed.num_nodes",
    "deepspeed.include",
    "srun.ntasks",
    "srun.ntasks_per_node",
    "srun.nodes",
    *(f"{name}.np" for name in MPI),
)
# The options that count processes, as the launchers also spell them: -n 4, -n4, -np 4.
SHORT = {"srun": {"n": "ntasks", "N": "nodes"}} | {name: {"n": "np", "np": "np", "c": "np"} for name in MPI}
DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)", re.MULTILINE)


def allocation(text: str) -> list[Value]:
    """Returns the options of the #SBATCH lines of a script, which srun takes over."""
    return [Value(word) for line in DIRECTIVE.findall(text) for word in line.split(" #")[0].split()]


def flags(
    path: Path, values: Sequence[Value], files: Mapping[str, str], allocated: Sequence[Value] = ()
) -> dict[str, Any]:
    """Returns the flags of a launcher as keys, such as torchrun.nnodes, with those of its file.

    values: the words before the script; files: that the shell script writes; allocated: the options of #SBATCH lines.
    """
    names = [value.text.rpartition("/")[2] for value in values]
    names = ["torchrun" if name.startswith("torch.distributed") else name.split(".")[0] for name in names]
    launcher = next((name for name in LAUNCHERS if name in names), "")
    if not launcher:
        return {}
    keys = _numbers(launcher, values)
    if launcher == "accelerate" and isinstance(name := keys.get("config_file"), str):
        file = beside(path, name, files)
        in_file = read_document(*file).values if file else {}
        keys["config_file"] = name if file else None
        keys = {key: in_file[key] for key in ("num_processes", "num_machines") if key in in_file} | keys
    if launcher == "srun":
        tasks = any(key.startswith("ntasks") for key in keys)
        # srun inherits nodes and tasks from the #SBATCH lines. A number of tasks of its own replaces all of theirs.
        names = ("nodes",) if tasks else ("nodes", "nt")
        inherited = {key: value for key, value in _numbers(launcher, allocated).items() if key.startswith(names)}
        keys = inherited | keys
    return {f"{launcher}.{key}": value for key, value in keys.items()}


def _numbers(launcher: str, values: Sequence[Value]) -> dict[str, Any]:
    """Returns the flags of a launcher, each with the one word after it."""
    options, _ = arguments.flags([_long(launcher, value) for value in values])
    # YAML would take torchrun's 1:4 for a number.
    return {
        key: arguments.value_of(
            value[0] if isinstance(value, list) else value, lambda text: int(text) if text.isdigit() else text
        )
        for key, value in options.items()
    }


def _long(launcher: str, value: Value) -> Value:
    """Returns a short option as a long one: --ntasks=4 for -n4 of srun."""
    match = re.fullmatch(r"--?([A-Za-z]+)=?(\d*)", value.text)
    name = SHORT.get(launcher, {}).get(match[1]) if match else None
    return Value(f"--{name}={match[2]}".rstrip("="), value.places) if match and name else value


def count(keys: Keys) -> int:
    """Returns the processes that the file starts; 0: it does not say."""
    explicit = keys.explicit
    # accelerate counts the processes of all machines, torchrun those of one.
    for key in ("accelerate.num_processes", "num_processes", "world_size"):
        if explicit.get(key):
            return int(explicit[key])
    for launcher in MPI:
        if isinstance(processes := explicit.get(f"{launcher}.np"), int):
            return processes
    if any(key.startswith("srun.") for key in explicit.keys() | keys.unread):
        return _tasks(keys)
    for launcher, per_node, nodes in (("torchrun", "nproc_per_node", "nnodes"), ("deepspeed", "num_gpus", "num_nodes")):
        counts = [f"{launcher}.{per_node}", f"{launcher}.{nodes}"]
        per_machine, machines = (explicit.get(key, 1) for key in counts)
        # A number that is not known is no number: then the file does not say how many there are.
        if not any(key.startswith(f"{launcher}.") for key in explicit) or not keys.unread.isdisjoint(counts):
            continue
        # All GPUs of a machine, or those that it lists.
        if launcher == "deepspeed" and counts[0] not in explicit:
            listed = str(explicit.get("deepspeed.include", ""))
            # DeepSpeed writes worker-0:0,1@worker-1:0,1.
            return sum(len(part.partition(":")[2].split(",")) for part in listed.split("@") if ":" in part)
        return per_machine * machines if isinstance(per_machine, int) and isinstance(machines, int) else 0
    return 0


def _tasks(keys: Keys) -> int:
    """Returns the tasks of srun; 0: the file does not say. One runs on each node if their number is not set."""
    counts = {key: keys.explicit.get(f"srun.{key}") for key in ("ntasks", "ntasks_per_node", "nodes")}
    known = {key.removeprefix("srun.") for key in keys.explicit.keys() | keys.unread if key.startswith("srun.nt")}
    if "ntasks" in known or not known <= {"ntasks_per_node"}:
        # --ntasks is the total, whatever --nodes says. Another option, as --ntasks-per-gpu, needs the cluster to count.
        return counts["ntasks"] if isinstance(counts["ntasks"], int) else 0
    if "srun.nodes" in keys.unread or (not known and counts["nodes"] is None):
        return 0
    per_node, nodes = (1 if counts[key] is None else counts[key] for key in ("ntasks_per_node", "nodes"))
    per_node_is_known = "srun.ntasks_per_node" not in keys.unread
    return per_node * nodes if per_node_is_known and isinstance(per_node, int) and isinstance(nodes, int) else 0
