"""POST /tokenize and /detokenize, GET /tokenizer_info, and /ping."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import TextSettings, choose_parsers
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from penstock.tokenizers import ChatTemplate, Tokenizer
from protocol.asgi_client import call
from protocol.conftest import ServerThread
from protocol.fake_dataplane import FakeDataPlane
from support.dataplane import Setup
from support.keys import api_keys
from support.tokenizers import byte_level, save_folder

TEMPLATE = "{{ shout }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools }}"
HI: Any = [{"role": "user", "content": "hi"}]
BOS = 1
TOOLS = [{"type": "function", "function": {"name": "time"}}]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.setup = Setup(folder, SchedulerConfig(), 64)
        backend = byte_level()
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        self.setup.model.tokenizer = self.tokenizer = Tokenizer(save_folder(folder, backend))
        self.setup.model.chat_template = ChatTemplate(TEMPLATE, {})
        self.setup.model.parsers = choose_parsers("hermes", "none", None, self.tokenizer)
        self.server = ServerThread(self.setup.plane, AppSettings(), ConnectionLimits()).start()
        self.server.do(self.setup.engine.start())
        self.setup.model.loaded = True
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def close(self) -> None:
        self.client.close()
        self.server.do(self.setup.engine.stop())
        self.server.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    running = Rig(tmp_path_factory.mktemp("model"))
    yield running
    running.close()


@pytest.mark.parametrize("text", ["Hello, world. 你好 🙂", "<|im_start|>", ""])
def test_there_and_back(rig: Rig, text: str) -> None:
    said = rig.post("/tokenize", model="m", prompt=text, add_special_tokens=False)
    assert said["tokens"] == rig.tokenizer.encode(text, add_special_tokens=False)
    assert (said["count"], said["max_model_len"], said["token_strs"]) == (len(said["tokens"]), 256, None)
    assert rig.post("/detokenize", model="m", tokens=said["tokens"]) == {"prompt": text}


def test_special_tokens_are_added_unless_that_is_refused(rig: Rig) -> None:
    for fields in ({}, {"add_special_tokens": None}, {"add_special_tokens": True}):
        assert rig.post("/tokenize", prompt="hi", **fields)["tokens"] == [BOS, *rig.tokenizer.encode("hi", False)]


def test_tokens_as_the_vocabulary_writes_them(rig: Rig) -> None:
    said = rig.post("/tokenize", prompt="a b", add_special_tokens=False, return_token_strs=True)
    assert "".join(said["token_strs"]) == "aĠb"
    assert len(said["token_strs"]) == said["count"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user: hi\nNone"),
        ({"add_generation_prompt": False, "chat_template_kwargs": {"shout": "HEY "}}, "HEY user: hi\nNone"),
        ({"tools": TOOLS}, f"user: hi\n{TOOLS}"),
        ({"tools": TOOLS, "tool_choice": "none"}, "user: hi\nNone"),
    ],
)
def test_the_prompt_of_a_chat(rig: Rig, fields: dict[str, Any], prompt: str) -> None:
    tokens = rig.post("/tokenize", messages=HI, **fields)["tokens"]
    assert rig.post("/detokenize", tokens=tokens)["prompt"] == prompt


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": ["hi"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "hi", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": "word " * 200_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "hi", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "hi", "model": None}, 400, "model"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": [{"role": "", "content": ""}]}, 400, "messages[0].role"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "hi"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_refused(rig: Rig, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = rig.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_no_tokens_are_no_text(rig: Rig) -> None:
    assert rig.post("/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("body", [{"prompt": "hi"}, {"messages": HI}])
async def test_a_key_for_other_models(rig: Rig, body: dict[str, Any]) -> None:
    keys = ApiKeys({key_digest(b"sesame"): Principal(models=("other",))})
    app = build_app(rig.setup.plane, AppSettings(keys=keys))
    headers = {"authorization": "Bearer sesame"}
    for named in ({}, {"model": "m"}):
        assert (await call(app, "/tokenize", body | named, headers=headers)).status == 403
        assert (await call(app, "/detokenize", {"tokens": [1]} | named, headers=headers)).status == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_says_whether_requests_would_be_served(method: str) -> None:
    dataplane = FakeDataPlane()
    app = build_app(dataplane, AppSettings(keys=api_keys({"team": "sesame"})))
    assert (await call(app, "/ping", method=method)).status == 200
    dataplane.models.is_ready = False
    assert (await call(app, "/ping", method=method)).status == 503


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_these_calls_count_as_requests_of_a_model(rig: Rig, path: str) -> None:
    """In the access log, for example."""
    ended: list[str] = []
    settings = AppSettings(journal=RequestJournal([lambda context: ended.append(context.record.model)]))
    body = {"model": "alias", "tokens": [5]} | ({"prompt": "hi"} if path == "/tokenize" else {"messages": HI})
    assert (await call(build_app(rig.setup.plane, settings), path, body)).status == 200
    assert ended == ["m"]


def test_what_the_tokenizer_is(rig: Rig, tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 9, "name_or_path": "/home/x", "vocab_file": "/x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = rig.setup.model
    model.texts = TextSettings(
        folder=str(tmp_path),
        chat_template=None,
        chat_template_content_format="auto",
        special_tokens_in_content=False,
        tool_parser="none",
        reasoning_parser="none",
    )
    try:
        for path in ("/tokenizer_info", "/tokenizer_info?model=m"):
            found = rig.client.get(path).json()
            assert (found["tokenizer_class"], found["model_max_length"]) == ("LlamaTokenizer", 9)
            assert found["chat_template"] == TEMPLATE
            assert found.items() >= rig.tokenizer.special_tokens.items()
            assert not {"name_or_path", "vocab_file"} & found.keys()  # where its maker had files
    finally:
        model.texts = None
    assert rig.client.get("/tokenizer_info").json()["tokenizer_class"] is None
    assert rig.client.get("/tokenizer_info?model=other").status_code == 404
