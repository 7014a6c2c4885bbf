"""A connection of each process to process 0, which the kernel closes when the process ends, also by kill -9.

So the others learn at once that a process was killed, and need not wait for its heartbeats. A network that stands still
closes nothing. Nor does a host that is lost; and a firewall may allow no connection: there JAX's heartbeats are left.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from jax._src.distributed import global_state

from jaxrl_llm.machine.distributed.processes import count, first, index
from jaxrl_llm.machine.distributed.store import exchange

CHANNEL = "lifeline"
# Seconds in which a living process connects again, if something between the hosts has cut its connection.
GRACE = 3
# Seconds without a word after which TCP sends one, so that no firewall forgets the connection.
IDLE = 60
# Unanswered probes that TCP sends before it gives up: a network may stand still for WORDS times IDLE seconds.
WORDS = 60


def hold(leaving: Event, died: Callable[[int], Any]) -> None:
    """Calls died(process) in process 0 when another process is killed before `leaving`. All processes must call it."""
    server = _listen() if first() else None
    listening = [server.getsockname()[1], secrets.token_hex(16)] if server else None
    port, token = exchange(listening, CHANNEL)[0]
    if server:
        watching = _watch_others(server, token, leaving, died)
        Thread(target=asyncio.run, args=(watching,), daemon=True).start()
    else:
        host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
        Thread(target=_hold, args=(host, port, token, leaving), daemon=True).start()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count())
    return socket.create_server(("", 0), backlog=count())


async def _watch_others(server: socket.socket, token: str, leaving: Event, died: Callable[[int], Any]) -> None:
    newest: dict[int, asyncio.StreamWriter] = {}  # the last connection of each process

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words: list[str] = []
        with suppress(OSError, ValueError):
            _keep_open(writer.get_extra_info("socket"))
            words = (await reader.readline()).decode().split()
        # The port is open to the network: somebody else, such as a scanner.
        if words[:1] != [token]:
            writer.close()
            return
        process = int(words[1])
        newest[process] = writer
        with suppress(OSError):
            await reader.read()
        # A living process connects again in this time, and is then another writer in `newest`.
        await asyncio.sleep(GRACE)
        if newest[process] is writer and not leaving.is_set():
            died(process)

    async with await asyncio.start_server(connected, sock=server) as serving:
        await serving.serve_forever()


def _hold(host: str, port: int, token: str, leaving: Event) -> None:
    """Holds the connection of this process. JAX itself ends a process at once when process 0 has died."""
    with suppress(OSError):  # process 0 has died, or a firewall is between
        while not leaving.is_set():
            with socket.create_connection((host, port), timeout=IDLE) as line:
                # The time limit is for the connecting alone; `recv` below waits as long as the run lasts.
                line.settimeout(None)
                _keep_open(line)
                line.sendall(f"{token} {index()}\n".encode())
                with suppress(OSError):
                    # Nothing is ever sent to it: it returns when the connection is cut.
                    line.recv(1)
            leaving.wait(GRACE / 10)


def _keep_open(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        for option, size in ((socket.TCP_KEEPIDLE, IDLE), (socket.TCP_KEEPINTVL, IDLE), (socket.TCP_KEEPCNT, WORDS)):
            line.setsockopt(socket.IPPROTO_TCP, option, size)
