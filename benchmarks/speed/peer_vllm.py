"""Times vLLM's rollout of one workload (a real CPU server, float32, compiled); prints one JSON object.

Arguments that are not ours go to the server, after those given here: `peer_vllm.py MODEL_DIR --enforce-eager`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.speed import workloads
from benchmarks.speed.workloads import Workload

START_SECONDS = 240.0


class Server:
    """A vLLM server in a process group of its own; tokens in and out, so that it needs no tokenizer."""

    def __init__(self, model_dir: str, workload: Workload, extra: list[str], folder: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.rows, self.log, self.peak = workload.prompts * workload.group, Path(folder, "log"), 0
        command = [
            sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model_dir,
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--tokens-only",
            "--max-model-len", str(workload.prompt_tokens + workload.completion_tokens),
            "--max-num-seqs", str(self.rows), "--generation-config", "vllm", *extra,
        ]  # fmt: skip
        # Both cores compute (one is kept from the worker otherwise), with the OpenMP runtime that vLLM's manual asks
        # for; the folder takes the compiler's cache, so that every start compiles, and what the server leaves behind.
        settings = dict(
            VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
            VLLM_CACHE_ROOT=folder, TMPDIR=folder, LD_PRELOAD=str(Path(sys.prefix, "lib", "libiomp5.so")),
        )  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Keep the largest sum of resident bytes over the server's processes."""
        while self.process.poll() is None:
            total = 0
            for process in psutil.process_iter(["memory_info"]):
                try:
                    member = os.getpgid(process.pid) == self.process.pid
                    total += process.info["memory_info"].rss if member else 0
                except (ProcessLookupError, psutil.Error):
                    continue
            self.peak = max(self.peak, total)
            time.sleep(1.0)

    def request(self, method: str, path: str, body: dict | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {answer[:500]!r}")
        return answer

    def wait(self) -> None:
        """Return when the server answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.request("GET", "/health")
                return
            except (OSError, RuntimeError):
                time.sleep(0.25)
        raise RuntimeError("the server did not start")

    def stop(self) -> None:
        """End the whole group: the workers outlive a server that is merely killed."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model_dir: str, workload: Workload, extra: list[str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server(model_dir, workload, extra, folder)
        try:
            server.wait()
            yield server
        except Exception:
            print(server.log.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
        finally:
            server.stop()


def rollout(server: Server, pool: ThreadPoolExecutor, workload: Workload, step: int) -> list[list[dict]]:
    """B x G choices, from one request each, all sent at once (one of n=G for each prompt is no faster)."""

    def one(prompt: list[int], length: int) -> dict:
        params = dict(
            max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0,
            temperature=workloads.TEMPERATURE, top_p=1.0, top_k=0,
        )  # fmt: skip
        body = dict(token_ids=prompt, sampling_params=params)
        return json.loads(server.request("POST", "/inference/v1/generate", body))["choices"][0]

    rows = zip(workload.prompt_ids(step), workload.lengths(step), strict=True)
    jobs = [[pool.submit(one, prompt, length) for length in lengths] for prompt, lengths in rows]
    return [[job.result() for job in group] for group in jobs]


def check(choices: list[list[dict]], workload: Workload, step: int) -> int:
    """The number of tokens, when every completion is as asked for and has its log-probabilities."""
    lengths = [[len(c["token_ids"]) for c in group] for group in choices]
    assert lengths == workload.lengths(step), "other completion lengths"
    for group in choices:
        assert len({tuple(c["token_ids"]) for c in group}) > 1, "one completion for a whole group"
        for c in group:
            logprobs = [token["logprob"] for token in c["logprobs"]["content"]]
            assert len(logprobs) == len(c["token_ids"]) and all(math.isfinite(x) and x <= 0 for x in logprobs)
    return sum(map(sum, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one of warm-up")
    args, extra = parser.parse_known_args()
    workload = workloads.read(args.model_dir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    start, seconds, tokens = time.perf_counter(), [], []
    with serving(args.model_dir, workload, extra) as server, ThreadPoolExecutor(server.rows) as pool:
        started = time.perf_counter() - start
        for step in range(args.steps + 1):
            begin = time.perf_counter()
            choices = rollout(server, pool, workload, step)
            seconds.append(time.perf_counter() - begin)
            tokens.append(check(choices, workload, step))
    print(json.dumps({
        "name": "vLLM",
        "version": {"vllm": version("vllm-cpu"), **{name: version(name) for name in ("torch", "transformers")}},
        "rollout": seconds[1:],
        "total": seconds[1:],
        "warmup": started + seconds[0],
        "peak_mb": server.peak / 2**20,
        "tokens": tokens[1:],
        "checks": {"lengths": "as asked for", "logprobs": "finite", "start": started, "server_arguments": extra},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
