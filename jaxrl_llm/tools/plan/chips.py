"""The chips of TPU slices, and GPUs as such: their published speeds, and the memory that a program may use."""

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
    """A TPU chip or a GPU. The speeds are the published ones, which no program reaches."""

    # GiB of HBM that a program may use: of a TPU the limit in the compiler's own message, of a GPU what JAX takes.
    memory: float
    flops: float  # bfloat16 operations a second
    bandwidth: float  # bytes of HBM a second
    # Bytes a second that a TPU sends along one axis of the torus, in both directions, and a GPU to those of its host.
    ring: float
    network: float = 0.0  # bytes a second that a GPU sends to other hosts; 0: what TPUs have has no published speed
    kernels: tuple[str, ...] = ('custom_call_target="tpu_custom_call"',)  # marks of fused kernels in a program's text
    refuses: bool = True  # its compiler refuses what does not fit
    note: str = ""  # what a reader of the plan must know of this chip


CHIPS = {
    "v4": Chip(30.75, 2.75e14, 1.23e12, 9e10),
    "v5e": Chip(15.75, 1.97e14, 8.1e11, 9e10),
    "v5p": Chip(95.74, 4.59e14, 2.77e12, 1.8e11),
    "v6e": Chip(31.25, 9.2e14, 1.64e12, 1.8e11),
    # Half of a chip: of its published 2,307 TFLOP/s, 7,380 GB/s of HBM, and links as those of v5p.
    "tpu7x": Chip(94.75, 1.1535e15, 3.69e12, 9e10, note="a TPU7x has two devices: a chip below is one, half a TPU7x"),
}
# Attention by cuDNN, and a kernel of ours in Triton. XLA's own fusions in Triton have no call.
GPU_KERNELS = ('custom_call_target="__cudnn$fmha', 'custom_call_target="__gpu$xla.gpu.triton"')


def topology(name: str, slices: int = 1, dump: str = "") -> tuple[Chip, list[Any]]:
    """Returns chip and devices of a topology, "v5e:4x4" or "h100:8". They can be compiled for, and nothing else.

    dump: a folder in which the TPU compiler reports the memory of programs.
    Raises: UserError, if there is no such topology, or its compiler is not installed.
    """
    kind = name.partition(":")[0]
    if kind not in {*CHIPS, *GPUS}:
        kinds = ", ".join([*CHIPS, *GPUS])
        raise UserError(f"--topology {name}: give one of {kinds} and its shape, for example v5e:4x4 or h100:8")
    if kind not in GPUS:
        return CHIPS[kind], _tpu_devices(name, slices, dump)
    if slices > 1:
        raise UserError(
            f"--slices {slices} is for TPUs: give hosts and GPUs of each in --topology, for example {kind}:4x8"
        )
    gpu, memory = GPUS[kind], allowed_memory(GPUS[kind]) / GIB
    chip = Chip(memory, gpu.flops, gpu.bandwidth, gpu.nvlink, gpu.network, GPU_KERNELS, refuses=False)
    return chip, gpu_devices(name)


def _tpu_devices(name: str, slices: int, dump: str) -> list[Any]:
    kind = name.partition(":")[0]
    if not find_spec("libtpu"):
        raise UserError("--topology needs the TPU compiler, which is not installed: pip install 'jaxrl_llm[tpu]'")
    # The topology is only described: with a platform "tpu" JAX would look for chips on this machine.
    jax.config.update("jax_platforms", "cpu")
    # The flag is set before XLA starts. XLA then writes to this folder how much memory a TPU program needs, which JAX
    # below 0.12 does not say.
    if dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    # The variables keep libtpu from locking the machine for one process, asking Google's metadata server, and writing
    # logs to /tmp.
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
    return list(description.devices)
