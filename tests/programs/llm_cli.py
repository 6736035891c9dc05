"""The `llm` command, over the chat completions API."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kit import KEY, Place, check, main, server
from scripted import MODEL, Call, scripted

VERSION = "0.36"
DEMO = "penstock-demo"
WEATHER = '''
def weather(city: str) -> str:
    """How warm it is in a city"""
    return f"{city}: 18 degrees"
'''


def install(place: Place) -> None:
    place.pip(f"llm=={VERSION}")


def settings(url: str) -> str:
    """JSON is YAML."""
    supports = {"api_base": f"{url}/v1", "supports_tools": True, "supports_schema": True}
    return json.dumps([{"model_id": name, "model_name": name} | supports for name in (DEMO, MODEL)])


def converse(place: Place) -> Iterator[str]:
    environ = {"LLM_USER_PATH": str(place.home), "OPENAI_API_KEY": KEY}
    call = Call("weather", {"city": "Rome"})
    with scripted("It is warm.", call) as model, server(DEMO, "--upstream", model.flag) as running:
        (place.home / "extra-openai-models.yaml").write_text(settings(running.url))
        said = place.run("llm", "-m", DEMO, "What does os.path.join do?", **environ)
        check("os.path.join" in said, "the demo model answers", said)
        said = place.run("llm", "-m", DEMO, "-c", "And os.path.split?", **environ)
        check("os.path.split" in said, "the demo model answers the second question", said)
        yield "a conversation of two questions, streamed"
        said = place.run("llm", "-m", DEMO, "--schema", "city, warm bool", "Rome is warm", **environ)
        check(json.loads(said).keys() == {"city", "warm"}, "the answer has the schema", said)
        yield "JSON by a schema"
        said = place.run("llm", "-m", MODEL, "--functions", WEATHER, "How warm is it in Rome?", **environ)
        check(said.strip() == "It is warm.", "the model's answer is printed", said)
        check(model.results() == ["Rome: 18 degrees"], "the model gets the function's result", model.results())
        yield "functions that the model calls"


if __name__ == "__main__":
    main(f"llm {VERSION}", install, converse)
