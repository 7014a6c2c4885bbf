"""A server that answers the requests with which a folder is put on a hub."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import huggingface_hub
import pytest


class FakeHub:
    """Answers the requests of create_repo and upload_folder, and keeps what it gets."""

    def __init__(self, status: int = 200):
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                outer.tokens.add(self.headers["Authorization"])
                self.answer(*(outer.take(self.path, body) if status == 200 else (status, {"error": "no right"})))

            def do_GET(self) -> None:
                self.answer(status, {"id": "lab/sums", "sha": "0" * 40, "siblings": []})

            def answer(self, code: int, found: dict) -> None:
                text = json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> tuple[int, dict]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/lab/sums"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        assert path.startswith("/api/models/lab/sums/commit/main"), path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/lab/sums/commit/1", "commitOid": "1", "hookOutput": ""}


@pytest.fixture
def online(monkeypatch):
    """Returns a function that starts a fake hub, with a token for it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")

    def start(**how) -> FakeHub:
        fake = FakeHub(**how)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", fake.url)
        return fake

    return start
