"""The built-in engines. Each function checks the `engine` section of a config and returns an `EngineChoice`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from jaxrl_llm.config.schema import AtLeastOne, Count, MayChange, NotNegative, Positive
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.jax.sizes import sequence_limit
from jaxrl_llm.rollout.protocol import Engine, EngineChoice, EngineInputs
from jaxrl_llm.rollout.vllm.address import LOOPBACK, check_python
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer

__all__ = ["jax", "vllm"]  # values of config.engine.name

VLLM_TEMPERATURES = (0.01, 2.0)  # vLLM raises lower temperatures to 0.01, and refuses higher ones
VLLM_PYTHON = ".vllm/bin/python"  # launch/vllm_cpu.sh and launch/vllm_gpu.sh install vLLM there
# Default arguments of `vllm serve`. Chunked prefill is off, because vLLM's CPU engine crashes with it on seeds.
SERVER_ARGS = (
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens",
    "8192",
    "--max-num-seqs",
    "512",
)


def jax_engine(
    *,
    devices: MayChange[Count] = 0,
    max_sequences: MayChange[Count] = 0,
    pages: MayChange[Count] = 0,
    weights: MayChange[Literal["", "int8"]] = "",
    cache: MayChange[Literal["", "int8"]] = "",
    drafts: MayChange[Count] = 0,
) -> EngineChoice:
    """Chooses the JAX sampler, which runs in the trainer's process (config.engine.name = "jax").

    devices: number of devices on all hosts that only the sampler uses, 0 = it shares the trainer's devices and mesh.
    max_sequences: most completions that hold pages of the key-value cache at a time; other completions wait until one
    of these has ended. 0 = as many as the pages allow.
    pages: number of pages on each device, of 64 tokens (128 on a TPU). If they run out, the youngest completion is
    computed again. 0 = as many as the completions may need, and as fit into the memory of an accelerator.
    weights: "int8" rounds the layers' kernels, with a scale for each output; "" = dtype of the model.
    cache: "int8" rounds keys and values, with a scale for each token and head; "" = dtype of the model.
    drafts: most tokens that a pass through the model verifies in advance, guessed from other completions of the prompt;
    0 = none. Only small decode programs have drafts.
    """

    def start(inputs: EngineInputs) -> Engine:
        # The models take a second to import, which a check of a config need not wait for.
        from jaxrl_llm.rollout.jax.engine import Sampler

        return Sampler(
            inputs.model,
            inputs.sampler_mesh or inputs.mesh,
            trainer_mesh=inputs.mesh,
            max_completion_tokens=inputs.max_completion_tokens,
            stop_ids=inputs.stop_ids,
            pad_id=inputs.pad_id,
            max_sequences=sequence_limit(max_sequences, inputs.sequences_per_step),
            pages=pages,
            cache_bytes=inputs.cache_bytes,
            in_int8=weights == "int8",
            cache_dtype=cache,
            observation_tokens=inputs.observation_tokens,
            drafts=drafts,
        )

    sizes: dict[str, Any] = dict(max_sequences=max_sequences, pages=pages, devices=devices, drafts=drafts)
    return EngineChoice(start, in_trainer=True, in_int8=weights == "int8", cache_dtype=cache, **sizes)


jax = jax_engine  # the name of this engine in configs


def vllm(
    *,
    managed: MayChange[bool] = True,
    python: MayChange[str] = VLLM_PYTHON,
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
    """Chooses vLLM servers, which the run or its user starts. configs/grpo_vllm.py explains each argument."""
    if managed and servers:
        raise UserError(
            f"config.engine.managed = True: the run starts a server of its own, but engine.servers = {servers} lists "
            "servers; set engine.servers = (), or engine.managed = False to use yours"
        )
    if not managed and not servers:
        raise UserError(
            "config.engine.managed = False: the run starts no server, so engine.servers must list yours; list them, or "
            "set engine.managed = True"
        )
    for name, value, default in (("python", python, VLLM_PYTHON), ("server_args", server_args, SERVER_ARGS)):
        if not managed and value != default:
            raise UserError(
                f"config.engine.{name} = {value!r} has no effect with engine.managed = False, because the run starts "
                f"no server; set it to {default!r}"
            )
    check_addresses(servers, push, push_address)
    check = partial(check_python, python, "config.engine.python") if managed else lambda: None
    server = partial(ManagedServer, python, config_args=server_args) if managed else None
    pushes = dict(push_address=push_address, weights_dir=weights_dir, max_gap=max_gap)
    requests = dict(concurrency=concurrency, timeout=timeout, patience=patience)

    def start(inputs: EngineInputs) -> Engine:
        # The client takes a second to import, which a check of a config need not wait for.
        from jaxrl_llm.rollout.vllm import engine as servers_of_vllm

        return servers_of_vllm.start(inputs, managed=server, servers=servers, **pushes, **requests)

    return EngineChoice(start, temperatures=VLLM_TEMPERATURES, check=check)


def check_addresses(servers: tuple[str, ...], push: str, push_address: str) -> None:
    """Raises: UserError, if an address is not valid, or if a server could not reach the weights."""
    locations = [_location(server) for server in servers]
    for server, location in zip(servers, locations, strict=True):
        if not location:
            raise UserError(
                f"config.engine.servers: {server!r} is not an address: it must look like 'http://127.0.0.1:8000', or "
                "like 'unix:/PATH' for a socket of this host"
            )
        if push == "file" and location[1] and location[0] not in LOOPBACK:
            raise UserError(
                f"config.engine.push = 'file': server {server} may be another host, which cannot read this host's "
                "file; set engine.push = 'http' and engine.push_address to this host's address"
            )
    if len(set(locations)) < len(servers):
        raise UserError(f"config.engine.servers = {servers}: a server is listed twice; list each server once")
    if push == "http" and push_address in ("", "0.0.0.0", "::"):
        raise UserError(
            f"config.engine.push_address = {push_address!r}: engine.push = 'http' needs the address at which the "
            "servers reach this host; set it"
        )
    if push == "file" and push_address:
        raise UserError(
            f"config.engine.push_address = {push_address!r} has no effect with engine.push = 'file'; set it to '', or "
            "set engine.push = 'http'"
        )


def _location(server: str) -> tuple[str, int] | None:
    """Returns host and port of a server's address, or path and 0 of a socket; None if the text is not an address.

    All names of this host give the same result.
    """
    if server.startswith("unix:/"):
        return server, 0
    try:
        # The number of a process may be a part of the port, so replace its mark before parsing.
        url = urlsplit(server.replace("{process}", "0"))
        host, port = url.hostname, url.port
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or not host:
        return None
    return LOOPBACK[0] if host in LOOPBACK else host, port or {"http": 80, "https": 443}[url.scheme]
