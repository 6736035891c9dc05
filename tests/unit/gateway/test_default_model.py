"""Requests that name no model, on every route of JSON."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import support.pooling
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.language.adapters import Adapter, AdapterSet
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import Principal
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.server.served_models import check_default_model
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane
from support.dataplane import Setup

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


def plane(*names: str) -> FakeDataPlane:
    return FakeDataPlane(models=tuple(ServedModel(name, "root", 0, INFO) for name in names))


def keys(*models: str) -> dict[str, Any]:
    return {"keys": ApiKeys({key_digest(b"key"): Principal(models=models)})}


async def ask(dataplane: FakeDataPlane, path: str, body: dict[str, Any], **settings: Any) -> AsgiCall:
    app = build_app(dataplane, AppSettings(**settings))
    return await call(app, path, body, headers={"authorization": "Bearer key"})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("unnamed", [{}, {"model": None}, {"model": ""}])
async def test_the_only_model_answers(path: str, unnamed: dict[str, Any]) -> None:
    answer = await ask(plane("tiny"), path, BODIES[path] | unnamed)
    assert answer.status == 200, answer.json()
    assert answer.json().get("model", "tiny") == "tiny"


@pytest.mark.parametrize("path", BODIES)
async def test_of_several_models_none_is_guessed(path: str) -> None:
    for names, count in ((("a", "b", "c"), "3 models"), ((), "no model")):
        answer = await ask(plane(*names), path, BODIES[path])
        assert answer.status == 400
        assert f"model. This request can use {count}" in str(answer.json()["error"])


@pytest.mark.parametrize("path", BODIES)
async def test_the_default_model_answers(path: str) -> None:
    for default, status in (("b", 200), ("absent", 400)):
        answer = await ask(plane("a", "b"), path, BODIES[path], default_model=default)
        assert answer.status == status
        if status == 200:
            assert answer.json().get("model", "b") == "b"


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_gets_the_one_that_it_may_use(path: str) -> None:
    answer = await ask(plane("a", "b"), path, BODIES[path], default_model="b", **keys("a"))
    assert answer.status == 200
    assert answer.json().get("model", "a") == "a"
    assert (await ask(plane("a", "b"), path, BODIES[path], **keys("other"))).status == 403


async def test_other_errors_of_such_a_request_stay_what_they_are() -> None:
    body = {"messages": [{"role": "user", "content": "hi", "model": 5}], "n": "x"}
    answer = await ask(plane("tiny"), "/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "n")
    for wrong in (5, [], {}, True):
        answer = await ask(plane("tiny"), "/v1/chat/completions", {"model": wrong, "messages": HI})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "model")


class Far:
    name, apis, gives_way = "far", ("chat",), False

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def answer(self, exchange: Any, api: str, body: bytes) -> bytes | None:
        self.bodies.append(body)
        await exchange.respond(200, b"{}")
        return None


async def test_models_of_other_servers_count() -> None:
    far, alone, both = Far(), plane(), plane("tiny")
    for dataplane in (alone, both):
        dataplane.models.add(cast("Any", far))
    chat = "/v1/chat/completions"
    assert (await ask(alone, chat, BODIES[chat])).status == 200
    assert b'"model":"far"' in far.bodies[0]
    refused = await ask(both, chat, BODIES[chat])
    assert refused.status == 400
    assert "model. This request can use 2 models" in refused.json()["error"]["message"]
    text = await ask(both, "/v1/completions", BODIES["/v1/completions"])
    assert text.json()["model"] == "tiny"  # the other one answers chats alone
    tokens = await ask(both, "/v1/messages/count_tokens", BODIES["/v1/messages/count_tokens"])
    assert tokens.status == 200, "the other one has none to count here"


async def test_embedding_models_have_a_default_of_their_own(tmp_path: Path) -> None:
    setup = support.pooling.Setup(tmp_path)
    for settings, status in (({}, 400), ({"default_model": "embedder"}, 200), ({"default_model": "tiny"}, 400)):
        app = build_app(setup.dataplane, AppSettings(**settings), None, setup.plane)
        answer = await call(app, "/pooling", {"input": "dog"})  # any of several models could answer
        assert (answer.status, "model" in str(answer.json())) == (status, True)
    app = build_app(setup.dataplane, AppSettings(), None, setup.plane)
    for path in ("/v1/embeddings", "/api/embed", "/embed"):
        answer = await call(app, path, {"inputs" if path == "/embed" else "input": "dog"})
        assert answer.status == 200, "the others give scores and classes"
    app = build_app(setup.dataplane, AppSettings(**keys("embedder")), None, setup.plane)
    answer = await call(app, "/v1/embeddings", {"input": "dog"}, headers={"authorization": "Bearer key"})
    assert (answer.status, answer.json()["model"]) == (200, "embedder")


def test_which_models_count(tmp_path: Path) -> None:
    model = Setup(tmp_path, SchedulerConfig(), 16).model
    model.adapters = AdapterSet([Adapter(name, name, tmp_path, 0) for name in ("x", "y")])
    models = Catalogue(
        on_demand=cast("OnDemand", SimpleNamespace(generating_models=lambda: ["later"], is_upstream="later".__eq__))
    )
    models.add(model)  # still loading
    assert models.usable(Kind.CHAT, lambda _: True) == [["later"], ["m", "alias", "x", "y"]]
    assert models.usable(Kind.TOKENS, lambda _: True) == [["m", "alias", "x", "y"]], "the other one is another server's"
    assert models.usable(Kind.CHAT, {"alias", "x"}.__contains__) == [["alias", "x"]]
    assert models.usable(Kind.CHAT, {"x", "y"}.__contains__) == [["x"], ["y"]]
    assert models.usable(Kind.CHAT, {"later"}.__contains__) == [["later"]]


@pytest.mark.parametrize(
    ("name", "repository", "is_known"),
    [(None, False, True), ("m", False, True), ("embedder", False, True), ("no", False, False), ("no", True, True)],
)
def test_a_name_that_no_model_has_is_an_error_at_the_start(
    tmp_path: Path, name: str | None, repository: bool, is_known: bool
) -> None:
    models = support.pooling.Setup(tmp_path / "pooling").plane.models
    models.add(Setup(tmp_path / "text", SchedulerConfig(), 16).model)
    with nullcontext() if is_known else pytest.raises(ConfigError, match="default-model: there is no model `no`"):
        check_default_model(name, models, has_repository=repository)


async def test_tokenize_takes_the_same_model() -> None:
    answer = await ask(plane("a", "b"), "/tokenize", {"content": "x"})
    assert "This request can use 2 models" in answer.json()["error"]["message"]
    answer = await ask(plane("a"), "/tokenize", {"content": "x"})
    assert answer.json()["error"]["message"] == "Missing required parameter: prompt or messages."
