"""The built-in engines. Each function checks the `engine` section of a config and returns an `EngineChoice`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange, NotNegative, Positive
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.sizes import sequence_limit
from jaxrl_llm.rollout.protocol import Engine, EngineChoice, EngineInputs
from jaxrl_llm.rollout.vllm import engine as servers_of_vllm
from jaxrl_llm.rollout.vllm.address import LOOPBACK, check_python
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer

__all__ = ["jax", "vllm"]  # names for config.engine.name

TEMPERATURES = (0.01, 2.0)  # vLLM samples at 0.01 where a request says less, and refuses more than 2
PYTHON = ".vllm/bin/python"  # where launch/vllm_cpu.sh and launch/vllm_gpu.sh install vLLM
# Chunked prefill is off, because with it vLLM's CPU engine dies on requests with seeds.
SERVER_ARGS = (
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens",
    "8192",
    "--max-num-seqs",
    "512",
)


def jax(
    *,
    devices: MayChange[Count] = 0,
    max_sequences: MayChange[Count] = 0,
    pages: MayChange[Count] = 0,
    weights: MayChange[Literal["", "int8"]] = "",
    cache: MayChange[Literal["", "int8"]] = "",
) -> EngineChoice:
    """The JAX sampler, in the trainer's process.

    devices: number of devices on all hosts that only the sampler uses, 0 = it shares the trainer's devices and mesh.
    max_sequences: completions that hold pages of the KV cache at once; the others wait until one has ended. 0 = as many
    as there are pages for.
    pages: number of pages on each device, of 64 tokens (128 on a TPU). If they run out, the youngest completion is
    computed again. 0 = as many as the completions may need, and as fit into the memory of an accelerator.
    weights: "int8" rounds the layers' kernels, with a scale for each output; "" = dtype of the model.
    cache: "int8" rounds keys and values, with a scale for each token and head; "" = dtype of the model.
    """

    def start(inputs: EngineInputs) -> Engine:
        return Sampler(
            inputs.model,
            inputs.sampler_mesh or inputs.mesh,
            trainer=inputs.mesh,
            max_completion_tokens=inputs.max_completion_tokens,
            stop_ids=inputs.stop_ids,
            pad_id=inputs.pad_id,
            max_sequences=sequence_limit(max_sequences, inputs.sequences_per_step),
            pages=pages,
            cache_bytes=inputs.cache_bytes,
            in_int8=weights == "int8",
            cache_dtype=cache,
            observation_tokens=inputs.observation_tokens,
        )

    sizes: dict[str, Any] = dict(max_sequences=max_sequences, pages=pages, devices=devices)
    return EngineChoice(start, in_trainer=True, in_int8=weights == "int8", cache_dtype=cache, **sizes)


def vllm(
    *,
    managed: MayChange[bool] = True,
    python: MayChange[str] = PYTHON,
    server_args: MayChange[tuple[str, ...]] = SERVER_ARGS,
    servers: MayChange[tuple[str, ...]] = (),
    push: MayChange[Literal["file", "http"]] = "file",
    push_address: MayChange[str] = "",
    weights_dir: MayChange[str] = "/dev/shm",
    concurrency: MayChange[AtLeastOne] = 64,
    timeout: MayChange[Positive] = 300.0,
    patience: MayChange[Positive] = 300.0,
    max_gap: MayChange[NotNegative] = 0.0,
) -> EngineChoice:
    """vLLM servers, started by the run or elsewhere. configs/grpo_vllm.py explains each argument."""
    if managed == bool(servers):
        raise UserError(
            f"config.engine.managed = {managed} and engine.servers = {servers}: give servers, or let the run "
            "start one of its own with managed = True and servers = ()"
        )
    for name, value, unset in (("python", python, PYTHON), ("server_args", server_args, SERVER_ARGS)):
        if not managed and value != unset:
            raise UserError(
                f"config.engine.{name} = {value!r} does nothing: engine.managed is False; set it to {unset!r}"
            )
    check_addresses(servers, push, push_address)
    check = partial(check_python, python, "config.engine.python") if managed else lambda: None
    server = partial(ManagedServer, python, extra=server_args) if managed else None
    pushes = dict(push_address=push_address, weights_dir=weights_dir, max_gap=max_gap)
    requests = dict(concurrency=concurrency, timeout=timeout, patience=patience)
    start = partial(servers_of_vllm.start, managed=server, servers=servers, **pushes, **requests)
    return EngineChoice(start, temperatures=TEMPERATURES, check=check)


def check_addresses(servers: tuple[str, ...], push: str, push_address: str) -> None:
    """Raises: UserError, if an address is wrong, or if a server cannot reach the weights."""
    locations = [_location(server) for server in servers]
    for server, location in zip(servers, locations, strict=True):
        if not location:
            raise UserError(
                f"config.engine.servers: {server!r} is no address: give one like 'http://127.0.0.1:8000', or "
                "'unix:/PATH' for a socket of this machine"
            )
        if push == "file" and location[1] and location[0] not in LOOPBACK:
            raise UserError(
                f"config.engine.push = 'file': {server} may be another host, which cannot see the file: "
                "set push = 'http' and push_address to this host's address"
            )
    if len(set(locations)) < len(servers):
        raise UserError(f"config.engine.servers = {servers} names one twice: give each once")
    if (push == "http") != bool(push_address) or push_address in ("0.0.0.0", "::"):
        raise UserError(
            f"config.engine.push = {push!r} and push_address = {push_address!r}: 'http' needs this host's address "
            "as the servers reach it, 'file' none"
        )


def _location(server: str) -> tuple[str, int] | None:
    """Returns host and port of a server, the same for all names of this host; of a socket its path and 0.

    None: the text is no address.
    """
    if server.startswith("unix:/"):
        return server, 0
    try:
        # The number of a process may be a part of the port.
        url = urlsplit(server.replace("{process}", "0"))
        host, port = url.hostname, url.port
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or not host:
        return None
    return LOOPBACK[0] if host in LOOPBACK else host, port or {"http": 80, "https": 443}[url.scheme]
