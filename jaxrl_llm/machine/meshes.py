"""The device mesh: its axes, and the devices of the trainer and of the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxrl_llm.config.schema import Field, MayChange
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed, progress

# Type of the config fields mesh.data, mesh.fsdp and mesh.tensor. A run may change them when it resumes.
MeshSize: TypeAlias = MayChange[Annotated[int, Field(int, low=-1)]]

AXES = ("data", "fsdp", "tensor")  # mesh axes: copies of the model, and two ways to split its parameters


def mesh_shape(data: int, fsdp: int, tensor: int, devices: int) -> tuple[int, int, int]:
    """Resolves the sizes of the mesh axes, of which at most one may be -1 for all remaining devices.

    Raises: UserError, if the mesh does not fit the devices.
    """
    sizes: dict[str, int] = {"data": data, "fsdp": fsdp, "tensor": tensor}
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " = ".join(f"config.mesh.{axis}" for axis in open_axes)
        raise UserError(f"{names} = -1: only one mesh axis can be -1, which takes all remaining devices")
    fixed_devices = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = max(devices // fixed_devices, 1)
    mesh_devices = math.prod(sizes.values())
    mesh_text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if mesh_devices > devices:
        raise UserError(
            f"config.mesh ({mesh_text}) needs {mesh_devices} devices, but only {devices} exist: choose smaller "
            "config.mesh.*"
        )
    if open_axes and mesh_devices < devices:
        raise UserError(
            f"config.mesh ({mesh_text}) leaves {devices - mesh_devices} of {devices} devices idle: the axes of "
            "config.mesh must divide the number of devices"
        )
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def make_mesh(*, data: MeshSize, fsdp: MeshSize, tensor: MeshSize) -> Mesh:
    """Makes a mesh over the first devices, with Auto axes, for which the compiler propagates shardings.

    With several processes the mesh has all devices, and each process has consecutive prompts of a batch.
    Raises: UserError, if the mesh does not fit the devices or the processes.
    """
    return mesh_over(all_devices(), data=data, fsdp=fsdp, tensor=tensor)


def make_meshes(sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the meshes of the trainer and of the sampler over all devices.

    sampler_devices: number of devices that only the sampler uses; 0 = both share one mesh. sizes: data, fsdp and
    tensor, the axis sizes of the trainer's mesh. Raises: UserError, if the meshes do not fit the devices.
    """
    return meshes_over(all_devices(), sampler_devices, **sizes)


def all_devices() -> list[Any]:
    """Initializes and returns the devices of all processes. Raises: UserError, if the processes are not connected."""
    with progress.task("starting the devices"):
        devices = jax.devices()
    if jax.process_count() > distributed.count():  # the processes of a TPU slice find each other without our help
        raise UserError(
            f"JAX runs in {jax.process_count()} processes, which are not connected: start train and sft with "
            "--distributed auto, and all other programs on a single host"
        )
    return devices


def meshes_over(devices: Sequence[Any], sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the meshes of the trainer and of the sampler over `devices`, which need not exist on this machine.

    The sampler gets `sampler_devices` of them, the last devices of each process, and the trainer all others; 0 = both
    share one mesh. Raises: UserError, if the devices cannot be split in this way, or a mesh does not fit.
    """
    if not sampler_devices:
        shared_mesh = mesh_over(devices, **sizes)
        return shared_mesh, shared_mesh
    of_trainer, of_sampler = _split_from_sampler(devices, sampler_devices)
    try:
        trainer_mesh = mesh_over(of_trainer, **sizes)
    except UserError as error:
        raise UserError(
            f"{error} (config.engine.devices = {sampler_devices} devices are reserved for the sampler)"
        ) from error
    # The tensor axis divides the sampler's devices of one process, because it must stay within a process.
    devices_per_process = sampler_devices // len({d.process_index for d in devices})
    sampler_tensor = math.gcd(trainer_mesh.shape["tensor"], devices_per_process)
    # The fsdp axis is 1, because the sampler's copy of the weights is gathered over fsdp anyway.
    return trainer_mesh, mesh_over(of_sampler, data=-1, fsdp=1, tensor=sampler_tensor)


def _split_from_sampler(devices: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Splits devices into the trainer's and the sampler's, which are `count` devices, the last of each process."""
    processes = sorted({d.process_index for d in devices})
    count_per_process = count // len(processes)
    if count % len(processes):
        raise UserError(
            f"config.engine.devices = {count} must be a multiple of the number of processes, which is {len(processes)}"
        )
    devices_by_process = [[device for device in devices if device.process_index == process] for process in processes]
    if count_per_process >= min(map(len, devices_by_process)):
        raise UserError(
            f"config.engine.devices = {count} of {len(devices)} devices leaves no device for the trainer: choose a "
            "smaller number, or 0 to let sampler and trainer share all devices"
        )
    of_trainer = [device for of_process in devices_by_process for device in of_process[:-count_per_process]]
    of_sampler = [device for of_process in devices_by_process for device in of_process[-count_per_process:]]
    return of_trainer, of_sampler


def mesh_over(devices: Sequence[Any], *, data: int, fsdp: int, tensor: int) -> Mesh:
    """Makes a mesh over `devices`, which need not exist on this machine.

    Raises: UserError, if the mesh does not fit.
    """
    shape, processes = mesh_shape(data, fsdp, tensor, len(devices)), len({d.process_index for d in devices})
    if processes > 1:
        device_grid = _split_by_process(devices, processes, shape)
    else:
        used_devices = devices[: math.prod(shape)]
        # JAX must be allowed to split an axis of the TPU's torus, because a mesh axis may be smaller than a torus axis.
        try:
            device_grid = mesh_utils.create_device_mesh(shape, used_devices, allow_split_physical_axes=True)
        except AssertionError as error:  # JAX's own check of a TPU's chips
            raise UserError(
                f"config.mesh: {len(used_devices)} of these TPU chips do not form a complete block of the torus: "
                "change the number of devices (config.mesh.*, config.engine.devices)"
            ) from error
    return Mesh(device_grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _split_by_process(devices: Sequence[Any], count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Arranges the devices of all processes in the shape of a mesh. The tensor axis stays within a process."""
    data, fsdp, tensor = shape
    mesh_text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    if math.prod(shape) < len(devices):
        raise UserError(
            f"config.mesh ({mesh_text}) leaves some of {len(devices)} devices idle: a run of several processes must "
            "use all devices"
        )
    # The processes divide the data axis first and fsdp second, because over data only gradients cross the network
    # between hosts, but over fsdp the parameters of every layer do.
    process_grid = (count, 1, 1) if data % count == 0 else (data, count // data, 1)
    if math.prod(process_grid) != count or fsdp % process_grid[1]:
        raise UserError(
            f"config.mesh ({mesh_text}) cannot be split over {count} processes of {len(devices) // count} devices: "
            "config.mesh.tensor must divide the devices of a process, and config.mesh.data the number of processes"
        )
    slices = len({_slice_number(d) for d in devices})
    if data % slices:
        raise UserError(
            f"config.mesh ({mesh_text}) would gather parameters over the slow network between {slices} TPU slices: "
            f"config.mesh.data must be a multiple of {slices}"
        )
    # Each process has a block of devices with these sizes in the mesh.
    block_shape = (data // process_grid[0], fsdp // process_grid[1], tensor)

    def sort_key(device: Any) -> tuple[Any, ...]:
        coordinates = getattr(device, "coords", None) or ()
        return _slice_number(device), device.process_index, coordinates, device.id

    # All processes sort the devices by one key. On a large slice the TPU compiler finds no route for an axis in another
    # order.
    sorted_devices = np.array(sorted(devices, key=sort_key), dtype=object)
    # Join the axes of processes and of blocks: [data, fsdp, 1] and [data, fsdp, tensor] become one mesh.
    blocks = sorted_devices.reshape(*process_grid, *block_shape)
    return blocks.transpose((0, 3, 1, 4, 2, 5)).reshape(shape)


def _slice_number(device: Any) -> int:
    """Returns the number of a device's TPU slice, 0 for other devices. Slices are connected by a slow network."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
