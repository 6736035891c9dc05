"""Codex CLI, over the Responses API. Its tools are functions, and beside them a namespace and web search."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kit import HERE, KEY, LOCAL, PNG, Place, agent_server, check, main
from scripted import MODEL, Call

VERSION = "0.171.0"
SETTINGS = """
model = "{model}"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
env_key = "PENSTOCK_KEY"
wire_api = "responses"
[mcp_servers.weather]
command = "{python}"
args = ["{mcp}"]
"""
EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
RESUME = ("exec", "resume", "--last", *EXEC[1:])


def install(place: Place) -> None:
    place.npm(f"@openai/codex@{VERSION}")


def converse(place: Place) -> Iterator[str]:
    calls = (
        Call("exec_command", {"cmd": "echo 42 > number.txt; echo wrote $((40 + 2))"}),
        Call("mcp__weather__temperature", {"city": "Rome"}),
        Call("view_image", {"path": str(place.work / "point.png")}),
    )
    (place.work / "point.png").write_bytes(PNG)
    with agent_server(place, "The number is 42.", *calls) as (server, model):
        (place.home / ".codex").mkdir()
        settings = SETTINGS.format(model=MODEL, url=server.url, python=sys.executable, mcp=HERE / "mcp_weather.py")
        (place.home / ".codex/config.toml").write_text(settings)
        said = place.run("codex", *EXEC, "Write 42 into number.txt", PENSTOCK_KEY=KEY)
        check(said.strip() == "The number is 42.", "the model's answer is printed", said)
        check((place.work / "number.txt").read_text() == "42\n", "the command has run")
        written, warm, seen = model.results()
        check("wrote 42" in written, "the model gets the command's output", written)
        check("Rome: 18 degrees" in warm, "the model gets the result of the MCP server's tool", warm)
        check("image" in seen, "the model gets a note in place of the picture", seen)
        yield "runs commands and tools of an MCP server that the model calls, and shows it a picture"
        said = place.run("codex", *RESUME, "-m", LOCAL, "And now?", PENSTOCK_KEY=KEY)
        check(bool(said.strip()), "the demo model answers", said)
        yield "the session goes on with a model that has a strict template"


if __name__ == "__main__":
    main(f"Codex CLI {VERSION}", install, converse)
