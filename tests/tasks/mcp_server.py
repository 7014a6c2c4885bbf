"""An MCP server whose tools answer, fail, stall or end the server: `python mcp_server.py [PORT]`."""

import os
import sys
import time

from mcp import MCPError
from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Repeats a text."""
    return text * times


@server.tool()
def fail() -> str:
    """Raises an error."""
    raise ValueError("broken")


@server.tool()
def refuse() -> str:
    """Answers with an error of the protocol."""
    raise MCPError(-32603, "internal")


@server.tool()
def stall() -> str:
    """Answers too late."""
    time.sleep(3)
    return "late"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
