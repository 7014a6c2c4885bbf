"""Converts parameters to the tensors of a Hugging Face checkpoint, and writes checkpoint folders."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxrl_llm.machine import disk, distributed, progress, sharding
from jaxrl_llm.models import adapters, names
from jaxrl_llm.models.hf import stored_dtype, tensor_table
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.structs import Array, PyTree

SHARD_BYTES = 5 * 2**30
# transformers would look for adapters because of the first file, and the second one is about other weights.
NOT_COPIED = ("adapter_config.json", "pytorch_model.bin.index.json")
COPIED = (".json", ".jinja", ".txt", ".model")


def save(folder: Path, params: PyTree, source: Path, *, family: str = "") -> None:
    """Writes a folder that `transformers` loads: weights in `source`'s dtype, and copies of `source`'s other files.

    All processes call it, and the first one writes. An old `folder` is replaced as a whole. family: as of
    `hf.family_of`. Raises: UserError, if the disk write fails.
    """
    dtype, table = stored_dtype(source, family), tensor_table(source, family)
    if distributed.first():
        with disk.replacing(folder) as unfinished:
            _save(unfinished, params, source, dtype, table)
    else:
        # Gathers them together with the first process.
        deque(tensors(params, table, dtype), maxlen=0)
    distributed.wait("export")


def _save(folder: Path, params: PyTree, source: Path, dtype: np.dtype, table: TensorNames) -> None:
    # Slow to import, and only needed here.
    from huggingface_hub import split_state_dict_into_shards_factory

    for file in source.iterdir():
        about_weights = "safetensors" in file.name or file.name in NOT_COPIED
        if file.is_file() and file.suffix in COPIED and not about_weights and _belongs_to(source, file):
            shutil.copy(file, folder)
    parts = split_state_dict_into_shards_factory(
        names.tensor_shapes(params, table),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    # One shard in host memory at a time; beside it a tensor that is a shard of its own.
    shards = defaultdict[str, dict[str, np.ndarray]](dict)
    with progress.task("exporting tensors", len(parts.tensor_to_filename)) as shown:
        for name, tensor in tensors(params, table, dtype):
            file = parts.tensor_to_filename[name]
            shards[file][name] = tensor
            if len(shards[file]) == len(parts.filename_to_tensors[file]):
                save_tensors(folder / file, shards.pop(file))
            shown.advance()
    if parts.is_sharded:
        index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file of safetensors. Raises: OSError, if the disk write fails."""
    try:
        # Some versions of transformers refuse a file without this entry.
        save_file(tensors, file, metadata={"format": "pt"})
    # safetensors raises it instead of an OSError.
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # Like the other files; safetensors makes it readable by the owner only.
    file.chmod(0o644)


def _belongs_to(folder: Path, file: Path) -> bool:
    """Returns whether a file of a model is no link out of its folder: the export may be published.

    The files of the hub's cache, MODEL/snapshots/REVISION, are links to MODEL/blobs.
    """
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        inside.append(folder.resolve().parent.parent / "blobs")
    return any(file.resolve().is_relative_to(allowed) for allowed in inside)


# Bytes that the host may hold of all layers together.
AT_ONCE = 2**28


def _layer(stacked: Array, i: int) -> Array:
    """Returns stacked[i] where it is. Indexing a jax.Array outside of jit would compile two programs for each shape."""
    return stacked[i] if isinstance(stacked, np.ndarray) else _index(stacked, i)


@jax.jit
def _index(stacked: PyTree, i: Array) -> jax.Array:
    return adapters.merged(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked))


def tensors(params: PyTree, table: TensorNames, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and value of each Hugging Face tensor, fetched from the devices one at a time.

    A kernel with an adapter is merged, a layer at a time. table: names of the family's tensors. A head that is tied to
    the embedding is not yielded, because the embedding has its values.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, adapters.is_kernel):
        name = sharding.path_name(path)
        form, remaining_names = table[name], iter(names.tensor_names(table[name], leaf.shape))
        # A slice on the device is a program for each shape, so the host slices what is small.
        on_host = not adapters.is_kernel(leaf) and leaf.nbytes <= AT_ONCE
        values: Any = sharding.gather_to_host(leaf) if on_host else leaf
        for i in range(leaf.shape[0] if names.stacked(form) else 1):
            fetched = sharding.gather_to_host(_layer(values, i) if names.stacked(form) else values)
            # The experts of a layer come together.
            for part in fetched if names.stacked(form) > 1 else (fetched,):
                part = part.astype(dtype, copy=False)
                yield next(remaining_names), np.ascontiguousarray(part.transpose(names.axes(name, form, part.ndim)))
