"""The chips of TPU slices: their published speeds, and what the TPU compiler allows."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_llm.errors import UserError


class Chip(NamedTuple):
    """A TPU chip. The speeds are the published ones, which no program reaches."""

    memory: float  # GiB of HBM that a program may use: the limit in the compiler's own message
    flops: float  # bfloat16 operations a second
    bandwidth: float  # bytes of HBM a second
    ring: float  # bytes a second that a chip sends along one axis of the torus, in both directions


CHIPS = {
    "v4": Chip(30.75, 2.75e14, 1.23e12, 9e10),
    "v5e": Chip(15.75, 1.97e14, 8.1e11, 9e10),
    "v5p": Chip(95.74, 4.59e14, 2.77e12, 1.8e11),
    "v6e": Chip(31.25, 9.2e14, 1.64e12, 1.8e11),
}


def topology(name: str, slices: int = 1) -> tuple[Chip, list[Any]]:
    """Returns chip and devices of a topology such as "v5e:4x4". The devices can be compiled for, and nothing else.

    Raises: UserError, if there is no such topology, or the TPU compiler is not installed.
    """
    kind = name.partition(":")[0]
    if kind not in CHIPS:
        raise UserError(f"--topology {name}: give one of {', '.join(CHIPS)} and its shape, for example v5e:4x4")
    if not find_spec("libtpu"):
        raise UserError("--topology needs the TPU compiler, which is not installed: pip install 'jaxrl_llm[tpu]'")
    # The topology is only described: with a platform "tpu" JAX would look for chips on this machine.
    jax.config.update("jax_platforms", "cpu")
    # Without these libtpu locks the machine for one process, asks Google's metadata server, and writes logs to /tmp.
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    is_single_chip = all(size == "1" for size in name.partition(":")[2].split("x"))
    # libtpu takes hosts of several chips for granted, and refuses a slice of one chip otherwise.
    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if is_single_chip else {}
    if slices > 1:
        options["num_slices"] = slices
    # XLA sees the two cores of a v4 chip as one device, as a run on the chip does.
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    # libtpu raises many types, all about the name.
    except Exception as error:
        message = str(error).splitlines()[0]
        raise UserError(
            f"--topology {name}: the TPU compiler does not know it ({message}): for example v5e:4x4"
        ) from error
    return CHIPS[kind], list(description.devices)
