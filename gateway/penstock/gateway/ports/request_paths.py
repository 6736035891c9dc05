"""Paths that are nearly right: with a slash too many they are served, else the answer says what would be right."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from penstock.gateway.errors import HttpError

_MAX_SHOWN = 128


def drop_trailing_slash(scope: Scope) -> None:
    """`/v1/models/` is `/v1/models` for everything that looks at the path from here on, the check of keys included."""
    if len(scope["path"]) > 1 and scope["path"].endswith("/"):
        scope["path"] = scope["path"][:-1]
        scope["raw_path"] = (scope.get("raw_path") or b"").removesuffix(b"/")


def route_error(error: HTTPException, scope: Scope, routes: Sequence[BaseRoute]) -> HttpError:
    """What is said instead of starlette's 404 and 405."""
    method, path = scope["method"], scope["path"]
    if error.status_code == 404:
        meant = next((other for other in ("/v1" + path, path.removeprefix("/v1")) if _methods(other, routes)), None)
        hint = f" Did you mean {meant[:_MAX_SHOWN]}?" if meant else ""
        return HttpError(404, f"No such route: {method} {path[:_MAX_SHOWN]}.{hint}", code="route_not_found")
    allowed = ", ".join(_methods(path, routes))
    return HttpError(
        error.status_code,
        f"{path[:_MAX_SHOWN]} does not allow {method}, only {allowed}.",
        code="method_not_allowed",
        headers=((b"allow", allowed.encode()),),
    )


def _methods(path: str, routes: Sequence[BaseRoute]) -> list[str]:
    """Of the routes that have this path."""
    found = [route for route in routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in found for method in route.methods or ()})
