"""Routes: one table of what a port answers, who may ask for it, and how each API says its errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from starlette.types import Scope

from penstock.gateway.errors import HttpError
from penstock.gateway.requests.access import Access
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm
from penstock.gateway.transports.http.exchange import Exchange

Handle = Callable[[Exchange], Awaitable[None]]
"""Answers the exchange, whose caller is let in. Raises what the route's form of errors says, and ClientGone."""

_MAX_SHOWN = 128
_MOST_KNOWN = 1000
_LONG_PATH = 300
"""Characters. Clients make paths up: what is kept of them is bounded."""
_NAME = re.compile(r"{(\w+)(?::(path|int))?}")
_KINDS = {None: "[^/]+", "path": ".*", "int": "[0-9]+"}
_SLASH = "\ud800"
"""Stands for an encoded slash, which does not part a name. No decoded text has it."""


@dataclass(frozen=True, slots=True)
class Api:
    """What the routes of an API share."""

    name: str
    """As `GET /` says it."""
    errors: ErrorForm = OPENAI_ERRORS
    prefix: str = ""
    """All paths below it are of this API, if only to say that there is nothing."""
    as_triton: bool = False
    """No HEAD beside GET, no path with a slash at its end, and Triton's words for what there is not."""

    def has(self, path: str) -> bool:
        return bool(self.prefix) and (path == self.prefix or path.startswith(self.prefix + "/"))


OPENAI = Api("openai")
SERVER = Api("server")
"""What belongs to no API; its errors look like OpenAI's."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    method: str
    path: str
    """{name} stands for a segment, {name:int} for one of digits, {name:path} for any number of them."""
    access: Access
    handle: Handle
    api: Api = OPENAI
    header: bytes = b""
    """Only requests with this header are for the route; it stands before the one for all others."""
    schema: type[Any] | None = None
    """The struct that a JSON body is decoded into."""
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields of the schema that this route refuses, each with the values that ask for nothing."""
    query: Sequence[str] = ()
    """Names that are read of the query."""
    form: Mapping[str, Any] | None = None
    """The JSON schema of a multipart form."""
    is_shown: bool = True
    """In /openapi.json."""
    name: str = field(init=False)
    """The path with {names} alone, for records and people."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _NAME.sub(r"{\1}", self.path))

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" and not self.api.as_triton else (self.method,)


@dataclass(frozen=True, slots=True)
class Match:
    """The route of a request."""

    route: Route
    names: Mapping[str, str]
    """What the path has in place of the route's {names}, percent-decoded once, each for itself."""

    @property
    def api(self) -> Api:
        return self.route.api


@dataclass(frozen=True, slots=True)
class NoRoute:
    """What a request without a route gets."""

    api: Api
    error: HttpError


class Routes:
    """All routes of a port, found by look-ups first. What is compared is `scope["path"]`, which no Host header can
    bend."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        plain = [route for route in routes if not route.header]
        self._areas = tuple(dict.fromkeys(route.api for route in routes if route.api.prefix))
        self._fixed = {(method, route.path): Match(route, {}) for route in plain for method in route.methods}
        self._named = [(_pattern(route.path), route) for route in plain if "{" in route.path]
        self._with_header: dict[str, list[Route]] = {}
        """By their paths."""
        for route in routes:
            if route.header:
                self._with_header.setdefault(route.path, []).append(route)
        self._known: dict[tuple[str, str], Match] = {}
        """Those of `_named`, by methods and paths that were asked for."""

    def find(self, scope: Scope) -> Match | NoRoute:
        key = (scope["method"], scope["path"])
        match = self._fixed.get(key) or self._match(scope, key)
        if match is None:
            return self._none(scope)
        if match.route.path in self._with_header:
            chosen = self._chosen(match.route.path, scope)
            return next((replace(match, route=route) for route in chosen if key[0] in route.methods), match)
        return match

    def methods(self, scope: Scope) -> list[str]:
        """Of a path; none: there is no such path."""
        return self._methods(scope["path"], _decoded(scope))

    def drop_trailing_slash(self, scope: Scope) -> None:
        """`/v1/models/` is `/v1/models` for everything that looks at the path from here on, the check of keys
        included."""
        path = scope["path"]
        if len(path) > 1 and path.endswith("/") and not self._api(path).as_triton:
            scope["path"] = path[:-1]
            scope["raw_path"] = (scope.get("raw_path") or b"").removesuffix(b"/")

    def _match(self, scope: Scope, key: tuple[str, str]) -> Match | None:
        """The route with names in its path."""
        encoded = b"%" in (scope.get("raw_path") or b"")
        known = None if encoded else self._known.get(key)
        if known is not None:
            return known
        method, path = key
        text = _decoded(scope)
        for pattern, route in self._named:
            parts = pattern.fullmatch(text) if method in route.methods else None
            if parts is None:
                continue
            match = Match(route, {name: value.replace(_SLASH, "/") for name, value in parts.groupdict().items()})
            if not encoded and len(path) < _LONG_PATH:
                if len(self._known) == _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = match
            return match
        return None

    def _chosen(self, path: str, scope: Scope) -> list[Route]:
        """The routes of this path, as a route has it, that a header of the request chooses."""
        names = {name for name, _ in scope["headers"]}
        return [route for route in self._with_header.get(path, ()) if route.header in names]

    def _api(self, path: str) -> Api:
        """Of a path that no route has."""
        return next((api for api in self._areas if api.has(path)), OPENAI)

    def _routes(self, path: str, decoded: str) -> list[Route]:
        """Of this path, whatever their methods."""
        named = [route for pattern, route in self._named if pattern.fullmatch(decoded)]
        return [route for route in self.all if route.path == path and not route.header] + named

    def _methods(self, path: str, decoded: str) -> list[str]:
        return sorted({method for route in self._routes(path, decoded) for method in route.methods})

    def _none(self, scope: Scope) -> NoRoute:
        """404 or 405."""
        method, path, decoded = scope["method"], scope["path"], _decoded(scope)
        routes = self._routes(path, decoded)
        if not routes:
            api = self._api(path)
            message = "Not Found" if api.as_triton else self._nothing(method, path)
            return NoRoute(api, HttpError(404, message, code="route_not_found"))
        api = next((candidate.api for route in routes for candidate in self._chosen(route.path, scope)), routes[0].api)
        allowed = ", ".join(self._methods(path, decoded))
        message = f"{path[:_MAX_SHOWN]} does not allow {method}, only {allowed}."
        if api.as_triton:
            message = "Method Not Allowed"
        headers = ((b"allow", allowed.encode()),)
        return NoRoute(api, HttpError(405, message, code="method_not_allowed", headers=headers))

    def _nothing(self, method: str, path: str) -> str:
        meant = next(
            (
                candidate
                for candidate in ("/v1" + path, path.removeprefix("/v1"))
                if self._methods(candidate, candidate)
            ),
            None,
        )
        hint = f" Did you mean {meant[:_MAX_SHOWN]}?" if meant else ""
        return f"No such route: {method} {path[:_MAX_SHOWN]}.{hint}"


def _pattern(path: str) -> re.Pattern[str]:
    parts = _NAME.split(path)  # a text, and then a name, its kind, and a text, any number of times
    pattern = re.escape(parts[0])
    for name, kind, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        pattern += f"(?P<{name}>{_KINDS[kind]}){re.escape(text)}"
    return re.compile(pattern, re.DOTALL)


def _decoded(scope: Scope) -> str:
    """The path in which an encoded slash is `_SLASH`."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%" not in raw:
        return str(scope["path"])
    return "/".join([unquote(part).replace("/", _SLASH) for part in raw.decode("latin-1").split("/")])
