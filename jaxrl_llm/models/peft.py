"""The adapters of a config, and PEFT's folders with them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxrl_llm.config.schema import AtLeastOne, MayChange, Positive
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk, distributed, sharding
from jaxrl_llm.models import hf, names
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.structs import PyTree

SETTINGS, WEIGHTS = hf.ADAPTER, "adapter_model.safetensors"
# What PEFT can do to adapters and we cannot. Without value or empty, each does nothing.
OTHERS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# How adapters can begin without a change to the base. After the other ways, such as pissa, PEFT changes the base too.
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def make_lora(
    model: Decoder,
    *,
    rank: AtLeastOne,
    alpha: Positive,
    rs: bool,
    targets: str,
    base_dtype: Literal["", "int8"],
    path: MayChange[str],
) -> Lora:
    """Returns the adapters of a model.

    targets: a regular expression; a kernel of the layers gets an adapter if the expression matches a part of its name,
    such as self_attn.q_proj. rs: rank-stabilized scaling. base_dtype: of the kernels of the layers, which do not learn;
    "": that of their products. path: of a folder to start from, as `load` reads it; "": none.
    Raises: UserError, if no kernel has such a name.
    """
    model_shapes, table, shape_of = model.shapes(), names.family_table(model.cfg.family), jax.ShapeDtypeStruct
    module_names = {name: table[name].removesuffix(".weight") for name in model.linears()}
    shapes, modules = dict[str, Any](), dict[str, str]()
    for name, module in module_names.items():
        if re.search(targets, _in_layer(module)):
            layers, d, e = _node(model_shapes, name).shape
            *parts, _ = name.split("/")
            # The tree has only paths with an adapter: `Lora.combine` takes all else from the base.
            node = reduce(lambda node, part: node.setdefault(part, {}), parts, shapes)
            node |= {
                "lora_a": shape_of((layers, d, rank), np.float32),
                "lora_b": shape_of((layers, rank, e), np.float32),
            }
            modules["/".join(parts)] = module
    if not modules:
        known = ", ".join(map(_in_layer, module_names.values()))
        raise UserError(f"config.lora.targets = {targets!r} is in no name of a kernel; there is {known}")
    return Lora(shapes, modules, rank, alpha, rs, frozenset(module_names if base_dtype else ()))


def load_base(folder: Path, model: Decoder, mesh: Mesh, lora: Lora) -> PyTree:
    """Loads the parameters beside the adapters. Raises: UserError, as `hf.load_params`."""

    def keep(path: str, leaf: jax.Array) -> Any:
        if path not in lora.in_int8:
            return leaf
        rounded = partial(lora.as_stored, path)
        # Rounded tensor by tensor while loading: the float kernels of all layers are never in memory together.
        place = sharding.shardings({path: jax.eval_shape(rounded, leaf)}, mesh)[path]
        return jax.jit(rounded, out_shardings=place)(leaf)

    return hf.load_params(folder, model, mesh, learns=False, keep=keep)


def base_shapes(shapes: PyTree, lora: Lora) -> PyTree:
    """Returns the parameters beside the adapters as shapes, from those of the model."""
    stored = lambda path, leaf: jax.eval_shape(partial(lora.as_stored, sharding.path_name(path)), leaf)  # noqa: E731
    return jax.tree_util.tree_map_with_path(stored, shapes)


def first_adapters(lora: Lora, path: str, seed: int, mesh: Mesh) -> PyTree:
    """Returns the adapters that a run begins with, on the mesh: those of a folder, or new ones if path is ""."""
    place = sharding.shardings(lora.shapes, mesh)
    if path:
        return jax.device_put(load(Path(path).expanduser(), lora), place)
    # Made where they stay: no process holds all of them.
    return jax.jit(lora.init, out_shardings=place)(jax.random.key(seed))


def save(folder: Path, adapters: PyTree, lora: Lora, base: str) -> None:
    """Writes a folder that PEFT loads onto the model `base`. All processes call it, and the first one writes.

    The new folder is complete before it replaces an old one. Raises: UserError, if the disk write fails.
    """
    # All processes take part: a sharded array is gathered by all of them, and only the first one writes.
    on_host = jax.tree.map(sharding.whole_to_host, adapters)
    if distributed.first():
        unfinished = folder.with_name(folder.name + ".partial")
        with disk.writing(folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            (unfinished / SETTINGS).write_text(json.dumps(settings(lora, base), indent=2) + "\n")
            try:
                save_file(tensors(on_host, lora), unfinished / WEIGHTS, metadata={"format": "pt"})
            # safetensors raises it instead of an OSError.
            except SafetensorError as error:
                raise OSError(str(error)) from error
            # safetensors makes it readable by the owner only.
            (unfinished / WEIGHTS).chmod(0o644)
            # A folder cannot be renamed over one that has files.
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    distributed.wait("adapter")


def settings(lora: Lora, base: str) -> dict[str, Any]:
    """Returns what adapter_config.json holds."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rs,
        # The last part of the names: PEFT adapts every module whose name ends so, in all layers.
        "target_modules": sorted({module.rpartition(".")[2] for module in lora.modules.values()}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def tensors(adapters: PyTree, lora: Lora) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, from adapters on the host. PEFT keeps A as [r, D] and B as [E, r]."""
    by_name = {}
    for path, which, name in _names(lora):
        stacked = _node(adapters, path)[which]
        by_name |= {name.format(i): np.ascontiguousarray(layer.T) for i, layer in enumerate(stacked)}
    return by_name


def load(folder: Path, lora: Lora) -> PyTree:
    """Reads the adapters of a folder, float32, on the host.

    Raises: UserError, if they are of another kind or shape, or if the config describes others.
    """
    settings = hf.read_config(folder, SETTINGS)
    idle = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(OTHERS)
    for name, value in idle.items():
        # Empty or missing: PEFT does nothing then.
        if (setting := settings.get(name, value)) and setting != value:
            raise UserError(f"{folder / SETTINGS}: {name} is {setting!r}, which is not supported: use plain LoRA")
    if (began := settings.get("init_lora_weights")) not in BEGINNINGS:
        raise UserError(
            f"{folder / SETTINGS}: init_lora_weights is {began!r}, with which PEFT changes the base too: convert it to "
            "plain LoRA in PEFT, by save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    ours = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rs}
    for (key, value), field in zip(ours.items(), ("rank", "alpha", "rs"), strict=True):
        if (setting := settings.get(key, False)) != value:
            raise UserError(f"config.lora.{field} = {value!r}, but {folder / SETTINGS} has {key} = {setting!r}: set it")
    try:
        stored = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}): fetch it again") from None
    adapters = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), lora.shapes)
    for path, which, name in _names(lora):
        stacked = _node(adapters, path)[which]
        for i in range(len(stacked)):
            tensor = stored.pop(name.format(i), None)
            if tensor is None or tensor.T.shape != stacked[i].shape:
                has = "is missing" if tensor is None else f"is {tensor.shape}, not {stacked[i].T.shape}"
                remedy = "config.lora.targets may name only kernels that it adapts in all layers"
                raise UserError(f"{folder / WEIGHTS}: tensor {name.format(i)} {has}: {remedy}")
            stacked[i] = tensor.T
    # What is left has no kernel here: training would go on without a part of what the folder's model has learned.
    if stored:
        # One of the embedding or the head.
        outside = next((name for name in stored if ".layers." not in name), None)
        remedy = "set config.lora.targets to all kernels that it adapts"
        if outside:
            remedy = "only kernels of the layers have adapters here; merge it into its base with PEFT, and train that"
        raise UserError(f"{folder / WEIGHTS} also has {outside or next(iter(stored))}: {remedy}")
    return adapters


def fingerprint(path: str) -> str:
    """Hash that tells adapters apart. Raises: UserError, if there are none."""
    file = Path(path).expanduser() / WEIGHTS
    if not file.is_file():
        raise UserError(f"config.lora.path = {path!r} has no {WEIGHTS}: give a folder that PEFT wrote")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _names(lora: Lora) -> list[tuple[str, str, str]]:
    """Returns path, leaf and tensor name of each stack of adapters."""
    leaves = {"lora_a": "lora_A", "lora_b": "lora_B"}
    return [
        (path, ours, f"base_model.model.{module}.{theirs}.weight")
        for path, module in lora.modules.items()
        for ours, theirs in leaves.items()
    ]


def _in_layer(module: str) -> str:
    """Returns a module's name behind that of its layer, such as self_attn.q_proj."""
    return module.rpartition("{}.")[2]


def _node(tree: PyTree, path: str) -> PyTree:
    return reduce(getitem, path.split("/"), tree)
