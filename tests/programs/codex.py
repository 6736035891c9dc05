"""Codex CLI, over the Responses API. Its tools are functions, and beside them a namespace and web search."""

from __future__ import annotations

from collections.abc import Iterator

from kit import KEY, LOCAL, Place, agent_server, check, main
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
"""
EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
RESUME = ("exec", "resume", "--last", *EXEC[1:])


def install(place: Place) -> None:
    place.npm(f"@openai/codex@{VERSION}")


def converse(place: Place) -> Iterator[str]:
    command = Call("exec_command", {"cmd": "echo 42 > number.txt; echo wrote $((40 + 2))"})
    with agent_server(place, "The number is 42.", command) as (server, model):
        (place.home / ".codex").mkdir()
        (place.home / ".codex/config.toml").write_text(SETTINGS.format(model=MODEL, url=server.url))
        said = place.run("codex", *EXEC, "Write 42 into number.txt", PENSTOCK_KEY=KEY)
        check(said.strip() == "The number is 42.", "the model's answer is printed", said)
        check((place.work / "number.txt").read_text() == "42\n", "the command has run")
        check("wrote 42" in model.results()[0], "the model gets the command's output", model.results())
        yield "runs the commands that the model calls"
        said = place.run("codex", *RESUME, "-m", LOCAL, "And now?", PENSTOCK_KEY=KEY)
        check(bool(said.strip()), "the demo model answers", said)
        yield "the session goes on with a model that has a strict template"


if __name__ == "__main__":
    main(f"Codex CLI {VERSION}", install, converse)
