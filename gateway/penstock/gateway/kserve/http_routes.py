"""What answers below /v2: the routes, found with look-ups, and their errors in Triton's shape."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.gateway.errors import HttpError, error_headers
from penstock.gateway.front.call import ClientGone
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.kserve import http_models, repository_http, settings_http
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.errors import kserve_error_body, kserve_status
from penstock.gateway.kserve.generate import generate
from penstock.gateway.kserve.http_infer import Infer

logger = logging.getLogger(__name__)

Endpoint = Callable[..., Awaitable[None]]
Verbs = dict[str, Endpoint]
"""Method to endpoint, which is called with the exchange and the names in the path."""
Found = tuple[Verbs, tuple[str, ...], str]
"""The verbs of a path, the names in it, and the path as the table has it."""


class KServeApp:
    """Plain ASGI for everything below /v2, its errors too. Finds its Exchange in the scope under SCOPE_KEY.

    Names in paths are percent-decoded once, each for itself, so that an encoded slash does not part a name.
    """

    def __init__(self, context: KServe) -> None:
        self._fixed = _fixed_routes(context)
        self._of_model = _model_routes(context)
        self._of_repository = _repository_routes(context)
        self._of_region = {kind: _region_routes(context, kind) for kind in ("system", "cuda")}

    @staticmethod
    def handles(path: str) -> bool:
        return path.startswith("/v2") and (len(path) == 3 or path[3] == "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        try:
            verbs, names, exchange.context.record.route = self._found(scope)
            endpoint = verbs.get(scope["method"])
            if endpoint is None:
                raise _method_not_allowed(verbs)
            await endpoint(exchange, *names)
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

    def _found(self, scope: Scope) -> Found:
        """Raises HttpError 404."""
        path: str = scope["path"]
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, (), path
        raw: bytes = scope.get("raw_path") or b""
        if b"%" in raw:
            parts = [unquote(part) for part in raw.decode("latin-1").split("/")][2:]
        else:
            parts = path.split("/")[2:]
        found = self._resolved(parts)
        if found is None:
            raise HttpError(404, "Not Found", code="route_not_found")
        return found

    def _resolved(self, parts: list[str]) -> Found | None:
        """`parts` are what is behind /v2/."""
        match parts:
            case ["models", name, "versions", version, *rest] if name and version.isascii() and version.isdigit():
                verbs = self._of_model.get(tuple(rest)) if rest != ["trace", "setting"] else None
                return (verbs, (name, version), _route("models/{model}/versions/{version}", *rest)) if verbs else None
            case ["models", name, *rest] if name:
                verbs = self._of_model.get(tuple(rest))
                return (verbs, (name, ""), _route("models/{model}", *rest)) if verbs else None
            case ["repository", *rest]:
                return self._resolved_repository(rest)
            case ["systemsharedmemory" | "cudasharedmemory" as kind, "region", region, verb] if region:
                verbs = self._of_region[kind.removesuffix("sharedmemory")].get(verb)
                return (verbs, (region,), _route(kind, "region/{region}", verb)) if verbs else None
        return None

    def _resolved_repository(self, parts: list[str]) -> Found | None:
        match parts:
            case ["models", name, verb] if name and verb in self._of_repository:
                return self._of_repository[verb], (name,), _route("repository/models/{model}", verb)
            case [repository, "index"] if repository:
                return {"POST": _no_repository_name}, (), _route("repository/{repository}/index")
            case [repository, "models", name, verb] if repository and name and verb in self._of_repository:
                return {"POST": _no_repository_name}, (), _route("repository/{repository}/models/{model}", verb)
        return None


def _route(*parts: str) -> str:
    return "/".join(("/v2", *parts))


def _fixed_routes(context: KServe) -> dict[str, Verbs]:
    def bound(endpoint: Any, **options: Any) -> Endpoint:
        return partial(endpoint, context, **options)

    routes: dict[str, Verbs] = {
        "/v2": {"GET": bound(http_models.server)},
        "/v2/health/live": {"GET": bound(http_models.live)},
        "/v2/health/ready": {"GET": bound(http_models.ready)},
        "/v2/models/stats": {"GET": bound(http_models.model_statistics)},
        "/v2/logging": _readable(context, settings_http.log_settings),
        "/v2/trace/setting": _readable(context, settings_http.trace_settings),
        "/v2/repository/index": {"POST": bound(repository_http.repository_index)},
    }
    for kind in ("system", "cuda"):
        prefix = f"/v2/{kind}sharedmemory"
        routes[f"{prefix}/status"] = {"GET": bound(settings_http.shared_memory_status, kind=kind)}
        routes[f"{prefix}/unregister"] = {"POST": bound(settings_http.unregister_shared_memory, kind=kind)}
    return routes


def _model_routes(context: KServe) -> dict[tuple[str, ...], Verbs]:
    """By what stands behind the model's name and version."""

    async def trace_setting(exchange: Exchange, name: str, version: str, *, update: bool) -> None:
        await settings_http.trace_settings(context, exchange, name, update=update)

    return {
        (): {"GET": partial(http_models.metadata, context)},
        ("infer",): {"POST": Infer(context)},
        ("generate",): {"POST": partial(generate, context, stream=False)},
        ("generate_stream",): {"POST": partial(generate, context, stream=True)},
        ("ready",): {"GET": partial(http_models.model_ready, context)},
        ("config",): {"GET": partial(http_models.config, context)},
        ("stats",): {"GET": partial(http_models.model_statistics, context)},
        ("trace", "setting"): {
            "GET": partial(trace_setting, update=False),
            "POST": partial(trace_setting, update=True),
        },
    }


def _repository_routes(context: KServe) -> dict[str, Verbs]:
    return {
        "load": {"POST": partial(repository_http.load_model, context)},
        "unload": {"POST": partial(repository_http.unload_model, context)},
    }


def _region_routes(context: KServe, kind: str) -> dict[str, Verbs]:
    async def status(exchange: Exchange, region: str) -> None:
        await settings_http.shared_memory_status(context, exchange, kind, region)

    async def register(exchange: Exchange, region: str) -> None:
        await settings_http.register_shared_memory(context, exchange, kind, region)

    async def unregister(exchange: Exchange, region: str) -> None:
        await settings_http.unregister_shared_memory(context, exchange, kind, region)

    return {"status": {"GET": status}, "register": {"POST": register}, "unregister": {"POST": unregister}}


def _readable(context: KServe, endpoint: Any) -> Verbs:
    return {
        "GET": partial(endpoint, context, update=False),
        "POST": partial(endpoint, context, update=True),
    }


async def _no_repository_name(exchange: Exchange) -> None:
    raise UnsupportedError("'repository_name' specification is not supported")


def _method_not_allowed(verbs: Verbs) -> HttpError:
    allow = ", ".join(sorted(verbs)).encode()
    return HttpError(405, "Method Not Allowed", code="method_not_allowed", headers=((b"allow", allow),))
