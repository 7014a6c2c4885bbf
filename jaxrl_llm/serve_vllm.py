"""A vLLM server for rollouts: `python -m jaxrl_llm.serve_vllm --model DIR [--python PYTHON] [-- vLLM's own arguments]`.

Starts vLLM in a process group of its own, starts it again when its engine dies, and leaves no process behind.
It imports no JAX: it may run in vLLM's environment, or name the Python of that. The trainer needs neither vLLM
nor torch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxrl_llm.errors import Parser, UserError, run_main

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FIXED = (
    "--served-model-name", "policy", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
    "--enable-scale-out",  # tokens in, tokens and the version of their weights out
    "--worker-extension-cls", "jaxrl_llm.vllm_pull.Extension", "--weight-transfer-config", '{"backend": "pull"}',
)  # fmt: skip
ENVIRONMENT = dict(
    VLLM_SERVER_DEV_MODE="1",  # without it there is no route to push weights by
    VLLM_NO_USAGE_STATS="1",
)
ON_A_CPU = dict(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB; otherwise a share of all memory
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # a trainer may be on these cores too
    TORCHINDUCTOR_CACHE_DIR=str(Path.home() / ".cache" / "jaxrl_llm" / "inductor"),  # 15 s of compiling at a start
)
TERMINATE = 20.0  # seconds that vLLM has to end by itself
PR_SET_PDEATHSIG = 1


def check_python(python: str, name: str) -> None:
    """Raises: UserError, naming the field, if an interpreter cannot import vLLM."""
    look = "import sys; from importlib.util import find_spec; sys.exit(not find_spec('vllm'))"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise UserError(f"{name} {python!r} has no vLLM: launch/vllm_cpu.sh and launch/vllm_gpu.sh install one")


def start(args: argparse.Namespace, extra: list[str], temporary: str) -> subprocess.Popen[bytes]:
    """vLLM, in a process group of its own; it ends should this process be killed."""
    command = [
        args.python, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", args.model,
        "--host", args.host, "--port", str(args.port), "--dtype", args.dtype, *FIXED,
        *(("--max-model-len", str(args.max_model_len)) if args.max_model_len else ()), *extra,
    ]  # fmt: skip
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join(x for x in (here, os.environ.get("PYTHONPATH")) if x)
    environment = ON_A_CPU | os.environ | ENVIRONMENT | {"PYTHONPATH": path, "TMPDIR": temporary}
    with args.log.open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=partial(_end_with_parent, os.getpid()),
        )  # fmt: skip


def _end_with_parent(parent: int) -> None:
    """Linux: SIGTERM for this process when its parent ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when the server answers. Raises: UserError, if it ends before."""
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        if process.poll() is not None:
            said = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line][-1:]
            raise UserError(f"vLLM did not start ({' '.join(said)[-300:]}): see {log}")
        time.sleep(0.25)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole group: workers outlive a server that is merely killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_at_eof() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m jaxrl_llm.serve_vllm", description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub id")
    parser.add_argument("--python", default=sys.executable, help="of the environment vLLM is in (default: this one)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="float32 | bfloat16 | auto, the model's own (default)")
    parser.add_argument("--max-model-len", type=int, default=0, help="prompt and completion (default: the model's)")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="(default: %(default)s)")
    parser.add_argument("--public", action="store_true", help="allow an address that others can reach")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    args = parser.parse_args(argv[:cut])
    if args.host not in LOOPBACK and not args.public:
        raise UserError(
            f"--host {args.host}: whoever reaches the server can replace its weights, and --api-key does not guard "
            "those routes; keep 127.0.0.1, or say --public on a network that is yours alone"
        )
    check_python(args.python, "--python")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.with_parent:
        threading.Thread(target=_end_at_eof, daemon=True).start()
    url = f"http://{args.host}:{args.port}"
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-vllm-", ignore_cleanup_errors=True) as temporary:
        while True:
            process = start(args, argv[cut + 1 :], temporary)
            try:
                wait(process, url, args.log)
                print(f"vLLM answers at {url}; its log is {args.log}", flush=True)
                process.wait()
            finally:
                stop(process)
            print(f"vLLM ended with exit code {process.returncode}: it is started again", flush=True)


if __name__ == "__main__":
    run_main(main)
