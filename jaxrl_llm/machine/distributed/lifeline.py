"""A TCP connection of each process to process 0, which the kernel closes when the process ends, even by kill -9.

So the other processes learn immediately that a process was killed, without waiting for its heartbeats. If a host or its
network fails, or a firewall blocks the connection, JAX's heartbeats still detect the loss.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from jaxrl_llm.machine.distributed.processes import count, first, index
from jaxrl_llm.machine.distributed.store import exchange
from jaxrl_llm.machine.jax_private import global_state

CHANNEL = "lifeline"
# Seconds in which a running process reconnects after something between the hosts has cut its connection.
RECONNECT_SECONDS = 3
# Seconds of silence after which TCP sends a probe, so that no firewall drops the connection.
PROBE_SECONDS = 60
# Unanswered probes after which TCP closes the connection, so the network may pause for an hour.
MAX_PROBES = 60


def open_lifeline(is_ending: Event, on_death: Callable[[int], Any]) -> None:
    """Connects this process to process 0, which calls on_death(process) if a process dies before `is_ending` is set.

    All processes must call it.
    """
    server = _listen() if first() else None
    address = [server.getsockname()[1], secrets.token_hex(16)] if server else None
    port, token = exchange(address, CHANNEL)[0]
    if server:
        watcher = _watch_others(server, token, is_ending, on_death)
        Thread(target=asyncio.run, args=(watcher,), daemon=True).start()
    else:
        host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
        Thread(target=_stay_connected, args=(host, port, token, is_ending), daemon=True).start()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count())
    return socket.create_server(("", 0), backlog=count())


async def _watch_others(server: socket.socket, token: str, is_ending: Event, on_death: Callable[[int], Any]) -> None:
    """Calls on_death(process) when a process ends. Each process keeps a connection to this server while it runs."""
    newest_writers: dict[int, asyncio.StreamWriter] = {}  # the last connection of each process

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words: list[str] = []
        with suppress(OSError, ValueError):
            _enable_probes(writer.get_extra_info("socket"))
            words = (await reader.readline()).decode().split()
        # The port is open to the network, so a scanner may connect, which does not know the token.
        if words[:1] != [token]:
            writer.close()
            return
        process = int(words[1])
        newest_writers[process] = writer
        with suppress(OSError):
            await reader.read()
        # A running process reconnects in this time, and then has another writer in `newest_writers`.
        await asyncio.sleep(RECONNECT_SECONDS)
        if newest_writers[process] is writer and not is_ending.is_set():
            on_death(process)

    async with await asyncio.start_server(handle_connection, sock=server) as serving:
        await serving.serve_forever()


def _stay_connected(host: str, port: int, token: str, is_ending: Event) -> None:
    """Keeps the connection to process 0 open, in a thread. If process 0 dies, JAX itself ends this process."""
    with suppress(OSError):  # process 0 has died, or a firewall blocks the connection
        while not is_ending.is_set():
            with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
                # The time limit applies only to connecting, because `recv` below waits as long as the run lasts.
                connection.settimeout(None)
                _enable_probes(connection)
                connection.sendall(f"{token} {index()}\n".encode())
                with suppress(OSError):
                    # Process 0 never sends anything, so `recv` returns only when the connection is cut.
                    connection.recv(1)
            is_ending.wait(RECONNECT_SECONDS / 10)


def _enable_probes(connection: socket.socket) -> None:
    """Lets the kernel probe an idle connection, so that the death of the other host is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        for option, size in (
            (socket.TCP_KEEPIDLE, PROBE_SECONDS),
            (socket.TCP_KEEPINTVL, PROBE_SECONDS),
            (socket.TCP_KEEPCNT, MAX_PROBES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, size)
