"""Offers the policy's weights to vLLM servers: one safetensors file in shared memory, by path or over HTTP."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
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
from jaxrl_llm.structs import PyTree

DTYPES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
LOCK = "lock"
BLOCK = 2**18  # bytes that are sent at once
# Keeps the requests but clears the caches, which hold values of the old weights. Does not rely on vLLM's default.
PAUSE = "/pause?mode=keep&clear_cache=true"


class WeightFile:
    """Holds one version of the weights in the run's own folder, until the next version or `close`.

    The file stays after a push, so that a restarted server can load it again.
    """

    def __init__(self, folder: Path, dtype: Any, table: TensorNames, *, address: str = ""):
        """dtype: cast the tensors to it; table: their names; address: serve over HTTP; "": give the path.

        Raises: UserError, if the folder cannot be made, is open to other users, or the address is not of this host.
        """
        self.folder, self._dtype, self._table = folder, np.dtype(dtype), table
        sweep(folder.parent)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"config.engine.weights_dir: {error}: give a folder that can be written") from None
        if not is_private(folder):
            about = folder.lstat()
            raise UserError(
                f"config.engine.weights_dir: {folder} is there already, is of user {about.st_uid} and has mode "
                f"{stat.S_IMODE(about.st_mode):o}, so that others could exchange the weights: remove it, or give "
                "another folder"
            )
        # thread_local=False: `close` may be called in another thread, and must release it.
        self._lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
        with suppress(OSError):
            # A hung trainer may still hold it.
            self._lock.acquire()
        self._server = WeightServer(folder / WEIGHTS, address) if address else None

    def write(self, params: PyTree) -> None:
        """Replaces the weights, one tensor at a time: the devices hold no second copy.

        Raises: UserError, if a tensor is not finite, there is no room, or the folder is gone.
        """
        try:
            self._write(params)
        except OSError as error:
            raise UserError(
                f"config.engine.weights_dir = {str(self.folder.parent)!r}: the weights cannot be written ({error}): "
                "make room, or give a folder that no other program empties; the same command resumes"
            ) from None

    def _write(self, params: PyTree) -> None:
        file = self.folder / WEIGHTS
        # First, to make room for the new file.
        file.unlink(missing_ok=True)
        shapes = names.tensor_shapes(params, self._table).values()
        size = sum(math.prod(shape) for shape in shapes) * self._dtype.itemsize
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise UserError(
                f"config.engine.weights_dir = {str(self.folder.parent)!r} has {free / 1e9:.1f} GB left, the weights "
                f"take {size / 1e9:.1f} GB: make room (docker's --shm-size), or give another folder"
            )
        with file.open("wb") as out:
            write_stream(out, params, self._table, self._dtype)

    @property
    def source(self) -> dict[str, str]:
        """The location of the file, for a server."""
        return self._server.source if self._server else {"path": str(self.folder / WEIGHTS)}

    @property
    def sent(self) -> int:
        """Bytes of pushes over HTTP, to all servers."""
        return self._server.sent if self._server else 0

    def close(self) -> None:
        if self._server:
            self._server.shutdown()
        self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes the weights of killed runs: their lock files exist, but nobody holds them."""
    for lock in parent.glob(f"{FOLDER}{'[0-9a-f]' * 12}/{LOCK}"):
        if not is_private(lock.parent):
            # Opening a lock could harm the target of a link.
            continue
        with suppress(OSError):  # the run is alive
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
    # safetensors wants the tensors at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, tensor in hf_export.tensors(params, table, dtype):
        if not np.isfinite(tensor).all():
            raise UserError(
                f"the policy's {name} is not finite and was not pushed: resume from the last checkpoint "
                "with a lower optim.learning_rate"
            )
        file.write(tensor.reshape(-1).view(np.uint8).data)


class WeightServer:
    """Serves one file over HTTP to clients that have the token, and nothing else."""

    def __init__(self, file: Path, address: str):
        token, send = secrets.token_urlsafe(32), self.send
        self.sent = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                authorization = self.headers.get("Authorization", "")
                # The comparison takes constant time, because the time must not tell how much of a token is right.
                if self.path != "/weights" or not secrets.compare_digest(authorization, f"Bearer {token}"):
                    self.send_error(403)
                    return
                with file.open("rb") as source:
                    self.send_response(200)
                    self.send_header("Content-Length", str(file.stat().st_size))
                    self.end_headers()
                    send(source, self.wfile)

            # A line for each request would end up in the trainer's terminal.
            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            # Any free port: each push tells it.
            self._server = ThreadingHTTPServer((address, 0), Handler)
        except OSError as error:
            raise UserError(
                f"config.engine.push_address = {address!r}: {error}: give this host's address as the servers reach it"
            ) from None
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.source = {"url": f"http://{address}:{self._server.server_port}/weights", "token": token}

    def send(self, source: BinaryIO, sink: BufferedIOBase) -> None:
        """Copies a file, and counts its bytes: a push lasts as long as the network needs."""
        while block := source.read(BLOCK):
            sink.write(block)
            self.sent += len(block)

    def shutdown(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def pull(post: Callable[..., Any], offer: WeightFile, tag: str) -> None:
    """Makes a server load the offer between two engine steps. If the server refuses it, the old weights stay in use.

    If an answer of the server is lost, it may compute with the new weights under the old version until the next try.
    post(path, body) raises in both cases.
    """
    post(PAUSE)
    try:
        post("/start_weight_update")
        post("/update_weights", {"update_info": offer.source})
        post("/finish_weight_update", {"weight_version": tag})
    # A server that stays paused would answer nobody, and its weights are whole: the old ones, or all of the new.
    finally:
        post("/resume")
