"""GET /: the server's name and version, where its documentation is, and its routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.front.access import PROBE, SEE_METADATA
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.ports.routes import GuardedRoute

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


def about_route(settings: AppSettings, routes: Iterable[Route], *, kserve: bool = False) -> GuardedRoute:
    """Of a port with these routes. A server with keys answers everybody, as its health does, but says no more than its
    name: neither its version nor what it has."""
    if settings.keys.needed:
        return GuardedRoute("/", About({"name": "penstock"}, {}), PROBE, methods=["GET"])
    about = {"name": "penstock", "version": settings.version, "description": _WHAT}
    return GuardedRoute("/", About(about, _sections(routes, kserve)), SEE_METADATA, methods=["GET"])


class About:
    """JSON or HTML where the client asks for it, else text."""

    def __init__(self, about: Mapping[str, str], sections: Mapping[str, list[str]]) -> None:
        self._json = msgspec.json.encode({**about, **sections, "documentation": DOCUMENTATION})
        title = " ".join(about[name] for name in ("name", "version") if name in about)
        title += f": {about['description']}" if "description" in about else ""
        lines = [title, "", *(f"{name}: {', '.join(each)}" for name, each in sections.items()), "documentation: "]
        text = "\n".join(lines)
        self._text = f"{text}{DOCUMENTATION}\n".encode()
        link = f'<a href="{DOCUMENTATION}">{DOCUMENTATION}</a>'
        head = "<!doctype html>\n<title>penstock</title>\n"
        self._html = f'{head}<pre style="white-space: pre-wrap">{escape(text)}{link}</pre>\n'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        accepted = exchange.headers.get(b"accept", b"").lower()
        if b"application/json" in accepted:
            await exchange.respond(200, self._json)
        elif b"text/html" in accepted:
            await exchange.respond(200, self._html, content_type=_HTML)
        else:
            await exchange.respond(200, self._text, content_type=_TEXT)


def _sections(routes: Iterable[Route], kserve: bool) -> dict[str, list[str]]:
    """The routes by API; an API without a route has none."""
    shown = [f"{_verb(route)} {route.path.replace(':path', '')}" for route in routes]
    anthropic = [each for each in shown if " /v1/messages" in each]
    ranking = [each for each in shown if each.endswith(("/rerank", "/score", "/classify", "/pooling"))]
    ranking += [each for each in shown if each.endswith("/embed") and " /api/" not in each]
    ollama = [each for each in shown if " /api/" in each]
    openai = [each for each in shown if " /v1/" in each and each not in (*anthropic, *ranking)]
    sections = {
        "openai": openai,
        "anthropic": anthropic,
        "ollama": ollama,
        "ranking": ranking,
        "kserve": _KSERVE if kserve else [],
        "server": [each for each in shown if each not in (*openai, *anthropic, *ollama, *ranking)],
    }
    return {name: section for name, section in sections.items() if section}


def _verb(route: Route) -> str:
    return next(method for method in sorted(route.methods or ()) if method != "HEAD")
