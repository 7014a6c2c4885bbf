"""An OpenEnv server with its own package: python openenv_server.py KIND PORT SESSIONS, KIND is mcp or actions."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Move(Action):
    """A move to the right or left."""

    steps: int = Field(..., description="how far to move")


class Place(Observation):
    place: int = 0


class Corridor(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.place, self.goal = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Place:
        self.place, self.goal = seed or 0, 10
        return Place(place=self.place, done=False, reward=None)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Place:
        self.place += action.steps
        return Place(place=self.place, done=self.place == self.goal, reward=float(self.place == self.goal))

    @property
    def state(self) -> State:
        return State(step_count=0)


class Notes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        from fastmcp import FastMCP

        server, self.notes = FastMCP("notes"), list[str]()

        @server.tool
        def add(text: str) -> int:
            """Adds a note. Returns how many there are."""
            self.notes.append(text)
            return len(self.notes)

        @server.tool
        def fail() -> str:
            """Fails."""
            raise RuntimeError("no paper is left")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.notes.clear()
        return Observation(done=False, reward=None)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=None)

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = 0.5, len(self.notes) == 3
        return observation

    @property
    def state(self) -> State:
        return State(step_count=len(self.notes))


if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    env, action, observation = {
        "mcp": (Notes, CallToolAction, CallToolObservation),
        "actions": (Corridor, Move, Place),
    }[kind]
    uvicorn.run(create_fastapi_app(env, action, observation, int(sessions)), port=int(port), log_level="warning")
