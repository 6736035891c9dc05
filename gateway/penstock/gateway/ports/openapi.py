"""GET /openapi.json: the public port's routes, and the fields that their readers read.

Paths come from the table that finds routes, fields from the structs that bodies are decoded into, without those that a
route refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.routes import Route
from penstock.gateway.http.settings import AppSettings

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

    def __init__(self, settings: AppSettings, routes: Sequence[Route]) -> None:
        self._version = settings.version
        self._routes = routes

    async def show(self, exchange: Exchange) -> None:
        await exchange.respond(200, self._json)

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(description(self._version, self._routes))


def description(version: str, routes: Sequence[Route]) -> dict[str, Any]:
    """As OpenAPI 3.1 has it."""
    kinds = list(dict.fromkeys(route.schema for route in routes if route.schema is not None))
    of_bodies, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = {kind: schemas.pop(body["$ref"].rsplit("/", 1)[1]) for kind, body in zip(kinds, of_bodies, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.is_shown:
            continue
        body = None if route.schema is None else _accepted(bodies[route.schema], route.refused)
        operation = _operation(route.name, body, route.query)
        if route.form is not None:
            operation["requestBody"] = _required("multipart/form-data", route.form)
        paths.setdefault(route.name, {})[route.method.lower()] = operation
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
