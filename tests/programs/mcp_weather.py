"""An MCP server with one tool, over standard input and output: a line for each message."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "temperature",
    "description": "How warm it is in a city",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        names = {"protocolVersion": params["protocolVersion"], "serverInfo": {"name": "weather", "version": "1"}}
        return names | {"capabilities": {"tools": {}}}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"{params['arguments']['city']}: 18 degrees"}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result(message["method"], message.get("params", {}))}
        print(json.dumps(answer), flush=True)
