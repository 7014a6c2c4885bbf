"""A vLLM server that the trainer starts and that ends with the trainer."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.vllm.address import UNIX

ERROR = "error: "  # before the line with which serve_vllm ends
# Bytes of a socket's path; the system allows 107.
LONGEST = 100


class ManagedServer:
    """Runs `python -m jaxrl_llm.tools.serve_vllm` as a child, which ends when this process ends, even by kill -9."""

    def __init__(
        self,
        python: str,
        model: Path,
        *,
        dtype: str,
        max_model_len: int,
        log: Path,
        extra: tuple[str, ...],
        more: tuple[str, ...] = (),
    ):
        """extra, more: arguments of vLLM, of the config and of the run."""
        # A port of the machine is open to its other users; serve_vllm makes the socket's folder for this one alone.
        uds = Path(tempfile.gettempdir()) / f"jaxrl_llm-{secrets.token_hex(8)}" / "vllm"
        if len(str(uds)) > LONGEST:
            uds = Path("/tmp").joinpath(*uds.parts[-2:])
        self.url, self.log, self._log_bytes = f"{UNIX}{uds}", log, 0
        options = dict(model=model, python=python, uds=uds, dtype=dtype, max_model_len=max_model_len, log=log)
        command = [sys.executable, "-m", "jaxrl_llm.tools.serve_vllm"]
        command += [f"--{name.replace('_', '-')}={x}" for name, x in options.items()]
        command += ["--with-parent", "--", *more, *extra]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                # The kernel closes this pipe when this process ends, however it ends: --with-parent waits for that.
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises: UserError, if the child has ended."""
        if self._process.poll() is not None:
            last_line = " ".join(self.log.read_text(errors="replace").strip().splitlines()[-1:])
            if last_line.startswith(ERROR):
                raise UserError(f"config.engine.server_args: {last_line.removeprefix(ERROR)}")
            raise UserError(f"the vLLM server ended ({last_line[:300]}): see {self.log}")

    def writes(self) -> bool:
        """Returns whether its log has changed since the last call."""
        before, self._log_bytes = self._log_bytes, self.log.stat().st_size
        return self._log_bytes != before

    def stop(self) -> None:
        """Ends the child and all processes that it started."""
        # The child ends its own children: it starts vLLM, which starts workers.
        self._process.terminate()
        self._process.wait()
