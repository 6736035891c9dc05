"""GET /openapi.json: the public port's routes, and the fields that their readers read.

Paths come from the tables that find routes, fields from the structs that bodies are decoded into, without those that an
endpoint refuses. What is read of a query or a form stands at the endpoint, as `query` and `form`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.ports.routes import GuardedRoute

_NAME = re.compile(r"{(\w+)}")
_REF = "#/components/schemas/{name}"
_TEXT: Mapping[str, Any] = {"schema": {"type": "string"}}
_INTEGER: Mapping[str, Any] = {"schema": {"type": "integer"}}
_QUERY: Mapping[str, Mapping[str, Any]] = {
    "include": {"schema": {"type": "array", "items": {"type": "string"}}},
    **dict.fromkeys(("level", "limit", "starting_after"), _INTEGER),
    "metadata": {"style": "deepObject", "schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    "order": {"schema": {"enum": ["asc", "desc"]}},
    "stream": {"schema": {"type": "boolean"}},
}
"""Parameters that are no plain texts."""
_ANSWERS = {"200": {"description": "The answer"}, "default": {"description": "An error, in the form of this API"}}


class OpenApi:
    """Made when it is asked for first: by then all routes are there."""

    def __init__(
        self, settings: AppSettings, routes: Sequence[GuardedRoute], kserve_paths: Mapping[str, list[str]]
    ) -> None:
        self._version = settings.version
        self._routes = routes
        self._kserve_paths = kserve_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, self._json)

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(description(self._version, self._routes, self._kserve_paths))


def description(version: str, routes: Sequence[GuardedRoute], kserve_paths: Mapping[str, list[str]]) -> dict[str, Any]:
    """As OpenAPI 3.1 has it."""
    kinds = list(dict.fromkeys(kind for route in routes if (kind := _schema_of(route)) is not None))
    of_bodies, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = {kind: schemas.pop(body["$ref"].rsplit("/", 1)[1]) for kind, body in zip(kinds, of_bodies, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        kind = _schema_of(route)
        body = None if kind is None else _accepted(bodies[kind], _refused_by(route))
        operation = _operation(route.name_in_records, body, getattr(route.app, "query", ()))
        if (form := getattr(route.app, "form", None)) is not None:
            operation["requestBody"] = _required("multipart/form-data", form)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.name_in_records, {})[method.lower()] = operation
    for path, methods in kserve_paths.items():
        for method in methods:
            paths.setdefault(path, {})[method.lower()] = _operation(path, None)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{name: []} for name in keys] + [{}],
    }


def _operation(path: str, body: dict[str, Any] | None, query: Sequence[str] = ()) -> dict[str, Any]:
    names = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _NAME.findall(path)
    ]
    names += [{"name": name, "in": "query", **_QUERY.get(name, _TEXT)} for name in query]
    operation: dict[str, Any] = {"responses": _ANSWERS}
    if names:
        operation["parameters"] = names
    if body is not None:
        operation["requestBody"] = _required("application/json", body)
    return operation


def _required(content_type: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {content_type: {"schema": schema}}}


def _accepted(body: Mapping[str, Any], refused: Mapping[str, Any]) -> dict[str, Any]:
    """The body's schema without the fields that this endpoint refuses."""
    properties = {name: field for name, field in body["properties"].items() if name not in refused}
    return {**body, "properties": properties}


def _schema_of(route: GuardedRoute) -> type[Any] | None:
    """None: its endpoint reads no JSON."""
    return getattr(route.app, "schema", None)


def _refused_by(route: GuardedRoute) -> Mapping[str, tuple[str, ...]]:
    return getattr(route.app, "unsupported", {})
