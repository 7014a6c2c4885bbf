"""PEFT's folders of adapters: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk, distributed, sharding
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.models.adapters import Adapters, PeftForm
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


def save(folder: Path, params: PyTree, adapters: Adapters, base: str) -> None:
    """Writes a folder that PEFT loads onto the model `base`. All processes call it, and the first one writes.

    params: parameters of the adapters, whose kind PEFT has. An old `folder` is replaced as a whole.
    Raises: UserError, if the disk write fails.
    """
    # All processes take part: a sharded array is gathered by all of them, and only the first one writes.
    on_host = jax.tree.map(sharding.gather_to_host, params)
    if distributed.first():
        with disk.replacing(folder) as unfinished:
            (unfinished / SETTINGS).write_text(json.dumps(settings(adapters, base), indent=2) + "\n")
            hf_export.save_tensors(unfinished / WEIGHTS, tensors(on_host, adapters))
    distributed.wait("adapter")


def settings(adapters: Adapters, base: str) -> dict[str, Any]:
    """Returns what adapter_config.json holds."""
    form = _form(adapters)
    without = {"exclude_modules": rf".*\b{adapters.without}\b.*"} if adapters.without else {}
    return {
        "peft_type": form.type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{key: getattr(adapters.kind, field) for field, key in form.settings.items()},
        # The last part of the names: PEFT adapts every module whose name ends so, in all layers.
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters.modules.values()}),
        **without,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def tensors(params: PyTree, adapters: Adapters) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, from parameters on the host. PEFT keeps each one transposed."""
    by_name = {}
    for path, which, name in _names(adapters):
        stacked = reduce(getitem, path.split("/"), params)[which]
        by_name |= {name.format(i): np.ascontiguousarray(layer.T) for i, layer in enumerate(stacked)}
    return by_name


def load(folder: Path, adapters: Adapters) -> PyTree:
    """Reads the adapters of a folder, float32, on the host.

    Raises: UserError, if they are of another kind or shape, or if the config describes others.
    """
    settings, form = hf.read_config(folder, SETTINGS), _form(adapters)
    idle = {"peft_type": form.type, "bias": "none"} | dict.fromkeys(OTHERS)
    for name, value in idle.items():
        # Empty or missing: PEFT does nothing then.
        if (setting := settings.get(name, value)) and setting != value:
            raise UserError(f"{folder / SETTINGS}: {name} is {setting!r}, which is not supported: use plain adapters")
    if (began := settings.get("init_lora_weights")) not in BEGINNINGS:
        raise UserError(
            f"{folder / SETTINGS}: init_lora_weights is {began!r}, with which PEFT changes the base too: convert it to "
            "plain adapters in PEFT, by save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for field, key in form.settings.items():
        if (setting := settings.get(key, False)) != (ours := getattr(adapters.kind, field)):
            theirs = f"{folder / SETTINGS} has {key} = {setting!r}"
            raise UserError(f"config.adapters.{field} = {ours!r}, but {theirs}: set it")
    try:
        stored = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}): fetch it again") from None
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), adapters.shapes)
    for path, which, name in _names(adapters):
        stacked = reduce(getitem, path.split("/"), params)[which]
        for i in range(len(stacked)):
            tensor = stored.pop(name.format(i), None)
            if tensor is None or tensor.T.shape != stacked[i].shape:
                has = "is missing" if tensor is None else f"is {tensor.shape}, not {stacked[i].T.shape}"
                remedy = "config.adapters.targets may name only kernels that it adapts in all layers"
                raise UserError(f"{folder / WEIGHTS}: tensor {name.format(i)} {has}: {remedy}")
            if not np.isfinite(tensor).all():
                weights = f"{folder / WEIGHTS}: tensor {name.format(i)}"
                raise UserError(f"{weights} has numbers that are not finite: use another checkpoint")
            stacked[i] = tensor.T
    # What is left has no kernel here: training would go on without a part of what the folder's model has learned.
    if stored:
        # One of the embedding or the head.
        outside = next((name for name in stored if ".layers." not in name), None)
        remedy = "set config.adapters.targets to all kernels that it adapts"
        if outside:
            remedy = "only kernels of the layers have adapters here; merge it into its base with PEFT, and train that"
        raise UserError(f"{folder / WEIGHTS} also has {outside or next(iter(stored))}: {remedy}")
    return params


def fingerprint(path: str) -> str:
    """Hash that tells adapters apart. Raises: UserError, if there are none."""
    file = Path(path).expanduser() / WEIGHTS
    if not file.is_file():
        raise UserError(f"config.adapters.path = {path!r} has no {WEIGHTS}: give a folder that PEFT wrote")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _form(adapters: Adapters) -> PeftForm:
    assert adapters.kind.peft
    return adapters.kind.peft


def _names(adapters: Adapters) -> list[tuple[str, str, str]]:
    """Returns path, leaf and tensor name of each stack of adapters."""
    return [
        (path, ours, f"base_model.model.{module}.{theirs}.weight")
        for path, module in adapters.modules.items()
        for ours, theirs in _form(adapters).leaves.items()
    ]
