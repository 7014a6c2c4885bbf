"""TPU chips and GPUs: their published speeds, the memory that a program may use, and devices for compiling."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.plan.gpus import GPUS, allowed_memory, gpu_devices

GIB = 2**30


class Chip(NamedTuple):
    """A TPU chip or a GPU, with published speeds, which no program reaches."""

    # GiB of HBM that a program may use. The limit of a TPU is that in the compiler's message; a GPU's is JAX's share.
    memory: float
    flops: float  # bfloat16 operations per second
    bandwidth: float  # bytes of HBM per second
    # Bytes per second that a TPU sends along one axis of the torus in both directions, or a GPU to its host's GPUs.
    ring: float
    network: float = 0.0  # bytes per second that a GPU sends to other hosts; 0 for TPUs, whose speed is not published
    kernels: tuple[str, ...] = ('custom_call_target="tpu_custom_call"',)  # marks of fused kernels in a program's text
    refuses: bool = True  # whether the chip's compiler refuses programs that need more than `memory`
    note: str = ""  # note on this chip for readers of the plan


CHIPS = {
    "v4": Chip(30.75, 2.75e14, 1.23e12, 9e10),
    "v5e": Chip(15.75, 1.97e14, 8.1e11, 9e10),
    "v5p": Chip(95.74, 4.59e14, 2.77e12, 1.8e11),
    "v6e": Chip(31.25, 9.2e14, 1.64e12, 1.8e11),
    # A device is half of a chip with the published 2,307 TFLOP/s, 7,380 GB/s of HBM, and links as those of v5p.
    "tpu7x": Chip(94.75, 1.1535e15, 3.69e12, 9e10, note="a TPU7x has two devices: a chip below is one, half a TPU7x"),
}
# Calls of cuDNN's attention, and of this package's kernel in Triton. XLA's own fusions in Triton have no call.
GPU_KERNELS = ('custom_call_target="__cudnn$fmha', 'custom_call_target="__gpu$xla.gpu.triton"')


def topology(name: str, slices: int = 1, dump: str = "") -> tuple[Chip, list[Any]]:
    """Returns chip and devices of a topology such as "v5e:4x4" or "h100:8", for compiling only.

    slices: number of TPU slices; dump: folder in which the TPU compiler reports the memory of programs.
    Raises: UserError, for an unknown topology, or if its compiler is not installed.
    """
    kind = name.partition(":")[0]
    if kind not in {*CHIPS, *GPUS}:
        kinds = ", ".join([*CHIPS, *GPUS])
        raise UserError(
            f"--topology {name} must be one of {kinds} with a shape after a colon, for example v5e:4x4 or h100:8"
        )
    if kind not in GPUS:
        return CHIPS[kind], _tpu_devices(name, slices, dump)
    if slices > 1:
        raise UserError(
            f"--slices {slices} is for TPUs only: for GPUs write HOSTSxGPUS in --topology, for example {kind}:4x8"
        )
    gpu, memory = GPUS[kind], allowed_memory(GPUS[kind]) / GIB
    chip = Chip(
        memory=memory,
        flops=gpu.flops,
        bandwidth=gpu.bandwidth,
        ring=gpu.nvlink,
        network=gpu.network,
        kernels=GPU_KERNELS,
        refuses=False,
    )
    return chip, gpu_devices(name)


def _tpu_devices(name: str, slices: int, dump: str) -> list[Any]:
    """Returns the devices of a TPU topology, for compiling only.

    Raises: UserError, if the TPU compiler is not installed or does not know the topology.
    """
    kind = name.partition(":")[0]
    if not find_spec("libtpu"):
        raise UserError("--topology needs the TPU compiler, which is not installed: pip install 'jaxrl_llm[tpu]'")
    # The platform is the CPU, because JAX would look for chips on this machine with the platform "tpu".
    jax.config.update("jax_platforms", "cpu")
    # The flag is set before XLA starts. XLA then writes to this folder how much memory a TPU program needs, which JAX
    # below 0.12 does not say.
    if dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    # The variables keep libtpu from locking the machine for one process, asking Google's metadata server, and writing
    # logs to /tmp.
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    is_single_chip = all(size == "1" for size in name.partition(":")[2].split("x"))
    # libtpu assumes hosts of several chips, and refuses a slice of one chip without this option.
    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if is_single_chip else {}
    if slices > 1:
        options["num_slices"] = slices
    # XLA sees the two cores of a v4 chip as one device, as a run on the chip does.
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    # libtpu raises many types of errors, and all of them are about the name of the topology.
    except Exception as error:
        message = str(error).splitlines()[0]
        raise UserError(
            f"--topology {name} is unknown to the TPU compiler ({message}): use another shape, for example v5e:4x4"
        ) from error
    return list(description.devices)
