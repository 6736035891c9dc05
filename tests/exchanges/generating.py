"""Exchanges of the APIs that generate: OpenAI's, Responses, Anthropic's, Ollama's, and those beside them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from exchanges.exchange import Exchange, get, request, shown
from support.server import Server, wait_until

MODEL = {"model": "demo_model"}
GREEDY = {**MODEL, "temperature": 0}
USER = [{"role": "user", "content": "What is a list?"}]
CHAT = {**GREEDY, "messages": USER, "max_tokens": 8}
TEXT = {**GREEDY, "prompt": "A list is", "max_tokens": 8}
LOOK_UP = {"name": "look_up", "description": "Looks a word up.",
           "parameters": {"type": "object", "properties": {"word": {"enum": ["list", "dict"]}}, "required": ["word"],
                          "additionalProperties": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": LOOK_UP}]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}, "max_tokens": 60}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "list"}'}}
HISTORY = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
           {"role": "tool", "tool_call_id": "call_1", "content": "a sequence"}]  # fmt: skip


def chat(name: str, **more: Any) -> Exchange:
    return request(f"chat: {name}", "/v1/chat/completions", {**CHAT, **more})


def completion(name: str, **more: Any) -> Exchange:
    return request(f"completions: {name}", "/v1/completions", {**TEXT, **more})


CHATS = [
    chat("plain"),
    chat("streamed", stream=True),
    chat("streamed with usage", stream=True, stream_options={"include_usage": True}),
    chat("two choices", n=2),
    chat("two choices streamed", n=2, max_tokens=1, stream=True),
    chat("log probabilities", logprobs=True, top_logprobs=2, max_tokens=2),
    chat("a stop string", stop=["sequence"]),
    chat("a stop string streamed", stop=["sequence"], stream=True),
    chat("a system message", messages=[{"role": "system", "content": "Be brief."}, *USER]),
    chat("parts of text", messages=[{"role": "user", "content": [{"type": "text", "text": "What is a list?"}]}]),
    chat("a tool that must be called", **FORCED),
    chat("a tool that must be called, streamed", **FORCED, stream=True),
    chat("a history with a tool's result", messages=HISTORY, tools=TOOLS),
    chat("a schema", response_format=SCHEMA, max_tokens=40),
    chat("a schema streamed", response_format=SCHEMA, max_tokens=40, stream=True),
    chat("a grammar by regular expression", structured_outputs={"regex": "(yes|no)!"}),
    chat("a hint that is ignored", verbosity="low", reasoning_effort="high"),
    chat("a seed", temperature=1, seed=7, max_tokens=1),
    chat("a bias that forbids nothing", logit_bias={"5": -1}),
    chat("a budget above the context", max_tokens=100000, stop=["sequence"]),
    chat("no messages", messages=[]),
    chat("messages of another type", messages="hello"),
    chat("a temperature out of range", temperature=9),
    chat("an unknown model", model="nowhere"),
    chat("an unknown field", unheard_of=1),
    chat("a prompt that does not fit", messages=[{"role": "user", "content": "list " * 5000}]),
    chat("a role that the template lacks", messages=[{"role": "wizard", "content": "hello"}]),
    chat("a bad schema", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}),
    chat("a tool choice without tools", tool_choice="required"),
    request("chat: no model", "/v1/chat/completions", {key: CHAT[key] for key in CHAT if key != "model"}),
    request("chat: no JSON", "/v1/chat/completions", b"{nonsense"),
    request("chat: a list", "/v1/chat/completions", []),
    request("chat: no body", "/v1/chat/completions", b""),
    request("chat: another content type", "/v1/chat/completions", CHAT, content_type="text/plain"),
    request("chat: another method", "/v1/chat/completions", CHAT, "PUT"),
    request("chat: from a web page", "/v1/chat/completions", CHAT, origin="https://example.org"),
    request("chat: a deadline that has passed", "/v1/chat/completions", CHAT, x_request_timeout="0.000001"),
]

COMPLETIONS = [
    completion("plain"),
    completion("streamed", stream=True),
    completion("echo", echo=True),
    completion("echo with log probabilities", echo=True, logprobs=1, max_tokens=1),
    completion("two prompts", prompt=["A list is", "A dict is"]),
    completion("token ids", prompt=[5, 6, 7], max_tokens=2),
    completion("best of two", best_of=2, n=1, temperature=0),
    completion("suffix", suffix=" the end"),
    completion("no tokens", max_tokens=0, echo=True),
    completion("a prompt of another type", prompt={"a": 1}),
    completion("an empty list of prompts", prompt=[]),
    completion("a token id out of range", prompt=[10**9]),
    completion("negative max_tokens", max_tokens=-1, stop=["items"]),
    completion("resumable without leave", stream=True, resumable=True),
]

ONE_RESPONSE = {**GREEDY, "input": "What is a list?", "max_output_tokens": 8}
RESPONSES = [
    request(f"responses: {name}", "/v1/responses", {**ONE_RESPONSE, **more})
    for name, more in {
        "plain": {},
        "streamed": {"stream": True},
        "not stored": {"store": False},
        "a forced function": {"tools": [{"type": "function", **LOOK_UP}], "max_output_tokens": 60,
                              "tool_choice": {"type": "function", "name": "look_up"}},
        "a forced function streamed": {"tools": [{"type": "function", **LOOK_UP}], "stream": True,
                                       "max_output_tokens": 60, "tool_choice": {"type": "function", "name": "look_up"}},
        "a schema": {"text": {"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}},
                     "max_output_tokens": 40},
        "instructions": {"instructions": "Be brief."},
        "a list of items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
        "an unknown earlier response": {"previous_response_id": "resp_nothing"},
        "a hosted tool that nobody runs": {"tools": [{"type": "computer_use_preview"}]},
        "an item of unknown type": {"input": [*USER, {"type": "hologram"}]},
        "no input": {"input": None},
        "an unknown model": {"model": "nowhere"},
    }.items()
]  # fmt: skip

ANTHROPIC = {"anthropic_version": "2023-06-01"}
MESSAGE = {**GREEDY, "messages": USER, "max_tokens": 8}
TOOL = {"name": "look_up", "description": "Looks a word up.", "input_schema": LOOK_UP["parameters"]}
MESSAGES = [
    request(f"messages: {name}", "/v1/messages", {**MESSAGE, **more}, **ANTHROPIC)
    for name, more in {
        "plain": {},
        "streamed": {"stream": True},
        "a system text": {"system": [{"type": "text", "text": "Be brief."}]},
        "a forced tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}, "max_tokens": 60},
        "a forced tool streamed": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"},
                                   "max_tokens": 60, "stream": True},
        "a stop sequence": {"stop_sequences": ["sequence"]},
        "a prompt that does not fit": {"messages": [{"role": "user", "content": "list " * 5000}]},
        "no max_tokens": {"max_tokens": None},
        "an unknown model": {"model": "nowhere"},
        "a bad role": {"messages": [{"role": "system", "content": 3}]},
    }.items()
] + [
    request("messages: count tokens", "/v1/messages/count_tokens", {**MODEL, "messages": USER}, **ANTHROPIC),
    get("messages: models", "/v1/models", **ANTHROPIC),
]  # fmt: skip

OPTIONS = {"options": {"temperature": 0, "num_predict": 8}}
OLLAMA = [
    request("ollama: chat", "/api/chat", {**MODEL, "messages": USER, **OPTIONS, "stream": False}),
    request("ollama: chat streamed", "/api/chat", {**MODEL, "messages": USER, **OPTIONS}),
    request("ollama: generate", "/api/generate", {**MODEL, "prompt": "A list is", **OPTIONS, "stream": False}),
    request("ollama: generate streamed", "/api/generate", {**MODEL, "prompt": "A list is", "raw": True, **OPTIONS}),
    request("ollama: a schema", "/api/chat", {**MODEL, "messages": USER, "stream": False, "format": COLOUR}),
    request("ollama: an unknown model", "/api/chat", {"model": "nowhere", "messages": USER}),
    request("ollama: a bad option", "/api/chat", {**MODEL, "messages": USER, "options": {"temperature": "hot"}}),
    get("ollama: version", "/api/version"),
    get("ollama: tags", "/api/tags"),
    request("ollama: show", "/api/show", MODEL),
    request("ollama: pull of what is there", "/api/pull", MODEL),
]

OTHERS = [
    get("models", "/v1/models"),
    get("models: one", "/v1/models/demo_model"),
    get("models: an unknown one", "/v1/models/nowhere"),
    request("tokenize", "/tokenize", {**MODEL, "prompt": "A list is"}),
    request("tokenize: a chat", "/tokenize", {**MODEL, "messages": USER}),
    request("detokenize", "/detokenize", {**MODEL, "tokens": [5, 6, 7]}),
    request("embeddings: a model that generates", "/v1/embeddings", {**MODEL, "input": "hello"}),
    request("moderations", "/v1/moderations", {"input": "hello"}),
    get("an unknown path", "/v1/nothing"),
    get("batches: none", "/v1/batches"),
    get("files: an unknown one", "/v1/files/file-nothing"),
]


def leave_midway(server: Server) -> Any:
    """A client that reads one event and goes: the request ends as aborted, and all blocks come back."""
    before = finished(server)
    with server.stream("/v1/completions", {**TEXT, "max_tokens": 1500, "ignore_eos": True}) as events:
        first = next(iter(events))
    wait_until(server.is_idle)
    return {"first": list(first), "finished": ended_since(server, before)}


def conversation(server: Server) -> Any:
    """A stored response, one that continues it, and its deletion."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        first = client.post("/v1/responses", json=ONE_RESPONSE)
        place = f"/v1/responses/{first.json()['id']}"
        follow = {**ONE_RESPONSE, "input": "And a dict?", "previous_response_id": first.json()["id"]}
        answers = [
            first,
            client.get(place),
            client.get(place + "/input_items"),
            client.post("/v1/responses", json=follow),
            client.post(place + "/cancel"),
            client.delete(place),
            client.get(place),
        ]
    return [plain(answer) for answer in answers]


def batch(server: Server) -> Any:
    """A file of two lines, one of which is bad, as a batch."""
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
             for n, body in enumerate([CHAT, {**CHAT, "messages": 3}])]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}).json()
        made = client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions",
                                                "completion_window": "24h"}).json()  # fmt: skip
        place = f"/v1/batches/{made['id']}"
        wait_until(lambda: client.get(place).json()["status"] == "completed")
        done = client.get(place)
        outputs = [client.get(f"/v1/files/{done.json()[key]}/content") for key in ("output_file_id", "error_file_id")]
    return [plain(done), *(shown(answer.status_code, [], answer.content) for answer in outputs)]


def plain(answer: httpx.Response) -> Any:
    return shown(answer.status_code, [("content-type", answer.headers.get("content-type", ""))], answer.content)


def finished(server: Server) -> dict[str, float]:
    """Requests that have ended, by reason."""
    lines = httpx.get(server.operator + "/metrics").text.splitlines()
    rows = [line.split(" ") for line in lines if line.startswith("penstock_requests_finished_total{")]
    return {name: float(value) for name, value in rows}


def ended_since(server: Server, before: dict[str, float]) -> dict[str, float]:
    now = finished(server)
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


EXCHANGES = [
    *CHATS,
    *COMPLETIONS,
    *RESPONSES,
    *MESSAGES,
    *OLLAMA,
    *OTHERS,
    Exchange("completions: a client that leaves", leave_midway),
    Exchange("responses: a stored conversation", conversation),
    Exchange("batches: one line of two is bad", batch),
]
