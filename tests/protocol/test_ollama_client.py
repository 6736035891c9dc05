"""Ollama's own client against a real server with a language model and an embedding model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from support.encoders import make_encoder, sentence_files
from support.server import Server, serving

MODEL = "penstock-demo"
HI: Any = [{"role": "user", "content": "What does os.path.join do?"}]
FIRM: Any = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("encoder")
    make_encoder(folder, files=sentence_files())
    flags = (MODEL, "--tool-parser", "hermes", "--embedding-model", f"vectors={folder}")
    with serving(*flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_chats_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HI, options=FIRM)
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    assert (whole.total_duration or 0) >= (whole.eval_duration or 0) > 0
    parts = list(client.chat(f"{MODEL}:latest", HI, options=FIRM, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


def test_prompts_are_chats_unless_they_are_raw(client: ollama.Client) -> None:
    chat = client.chat(MODEL, [{"role": "system", "content": "Be kind."}, *HI], options=FIRM)
    prompt = client.generate(MODEL, HI[0]["content"], system="Be kind.", options=FIRM)
    assert prompt.response == chat.message.content
    raw = client.generate(MODEL, "import os", raw=True, options=FIRM)
    assert raw.prompt_eval_count < prompt.prompt_eval_count  # type: ignore[operator]
    assert list(client.generate(MODEL, "import os", raw=True, options=FIRM, stream=True))[-1].eval_count == 12


class Rose(BaseModel):
    thorns: int
    red: bool


def test_a_format_makes_the_answer_json_of_its_schema(client: ollama.Client) -> None:
    options = {"num_predict": 200, "seed": 1}
    answer = client.chat(MODEL, HI, format=Rose.model_json_schema(), options=options)
    assert Rose.model_validate_json(answer.message.content or "")
    anything = client.chat(MODEL, HI, format="json", options=options)
    assert (anything.message.content or "").lstrip().startswith("{")


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return "rain in " + city


def test_a_conversation_with_tools(client: ollama.Client, server: Server) -> None:
    called: Any = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    result: Any = {"role": "tool", "tool_name": "weather", "content": "rain"}
    assert client.chat(MODEL, [*HI, called, result], tools=[weather], options=FIRM).message
    assert client.chat(MODEL, [*HI, result], tools=[weather], options=FIRM).message


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_spell_the_text_and_begin_with_the_likeliest(client: ollama.Client, stream: bool) -> None:
    more: Any = {"options": FIRM, "logprobs": True, "top_logprobs": 2, "stream": stream}
    chat: Any = client.chat(MODEL, HI, **more)
    prompt: Any = client.generate(MODEL, "import os", raw=True, **more)
    for answer, text_of in ((chat, lambda each: each.message.content), (prompt, lambda each: each.response)):
        parts = list(answer) if stream else [answer]
        found = [each for part in parts for each in part.logprobs or ()]
        assert len(found) == 12
        assert "".join(each.token for each in found) == "".join(text_of(part) or "" for part in parts)
        for each in found:
            assert each.logprob <= 0
            assert len(each.top_logprobs) == 2
            assert each.top_logprobs[0].token == each.token, "the likeliest one, since nothing is drawn"


def test_what_a_models_files_say(client: ollama.Client, server: Server) -> None:
    entry = next(each for each in client.list().models if each.model == MODEL)
    details = entry.details
    assert entry.size is not None
    assert details is not None
    assert entry.size > 13_000_000
    assert (details.format, details.family, details.families) == ("safetensors", "llama", ["llama"])
    assert (details.parameter_size, details.quantization_level) == ("6.8M", "BF16")
    [running] = [each for each in client.ps().models if each.model == MODEL]
    assert (running.size, running.digest, running.context_length) == (entry.size, entry.digest, 2048)
    shown = client.show(MODEL)
    assert shown.details == details
    assert shown.template is not None
    assert "<|im_start|>" in shown.template
    assert 'stop                           "<|im_end|>"' in (shown.parameters or "")
    assert (shown.modelfile or "").startswith(f"FROM {MODEL}")


def test_a_model_that_is_there_is_pulled_at_once(client: ollama.Client, server: Server) -> None:
    states = [each.status for each in client.pull(f"{MODEL}:latest", stream=True)]
    assert (states[0], states[-1]) == ("pulling manifest", "success")
    assert client.pull("vectors").status == "success"
    for refused in (
        lambda: client.pull("llama3"),
        lambda: list(client.pull("llama3", stream=True)),
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "b"),
        lambda: client.push(MODEL),
        lambda: client.create("b", from_=MODEL),
    ):
        with pytest.raises(ollama.ResponseError, match="models of this server"):
            refused()


def test_vectors_are_the_same_by_both_routes_and_long_texts_are_cut(client: ollama.Client) -> None:
    several = client.embed("vectors", ["a text", "another"])
    assert len(several.embeddings) == 2
    assert (several.prompt_eval_count or 0) > 0
    assert client.embed("vectors", "").embeddings == [], "no text asks whether the model is there"
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.embed("nobody", "")
    assert len(client.embed("vectors", "word " * 5000).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="truncate"):
        client.embed("vectors", "word " * 5000, truncate=False)
    old = client.embeddings("vectors", "a text")
    assert list(old.embedding) == pytest.approx(list(several.embeddings[0]), abs=1e-4)
    with pytest.raises(ollama.ResponseError) as wrong:
        client.embed(MODEL, "a text")
    assert (wrong.value.status_code, "gives no embeddings" in wrong.value.error) == (400, True), wrong.value.error


def test_what_models_there_are(client: ollama.Client, server: Server) -> None:
    assert [model.model for model in client.list().models] == [MODEL, "vectors"]
    assert [model.model for model in client.ps().models] == [MODEL, "vectors"]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert client.show("vectors").capabilities == ["embedding"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    version = httpx.get(f"{server.url}/api/version").json()
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4), "VS Code takes no older Ollama"
    assert version["penstock_version"]
    loaded = httpx.post(f"{server.url}/api/chat", json={"model": MODEL}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("path", "fields", "status", "said"),
    [
        ("chat", {"model": "nobody"}, 404, "does not exist"),
        ("chat", {"options": {"temperature": "hot"}}, 400, "temperature"),
        ("chat", {"format": {"type": "rose"}}, 400, "rose"),
        ("generate", {"prompt": "a", "context": [4096]}, 400, "oken ids"),
        ("generate", {"prompt": "a", "raw": True, "context": [1]}, 400, "context"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("show", {"model": "nobody"}, 404, "does not exist"),
        ("nowhere", {}, 404, "route"),
    ],
)
def test_bad_requests(server: Server, path: str, fields: dict[str, Any], status: int, said: str) -> None:
    asked = {"model": MODEL, "messages": HI} if path == "chat" else {"model": MODEL}
    answer = httpx.post(f"{server.url}/api/{path}", json=asked | fields, timeout=30)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]


def test_a_line_of_a_stream_is_json(server: Server) -> None:
    with httpx.stream("POST", f"{server.url}/api/chat", json={"model": MODEL, "messages": HI}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert all(json.loads(line)["model"] == MODEL for line in answer.iter_lines())
