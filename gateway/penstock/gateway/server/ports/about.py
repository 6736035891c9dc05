"""GET /: the server's name and version, where its documentation is, and its routes; and GET /openapi.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

import msgspec

from penstock.gateway.requests.access import PROBE, SEE_METADATA
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Route
from penstock.gateway.transports.http.settings import AppSettings

DOCUMENTATION = "https://github.com/penstock-server/penstock-server/tree/main/docs"
_WHAT = "OpenAI API, Anthropic API and KServe v2 for language models and Triton model repositories"
_TEXT, _HTML = b"text/plain; charset=utf-8", b"text/html; charset=utf-8"
_KSERVE = [
    "GET /v2",
    "GET /v2/models/{name}",
    "POST /v2/models/{name}/infer",
    "POST /v2/models/{name}/generate",
    "POST /v2/models/{name}/generate_stream",
    "POST /v2/repository/index",
]


def about_route(settings: AppSettings, routes: Iterable[Route]) -> Route:
    """Of a port with these routes. A server with keys answers everybody, as its health does, but says no more than its
    name: neither its version nor what it has."""
    if settings.keys.needed:
        return Route("GET", "/", PROBE, About({"name": "penstock"}, {}).show, SERVER)
    about = {"name": "penstock", "version": settings.version, "description": _WHAT}
    return Route("GET", "/", SEE_METADATA, About(about, _sections(routes)).show, SERVER)


class About:
    """JSON or HTML where the client asks for it, else text."""

    def __init__(self, about: Mapping[str, str], sections: Mapping[str, list[str]]) -> None:
        self._json = msgspec.json.encode({**about, **sections, "documentation": DOCUMENTATION})
        title = " ".join(about[name] for name in ("name", "version") if name in about)
        title += f": {about['description']}" if "description" in about else ""
        lines = [title, "", *(f"{name}: {', '.join(items)}" for name, items in sections.items()), "documentation: "]
        text = "\n".join(lines)
        self._text = f"{text}{DOCUMENTATION}\n".encode()
        link = f'<a href="{DOCUMENTATION}">{DOCUMENTATION}</a>'
        head = "<!doctype html>\n<title>penstock</title>\n"
        self._html = f'{head}<pre style="white-space: pre-wrap">{escape(text)}{link}</pre>\n'.encode()

    async def show(self, exchange: Exchange) -> None:
        accepted = exchange.headers.get(b"accept", b"").lower()
        if b"application/json" in accepted:
            await exchange.respond(200, self._json)
        elif b"text/html" in accepted:
            await exchange.respond(200, self._html, content_type=_HTML)
        else:
            await exchange.respond(200, self._text, content_type=_TEXT)


def _sections(routes: Iterable[Route]) -> dict[str, list[str]]:
    """The routes by API; an API without a route has none."""
    sections: dict[str, list[str]] = {name: [] for name in ("openai", "anthropic", "ollama", "ranking", "kserve")}
    for route in routes:
        if not route.header:
            sections.setdefault(route.api.name, []).append(f"{route.method} {route.name}")
    if sections["kserve"]:
        sections["kserve"] = _KSERVE
    return {name: section for name, section in sections.items() if section}


# GET /openapi.json: the public port's routes, and the fields that their readers read.
#
# Paths come from the table that finds routes, fields from the structs that bodies are decoded into, without those
# that a route refuses.

_NAME = re.compile(r"{(\w+)}")
_REF = "#/components/schemas/{name}"
_PLAIN: Mapping[str, Any] = {"schema": {"type": "string"}}
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
    names += [{"name": name, "in": "query", **_QUERY.get(name, _PLAIN)} for name in query]
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
