"""/openapi.json: that all routes are in it and no others, and that endpoints read the fields that it shows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.gateway.server.ports.http_apps import App, build_app
from penstock.gateway.transports.http.routes import Match
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import call
from protocol.fake_dataplane import FakeDataPlane
from support.kserve import FakeModelStore, add_sub
from support.kserve_http import kserve_app, kserve_context

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HI},
}
WRONG: list[Any] = [[[[]]], 1.5, "\u2205", {"\u2205": [[]]}]
"""Of these, no field takes all; the first that its schema does not allow is sent."""
TYPES = {list: "array", float: "number", str: "string", dict: "object"}


def app_of() -> App:
    made = kserve_app(kserve_context(FakeModelStore(add_sub())))
    assert isinstance(made, App)
    return made


async def described(app: App) -> dict[str, Any]:
    answer = await call(app, "/openapi.json", method="GET")
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


def operations(description: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, verbs in description["paths"].items() for method in verbs}


async def test_every_route_is_there() -> None:
    app = app_of()
    shown = operations(await described(app))
    assert shown == {(route.method, route.name) for route in app.routes.all if route.is_shown}
    for method, path in shown:
        named = path.replace("{version}", "1").replace("{", "").replace("}", "")
        found = app.routes.find({"path": named, "method": method, "headers": []})
        assert isinstance(found, Match), path
        assert found.route.name == path


async def test_without_kserve_its_paths_are_not_there() -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    assert isinstance(app, App)
    assert not [path for path in (await described(app))["paths"] if path.startswith("/v2/models")]


async def test_references_lead_somewhere_and_names_are_parameters() -> None:
    description = await described(app_of())
    for name in set(re.findall(r'"#/components/schemas/(.*?)"', str(description).replace("'", '"'))):
        assert name in description["components"]["schemas"]
    for path, verbs in description["paths"].items():
        for operation in verbs.values():
            names = [each["name"] for each in operation.get("parameters", []) if each["in"] == "path"]
            assert names == re.findall(r"{(\w+)}", path)


def body_of(description: dict[str, Any], path: str) -> dict[str, Any]:
    content = description["paths"][path]["post"]["requestBody"]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]
    return found


def types_of(field: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """Of the values that a field takes; empty: any."""
    if "$ref" in field:
        field = schemas[field["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in field:
        return {kind for each in field["anyOf"] for kind in types_of(each, schemas)}
    if "enum" in field:
        return {"a word"}
    return {field["type"]} if "type" in field else set()


@pytest.mark.parametrize("path", BODIES)
async def test_the_fields_of_a_body_are_read_and_taken(path: str) -> None:
    app = app_of()
    description = await described(app)
    body, schemas = body_of(description, path), description["components"]["schemas"]
    assert set(body["required"]) == set(BODIES[path])
    for name, field in body["properties"].items():
        types = types_of(field, schemas)
        wrong = next((value for value in WRONG if types and TYPES[type(value)] not in types), None)
        if wrong is not None:
            answer = await call(app, path, {**BODIES[path], name: wrong})
            assert answer.status == 400, name
            assert name in answer.json()["error"]["message"]
            assert answer.json()["error"].get("code") != "unsupported_parameter", name
        if name not in body["required"]:
            answer = await call(app, path, {**BODIES[path], name: None})
            assert answer.status == 200, (name, answer.bodies)


async def test_what_is_read_of_queries() -> None:
    """Whatever shows pages says so."""
    app = app_of()
    said = {}
    for path, verbs in (await described(app))["paths"].items():
        query = [each["name"] for each in verbs.get("get", {}).get("parameters", []) if each["in"] == "query"]
        if path.startswith("/v1/") and query:
            said[path] = query
    assert {path for path, query in said.items() if query[:3] == ["limit", "order", "after"]} == {
        *("/v1/chat/completions", "/v1/chat/completions/{completion_id}/messages"),
        *("/v1/responses/{response_id}/input_items", "/v1/conversations/{conversation_id}/items"),
        *("/v1/files", "/v1/batches"),
    }
    for name in [*said["/v1/chat/completions"][:3], "metadata"]:
        answer = await call(app, f"/v1/chat/completions?{name}=0", method="GET")
        assert (answer.status, answer.json()["error"]["param"]) == (400, name)


async def test_a_file_comes_as_a_form() -> None:
    content = (await described(app_of()))["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert set(content["multipart/form-data"]["schema"]["properties"]) >= {"file", "purpose"}


async def test_refused_fields_are_not_shown() -> None:
    description = await described(app_of())
    assert "n" in body_of(description, "/v1/chat/completions")["properties"]
    for path, name in (
        ("/v1/responses", "n"),
        ("/v1/responses", "response_format"),
        ("/v1/completions", "tools"),
    ):
        assert name not in body_of(description, path)["properties"]
