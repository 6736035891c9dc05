"""GET /: what this server is and where to go, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings

_TEXT = b"text/plain; charset=utf-8"
_KSERVE = [
    "GET /v2",
    "GET /v2/models/{name}",
    "POST /v2/models/{name}/infer",
    "POST /v2/models/{name}/generate",
    "POST /v2/models/{name}/generate_stream",
    "POST /v2/repository/index",
]


class About:
    """JSON where the client asks for it, else text."""

    def __init__(self, settings: AppSettings, routes: Iterable[Route], *, kserve: bool) -> None:
        shown = [f"{_verb(route)} {route.path.replace(':path', '')}" for route in routes]
        anthropic = [each for each in shown if " /v1/messages" in each]
        ranking = [each for each in shown if each.endswith(("/rerank", "/score", "/classify", "/pooling"))]
        ollama = [each for each in shown if " /api/" in each]
        openai = [each for each in shown if " /v1/" in each and each not in (*anthropic, *ranking)]
        sections = {
            "openai": openai,
            "anthropic": anthropic,
            "ollama": ollama,
            "ranking": ranking,
            **({"kserve": _KSERVE} if kserve else {}),
            "server": [each for each in shown if each not in (*openai, *anthropic, *ollama, *ranking)],
        }
        what = "OpenAI API, Anthropic API and KServe v2 for language models and Triton model repositories"
        documentation = "README.md and docs/ of the project; penstock serve --help"
        about = {"name": "penstock", "version": settings.version, "description": what}
        self._json = msgspec.json.encode(about | sections | {"documentation": documentation})
        lines = [f"{name}: {', '.join(each)}" for name, each in sections.items()]
        text = [f"penstock {settings.version}: {what}", "", *lines, f"documentation: {documentation}", ""]
        self._text = "\n".join(text).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        if b"application/json" in exchange.headers.get(b"accept", b"").lower():
            await exchange.respond(200, self._json)
        else:
            await exchange.respond(200, self._text, content_type=_TEXT)


def _verb(route: Route) -> str:
    return next(method for method in sorted(route.methods or ()) if method != "HEAD")
