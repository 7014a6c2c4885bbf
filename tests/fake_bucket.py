"""A stand-in for Cloud Storage: objects are files, FOLDER/BUCKET/OBJECT, behind the JSON API that its clients speak.

TensorStore speaks with the server, and fsspec does so by `FakeFileSystem`.
`python -m fake_bucket PROGRAM ARGUMENTS` runs a program as `jaxrl` does, in such a world.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fsspec
import httpx
from fsspec import AbstractFileSystem
from orbax.checkpoint._src.path import gcs_utils

URL = "STORAGE_EMULATOR_HOST"  # environment variable, which google.cloud reads too
Answer = tuple[int, dict[str, str], bytes]


def answer(status: int, content: Any = None, **headers: str) -> Answer:
    return status, {"Content-Type": "application/json"} | headers, json.dumps(content or {}).encode()


def failed(status: int) -> Answer:
    return answer(status, {"error": {"code": status, "message": f"the stand-in says {status}"}})


class BucketHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BucketServer

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers, content = self.answer(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_DELETE = do_GET

    def answer(self, body: bytes) -> Answer:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        place = re.fullmatch(r"(/upload)?(?:/download)?/storage/v1/b/([^/]+)/o(?:/(.*))?", url.path)
        root = self.server.folder / place[2]
        if not root.is_dir():
            return failed(404)
        with self.server.lock:
            if place[1] == "/upload":
                return self.upload(root / asked["name"], asked, body)
            return self.known(root / unquote(place[3]), asked) if place[3] else self.listed(root, asked)

    def known(self, file: Path, asked: dict[str, str]) -> Answer:
        if not file.is_file():
            return failed(404)
        generation, content = str(file.stat().st_mtime_ns), file.read_bytes()
        if self.command == "DELETE":
            self.server.changes(f"DELETE {self.about(file)['name']}")
            file.unlink()
            return 204, {}, b""
        if asked.get("alt") != "media":
            return answer(200, self.about(file))
        status, extra = 200, {"x-goog-generation": generation, "Content-Type": "application/octet-stream"}
        if part := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or ""):
            size = len(content)
            first = int(part[1]) if part[1] else size - int(part[2])
            last = min(int(part[2]), size - 1) if part[1] and part[2] else size - 1
            status, content = 206, content[first : last + 1]
            extra["Content-Range"] = f"bytes {first}-{last}/{size}"
        return status, extra, content

    def upload(self, file: Path, asked: dict[str, str], content: bytes) -> Answer:
        generation = str(file.stat().st_mtime_ns) if file.is_file() else "0"
        if asked.get("ifGenerationMatch", generation) != generation:
            return failed(412)
        self.server.changes(f"PUT {asked['name']}")
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.server.folder / "partial"
        partial.write_bytes(content)
        os.replace(partial, file)
        return answer(200, self.about(file))

    def about(self, file: Path) -> dict[str, str]:
        bucket, _, name = str(file.relative_to(self.server.folder)).partition("/")
        found, time = file.stat(), "2026-01-01T00:00:00.000Z"
        return {
            "kind": "storage#object", "name": name, "bucket": bucket, "size": str(found.st_size), "updated": time,
            "timeCreated": time, "generation": str(found.st_mtime_ns), "metageneration": "1",
        }  # fmt: skip

    def listed(self, root: Path, asked: dict[str, str]) -> Answer:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
        names = [name for name in names if name.startswith(prefix) and name >= asked.get("startOffset", "")]
        names = [name for name in names if "endOffset" not in asked or name < asked["endOffset"]]
        below = {name for name in names if delimiter and delimiter in name.removeprefix(prefix)}
        folders = {prefix + name.removeprefix(prefix).split(delimiter)[0] + delimiter for name in below}
        items = [self.about(root / name) for name in names if name not in below]
        return answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)})


class BucketServer(ThreadingHTTPServer):
    """The server of a folder with the bucket `bucket`."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), BucketHandler)
        (folder / "bucket").mkdir(parents=True)
        self.folder, self.lock = folder, Lock()  # a condition and the write that depends on it are one
        self.changes: Callable[[str], None] = lambda change: None  # called before each, such as "PUT run/config.json"

    def handle_error(self, request: object, client_address: object) -> None:
        """Is silent about a client that is gone, or that `changes` has ended."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of programs that use this server."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {URL: url, "TENSORSTORE_GCS_HTTP_URL": url, "GCE_METADATA_ROOT": "127.0.0.1:1"}


class FakeFileSystem(AbstractFileSystem):
    """gs:// of fsspec, with as few requests as gcsfs has, and no folder without an object in it."""

    protocol = ("gs", "gcs")

    def __init__(self, **_: Any):
        super().__init__(use_listings_cache=False)
        self._client = httpx.Client(base_url=os.environ[URL], timeout=60)

    def _ask(self, method: str, path: str, **asked: str) -> httpx.Response:
        bucket, _, name = self._strip_protocol(path).partition("/")
        answered = self._client.request(method, f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", params=asked)
        if answered.status_code == 404:
            raise FileNotFoundError(path)
        return answered.raise_for_status()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, _, name = self._strip_protocol(path).partition("/")
        query = {"prefix": f"{name}/" if name else "", "delimiter": "/"}
        found = self._ask("GET", bucket, **query).json()
        objects = found["items"] or ([] if found["prefixes"] else [self._ask("GET", path).json()])
        entries = [
            {"name": f"{bucket}/{x['name']}", "size": int(x["size"]), "type": "file", "generation": x["generation"]}
            for x in objects
        ]
        entries += [{"name": f"{bucket}/{x[:-1]}", "size": 0, "type": "directory"} for x in found["prefixes"]]
        return entries if detail else [x["name"] for x in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._ask("GET", path, alt="media").content[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        bucket, _, name = self._strip_protocol(path).partition("/")
        asked = {"uploadType": "media", "name": name} | ({"ifGenerationMatch": "0"} if mode == "create" else {})
        answered = self._client.post(f"/upload/storage/v1/b/{bucket}/o", params=asked, content=value)
        if answered.status_code == 412:
            raise FileExistsError(path)
        answered.raise_for_status()

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", path)

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        for file in self.find(path) if recursive else [path]:
            self.rm_file(file)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else Written(self, path)


class Written(io.BytesIO):
    """A file that becomes an object when it is closed."""

    def __init__(self, fs: FakeFileSystem, path: str):
        super().__init__()
        self._fs, self._path = fs, path

    def close(self) -> None:
        if not self.closed:
            self._fs.pipe_file(self._path, self.getvalue())
        super().close()


def enter() -> None:
    """Gives this process a file system for gs://, and Orbax a bucket without folders of its own."""
    for protocol in FakeFileSystem.protocol:
        fsspec.register_implementation(protocol, FakeFileSystem, clobber=True)
    gcs_utils.get_bucket = lambda name: SimpleNamespace()


@contextmanager
def served(folder: Path) -> Iterator[BucketServer]:
    """Serves a new folder."""
    with BucketServer(folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    from jaxrl_llm.tools.__main__ import run

    enter()
    sys.argv[0] = "jaxrl"
    run()
