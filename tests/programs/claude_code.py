"""Claude Code, over the Messages API. It sends system messages after the user's, and asks for 32,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator

from kit import KEY, LOCAL, PNG, Place, agent_server, check, main
from scripted import MODEL, Call

VERSION = "2.1.332"
TOOLS = ("--allowedTools", "Bash", "Write", "--")


def install(place: Place) -> None:
    place.npm(f"@anthropic-ai/claude-code@{VERSION}")


def converse(place: Place) -> Iterator[str]:
    calls = (
        Call("Bash", {"command": "echo 42 > number.txt; echo wrote $((40 + 2))", "description": "Writes it"}),
        Call("Write", {"file_path": str(place.work / "other.txt"), "content": "43"}),
        Call("Read", {"file_path": str(place.work / "point.png")}),
    )
    (place.work / "point.png").write_bytes(PNG)
    with agent_server(place, "The number is 42.", *calls) as (server, model):
        environ = {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        said = place.run("claude", "-p", "--model", MODEL, *TOOLS, "Write 42 into number.txt", **environ)
        check(said.strip() == "The number is 42.", "the model's answer is printed", said)
        check((place.work / "number.txt").read_text() == "42\n", "the command has run")
        check((place.work / "other.txt").read_text() == "43", "the file is written")
        written, _, seen = model.results()
        check("wrote 42" in written, "the model gets the command's output", written)
        check("image" in seen, "the model gets a note in place of the picture", seen)
        yield "runs commands, writes files and reads a picture as the model calls for it"
        said = place.run("claude", "-p", "--continue", "--model", LOCAL, "And now?", **environ)
        check(bool(said.strip()), "the demo model answers", said)
        yield "the session goes on with a model that has a strict template"


if __name__ == "__main__":
    main(f"Claude Code {VERSION}", install, converse)
