"""Reads and writes PEFT folders of adapters: adapter_config.json and adapter_model.safetensors."""

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
from jaxrl_llm.machine import disk, distributed, transfers
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.models.adapters import Adapters, PeftForm
from jaxrl_llm.structs import PyTree

SETTINGS_FILE, WEIGHTS_FILE = hf.ADAPTER, "adapter_model.safetensors"
# Keys of adapter_config.json for features of PEFT that this package lacks. PEFT does not use a feature if its key is
# missing or its value is empty.
UNSUPPORTED_SETTINGS = (
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
# Values of init_lora_weights that leave the base unchanged. With any other value, such as "pissa", PEFT changes the
# base too.
SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


def save(folder: Path, params: PyTree, adapters: Adapters, base: str) -> None:
    """Writes a folder of adapters that PEFT loads. All processes must call this function; the first one writes.

    folder: path of the new folder; an old folder is replaced. params: arrays of the adapters. base: path or hub id of
    the base model, for adapter_config.json. Raises: UserError, if the disk write fails.
    """
    # Gathering a sharded array needs all processes.
    host_params = jax.tree.map(transfers.gather_to_host, params)
    if distributed.first():
        with disk.replacing(folder) as unfinished:
            (unfinished / SETTINGS_FILE).write_text(json.dumps(settings(adapters, base), indent=2) + "\n")
            hf_export.save_tensors(unfinished / WEIGHTS_FILE, tensors(host_params, adapters))
    distributed.wait("adapter")


def settings(adapters: Adapters, base: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json. base: path or hub id of the base model."""
    form = _form(adapters)
    excluded = {"exclude_modules": rf".*\b{adapters.excluded_module}\b.*"} if adapters.excluded_module else {}
    return {
        "peft_type": form.type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{key: getattr(adapters.kind, field) for field, key in form.settings.items()},
        # PEFT adapts every module whose name ends with one of these parts, in all layers.
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters.modules.values()}),
        **excluded,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def tensors(params: PyTree, adapters: Adapters) -> dict[str, np.ndarray]:
    """Returns {name: tensor} for adapter_model.safetensors, from the adapters' arrays on the host.

    PEFT stores each array transposed, and each layer in its own tensor.
    """
    tensors_by_name = {}
    for module_path, array_name, template in _adapter_tensors(adapters):
        stacked_array = _subtree(params, module_path)[array_name]
        for i, layer_array in enumerate(stacked_array):
            tensors_by_name[template.format(i)] = np.ascontiguousarray(layer_array.T)
    return tensors_by_name


def load(folder: Path, adapters: Adapters) -> PyTree:
    """Reads the adapters of a PEFT folder as float32 arrays on the host.

    Raises: UserError, if their kind, settings or shapes differ from those of `adapters`, which the config defines.
    """
    # Check the settings: the folder must use no feature that this package lacks, and agree with the config.
    settings, form = hf.read_config(folder, SETTINGS_FILE), _form(adapters)
    supported_settings = {"peft_type": form.type, "bias": "none"} | dict.fromkeys(UNSUPPORTED_SETTINGS)
    for name, value in supported_settings.items():
        # An empty or missing setting means that PEFT does not use the feature.
        if (setting := settings.get(name, value)) and setting != value:
            raise UserError(
                f"{folder / SETTINGS_FILE}: {name} is {setting!r}, but must be {value!r}: use adapters without this "
                "feature of PEFT"
            )
    if (init_method := settings.get("init_lora_weights")) not in SUPPORTED_INITS:
        raise UserError(
            f"{folder / SETTINGS_FILE}: init_lora_weights is {init_method!r}, which also changes the base model: "
            "convert the adapters in PEFT by save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for field, key in form.settings.items():
        if (setting := settings.get(key, False)) != (setting_here := getattr(adapters.kind, field)):
            peft_setting = f"{key} = {setting!r} in {folder / SETTINGS_FILE}"
            raise UserError(
                f"config.adapters.{field} = {setting_here!r}: must agree with {peft_setting}: set "
                f"config.adapters.{field}"
            )
    try:
        file_tensors = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS_FILE} cannot be read ({error}): fetch it again") from None
    # Fill the arrays of the adapters, layer by layer. Each tensor that is used leaves `file_tensors`.
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), adapters.shapes)
    for module_path, array_name, template in _adapter_tensors(adapters):
        stacked_array = _subtree(params, module_path)[array_name]
        for i in range(len(stacked_array)):
            tensor, tensor_text = file_tensors.pop(template.format(i), None), f"tensor {template.format(i)}"
            if tensor is None or tensor.T.shape != stacked_array[i].shape:
                problem = "is missing" if tensor is None else f"is {tensor.shape}, not {stacked_array[i].T.shape}"
                remedy = "let config.adapters.targets match only kernels that the folder adapts in all layers"
                raise UserError(f"{folder / WEIGHTS_FILE}: {tensor_text} {problem}: {remedy}")
            if not np.isfinite(tensor).all():
                problem = "has infinite or NaN values"
                raise UserError(f"{folder / WEIGHTS_FILE}: {tensor_text} {problem}: use another checkpoint")
            stacked_array[i] = tensor.T
    # The tensors that are left adapt no kernel of this run, so the run would lose a part of the trained adapters.
    if file_tensors:
        # An adapter of the embedding or of the head cannot be matched by any targets.
        outside = next((name for name in file_tensors if ".layers." not in name), None)
        remedy = "let config.adapters.targets match all kernels that the folder adapts"
        if outside:
            remedy = (
                "only kernels of the layers can have adapters: merge the adapters into their base with PEFT, and "
                "train the merged model"
            )
        unused = outside or next(iter(file_tensors))
        raise UserError(
            f"{folder / WEIGHTS_FILE}: tensor {unused} adapts no kernel that config.adapters.targets matches: {remedy}"
        )
    return params


def fingerprint(path: str) -> str:
    """Returns a hash of the adapters in a PEFT folder. Raises: UserError, if the folder has no adapters."""
    file = Path(path).expanduser() / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(
            f"config.adapters.path = {path!r}: the folder has no {WEIGHTS_FILE}: set it to a folder that PEFT wrote"
        )
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _form(adapters: Adapters) -> PeftForm:
    """Returns the names that PEFT uses for these adapters, their settings and their arrays."""
    assert adapters.kind.peft
    return adapters.kind.peft


def _subtree(params: PyTree, path: str) -> PyTree:
    """Returns the part of a parameter tree at a path such as layers/attention/query."""
    return reduce(getitem, path.split("/"), params)


def _adapter_tensors(adapters: Adapters) -> list[tuple[str, str, str]]:
    """Returns (path of the module, name of the array, name of its tensors with {} for the layer) of all arrays."""
    return [
        (module_path, array_name, f"base_model.model.{module_name}.{peft_name}.weight")
        for module_path, module_name in adapters.modules.items()
        for array_name, peft_name in _form(adapters).leaves.items()
    ]
