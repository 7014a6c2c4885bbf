"""Writes Hugging Face checkpoint folders: converts parameters to named tensors, and copies the other files."""

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

from jaxrl_llm.machine import disk, distributed, progress, sharding, transfers
from jaxrl_llm.models import adapters, names
from jaxrl_llm.models.hf import stored_dtype, tensor_table
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.structs import Array, PyTree

SHARD_BYTES = 5 * 2**30  # largest size of one weight file
# An export leaves out these files: the first would make transformers look for adapters, the second lists other weights.
UNCOPIED_FILES = ("adapter_config.json", "pytorch_model.bin.index.json")
# An export copies the files with these endings, which hold settings and tokenizer, from the initial model.
COPIED_ENDINGS = (".json", ".jinja", ".txt", ".model")


def save(folder: Path, params: PyTree, source: Path, *, family: str = "") -> None:
    """Writes a checkpoint folder that transformers loads. All processes must call this; the first one writes.

    folder: path of the new folder; an old folder is replaced. source: folder of the initial model, which gives the
    dtype of the weights, the tokenizer and the other files. family: dotted name of a user's function for a model_type
    that this package lacks, "" = none. Raises: UserError, if the disk write fails.
    """
    dtype, table = stored_dtype(source, family), tensor_table(source, family)
    if distributed.first():
        with disk.replacing(folder) as unfinished:
            _save(unfinished, params, source, dtype, table)
    else:
        # The other processes only take part in gathering the tensors.
        deque(tensors(params, table, dtype), maxlen=0)
    distributed.wait("export")


def _save(folder: Path, params: PyTree, source: Path, dtype: np.dtype, table: TensorNames) -> None:
    """Writes the weights, and copies the tokenizer and settings of `source`, into an empty folder."""
    # Imported here, because the import is slow and only an export needs it.
    from huggingface_hub import split_state_dict_into_shards_factory

    for file in source.iterdir():
        about_weights = "safetensors" in file.name or file.name in UNCOPIED_FILES
        if file.is_file() and file.suffix in COPIED_ENDINGS and not about_weights and _is_inside(source, file):
            shutil.copy(file, folder)
    shard_plan = split_state_dict_into_shards_factory(
        names.tensor_shapes(params, table),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    # Tensors are collected by file and written when the file is complete, so the host holds about one file.
    shards = defaultdict[str, dict[str, np.ndarray]](dict)
    with progress.task("exporting tensors", len(shard_plan.tensor_to_filename)) as progress_bar:
        for name, tensor in tensors(params, table, dtype):
            file = shard_plan.tensor_to_filename[name]
            shards[file][name] = tensor
            if len(shards[file]) == len(shard_plan.filename_to_tensors[file]):
                save_tensors(folder / file, shards.pop(file))
            progress_bar.advance()
    if shard_plan.is_sharded:
        index = {"metadata": shard_plan.metadata, "weight_map": shard_plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes {name: tensor} to a safetensors file. Raises: OSError, if the disk write fails."""
    try:
        # The metadata entry is needed, because some versions of transformers refuse a file without it.
        save_file(tensors, file, metadata={"format": "pt"})
    # safetensors raises SafetensorError where other libraries raise OSError.
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # safetensors makes the file readable by its owner only, but the other files are readable by all.
    file.chmod(0o644)


def _is_inside(folder: Path, file: Path) -> bool:
    """Returns whether a file lies in `folder`, and is not a link to a file elsewhere, which must not be published.

    Links into MODEL/blobs count as inside, because files in the hub's cache, MODEL/snapshots/REVISION, are such links.
    """
    allowed_folders = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed_folders.append(folder.resolve().parent.parent / "blobs")
    return any(file.resolve().is_relative_to(allowed) for allowed in allowed_folders)


# Stacked parameters of at most this many bytes are fetched to the host as a whole, others layer by layer.
HOST_BYTES = 2**28


def _layer_of(stacked: Array, i: int) -> Array:
    """Returns layer i of a stacked parameter. A jax.Array is indexed in jit, because this compiles fewer programs."""
    return stacked[i] if isinstance(stacked, np.ndarray) else _merged_layer(stacked, i)


@jax.jit
def _merged_layer(stacked: PyTree, i: Array) -> jax.Array:
    return adapters.merge_adapters(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked))


def tensors(params: PyTree, table: TensorNames, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, value) of each Hugging Face tensor, fetched from the devices one at a time.

    params: parameters, with adapters or not; adapters are merged layer by layer. table: {path of a parameter: name of
    its tensors}. dtype: dtype of the tensors. A head that is tied to the embedding is not yielded.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, adapters.is_kernel):
        name = sharding.path_name(path)
        template, remaining_names = table[name], iter(names.tensor_names(table[name], leaf.shape))
        # Small parameters are sliced on the host, because slicing on a device compiles a program for each shape.
        on_host = not adapters.is_kernel(leaf) and leaf.nbytes <= HOST_BYTES
        parameter: Any = transfers.gather_to_host(leaf) if on_host else leaf
        for i in range(leaf.shape[0] if names.stacked_axes(template) else 1):
            host_values = transfers.gather_to_host(
                _layer_of(parameter, i) if names.stacked_axes(template) else parameter
            )
            # One layer holds all its experts, which are separate tensors in most checkpoints.
            for tensor in host_values if names.stacked_axes(template) > 1 else (host_values,):
                tensor = tensor.astype(dtype, copy=False)
                yield (
                    next(remaining_names),
                    np.ascontiguousarray(tensor.transpose(names.tensor_axes(name, template, tensor.ndim))),
                )
