"""An OpenAI-compatible server of the in-JAX engine: `jaxrl serve --model DIR [--port 8000]`.

It answers POST /v1/chat/completions, /v1/completions and /inference/v1/generate, and records sessions as traces.
docs/agents.md shows how to call it.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from datetime import date
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.schema import Field
from jaxrl_llm.data import encoding
from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.machine import keys, meshes
from jaxrl_llm.machine.compilation import enable_compilation_cache
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.vllm.address import LOOPBACK

KEY_VARIABLE = "JAXRL_API_KEY"
USUAL_TOKENS = 512  # most tokens of a prompt, and of a completion, unless options set them
# Seconds for which an idle connection stays open: longer than clients keep one, because a request that meets a server
# which is just closing the connection fails.
KEEP_ALIVE_SECONDS = 75
SHUTDOWN_SECONDS = 5  # seconds for running requests when the server stops
LIMITS = dict.fromkeys(
    ("max_prompt_tokens", "max_completion_tokens", "max_sequences", "max_waiting", "max_sessions"), Field(int, low=1)
) | {
    "port": Field(int, low=0, high=65535),
    "seed": Field(int, low=0, high=2**31 - 1),
    "top_k": Field(int, low=0),
    "top_p": Field(float, low=0, high=1, exclusive=True),
}


def parse() -> argparse.Namespace:
    """Parses and checks the command line. Raises: UserError."""
    parser = Parser("jaxrl_llm.tools.serve", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a Hugging Face folder or hub id")
    add("--name", default="", help="name of the model in requests (default: the folder's name)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, help="port; 0 = any free one (default: %(default)s)")
    add("--api-key", default="", help=f"key of all requests (default: ${KEY_VARIABLE}, or none on this machine alone)")
    default_text = f"default: {USUAL_TOKENS}, or half of the model's positions if these are fewer"
    add("--max-prompt-tokens", type=int, help=f"most tokens of a prompt ({default_text})")
    add("--max-completion-tokens", type=int, help=f"most tokens of a completion ({default_text})")
    add("--max-sequences", type=int, default=16, help="completions at a time (default: %(default)s)")
    add("--max-waiting", type=int, default=256, help="completions that wait, before 429 (default: %(default)s)")
    add("--max-sessions", type=int, default=1024, help="sessions at a time, before 429 (default: %(default)s)")
    add("--top-k", type=int, default=0, help="top-k of all requests; 0 = off (default)")
    add("--top-p", type=float, default=1.0, help="top-p of all requests; 1 = off (default)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of activations (default: float32)")
    add("--seed", type=int, default=0, help="seed of the random numbers of all requests (default: %(default)s)")
    args = parser.parse_args()
    for name, field in LIMITS.items():
        value = getattr(args, name)
        if value is not None and (problem := field.problem(value)):
            raise UserError(f"--{name.replace('_', '-')} {problem}")
    args.api_key = args.api_key or os.environ.get(KEY_VARIABLE, "")
    if args.host not in LOOPBACK and not args.api_key:
        raise UserError(
            f"--host {args.host} lets other machines use the model: set --api-key or the environment variable "
            f"{KEY_VARIABLE}, or use 127.0.0.1"
        )
    return args


def listen(host: str, port: int) -> socket.socket:
    """Opens the port before the model is loaded, which takes long. Raises: UserError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--port {port} of --host {host} cannot be used ({error}): choose another port") from None


def main() -> None:
    """Starts the engine, and serves it over HTTP until the process ends."""
    args = parse()
    # These packages are imported after the arguments are checked, because they are an extra.
    try:
        import uvicorn

        from jaxrl_llm.rollout.serving.application import application
    except ImportError as error:
        raise UserError(f"jaxrl serve needs {error.name}: pip install 'jaxrl_llm[serve]'") from error
    start = time.perf_counter()
    folder = hf.find_checkpoint(args.model, "--model")
    with listen(args.host, args.port) as listener:
        enable_compilation_cache()
        service = open_service(args, folder)
        app = application(service, key=args.api_key)
        config = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=SHUTDOWN_SECONDS
        )
        server = uvicorn.Server(config)

        def stop() -> None:
            server.should_exit = True

        service.engine.on_failure = stop
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{service.model.name} after {time.perf_counter() - start:.0f} s; listening on {address}", flush=True)
        try:
            server.run(sockets=[listener])
        finally:
            service.engine.close()
    if service.engine.error:
        raise service.engine.error


def open_service(args: argparse.Namespace, folder: Path) -> Any:
    """Loads the model, and starts the engine's thread. Raises: UserError, naming the flag that does not fit."""
    from jaxrl_llm.rollout.serving.engine_thread import EngineThread
    from jaxrl_llm.rollout.serving.service import ServedModel, Service

    mesh = meshes.make_mesh(data=1, fsdp=-1, tensor=1)
    model = hf.load_model(folder, mesh, dtype=args.dtype)
    tokenizer = encoding.on_day(hf.load_tokenizer(folder), date.today().isoformat())
    stop_ids, positions = hf.stop_ids(folder, tokenizer), model.cfg.max_positions
    default_tokens = min(USUAL_TOKENS, positions // 2)
    prompt_tokens = args.max_prompt_tokens or default_tokens
    completion_tokens = args.max_completion_tokens or default_tokens
    if prompt_tokens + completion_tokens > positions:
        raise UserError(
            f"--max-prompt-tokens {prompt_tokens} and --max-completion-tokens {completion_tokens}: the model has "
            f"{positions} positions: lower one of them"
        )
    sampler = Sampler(
        model, mesh, max_completion_tokens=completion_tokens, stop_ids=stop_ids, pad_id=tokenizer.pad_token_id
    )
    sampler.update_weights(hf.load_params(folder, model, mesh, learns=False))
    engine, sampling = EngineThread(args.max_waiting), Sampling(1.0, args.top_k, args.top_p)
    sizes = dict(rows=args.max_sequences, prompt_width=prompt_tokens)
    engine.start(sampler.open_stream(engine, keys.key(args.seed), sampling=sampling, **sizes))
    served = ServedModel(
        name=args.name or folder.resolve().name,
        tokenizer=tokenizer,
        stop_ids=frozenset(stop_ids),
        vocab_size=model.cfg.vocab_size,
        max_prompt_tokens=prompt_tokens,
        max_completion_tokens=completion_tokens,
        sampling=sampling,
        max_sessions=args.max_sessions,
    )
    # The programs are compiled before the server listens.
    engine.warm_up(tokenizer.pad_token_id)
    return Service(served, engine)


if __name__ == "__main__":
    run_main(main)
