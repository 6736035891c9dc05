"""Index, load and unload over HTTP."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import EngineError, NotReadyError
from penstock.gateway.apis.kserve import http_administration
from penstock.gateway.apis.kserve.grpc.administration import Administration
from penstock.gateway.apis.kserve.store import IndexEntry
from penstock.gateway.requests.context import ALL_ROLES, USER_ROLES, Principal, RequestContext, Role
from penstock.gateway.transports.http.exchange import Exchange
from support.endpoint import answer, kserve
from support.kserve import FakeModelStore, add_sub


class Repository:
    """The endpoints over a store."""

    def __init__(self) -> None:
        self.store = FakeModelStore(add_sub())
        self.context = kserve(self.store, max_input_bytes=4096)

    async def index(self, body: Any = b"") -> tuple[int, Any]:
        return await answer(partial(http_administration.repository_index, self.context), body)

    async def load(self, body: Any = b"", name: str = "m") -> tuple[int, Any]:
        async def endpoint(exchange: Exchange) -> None:
            await http_administration.load_model(self.context, exchange, name)

        return await answer(endpoint, body)

    async def unload(self, body: Any = b"", name: str = "m") -> tuple[int, Any]:
        async def endpoint(exchange: Exchange) -> None:
            await http_administration.unload_model(self.context, exchange, name)

        return await answer(endpoint, body)


@pytest.fixture
def repository() -> Repository:
    return Repository()


async def test_the_index_shows_what_there_is_to_say(repository: Repository) -> None:
    repository.store.entries = [
        IndexEntry("identity"),
        IndexEntry("broken", "1", "UNAVAILABLE", "no such file"),
        IndexEntry("slow", "2", "LOADING"),
    ]
    ready = [{"name": "add_sub", "version": "1", "state": "READY"}]
    everything = [
        *ready,
        {"name": "identity"},
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"},
        {"name": "slow", "version": "2", "state": "LOADING"},
    ]
    for body in (b"", b"{}", b"null", {"ready": False}):
        assert await repository.index(body) == (200, everything)
    assert await repository.index({"ready": True}) == (200, ready)


@pytest.mark.parametrize(("roles", "reason"), [(ALL_ROLES, "all of it"), (USER_ROLES, "a part")])
async def test_some_reasons_are_for_those_who_may_administer(
    repository: Repository, roles: frozenset[Role], reason: str
) -> None:
    repository.store.entries = [IndexEntry("broken", "1", "UNAVAILABLE", "all of it", "a part")]
    principal = Principal(roles=roles)

    async def endpoint(exchange: Exchange) -> None:
        exchange.context.principal = principal
        await http_administration.repository_index(repository.context, exchange)

    _, shown = await answer(endpoint)
    assert shown[1] == {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": reason}
    request, context = pb.RepositoryIndexRequest(), RequestContext(principal=principal)
    over_grpc = await Administration(repository.context).index(request, context)
    assert over_grpc.models[1].reason == reason


@pytest.mark.parametrize("body", [b"{", b"[]", {"ready": 1}, {"ready": None}, {"foo": 1}, b"[" * 250_000])
async def test_bodies_that_ask_for_no_index(repository: Repository, body: Any) -> None:
    status, said = await repository.index(body)
    assert (status, list(said)) == (400, ["error"])


async def test_a_model_is_loaded(repository: Repository) -> None:
    bodies: list[Any] = [b"", b"{}", b"null", {"parameters": {}}, {"parameters": None}]
    for body in bodies:
        assert await repository.load(body) == (200, None)
    assert repository.store.loads == [("m", None, None)] * 5


async def test_a_model_is_loaded_from_what_the_request_brings(repository: Repository) -> None:
    data = bytes(range(256))
    parameters = {"config": "{}", "file:1/model.onnx": base64.b64encode(data).decode(), "file:../x": ""}
    assert await repository.load({"parameters": parameters}) == (200, None)
    assert repository.store.loads == [("m", "{}", {"1/model.onnx": data, "../x": b""})]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"foo": "x"}, "unrecognized load parameter 'foo'"),
        ({"unload_dependents": True}, "unrecognized load parameter 'unload_dependents'"),
        ({"config": {}}, "the load parameter 'config' must be a string"),
        ({"config": 5}, "the load parameter 'config' must be a string"),
        ({"config": None}, "the load parameter 'config' must be a string"),
        ({"file:1/m": 5}, "the load parameter 'file:1/m' must be a string"),
        ({"file:1/m": "!!"}, "the load parameter 'file:1/m' is not base64"),
        ({"file:1/m": "AAA"}, "is not base64"),
        ({"file:1/m": "é"}, "is not base64"),
        ("x", "'parameters' must be an object"),
        ([], "'parameters' must be an object"),
    ],
)
async def test_bad_load_parameters(repository: Repository, parameters: Any, text: str) -> None:
    status, said = await repository.load({"parameters": parameters})
    assert status == 400
    assert text in said["error"]
    assert repository.store.loads == []


async def test_bodies_that_are_no_load_requests(repository: Repository) -> None:
    bodies: list[tuple[Any, str]] = [
        (b"{", "The request body is not valid JSON: Input data was truncated."),
        (b"[]", "The request body: expected `object`, got `array`."),
        ({"foo": 1}, "unknown field 'foo' in the request"),
        (b"\xff", "The request body is not valid UTF-8."),
    ]
    for body, error in bodies:
        assert await repository.load(body) == (400, {"error": error})
        assert await repository.unload(body) == (400, {"error": error})
    status, said = await repository.load(b" " * 5000)
    assert status == 413
    assert "4096" in said["error"]


async def test_what_the_store_says_is_passed_on(repository: Repository) -> None:
    repository.store.load_error = EngineError("failed to load 'm', failed to poll from model repository")
    assert await repository.load() == (500, {"error": "failed to load 'm', failed to poll from model repository"})
    repository.store.load_error = NotReadyError("explicit model load / unload is not allowed if polling is enabled")
    assert await repository.load() == (
        503,
        {"error": "explicit model load / unload is not allowed if polling is enabled"},
    )


async def test_a_model_is_unloaded(repository: Repository) -> None:
    assert await repository.unload() == (200, None)
    assert await repository.unload({"parameters": {"unload_dependents": True}}) == (200, None)
    assert repository.store.unloads == [("m", False), ("m", True)]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"unload_dependents": 1}, "the unload parameter 'unload_dependents' must be a boolean"),
        ({"foo": True}, "unrecognized unload parameter 'foo'"),
        ({"unload_dependents": True, "config": "{}"}, "unrecognized unload parameter 'config'"),
    ]
    for parameters, error in wrong:
        assert await repository.unload({"parameters": parameters}) == (400, {"error": error})
    assert len(repository.store.unloads) == 2
