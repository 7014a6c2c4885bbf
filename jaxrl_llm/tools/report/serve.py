"""Serves the page of runs on this machine, and renders it again after their files have changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from plotly.offline import get_plotlyjs

from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.tools.report import page
from jaxrl_llm.tools.report.runs import Reader

HOST = "127.0.0.1"  # address of this machine alone, because completions may be private


class PageServer(ThreadingHTTPServer):
    """Server of a page about runs. Raises: UserError, if the port cannot be used."""

    daemon_threads = True

    def __init__(self, workdirs: Sequence[Path], port: int = 0):
        """port: 0 for a free port."""
        try:
            super().__init__((HOST, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--serve {port}: the port cannot be used ({error}): use another port, or --serve without a port"
            ) from error
        self._workdirs, self._lock = workdirs, Lock()
        self._stamp, self._page = "", ""
        self._readers: dict[Path, Reader] = {}

    @property
    def address(self) -> str:
        return f"{HOST}:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints the error of an answer in one line. A browser that closes its connection is no error."""
        if isinstance(error := sys.exception(), Exception) and not isinstance(error, ConnectionError):
            print(f"no answer to a request: {describe(error)}", file=sys.stderr, flush=True)

    def stamp(self) -> str:
        return page.stamp(self._workdirs)

    def page(self) -> str:
        """Returns the page, rendered again if the files have changed."""
        # Only one thread at a time renders the page, because the readers keep their offsets in the files.
        with self._lock:
            # The stamp is taken before the files are read, so that a write meanwhile changes the next stamp.
            now = self.stamp()
            if now != self._stamp:
                try:
                    self._page = page.render(self._workdirs, live=now, readers=self._readers)
                except UserError as error:  # a run without a record yet
                    self._page = page.render_waiting(str(error), now)
                # Files of another version, or a bug, must not end the server. The readers are replaced, because they
                # may have stopped in the middle of a file.
                except Exception as error:
                    self._readers = {}
                    message = f"the page cannot be made: {describe(error)}"
                    print(message, file=sys.stderr, flush=True)
                    self._page = page.render_waiting(message, now)
                # The stamp is set after an error too, because each request would read the files and fail again.
                self._stamp = now
            return self._page


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Sends the page of the report, its time stamp, or Plotly's script."""
        # A page of another site whose name resolves to this machine (DNS rebinding) has another Host.
        if self.headers["Host"] not in (self.server.address, f"localhost:{self.server.server_port}"):
            self.send_error(403)
        elif self.path == "/":
            self._send(self.server.page(), "text/html")
        elif self.path == "/stamp":
            self._send(self.server.stamp(), "text/plain")
        elif self.path == page.PLOTLY:
            self._send(get_plotlyjs(), "text/javascript", "max-age=86400")
        else:
            self.send_error(404)

    def _send(self, text: str, kind: str, cache: str = "no-store") -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", cache)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing, because a polling page would fill the terminal."""
