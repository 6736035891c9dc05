"""Models that take and give text as tensors, under the OpenAI API: which they are, what they are asked, what they
answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.gateway.apis.kserve.store import NotExplicitError
from penstock.gateway.apis.openai.tensor_models import TensorModel, TensorModels
from penstock.gateway.apis.openai.tensor_requests import takes_text
from penstock.gateway.models.entries import Upstream
from penstock.gateway.models.repository.models import LoadedVersions
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.kserve import FakeModel, FakeModelStore, identity, tensor_config
from support.kserve_http import kserve_context

TEXT = f"input {tensor_config('text_input', 'BYTES', [1])} input {tensor_config('stream', 'BOOL', [1])} "
OUT = f"output {tensor_config('text_output', 'BYTES', [-1])} "
SAMPLING = f"input {tensor_config('sampling_parameters', 'BYTES', [1], 'optional: true')} "
DECOUPLED = "model_transaction_policy { decoupled: true } "
COUNTS = ("num_input_tokens", "num_output_tokens")
CHAT = {"messages": [{"role": "user", "content": "to be or not"}]}


def optional(name: str, datatype: str, dims: Iterable[int] = (1,)) -> str:
    return f"input {tensor_config(name, datatype, dims, 'optional: true')} "


def texts(*values: str) -> Tensor:
    return Tensor("text_output", "BYTES", np.array([value.encode() for value in values], np.object_))


def number(name: str, value: int) -> Tensor:
    return Tensor(name, "UINT32", np.array([value], NUMPY_TYPES["UINT32"]))


def prompt_of(request: InferRequest) -> str:
    return str(request.inputs["text_input"].array.item().decode())


def echo(inputs: str = "", *, folder: Path | None = None, batched: int = 0) -> FakeModel:
    """Answers with its prompt."""
    config = f'name: "m" backend: "python" max_batch_size: {batched} {TEXT} {inputs} {OUT}'
    model = FakeModel(config, lambda request: [texts(prompt_of(request))], folder=folder)
    model._check = lambda request: None  # type: ignore[method-assign]
    return model


def streaming(*responses: InferResponse | asyncio.Event) -> FakeModel:
    model = FakeModel(f'name: "m" backend: "python" {DECOUPLED} {TEXT} {SAMPLING} {OUT}', lambda request: [])
    model.script = lambda request: responses
    return model


def words(text: str, *more: Tensor) -> list[InferResponse | asyncio.Event]:
    found = [InferResponse([texts(word), *more], final=False) for word in text.split("|")]
    return [*found, InferResponse(None, final=True)]


class Front:
    def __init__(self, *models: FakeModel, **settings: Any) -> None:
        self.store = FakeModelStore(*models)
        self.settings = AppSettings(**settings)
        self.kserve = kserve_context(self.store)
        self.dataplane = FakeDataPlane()
        self.models = TensorModels(self.kserve, self.dataplane.models, self.settings)
        self.look()
        self.app = build_app(self.dataplane, self.settings, self.kserve)

    def look(self) -> None:
        """What the store has serves."""
        for name, versions in self.store.by_name.items():
            self.dataplane.models.publish(name, LoadedVersions(dict(versions)) if versions else None)
        self.models.look()

    async def __call__(self, path: str, body: dict[str, Any] | None = None) -> AsgiCall:
        method = "GET" if body is None else "POST"
        return await call(self.app, path, b"" if body is None else body, method=method)

    async def names(self) -> list[str]:
        return [each["id"] for each in (await self("/v1/models")).json()["data"]]


def chunks(answer: AsgiCall) -> list[dict[str, Any]]:
    events = b"".join(answer.bodies).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]


def streamed(answer: AsgiCall) -> str:
    choices = [choice for chunk in chunks(answer) for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        (TEXT + OUT, True),
        (TEXT + SAMPLING + OUT, True),
        (TEXT.replace("[1]", "[1, 1]") + OUT.replace("[-1]", "[1, -1]"), True),
        (TEXT + optional("image", "BYTES") + OUT, True),
        (TEXT + f"input {tensor_config('image', 'BYTES', [1])}" + OUT, False),
        (TEXT.replace("[1]", "[2]") + OUT, False),
        (TEXT.replace("TYPE_BOOL", "TYPE_INT32") + OUT, False),
        (TEXT + OUT.replace("text_output", "TEXT"), False),
        (TEXT + OUT + "sequence_batching { }", False),
    ],
)
def test_which_models_take_text(config: str, fits: bool) -> None:
    assert takes_text(FakeModel(f'name: "m" backend: "python" {config}', lambda request: []).signature) is fits


async def test_they_are_listed_as_long_as_they_serve() -> None:
    front = Front(echo(), identity("FP32", name="numbers"))
    assert await front.names() == ["tiny", "m"]
    assert (await front("/v1/models/m")).json()["capabilities"] == ["chat", "completion"]
    first = front.dataplane.models.first("m")
    front.look()
    assert front.dataplane.models.first("m") is first
    front.store.by_name["m"] = {2: echo()}
    front.look()
    assert front.dataplane.models.first("m") is not first
    front.store.by_name["m"] = {}
    front.look()
    assert await front.names() == ["tiny"]


async def test_names_of_others_stay_theirs() -> None:
    front, far = Front(), cast(Upstream, SimpleNamespace(name="m", gives_way=False))
    front.dataplane.models.add(far)
    front.store.by_name["m"] = {1: echo()}
    front.look()
    assert front.dataplane.models.first("m") is far
    front.dataplane.models.remove(far)
    front.look()
    assert isinstance(front.dataplane.models.first("m"), TensorModel)
    # the folder has become another server's model, which has the name from its loading on
    front.dataplane.models.add(far)
    front.look()
    assert front.dataplane.models.first("m") is far


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_is_not_decoupled(stream: bool) -> None:
    model = echo(batched=4)
    front = Front(model)
    answer = await front("/v1/completions", {"model": "m", "prompt": "hello", "stream": stream})
    assert answer.status == 200
    assert model.requests[0].inputs["stream"].array.tolist() == [[False]]
    assert model.requests[0].inputs["text_input"].array.tolist() == [[b"hello"]]
    if stream:
        assert streamed(answer) == "hello"
        assert chunks(answer)[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        assert answer.json()["usage"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_a_decoupled_model(stream: bool) -> None:
    counts = number("num_input_tokens", 4), number("num_output_tokens", 1)
    model = streaming(*words("to |be |or", *counts))
    asked = {"model": "m", **CHAT, "stream": stream, "stream_options": {"include_usage": True}}
    answer = await Front(model)("/v1/chat/completions", asked)
    [request] = model.requests
    assert prompt_of(request) == "to be or not"
    assert request.inputs["stream"].array.tolist() == [stream]
    if stream:
        assert [each["choices"][0]["delta"] for each in chunks(answer)[:3]] == [
            {"role": "assistant", "content": ""},
            {"content": "to "},
            {"content": "be "},
        ]
        usage = chunks(answer)[-1]["usage"]
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "to be or"
        usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 3, 7)


async def test_what_a_request_says_about_sampling_goes_to_its_input() -> None:
    model = echo(SAMPLING + optional("exclude_input_in_output", "BOOL"))
    body = {"model": "m", **CHAT, "temperature": 0, "seed": 7, "max_completion_tokens": 5, "stop": "x", "top_k": 3}
    await Front(model)("/v1/chat/completions", body)
    inputs = model.requests[0].inputs
    sampling = json.loads(inputs["sampling_parameters"].array.item())
    assert sampling == {"temperature": 0, "seed": 7, "max_tokens": 5, "stop": ["x"], "top_k": 3}
    assert inputs["exclude_input_in_output"].array.tolist() == [True]


async def test_or_to_inputs_of_its_own_names() -> None:
    fields = {"max_tokens": "INT32", "temperature": "FP32", "seed": "UINT64"}
    model = echo("".join(optional(*each) for each in fields.items()) + optional("stop_words", "BYTES", [-1]))
    front = Front(model)
    asked = {"model": "m", "prompt": "a b", "max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": ["x", "y"]}
    answer = await front("/v1/completions", {**asked, "top_p": 0.9})
    assert answer.headers["x-penstock-ignored"] == "top_p"
    inputs = model.requests[0].inputs
    assert {name: inputs[name].array.tolist() for name in (*fields, "stop_words")} == {
        "max_tokens": [5],
        "temperature": [0.5],
        "seed": [7],
        "stop_words": [b"x", b"y"],
    }
    await front("/v1/completions", {**asked, "max_tokens": -1, "seed": -1})
    assert not model.requests[-1].inputs.keys() & {"max_tokens", "seed"}
    for field, value in {"max_tokens": 2**40, "seed": -2, "temperature": 1e300}.items():
        refused = await front("/v1/completions", {**asked, field: value})
        assert (refused.status, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", 2), ("best_of", 2), ("logprobs", 1), ("suffix", "x"), ("logit_bias", {"1": 5}), ("seed", 0)),
        *(("min_tokens", 2), ("stop_token_ids", [1]), ("guided_choice", ["a"]), ("cache_salt", "s")),
        *(("response_format", {"type": "json_object"}), ("prompt", [1, 2]), ("prompt", ["a", "b"]), ("stop", [""])),
    ],
)
async def test_what_would_change_the_answer_is_refused(field: str, value: object) -> None:
    model = echo()
    refused = await Front(model)("/v1/completions", {"model": "m", "prompt": "a", field: value})
    assert (refused.status, refused.json()["error"]["param"]) == (400, field)
    assert model.requests == []


async def test_tools_are_refused_unless_none_may_be_called() -> None:
    front = Front(echo())
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    refused = await front("/v1/chat/completions", {"model": "m", **CHAT, **tools})
    assert refused.status == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    allowed = await front("/v1/chat/completions", {"model": "m", **CHAT, **tools, "tool_choice": "none"})
    assert allowed.status == 200


async def test_hints_never_refuse() -> None:
    hints = {"reasoning_effort": "high", "user": "u", "service_tier": "auto", "metadata": {"a": "b"}}
    answer = await Front(echo())("/v1/chat/completions", {"model": "m", **CHAT, **hints})
    assert answer.status == 200
    assert answer.headers["x-penstock-ignored"] == "reasoning_effort"
    assert answer.json()["metadata"] == {"a": "b"}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_hold_whatever_the_model_does(stream: bool) -> None:
    model = streaming(*words("to be |or n|ot"))
    answer = await Front(model)("/v1/completions", {"model": "m", "prompt": "a", "stop": "r no", "stream": stream})
    text = streamed(answer) if stream else answer.json()["choices"][0]["text"]
    assert text == "to be o"
    last = chunks(answer)[-1] if stream else answer.json()
    assert last["choices"][0]["stop_reason"] == "r no"
    assert model.streams[0].closed.is_set()


async def test_echo_puts_the_prompt_first() -> None:
    answer = await Front(streaming(*words("c d")))("/v1/completions", {"model": "m", "prompt": "a b ", "echo": True})
    assert answer.json()["choices"][0]["text"] == "a b c d"


async def test_the_model_s_finish_reason() -> None:
    reason = Tensor("finish_reason", "BYTES", np.array([b"length"], np.object_))
    answer = await Front(streaming(*words("a", reason)))("/v1/completions", {"model": "m", "prompt": "x"})
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_chat_template_in_the_model_s_folder(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/chat_template.jinja").write_text(
        "{{bos_token}}{% for m in messages %}[{{m.role}}]{{m.content}}{% endfor %}"
    )
    (tmp_path / "1/tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    model = echo(folder=tmp_path)
    await Front(model)("/v1/chat/completions", {"model": "m", **CHAT})
    assert prompt_of(model.requests[0]) == "<s>[user]to be or not"
    (tmp_path / "1/chat_template.jinja").write_text("{% if")
    broken = await Front(echo(folder=tmp_path))("/v1/chat/completions", {"model": "m", **CHAT})
    assert broken.status == 500
    assert "chat template of the model `m` cannot be used" in broken.json()["error"]["message"]


async def test_without_a_template_several_messages_have_their_roles() -> None:
    model = echo()
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    await Front(model)("/v1/chat/completions", {"model": "m", "messages": messages})
    assert prompt_of(model.requests[0]) == "system: be kind\nuser: hi\nassistant:"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_model(stream: bool) -> None:
    bad = InferResponse(None, error=InvalidRequestError("not so"), final=True)
    front = Front(streaming(bad))
    answer = await front("/v1/completions", {"model": "m", "prompt": "x", "stream": stream})
    assert (answer.status, answer.json()["error"]["message"]) == (400, "not so")
    front = Front(streaming(InferResponse([texts("a")], final=False), bad))
    answer = await front("/v1/completions", {"model": "m", "prompt": "x", "stream": stream})
    assert answer.status == (200 if stream else 400)
    assert b"not so" in b"".join(answer.bodies)
    two = await Front(streaming(InferResponse([texts("a", "b")])))("/v1/completions", {"model": "m", "prompt": "x"})
    assert two.status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_character_may_be_cut_by_the_end_of_a_response(stream: bool) -> None:
    halves = [Tensor("text_output", "BYTES", np.array([half], np.object_)) for half in (b"caf\xc3", b"\xa9 \xe2")]
    front = Front(streaming(*(InferResponse([half], final=False) for half in halves), InferResponse(None)))
    answer = await front("/v1/completions", {"model": "m", "prompt": "x", "stream": stream})
    assert (streamed(answer) if stream else answer.json()["choices"][0]["text"]) == "café \ufffd"


async def test_outputs_of_other_datatypes_than_a_text_and_numbers_have() -> None:
    front = Front(streaming(InferResponse([number("text_output", 5)])))
    answer = await front("/v1/chat/completions", {"model": "m", **CHAT})
    assert (answer.status, answer.json()["error"]["code"]) == (500, "engine_error")
    assert "UINT32 instead of BYTES" in answer.json()["error"]["message"]
    words_for_numbers = [Tensor(name, "BYTES", np.array([b"many"], np.object_)) for name in COUNTS]
    front = Front(streaming(*words("to be", *words_for_numbers, number("finish_reason", 1))))
    body = (await front("/v1/chat/completions", {"model": "m", **CHAT})).json()
    assert (body["usage"], body["choices"][0]["finish_reason"]) == (None, "stop")


async def test_a_slow_model_gets_comments_into_its_stream() -> None:
    gate = asyncio.Event()
    front = Front(streaming(gate, *words("a")), heartbeat_s=0.01)
    asked = AsgiCall(front.app, "/v1/completions", {"model": "m", "prompt": "x", "stream": True})
    running = asyncio.create_task(asked.run())
    while not any(b": keep-alive" in body for body in asked.bodies):
        asked.sent.clear()
        await asked.sent.wait()
    gate.set()
    assert streamed(await running) == "a"


async def test_a_client_that_leaves_ends_the_request() -> None:
    model = streaming(InferResponse([texts("a")], final=False), asyncio.Event())
    asked = AsgiCall(Front(model).app, "/v1/completions", {"model": "m", "prompt": "x", "stream": True})
    running = asyncio.create_task(asked.run())
    while not any(b'"a"' in body for body in asked.bodies):
        asked.sent.clear()
        await asked.sent.wait()
    asked.disconnect()
    await asyncio.gather(running, return_exceptions=True)
    assert model.streams[0].closed.is_set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 5, **CHAT}),
        ("/v1/responses", {"input": "to be or not"}),
        ("/api/chat", {"stream": False, **CHAT}),
    ],
)
async def test_other_apis_ask_them_as_well(path: str, body: dict[str, Any]) -> None:
    model = streaming(*words("to |be"))
    answer = await Front(model)(path, {"model": "m", **body})
    assert answer.status == 200
    assert "to be" in b"".join(answer.bodies).decode()
    assert prompt_of(model.requests[0]) == "to be or not"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "to be"}),
        ("/tokenize", CHAT),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/responses/input_tokens", {"input": "to be"}),
        ("/v1/embeddings", {"input": "to be"}),
        ("/api/embed", {"input": "to be"}),
        ("/v1/rerank", {"query": "to be", "documents": ["or not"]}),
        ("/v1/score", {"text_1": "to be", "text_2": "or not"}),
        ("/pooling", {"input": "to be"}),
        ("/tokenizer_info?model=m", None),
    ],
)
async def test_what_needs_tokens_or_vectors_is_refused_by_name(path: str, body: dict[str, Any] | None) -> None:
    answer = await Front(echo())(path, None if body is None else {"model": "m", **body})
    assert answer.status == 400
    assert "The model `m`" in answer.bodies[-1].decode()


async def test_ollama_s_clients_see_them(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.py").write_bytes(bytes(100))
    front = Front(echo(folder=tmp_path))
    front.dataplane.models.remove(front.dataplane.models.own_language("tiny").model)
    for path in ("/api/tags", "/api/ps"):
        [entry] = (await front(path)).json()["models"]
        assert (entry["name"], entry["size"]) == ("m", 100)
    shown = (await front("/api/show", {"model": "m:latest"})).json()
    assert shown["capabilities"] == ["completion"]
    front.store.by_name["m"] = {}
    front.look()
    assert (await front("/api/show", {"model": "m"})).status == 404
    assert (await front("/tokenize", {"model": "m", "prompt": "x"})).status == 404


async def test_load_and_unload() -> None:
    front = Front(echo())
    front.store.by_name["new"] = {}

    async def load(name: str, **_: Any) -> None:
        model = echo()
        model.name = name
        front.store.by_name[name] = {1: model}
        front.look()

    front.store.load = load  # type: ignore[method-assign]
    loaded = await front("/v1/models/new/load", {})
    assert (loaded.status, loaded.json()["id"], loaded.json()["object"]) == (200, "new", "model")
    again = await front("/v1/models/new/load", {})
    assert (again.status, again.json()["error"]["param"]) == (400, "model")
    unloaded = await front("/v1/models/new/unload", {})
    assert unloaded.json() == {"status": "success", "model": "new"}
    assert front.store.unloads == [("new", False)]
    assert (await front("/v1/models/nowhere/unload", {})).status == 404


@pytest.mark.parametrize(("error", "status"), [(NotExplicitError(), 400), (EngineError("broken"), 500)])
async def test_a_load_that_cannot_be(error: Any, status: int) -> None:
    front = Front()
    front.store.load_error = error
    answer = await front("/v1/models/new/load", {})
    assert answer.status == status
    assert "explicit" in answer.json()["error"]["message"] or status == 500
