"""aider, over the chat completions API and over Ollama's. It has no tools: it edits files as the answer says."""

from __future__ import annotations

from collections.abc import Iterator

from kit import KEY, LOCAL, Place, agent_server, check, main
from scripted import MODEL

VERSION = "0.86.2"
QUIET = ("--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings", "--no-check-update", "--message")
EDIT = """The number is 42.

number.py
```python
<<<<<<< SEARCH
number = 41
=======
number = 42
>>>>>>> REPLACE
```
"""


def install(place: Place) -> None:
    place.pip(f"aider-chat=={VERSION}")


def converse(place: Place) -> Iterator[str]:
    file = place.work / "number.py"
    file.write_text("number = 41\n")
    with agent_server(place, EDIT) as (server, _):
        environ = {
            "OPENAI_API_BASE": f"{server.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OLLAMA_API_BASE": server.url,
            "AIDER_ANALYTICS": "false",
        }
        edit = ("--edit-format", "diff", *QUIET, "Make it 42", "number.py")
        said = place.run("aider", "--model", f"openai/{MODEL}", *edit, **environ)
        check(file.read_text() == "number = 42\n", "the file is edited", said)
        yield "edits a file as the answer says, over the chat completions API"
        ask = ("--chat-mode", "ask", *QUIET, "What is it?", "number.py")
        said = place.run("aider", "--model", f"ollama_chat/{LOCAL}", *ask, **environ)
        check("Tokens: " in said, "the demo model answers", said)
        yield "asks a model that has a strict template, over Ollama's API"


if __name__ == "__main__":
    main(f"aider {VERSION}", install, converse)
