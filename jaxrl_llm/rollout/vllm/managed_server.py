"""A vLLM server that the trainer starts and that ends with the trainer."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from jaxrl_llm.errors import UserError


class ManagedServer:
    """Runs `python -m jaxrl_llm.serve_vllm` as a child, which ends when this process ends, even by kill -9."""

    def __init__(self, python: str, model: Path, *, dtype: str, max_model_len: int, log: Path, extra: tuple[str, ...]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            sys.executable,
            "-m",
            "jaxrl_llm.serve_vllm",
            "--model",
            str(model),
            "--python",
            python,
            "--port",
            str(port),
            "--dtype",
            dtype,
            "--max-model-len",
            str(max_model_len),
            "--log",
            str(log),
            "--with-parent",
            "--",
            *extra,
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def check(self) -> None:
        """Raises: UserError, if the child has ended."""
        if self._process.poll() is not None:
            said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"the vLLM server did not start ({' '.join(said)[:300]}): see {self.log}")

    def stop(self) -> None:
        """Ends the child and all processes that it started."""
        self._process.terminate()
        self._process.wait()
