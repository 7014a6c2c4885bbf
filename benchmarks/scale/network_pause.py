"""How long a network pause between two processes may be: `python -m benchmarks.scale.network_pause`.

Process 1 reaches process 0 through a proxy, which stands still for so many seconds (SIGSTOP) while both exchange a
value ten times a second. Nothing is compiled. All pauses are measured at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from jaxrl_llm.machine.distributed.joining import HEARTBEAT_SECONDS

EXCHANGES = """
import sys, time
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.distributed import joining
address, joining.HEARTBEAT_SECONDS, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with distributed.join_processes(address):
    distributed.wait("start")
    print("joined", flush=True)
    end = time.monotonic() + seconds
    while max(distributed.exchange(end - time.monotonic())) > 0:
        time.sleep(0.1)
"""


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def proxy(listens: int, to: int) -> None:
    """Passes on what comes, until it is killed."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while received := await reader.read(65536):
                writer.write(received)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", to)
            await asyncio.gather(pipe(reader, other_writer), pipe(other_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", listens)
        await server.serve_forever()

    asyncio.run(serve())


class Pair:
    """Two processes, and the proxy between them."""

    def __init__(self, pause: int, heartbeat: int):
        self.pause, ports = pause, (port(), port())
        self._proxy = multiprocessing.Process(target=proxy, args=(ports[1], ports[0]), daemon=True)
        self._proxy.start()
        command = [sys.executable, "-c", EXCHANGES]
        more = [str(heartbeat), str(2 * pause + 30)]
        self._each = [
            subprocess.Popen(
                [*command, f"127.0.0.1:{ports[i]},{i}/2", *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for i in range(2)
        ]

    def wait(self) -> None:
        for process in self._each:
            # A line before it may say that the process waits for the other one.
            assert process.stdout and any("joined" in line for line in iter(process.stdout.readline, ""))

    def send(self, number: int) -> None:
        assert self._proxy.pid
        os.kill(self._proxy.pid, number)

    def outcome(self, began: float) -> str:
        for process in self._each:
            process.communicate()
        seconds = time.monotonic() - began
        self._proxy.kill()
        codes = [process.returncode for process in self._each]
        said = "both go on" if codes == [0, 0] else f"both have ended after {seconds:.0f} s, with exit codes {codes}"
        return f"pause of {self.pause} s: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, nargs="+", default=[40, 50, 70, 150])
    parser.add_argument(
        "--heartbeat", type=int, default=HEARTBEAT_SECONDS, help="seconds without a sign of life (%(default)s)"
    )
    args = parser.parse_args()
    pairs = [Pair(seconds, args.heartbeat) for seconds in args.seconds]
    for pair in pairs:
        pair.wait()
    for pair in pairs:
        pair.send(signal.SIGSTOP)
    began = time.monotonic()
    outcomes = [ThreadPoolExecutor().submit(pair.outcome, began) for pair in pairs]
    for pair in sorted(pairs, key=lambda pair: pair.pause):
        time.sleep(max(began + pair.pause - time.monotonic(), 0))
        pair.send(signal.SIGCONT)
    for outcome in outcomes:
        print(f"heartbeat {args.heartbeat} s, {outcome.result()}", flush=True)


if __name__ == "__main__":
    main()
