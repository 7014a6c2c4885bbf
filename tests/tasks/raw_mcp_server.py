"""A server that begins as an MCP server does, and whose tools then answer something else."""

import json
import os
import sys

RESULTS = {"a picture": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}}
RESULTS |= {"an unknown part": {"content": [{"type": "hologram"}]}, "a number as parts": {"content": 7}}
LINES = {"no JSON": "<html>", "a list": "[1]", "half a character": '{"jsonrpc": "2.0", "result": "\\ud800"}'}


def answer(message: dict) -> str:
    """The line that answers a request."""
    params = message.get("params", {})
    name = params.get("name")
    if name in LINES:
        return LINES[name]
    schema = {"type": "object", "properties": {}}
    tools = [{"name": tool, "inputSchema": schema} for tool in (*RESULTS, *LINES, "a part of an answer")]
    begun = {"capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "0"}}
    result = RESULTS.get(name) or {
        "initialize": begun | {"protocolVersion": params.get("protocolVersion")},
        "tools/list": {"tools": tools},
    }.get(message["method"])
    outcome = {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
    return json.dumps({"jsonrpc": "2.0", "id": message["id"]} | outcome)


for line in sys.stdin:
    request = json.loads(line)
    if request.get("params", {}).get("name") == "a part of an answer":
        sys.stdout.write('{"jsonrpc": "2.0", ')
        sys.stdout.flush()
        os._exit(1)
    if "id" in request:
        print(answer(request), flush=True)
