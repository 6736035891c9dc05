"""opencode, over the chat completions API."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kit import KEY, LOCAL, Place, agent_server, check, main
from scripted import MODEL, Call

VERSION = "1.18.33"
LIMIT = {"context": 65536, "output": 4096}


def install(place: Place) -> None:
    place.npm(f"opencode-ai@{VERSION}")


def settings(url: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {name: {"limit": LIMIT} for name in (MODEL, LOCAL)},
    }
    names = {"model": f"penstock/{MODEL}", "small_model": f"penstock/{MODEL}"}
    return json.dumps({"autoupdate": False, "permission": "allow", "provider": {"penstock": provider}} | names)


def converse(place: Place) -> Iterator[str]:
    calls = (
        Call("bash", {"command": "echo 42 > number.txt; echo wrote $((40 + 2))", "description": "Writes it"}),
        Call("write", {"filePath": str(place.work / "other.txt"), "content": "43"}),
    )
    environ = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    with agent_server(place, "The number is 42.", *calls) as (server, model):
        (place.work / "opencode.json").write_text(settings(server.url))
        said = place.run("opencode", "run", "Write 42 into number.txt", **environ)
        check("The number is 42." in said, "the model's answer is printed", said)
        check((place.work / "number.txt").read_text() == "42\n", "the command has run")
        check((place.work / "other.txt").read_text() == "43", "the file is written")
        check("wrote 42" in model.results()[0], "the model gets the command's output", model.results())
        yield "runs the commands and writes the files that the model calls for"
        said = place.run("opencode", "run", "--continue", "-m", f"penstock/{LOCAL}", "And now?", **environ)
        check(bool(said.strip()), "the demo model answers", said)
        yield "the session goes on with a model that has a strict template"


if __name__ == "__main__":
    main(f"opencode {VERSION}", install, converse)
