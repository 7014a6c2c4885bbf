"""Addresses of vLLM servers and of weights. Imports no JAX, because vLLM's workers and `serve_vllm` use it too."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib import request as http
from urllib.parse import urlsplit

import httpcore

from jaxrl_llm.errors import MissingHere

if TYPE_CHECKING:  # it takes half a second, which a check of a config need not wait for
    import httpx

LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNIX = "unix:"  # prefix of the path of a server's socket; other addresses are URLs
WEIGHTS = "model.safetensors"
FOLDER = "jaxrl_llm-"  # prefix of a run's folder with weights; 12 hexadecimal digits follow

# Opens only http and https, uses no proxy and follows no redirect, so that only the trainer sees the token.
DIRECT = http.OpenerDirector()
for _handler in (http.HTTPHandler, http.HTTPSHandler, http.HTTPErrorProcessor, http.HTTPDefaultErrorHandler):
    DIRECT.add_handler(_handler())


class _PatientStream:
    """A connection that continues to read after a time-out as long as is_working() is True."""

    def __init__(self, stream: httpcore.NetworkStream, is_working: Callable[[], bool]):
        self._stream, self._works = stream, is_working

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        while True:
            try:
                return self._stream.read(max_bytes, timeout)
            except httpcore.ReadTimeout:
                if not self._works():
                    raise

    def start_tls(self, *args: Any, **options: Any) -> Any:
        return _PatientStream(self._stream.start_tls(*args, **options), self._works)


class _PatientBackend(httpcore.SyncBackend):
    """Opens connections of the class `_PatientStream`."""

    def __init__(self, is_working: Callable[[], bool]):
        self._works = is_working

    def connect_tcp(self, *args: Any, **options: Any) -> Any:
        return _PatientStream(super().connect_tcp(*args, **options), self._works)

    def connect_unix_socket(self, *args: Any, **options: Any) -> Any:
        return _PatientStream(super().connect_unix_socket(*args, **options), self._works)


def client(
    address: str, limits: httpx.Limits | None = None, is_working: Callable[[], bool] | None = None, **options: Any
) -> httpx.Client:
    """Returns an HTTP client for the server "http://HOST:PORT" or "unix:/PATH". It uses no proxy.

    is_working(): is called after a read time-out; while it returns True, the client continues to wait. None = a
    time-out is an error.
    """
    import httpx

    uds = address.removeprefix(UNIX) if address.startswith(UNIX) else None
    transport = httpx.HTTPTransport(uds=uds, limits=limits or httpx.Limits(), trust_env=False)
    if is_working:
        # httpx has no argument for the backend, so set the private attribute.
        transport._pool._network_backend = _PatientBackend(is_working)
    # The host name of a socket's URL is arbitrary, because nothing looks it up.
    return httpx.Client(base_url="http://vllm" if uds else address, transport=transport, trust_env=False, **options)


def check_python(python: str, name: str) -> None:
    """Raises: MissingHere, if the interpreter `python` cannot import vLLM. name: its config field, for the message."""
    # Call find_spec, because the import itself would take many seconds.
    code = "import sys; from importlib.util import find_spec; sys.exit(not find_spec('vllm'))"
    try:
        has_vllm = subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        has_vllm = False
    if not has_vllm:
        raise MissingHere(
            f"{name} = {python!r}: this interpreter has no vLLM; launch/vllm_cpu.sh and launch/vllm_gpu.sh install it"
        )


def is_private(folder: Path) -> bool:
    """Returns whether a folder belongs to this user, is not a link, and is closed to all other users."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077


def check_weights(path: str) -> str:
    """Returns `path` if it is the weights file of a run of this user. Raises: ValueError, otherwise."""
    file = Path(path)
    try:
        is_allowed = file.name == WEIGHTS and file.parent.name.startswith(FOLDER) and is_private(file.parent)
        is_allowed = is_allowed and stat.S_ISREG(file.lstat().st_mode)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not is_allowed:
        raise ValueError(
            f"refused: {path} is not the weights file of a run of the server's user; run trainer and server as one "
            "user, or set config.engine.push = 'http'"
        )
    return path


def open_weights(url: str, token: str, timeout: float) -> BinaryIO:
    """Opens the weights that a trainer serves over HTTP. Raises: ValueError, if the URL is not of http or https."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"refused: {url} is not an http or https address; set config.engine.push to 'file' or 'http'")
    # The token is in a header, because a URL would be in the server's log.
    request = http.Request(url, headers={"Authorization": f"Bearer {token}"})
    response = DIRECT.open(request, timeout=timeout)
    # DIRECT has a handler for both schemes, so it always returns a response.
    assert response is not None
    return response
