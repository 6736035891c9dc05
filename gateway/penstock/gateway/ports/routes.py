"""Routes of the HTTP ports: none without an Access, and found by look-ups first."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from penstock.gateway.errors import HttpError
from penstock.gateway.front.access import Access
from penstock.gateway.ports.request_paths import methods_of, no_route


class GuardedRoute(Route):
    def __init__(self, path: str, endpoint: ASGIApp, access: Access, *, methods: Sequence[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.access = access
        self.name_in_records = path.replace(":path", "")


class Routes:
    """All routes of a port."""

    def __init__(self, routes: Sequence[GuardedRoute]) -> None:
        self.all = tuple(routes)
        plain = [route for route in routes if "{" not in route.path]
        self._paths = frozenset(route.path for route in plain)
        self._plain = {(route.path, method): route for route in plain for method in route.methods or ()}

    def has(self, path: str) -> bool:
        """Whether there is a route without names for this path, whatever its methods."""
        return path in self._paths

    def methods(self, path: str) -> list[str]:
        """Of the routes for this path; none: there is no such path."""
        return methods_of(path, self.all)

    def find(self, scope: Scope) -> GuardedRoute | HttpError:
        """The route for a path and method, with the names in the path put into the scope; or what to answer."""
        route = self._plain.get((scope["path"], scope["method"]))
        if route is not None:
            return route
        for each in self.all:
            match, child_scope = each.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                return each
        return no_route(scope, self.all)
