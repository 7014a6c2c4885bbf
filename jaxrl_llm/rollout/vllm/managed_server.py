"""A vLLM server that the trainer starts and that ends with the trainer."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.vllm.address import UNIX

ERROR_PREFIX = "error: "  # prefix of serve_vllm's last line after an error
# Most bytes of a socket's path; the system allows 107.
MAX_SOCKET_PATH = 100


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
        config_args: tuple[str, ...],
        run_args: tuple[str, ...] = (),
    ):
        """config_args: arguments of vLLM in config.engine.server_args. run_args: arguments that the run adds."""
        # A socket is safer than a port, which other users of the host could reach. serve_vllm makes the socket's folder
        # for this user alone.
        uds = Path(tempfile.gettempdir()) / f"jaxrl_llm-{secrets.token_hex(8)}" / "vllm"
        if len(str(uds)) > MAX_SOCKET_PATH:
            uds = Path("/tmp").joinpath(*uds.parts[-2:])
        self.url, self.log, self._log_bytes = f"{UNIX}{uds}", log, 0
        options = dict(model=model, python=python, uds=uds, dtype=dtype, max_model_len=max_model_len, log=log)
        command = [sys.executable, "-m", "jaxrl_llm.tools.serve_vllm"]
        command += [f"--{name.replace('_', '-')}={x}" for name, x in options.items()]
        command += ["--with-parent", "--", *run_args, *config_args]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                # --with-parent waits for the end of this pipe, which the kernel closes when this process ends.
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
            if last_line.startswith(ERROR_PREFIX):
                raise UserError(f"config.engine.server_args: {last_line.removeprefix(ERROR_PREFIX)}")
            raise UserError(
                f"config.engine.managed: the vLLM server has ended ({last_line[:300]}): mend what {self.log} says, and "
                "start the run again"
            )

    def has_log_grown(self) -> bool:
        """Returns whether the server's log has grown since the last call."""
        earlier_bytes, self._log_bytes = self._log_bytes, self.log.stat().st_size
        return self._log_bytes != earlier_bytes

    def stop(self) -> None:
        """Ends the child and all processes that it started."""
        # The child ends vLLM and its workers, which it has started.
        self._process.terminate()
        self._process.wait()
