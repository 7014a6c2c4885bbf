"""Offers the policy's weights to vLLM servers as a safetensors file in shared memory, by path or over HTTP."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import stat
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from filelock import FileLock

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf_export, names
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.rollout.vllm.address import FOLDER, WEIGHTS, is_private
from jaxrl_llm.rollout.vllm.answers import Unavailable
from jaxrl_llm.structs import PyTree

DTYPES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
LOCK = "lock"
BLOCK = 2**18  # bytes of a write to a connection
# A pause keeps the requests but clears the caches, which hold values of the old weights. The path states both, because
# vLLM's defaults may change.
PAUSE = "/pause?mode=keep&clear_cache=true"


class WeightFile:
    """A file in the run's own folder with one version of the weights, until the next version or `close`.

    The file stays after a push, so that a restarted server can load it again.
    """

    def __init__(self, folder: Path, dtype: Any, table: TensorNames, *, address: str = ""):
        """dtype: dtype of the tensors in the file. table: their names. address: address of this host at which servers
        get the file over HTTP; "" = servers read the file by its path.

        Raises: UserError, if the folder cannot be made, is open to other users, or the address is not of this host.
        """
        self.folder, self._dtype, self._table = folder, np.dtype(dtype), table
        self.version, self.tensor_shapes = 0, dict[str, list[int]]()
        sweep(folder.parent)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"config.engine.weights_dir = {str(folder.parent)!r}: {error}; choose a folder that you can write to"
            ) from None
        if not is_private(folder):
            about = folder.lstat()
            raise UserError(
                f"config.engine.weights_dir = {str(folder.parent)!r}: {folder} exists, belongs to user {about.st_uid} "
                f"and has mode {stat.S_IMODE(about.st_mode):o}, so other users could replace the weights; remove it, "
                "or choose another weights_dir"
            )
        # thread_local=False lets `close` release the lock in another thread.
        self._lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
        with suppress(OSError):
            # If a hung trainer still holds the lock, continue without it.
            self._lock.acquire()
        self._server = WeightServer(folder / WEIGHTS, address) if address else None

    def write(self, params: PyTree, version: int = 0) -> None:
        """Replaces the weights, one tensor at a time, so that the devices hold no second copy.

        The version changes after the file, so that a push that reads the version first never has older weights.

        Raises: UserError, if a tensor is not finite, if the disk is full, or if the folder has vanished.
        """
        try:
            self._write(params)
        except OSError as error:
            raise UserError(
                f"config.engine.weights_dir = {str(self.folder.parent)!r}: the weights cannot be written ({error}); "
                "free space, or choose a folder that no other program cleans; the same command resumes the run"
            ) from None
        self.version = version

    def _write(self, params: PyTree) -> None:
        """Writes the parameters into the file from which the vLLM servers load them."""
        file = self.folder / WEIGHTS
        # Remove the old file first, to make room for the new one.
        file.unlink(missing_ok=True)
        self.tensor_shapes = {name: list(shape) for name, shape in names.tensor_shapes(params, self._table).items()}
        size = sum(map(math.prod, self.tensor_shapes.values())) * self._dtype.itemsize
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise UserError(
                f"config.engine.weights_dir = {str(self.folder.parent)!r}: {free / 1e9:.1f} GB are free, but the "
                f"weights need {size / 1e9:.1f} GB; free space (docker: --shm-size), or choose another folder"
            )
        with file.open("wb") as out:
            write_stream(out, params, self._table, self._dtype)

    def source(self, vllm: str) -> dict[str, str]:
        """Returns the location of the file for the vLLM server `vllm`: a path, or a URL with the server's token."""
        return self._server.source(vllm) if self._server else {"path": str(self.folder / WEIGHTS)}

    def sent(self, vllm: str) -> int:
        """Returns the bytes sent over HTTP to the vLLM server `vllm` since the start."""
        return self._server.sent[vllm] if self._server else 0

    def close(self) -> None:
        if self._server:
            self._server.shutdown()
        self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes the weights of killed runs: folders with a lock file that no process holds."""
    for lock in parent.glob(f"{FOLDER}{'[0-9a-f]' * 12}/{LOCK}"):
        if not is_private(lock.parent):
            # Skip folders of other users, because opening a lock could harm the target of a link.
            continue
        with suppress(OSError):  # the lock is held, so the run is alive
            with FileLock(lock, blocking=False):
                (lock.parent / WEIGHTS).unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            lock.parent.rmdir()


def write_stream(file: BinaryIO, params: PyTree, table: TensorNames, dtype: Any) -> None:
    """Writes params as one safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes in order.

    Needs one tensor in memory at a time; the safetensors library needs all of them.
    Raises: UserError, with the name of the tensor, if one is not finite.
    """
    header, offset, kind = {}, 0, np.dtype(dtype)
    for name, shape in names.tensor_shapes(params, table).items():
        size = math.prod(shape) * kind.itemsize
        header[name] = {"dtype": DTYPES[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    # safetensors requires the tensors to start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, tensor in hf_export.tensors(params, table, dtype):
        if not np.isfinite(tensor).all():
            raise UserError(
                f"the policy's tensor {name} is not finite, so the "
                "weights were not pushed; resume from the last checkpoint with a lower config.optim.learning_rate"
            )
        file.write(tensor.reshape(-1).view(np.uint8).data)


class WeightServer:
    """Serves a single file over HTTP to vLLM servers, each of which has a token of its own."""

    def __init__(self, file: Path, address: str):
        tokens, send = dict[str, str](), self.send
        # vLLM server -> bytes sent to it, because the bytes of one server must not hide the silence of another.
        self.sent = Counter[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Sends the weights to a server that has a token of this run."""
                authorization = self.headers.get("Authorization", "")
                # Compare in constant time, because the time must not reveal how much of a token is right.
                is_right = partial(secrets.compare_digest, authorization.encode())
                vllm = [vllm for vllm, token in list(tokens.items()) if is_right(f"Bearer {token}".encode())]
                if self.path != "/weights" or not vllm:
                    self.send_error(403)
                    return
                with file.open("rb") as source:
                    self.send_response(200)
                    self.send_header("Content-Length", str(file.stat().st_size))
                    self.end_headers()
                    send(vllm[0], source, self.wfile)

            # Log nothing, because a line for each request would clutter the trainer's terminal.
            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            # Port 0 takes any free port. Each push sends its number to the servers.
            self._server = ThreadingHTTPServer((address, 0), Handler)
        except OSError as error:
            raise UserError(
                f"config.engine.push_address = {address!r}: {error}; it must be an address of this host that the "
                "servers can reach"
            ) from None
        Thread(target=self._server.serve_forever, daemon=True).start()
        self._url, self._tokens = f"http://{address}:{self._server.server_port}/weights", tokens

    def source(self, vllm: str) -> dict[str, str]:
        """Returns the URL of the file, and the token of the vLLM server `vllm`."""
        return {"url": self._url, "token": self._tokens.setdefault(vllm, secrets.token_urlsafe(32))}

    def send(self, vllm: str, source: BinaryIO, sink: BufferedIOBase) -> None:
        """Copies a file and counts its bytes, which shows that a slow push to a vLLM server still makes progress."""
        while block := source.read(BLOCK):
            sink.write(block)
            self.sent[vllm] += len(block)

    def shutdown(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def pull(post: Callable[..., Any], source: dict[str, str], tag: str) -> None:
    """Makes a server load the weights at `source`, with this version tag, between two of its steps.

    If the server refuses the weights, it keeps the old ones. If its answer is lost, it may use the new weights under
    the old version until the next push. In both cases post(path, body) raises.
    """
    post(PAUSE)
    try:
        post("/start_weight_update")
        post("/update_weights", {"update_info": source})
        post("/finish_weight_update", {"weight_version": tag})
    except (Unavailable, UserError):
        # Resume here too: the server's weights are complete, either the old or the new ones. vLLM closes the connection
        # after a refusal, so this request may fail, which must not hide the refusal. The next push resumes again.
        with suppress(Unavailable):
            post("/resume")
        raise
    post("/resume")
