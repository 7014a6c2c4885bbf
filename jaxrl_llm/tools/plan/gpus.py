"""NVIDIA GPUs for which XLA can compile on any machine: descriptions for XLA, and published speeds."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_llm.errors import UserError


class Gpu(NamedTuple):
    """A GPU in its SXM form, with the speeds that NVIDIA publishes for matrix products without sparsity."""

    name: str  # name in CUDA
    flops: float  # bfloat16 operations per second
    bandwidth: float  # bytes of HBM per second
    nvlink: float  # bytes per second that the GPU sends to the other GPUs of its host
    # Bytes per second that the GPU sends to other hosts. As in NVIDIA's DGX, each GPU has a network card, of 200 Gb/s
    # (HDR InfiniBand) for an A100, and of 400 Gb/s (NDR) for all others.
    network: float
    memory: int  # bytes of memory, as CUDA counts them
    capability: int  # compute capability, the number before the point
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    shared: int  # bytes of a core's shared memory
    l2: int  # bytes of the L2 cache
    clock: float  # clock rate in GHz


# {name in --topology: GPU}, the GPUs for which `jaxrl plan` can compile.
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        flops=3.12e14,
        bandwidth=2.04e12,
        nvlink=3e11,
        network=2.5e10,
        memory=85_100_068_864,
        capability=8,
        cores=108,
        lanes=64,
        shared=167_936,
        l2=41_943_040,
        clock=1.41,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        flops=9.89e14,
        bandwidth=3.35e12,
        nvlink=4.5e11,
        network=5e10,
        memory=84_942_979_072,
        capability=9,
        cores=132,
        lanes=128,
        shared=233_472,
        l2=52_428_800,
        clock=1.98,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        flops=9.89e14,
        bandwidth=4.8e12,
        nvlink=4.5e11,
        network=5e10,
        memory=151_397_597_184,
        capability=9,
        cores=132,
        lanes=128,
        shared=233_472,
        l2=52_428_800,
        clock=1.98,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        flops=2.25e15,
        bandwidth=8e12,
        nvlink=9e11,
        network=5e10,
        memory=191_514_411_008,
        capability=10,
        cores=148,
        lanes=128,
        shared=233_472,
        l2=132_644_864,
        clock=1.965,
    ),
}
BLOCK = 1024  # bytes of a core's shared memory that the system keeps for each block
# The shape in a topology of GPUs: the number of GPUs of one host, or HOSTSxGPUS.
SHAPE = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)")
# A `GpuTargetConfigProto` of XLA, in the text form of protocol buffers.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_core_limit: 2048  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {optin}  shared_memory_per_core: {shared}
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  core_count: {cores}  fpus_per_core: {lanes}  clock_rate_ghz: {clock}
  l2_cache_size: {l2}  memory_bandwidth: {bandwidth:.0f}  device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} {features} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10 }}
device_description_str: "{name}"
"""


def target(gpu: Gpu) -> str:
    """Returns XLA's description of a GPU, for which it can then compile."""
    # A program for Hopper or newer may use instructions that later GPUs lack, such as those of its matrix products.
    features = "feature_extension: ACCELERATED_FEATURES" if gpu.capability >= 9 else ""
    return TARGET.format(**gpu._asdict(), optin=gpu.shared - BLOCK, features=features)


def allowed_memory(gpu: Gpu) -> float:
    """Returns the bytes of a GPU that JAX uses in a run: the share in JAX's environment variable, or 75 %."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    name = next((name for name in names if os.environ.get(name)), "")
    if not name:
        return 0.75 * gpu.memory
    try:
        share = float(os.environ[name])
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{name}={os.environ[name]} must be JAX's share of a GPU's memory, above 0 and at most 1")
    return share * gpu.memory


def gpu_devices(name: str) -> list[Any]:
    """Returns the devices of a topology such as "h100:8" or "h100:4x8", for compiling only.

    Raises: UserError, for an invalid shape, or if the compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    if not (match := SHAPE.fullmatch(shape)):
        raise UserError(
            f"--topology {name} must have a number of GPUs, for example {kind}:8, or HOSTSxGPUS, for example {kind}:4x8"
        )
    if not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError(
            f"--topology {name} needs XLA's compiler for GPUs, which is not installed: pip install 'jaxrl_llm[cuda]'"
        )
    # Autotuning is off, because it would run programs on the GPU. Matrix products then have a default form, on which
    # memory and collectives do not depend.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    # The platform is the CPU, because JAX would look for GPUs on this machine with the platform "cuda".
    jax.config.update("jax_platforms", "cpu")
    hosts = f"1 x {match[1] or 1} x {match[2]}"
    description = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target(GPUS[kind]), topology=hosts
    )
    return list(description.devices)
