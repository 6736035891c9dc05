"""Paths that are nearly right: with a slash too many they are served, else the answer says what would be right."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import Scope

from penstock.gateway.errors import HttpError

_MAX_SHOWN = 128


def drop_trailing_slash(scope: Scope) -> None:
    """`/v1/models/` is `/v1/models` for everything that looks at the path from here on, the check of keys included."""
    if len(scope["path"]) > 1 and scope["path"].endswith("/"):
        scope["path"] = scope["path"][:-1]
        scope["raw_path"] = (scope.get("raw_path") or b"").removesuffix(b"/")


def no_route(scope: Scope, routes: Sequence[Route]) -> HttpError:
    """Why none of these routes is for this path and method: 404 or 405."""
    method, path = scope["method"], scope["path"]
    allowed = ", ".join(methods_of(path, routes))
    if not allowed:
        meant = next((other for other in ("/v1" + path, path.removeprefix("/v1")) if methods_of(other, routes)), None)
        hint = f" Did you mean {meant[:_MAX_SHOWN]}?" if meant else ""
        return HttpError(404, f"No such route: {method} {path[:_MAX_SHOWN]}.{hint}", code="route_not_found")
    return HttpError(
        405,
        f"{path[:_MAX_SHOWN]} does not allow {method}, only {allowed}.",
        code="method_not_allowed",
        headers=((b"allow", allowed.encode()),),
    )


def methods_of(path: str, routes: Sequence[Route]) -> list[str]:
    """Of the routes that have this path."""
    return sorted({method for route in routes if route.path_regex.match(path) for method in route.methods or ()})
