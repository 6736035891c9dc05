"""GET /: the server's name and version, where its documentation is, and its routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

import msgspec

from penstock.gateway.front.access import PROBE, SEE_METADATA
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.routes import SERVER, Route
from penstock.gateway.http.settings import AppSettings

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
        lines = [title, "", *(f"{name}: {', '.join(each)}" for name, each in sections.items()), "documentation: "]
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
