"""Tools of MCP servers: what a call returns, how each failure is counted, and that the next call connects again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from test_tools import call

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.mcp import MCPTools

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {SERVER}"
pytestmark = pytest.mark.needs("mcp")


def counted(tools: MCPTools, name: str, **arguments: object) -> tuple[str, dict[str, float]]:
    """The result of a call, and the errors that it counts."""
    reply = tools.step(call(name, **arguments))
    assert not reply.done and reply.metrics["calls"] == 1
    (text,) = reply.observation
    return text, {name: count for name, count in reply.metrics.items() if count and name != "calls"}


def test_an_mcp_server_is_described_to_the_policy_and_answers_its_calls():
    tools = MCPTools(server=COMMAND)
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert schemas["add"]["description"] == "Adds two numbers." and set(schemas["add"]["parameters"]["required"]) == {
        "a",
        "b",
    }
    with ThreadPoolExecutor(8) as threads:  # episodes share the connection
        sums = list(threads.map(lambda x: counted(MCPTools(server=COMMAND), "add", a=x, b=x), range(32)))
    assert sums == [(str(2 * x), {}) for x in range(32)]
    assert counted(tools, "echo", text="ü€\n漢") == ("ü€\n漢", {})
    assert len(counted(tools, "echo", text="long", times=250_000)[0]) == 1_000_000
    assert tools.step("no call").done


def test_a_call_that_a_tool_refuses_is_the_error_of_the_policy():
    tools = MCPTools(server=COMMAND)
    for name, arguments in (("add", {"a": "x", "b": 1}), ("add", {"a": 1}), ("fail", {})):
        assert counted(tools, name, **arguments)[1] == {"own_errors": 1.0}
    assert counted(tools, "nothing")[1] == {"invalid": 1.0}


def test_a_server_that_stalls_or_ends_costs_a_call_and_not_the_next_one():
    tools = MCPTools(server=COMMAND, timeout=1.0)
    assert counted(tools, "stall")[1] == {"errors": 1.0, "server_stalled": 1.0}
    assert counted(tools, "add", a=1, b=1) == ("2", {})
    assert counted(tools, "refuse")[1] == {"errors": 1.0, "server_errors": 1.0}
    with ThreadPoolExecutor(2) as threads:  # the end of the connection is no fault of the next one
        ended = [threads.submit(counted, tools, "die"), threads.submit(counted, tools, "stall")]
        assert all(call.result()[1]["errors"] == 1 for call in ended)
    assert counted(tools, "add", a=2, b=2) == ("4", {})
    assert counted(tools, "die")[1] == {"errors": 1.0, "server_closed": 1.0}
    assert counted(tools, "add", a=2, b=1) == ("3", {})


@pytest.mark.parametrize(
    ("tool", "failure"),
    [
        ("an unknown part", "server_nonsense"),
        ("a number as parts", "server_nonsense"),
        ("no JSON", "server_stalled"),
        ("a list", "server_stalled"),
        ("half a character", "server_stalled"),
        ("a part of an answer", "server_closed"),
    ],
)
def test_an_answer_of_another_form_costs_a_call_and_not_the_next_one(tool, failure):
    tools = MCPTools(server=f"{sys.executable} {SERVER.with_name('raw_mcp_server.py')}", timeout=1.0)
    assert counted(tools, tool)[1] == {"errors": 1.0, failure: 1.0}
    assert counted(tools, "a picture") == ("[image]", {})


def test_a_server_at_an_address_is_called_and_may_be_restarted():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"

    def start() -> subprocess.Popen:
        server = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return server
            time.sleep(0.1)
        raise TimeoutError

    server = start()
    try:
        tools = MCPTools(server=url, timeout=5.0)
        assert counted(tools, "add", a=1, b=1) == ("2", {})
        server.kill()
        server.wait()
        assert counted(tools, "add", a=1, b=1)[1].keys() == {"errors", "server_closed"}
        assert counted(tools, "add", a=1, b=1)[1].keys() == {"errors", "server_unreachable"}
        server = start()
        assert counted(tools, "add", a=1, b=1) == ("2", {})
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("server", ["no_such_program", "false", "http://127.0.0.1:9/mcp", "cat", "", "'"])
def test_a_server_that_does_not_answer_is_refused(server):
    with pytest.raises(UserError, match=r"config\.env\.server"):
        MCPTools(server=server, timeout=2.0)
