"""Runs inside vLLM's workers, without JAX: pulls the trainer's weights, checks all of them, and then loads them.

One worker of each host downloads the file, and each worker checks its share of the tensors.

vllm serve MODEL --worker-extension-cls jaxrl_llm.rollout.vllm.receive.Extension \\
    --weight-transfer-config '{"backend": "pull"}'

It uses vLLM 0.32's weight-transfer API. Only `load` depends on how vLLM loads a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from jaxrl_llm.rollout.vllm import address

SHARED_MEMORY = "/dev/shm"


@dataclass
class Init(WeightTransferInitInfo):
    """Start of the weight transfer. tensors: {name: shape} of all tensors of a push."""

    tensors: dict[str, list[int]]


@dataclass
class Update(WeightTransferUpdateInfo):
    """Location of a push: the path of a safetensors file on this host, or a URL with the token that it requires."""

    path: str = ""
    url: str = ""
    token: str = ""
    timeout: float = 60.0


class PushRefused(Exception):
    """A worker cannot use a push. All workers raise this error before any of them changes a weight."""


class PullBackend(WeightTransferEngine[Init, Update]):
    """vLLM's weight-transfer backend "pull". It checks a whole push before it loads any tensor.

    If the push is wrong, the old weights stay in use.
    """

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Init) -> None:
        # vLLM 0.32 on a CPU packs experts when it loads them, and cannot load them a second time.
        if self.device.type == "cpu" and any(".experts." in name for name in init_info.tensors):
            raise ValueError(
                "refused: on a CPU, vLLM cannot load the weights of experts again; set config.engine.name = 'jax'"
            )
        self.tensors = {name: tuple(shape) for name, shape in init_info.tensors.items()}

    def start_weight_update(self) -> None:
        # Nothing to do here: `receive_weights` checks all tensors before the model changes.
        pass

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: Update) -> None:
        """Loads pushed weights into this worker's model. All workers of the server call it together."""
        rank, workers = get_world_group().rank_in_group, get_world_group().world_size
        try:
            with ExitStack() as files:
                first, path = gathered(host()).index(host()), ""
                with agreed():
                    if rank == first:
                        path = files.enter_context(_local(update_info))
                path = gathered(path)[first]
                with agreed():
                    file = files.enter_context(safe_open(path, "pt"))
                    check(file, self.tensors, list(self.tensors)[rank::workers])
                load(file, self.model, self.model_config, self.device)
        except PushRefused as error:
            # Only the last worker raises, because vLLM 0.32 reads the workers' answers up to the first failure. It
            # would take the remaining answers for those of its next call.
            if (rank + 1) % self.parallel_config.world_size == 0:
                raise ValueError(str(error)) from None

    def shutdown(self) -> None:
        pass


class Extension:
    """Methods that vLLM adds to its workers. vLLM imports this module for them, which registers `PullBackend`."""

    # Attributes of vLLM's worker class.
    _weight_update_active: bool
    model_config: Any

    def config_json(self) -> dict[str, Any]:
        """Returns the settings of the served model, with the defaults of transformers and the server's overrides."""
        return json.loads(self.model_config.hf_config.to_json_string(use_diff=False))

    def forget_push(self) -> None:
        """Drops the unfinished push of a killed trainer, if any.

        vLLM's own call to finish a push fails without an unfinished push. With tensor parallelism, a failed call leaves
        an answer in the queue, which later calls would read as their own.
        """
        self._weight_update_active = False


def gathered(value: Any) -> list[Any]:
    """Returns the values of all workers, by rank. Waits for all workers."""
    group = get_world_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


@contextmanager
def agreed() -> Iterator[None]:
    """Waits for all workers at the end of the block. Raises: PushRefused in all workers, if the block fails in one."""
    error = ""
    try:
        yield
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if errors := list(filter(None, gathered(error))):
        raise PushRefused(errors[0])


def host() -> str:
    """Returns an id that is equal for processes that can open each other's files in /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def setting(model_config: Any, name: str) -> Any:
    """Returns a field of config.json, None if it is missing. Models with images have some fields in text_config."""
    configs = model_config.hf_config, model_config.hf_text_config
    return next((getattr(config, name) for config in configs if hasattr(config, name)), None)


@contextmanager
def _local(update: Update) -> Iterator[str]:
    """Yields the path of an update's file. If the update has a URL, it downloads the file first.

    Raises: ValueError, if a trainer may not name this file or this URL.
    """
    if update.path:
        yield address.check_weights(update.path)
        return
    # The file has no name, so that the system frees it even if the worker is killed.
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None) as download:
        with address.open_weights(update.url, update.token, update.timeout) as response:
            shutil.copyfileobj(response, download, 2**22)
        download.flush()
        # The other workers can open this path too, as long as this process keeps the file open.
        yield f"/proc/{os.getpid()}/fd/{download.fileno()}"


def check(file: Any, tensors: dict[str, tuple[int, ...]], share: list[str]) -> None:
    """Checks the tensors of a push. tensors: expected {name: shape}; share: names that this worker checks for NaN.

    Raises: ValueError, if a tensor is missing, unknown or of another shape, or if one of `share` is not finite.
    """
    names = set(file.keys())
    if missing := sorted(set(tensors) - names):
        raise ValueError(f"refused: the weights lack {len(missing)} tensors, the first {missing[0]}")
    if unknown := sorted(names - set(tensors)):
        raise ValueError(f"refused: the weights have {len(unknown)} unknown tensors, the first {unknown[0]}")
    for name, shape in tensors.items():
        actual = tuple(file.get_slice(name).get_shape())
        if actual != shape:
            raise ValueError(f"refused: {name} has shape {actual}, not {shape}")
    for name in share:
        if not torch.isfinite(file.get_tensor(name)).all():
            raise ValueError(f"refused: {name} is not finite")


def load(file: Any, model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
    """Loads checked weights as vLLM does at its start: fuses, slices for tensor parallelism, and casts them."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in file.keys():  # noqa: SIM118, not a dict
            yield name, file.get_tensor(name)
        # vLLM's CPU linear layers keep a packed copy of their weights. A tied head gets the embedding again here,
        # because it would keep its old copy. Gemma 2 has no head, and a model with images has its head within its text
        # model.
        text_model = model.get_language_model() if hasattr(model, "get_language_model") else model
        if setting(model_config, "tie_word_embeddings") and hasattr(text_model, "lm_head") and device.type == "cpu":
            embedding = next(name for name in file.keys() if name.endswith("embed_tokens.weight"))  # noqa: SIM118
            yield "lm_head.weight", file.get_tensor(embedding)

    with torch.device(device):
        initialize_layerwise_reload(model)
        model.load_weights(tensors())
        finalize_layerwise_reload(model, model_config)


WeightTransferEngineFactory.register_engine("pull", PullBackend)
