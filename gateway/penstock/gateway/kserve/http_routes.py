"""What answers below /v2: the routes, found with look-ups, and their errors in Triton's shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from urllib.parse import unquote

from starlette.types import Scope

from penstock.engines.errors import PenstockError
from penstock.gateway.errors import HttpError, drop_traceback, error_headers
from penstock.gateway.front.access import Access
from penstock.gateway.front.call import ClientGone
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.errors import kserve_error_body, kserve_status
from penstock.gateway.kserve.http_endpoints import (
    ELSEWHERE,
    Endpoint,
    Verbs,
    fixed_routes,
    model_routes,
    region_routes,
    repository_routes,
)

logger = logging.getLogger(__name__)

Matched = tuple[Verbs | None, tuple[str, ...], str]
"""The verbs of a path, None where there is no such path; the names in it; and the path as the table has it."""
_NOTHING: Matched = (None, (), "")
_MOST_KNOWN = 1000
_LONG_PATH = 300
"""Characters. Clients make paths up: what is kept of them is bounded."""
_NOT_OF_VERSIONS = ("trace", "setting")
"""Of a model as a whole."""


@dataclass(frozen=True, slots=True)
class EndpointMatch:
    """What a request asks for."""

    endpoint: Endpoint
    names: tuple[str, ...]
    route: str
    """The path with {names} for what varies."""

    @property
    def access(self) -> Access:
        return self.endpoint.access


class KServeApp:
    """Answers everything below /v2, with errors in Triton's shape.

    Names in paths are percent-decoded once, each for itself, so that an encoded slash does not part a name.
    """

    def __init__(self, context: KServe) -> None:
        self._fixed = fixed_routes(context)
        self._of_model = model_routes(context)
        self._of_repository = repository_routes(context)
        self._of_region = {kind: region_routes(context, kind) for kind in ("system", "cuda")}
        self._known: dict[tuple[str, str], EndpointMatch] = {}
        """By method and path, of paths that are written as they are meant."""

    @staticmethod
    def handles(path: str) -> bool:
        return path.startswith("/v2") and (len(path) == 3 or path[3] == "/")

    async def answer(self, exchange: Exchange, match: EndpointMatch | HttpError) -> None:
        """What `find` has found; the caller is let in."""
        try:
            if isinstance(match, HttpError):
                raise match
            await match.endpoint.answer(exchange, *match.names)
        except ClientGone:
            pass
        except Exception as error:
            await self.fail(exchange, error)

    @staticmethod
    async def fail(exchange: Exchange, error: Exception) -> None:
        """Answers with the error, if no answer has begun; what is not in the tree of errors is logged."""
        exchange.context.record.failed(error)
        if not isinstance(error, PenstockError):
            logger.error("Unexpected error", exc_info=error)
        if not exchange.started:
            await exchange.respond(kserve_status(error), kserve_error_body(error), headers=error_headers(error))
        drop_traceback(error)

    def find(self, scope: Scope) -> EndpointMatch | HttpError:
        """The endpoint for a path and method; or what to answer."""
        asked = (scope["method"], scope["path"])
        encoded = b"%" in (scope.get("raw_path") or b"")
        match = None if encoded else self._known.get(asked)
        return match if match is not None else self._looked_up(scope, asked, encoded)

    def _looked_up(self, scope: Scope, asked: tuple[str, str], encoded: bool) -> EndpointMatch | HttpError:
        method, path = asked
        verbs, names, route = self._match(scope, encoded=encoded)
        if verbs is None:
            return HttpError(404, "Not Found", code="route_not_found")
        endpoint = verbs.get(method)
        if endpoint is None:
            return _method_not_allowed(verbs)
        match = EndpointMatch(endpoint, names, route)
        if not encoded and len(path) < _LONG_PATH:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[asked] = match
        return match

    def methods(self, scope: Scope) -> list[str]:
        """Of a path; none: there is no such path."""
        verbs, _, _ = self._match(scope, encoded=b"%" in (scope.get("raw_path") or b""))
        return list(verbs or ())

    def endpoints(self) -> Iterator[Endpoint]:
        """Every one there is."""
        for verbs in chain(
            self._fixed.values(), self._of_model.values(), self._of_repository.values(), ELSEWHERE.values()
        ):
            yield from verbs.values()
        for region in self._of_region.values():
            for verbs in region.values():
                yield from verbs.values()

    def paths(self) -> dict[str, list[str]]:
        """The methods of every path there is; {names} stand for what varies."""
        methods = {path: list(verbs) for path, verbs in self._fixed.items()}
        for rest, verbs in self._of_model.items():
            methods[_route("models/{model}", *rest)] = list(verbs)
            if rest != _NOT_OF_VERSIONS:
                methods[_route("models/{model}/versions/{version}", *rest)] = list(verbs)
        for verb, verbs in self._of_repository.items():
            methods[_route("repository/models/{model}", verb)] = list(verbs)
        for kind, region in self._of_region.items():
            for verb, verbs in region.items():
                methods[_route(f"{kind}sharedmemory", "region/{region}", verb)] = list(verbs)
        return methods

    def _match(self, scope: Scope, *, encoded: bool) -> Matched:
        path: str = scope["path"]
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, (), path
        if encoded:
            parts = [unquote(part) for part in scope["raw_path"].decode("latin-1").split("/")][2:]
        else:
            parts = path.split("/")[2:]
        return self._resolved(parts)

    def _resolved(self, parts: list[str]) -> Matched:
        """`parts` are what is behind /v2/."""
        match parts:
            case ["models", name, "versions", version, *rest] if name and version.isascii() and version.isdigit():
                verbs = self._of_model.get(tuple(rest)) if (*rest,) != _NOT_OF_VERSIONS else None
                return verbs, (name, version), _route("models/{model}/versions/{version}", *rest)
            case ["models", name, *rest] if name:
                return self._of_model.get(tuple(rest)), (name, ""), _route("models/{model}", *rest)
            case ["repository", *rest]:
                return self._resolved_repository(rest)
            case ["systemsharedmemory" | "cudasharedmemory" as kind, "region", region, verb] if region:
                verbs = self._of_region[kind.removesuffix("sharedmemory")].get(verb)
                return verbs, (region,), _route(kind, "region/{region}", verb)
        return _NOTHING

    def _resolved_repository(self, parts: list[str]) -> Matched:
        match parts:
            case ["models", name, verb] if name:
                return self._of_repository.get(verb), (name,), _route("repository/models/{model}", verb)
            case [repository, "index"] if repository:
                return ELSEWHERE["index"], (), _route("repository/{repository}/index")
            case [repository, "models", name, "load" | "unload" as verb] if repository and name:
                return ELSEWHERE[verb], (), _route("repository/{repository}/models/{model}", verb)
        return _NOTHING


def _route(*parts: str) -> str:
    return "/".join(("/v2", *parts))


def _method_not_allowed(verbs: Verbs) -> HttpError:
    allow = ", ".join(sorted(verbs)).encode()
    return HttpError(405, "Method Not Allowed", code="method_not_allowed", headers=((b"allow", allow),))
