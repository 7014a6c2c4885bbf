"""The HTTP server of a run's agents, on this machine alone. Only runs with agents import it."""

from __future__ import annotations

import socket
from threading import Thread

import uvicorn

from jaxrl_llm.rollout.agents.sessions import AgentService
from jaxrl_llm.rollout.serving.application import application

KEEP_ALIVE_SECONDS = 600  # an agent may work for minutes between two calls on one connection
SHUTDOWN_SECONDS = 1  # seconds for running requests when the server stops


class AgentServer:
    """Serves the sessions of agents in a thread."""

    def __init__(self, service: AgentService):
        self._listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            application(service),
            log_level="critical",  # because a server that stops cancels the requests of agents
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        sockets = {"sockets": [self._listener]}
        self._thread = Thread(target=self._server.run, kwargs=sockets, name="agent server", daemon=True)
        self._thread.start()

    def base_url(self, session_name: str) -> str:
        """Returns the address of a session, as `openai` needs it."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/sessions/{session_name}/v1"

    def close(self) -> None:
        """Ends the server and its thread."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
