"""Times the search server: `python -m benchmarks.speed.retriever [--documents 100000] [--clients 16] [--seconds 20]`.

The documents are random words with the frequencies of a natural language (Zipf), 100 of them in each, and a query has
five words of one document. Each client sends its next query when it has the answer to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from jaxrl_llm.retriever.client import RetrieverClient

WORDS, LENGTH, QUERY, TOPK = 50_000, 100, 5, 3


def write_corpus(path: Path, count: int) -> list[str]:
    """Writes documents, and returns queries for some of them."""
    rng, queries = np.random.default_rng(0), []
    with path.open("w") as file:
        for i in range(count):
            words = [f"w{n}" for n in (rng.zipf(1.2, LENGTH) % WORDS).tolist()]
            file.write(json.dumps({"id": str(i), "contents": f'"Title {i}"\n{" ".join(words)}'}) + "\n")
            if i % 50 == 0:
                queries.append(" ".join(rng.choice(words, QUERY)))
    return queries


def client(url: str, queries: list[str], number: int, end: float) -> list[float]:
    """Sends queries until the end. Returns the seconds of each."""
    retriever, seconds = RetrieverClient(url, topk=TOPK, timeout=30.0, retries=0), []
    while time.monotonic() < end:
        began = time.perf_counter()
        (found,) = retriever.search([queries[(number + 31 * len(seconds)) % len(queries)]])
        seconds.append(time.perf_counter() - began)
        assert found
    retriever.close()
    return seconds


def wait_for(url: str) -> None:
    """Waits until the server answers."""
    for _ in range(100):
        try:
            httpx.get(url + "/health", trust_env=False).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")


def memory(pid: int) -> float:
    """Returns the largest resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with TemporaryDirectory() as made:
        corpus = Path(made) / "corpus.jsonl"
        queries = write_corpus(corpus, args.documents)
        command = [sys.executable, "-m", "jaxrl_llm.tools.serve_retriever", "--corpus", str(corpus), "--port", "8317"]
        environment = os.environ | {"XDG_CACHE_HOME": made}  # so that nothing is left there
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert server.stdout
            print(server.stdout.readline().strip())
            url = "http://127.0.0.1:8317"
            wait_for(url)
            end = time.monotonic() + args.seconds
            with ThreadPoolExecutor(args.clients) as threads:
                each = threads.map(lambda i: client(url, queries, i, end), range(args.clients))
                seconds = np.sort([x for of_one in each for x in of_one])
            p50, p99 = (1000 * np.percentile(seconds, p) for p in (50, 99))
            print(
                f"{len(seconds) / args.seconds:.0f} queries/s of {args.clients} clients; p50 {p50:.0f} ms, "
                f"p99 {p99:.0f} ms; server's memory {memory(server.pid):.0f} MiB, "
                f"corpus {corpus.stat().st_size / 2**20:.0f} MiB"
            )
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
