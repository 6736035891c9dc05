"""What another server is sent for a request: body, headers, and the right key."""

from __future__ import annotations

from penstock.engines.replicas.settings import RoutingPolicy
from penstock.gateway.configuration.upstream_settings import Api, UpstreamSettings, base_url
from penstock.gateway.front.context import RequestContext
from penstock.gateway.upstream.api_key import ApiKey
from penstock.gateway.upstream.attempts import Question
from penstock.gateway.upstream.failures import Redactor
from penstock.gateway.upstream.request_body import UpstreamRequest

PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings"}
"""Behind an upstream's url."""
_BEARER = "Bearer "


class Asking:
    """Of one model."""

    def __init__(self, settings: UpstreamSettings, key: ApiKey, user_agent: str) -> None:
        self._settings = settings
        self._key = key
        self._model = settings.model or settings.name
        self._always = [("user-agent", user_agent), *settings.headers.items()]
        self._caches_matter = len(settings.urls) > 1 and settings.routing is RoutingPolicy.PREFIX
        self._secrets = [*settings.headers.values(), *(base_url(url).authority for url in settings.urls)]

    def question(self, context: RequestContext, request: UpstreamRequest, api: Api) -> Question:
        settings = self._settings
        authorization = self._authorization(context)
        headers = [*self._always, ("x-request-id", context.id)]
        headers.append(("accept", "text/event-stream" if request.streams else "application/json"))
        if authorization:
            headers.append(("authorization", authorization))
        if context.traceparent:
            headers.append(("traceparent", context.traceparent))
            if context.tracestate.isascii() and context.tracestate.isprintable() and context.tracestate:
                headers.append(("tracestate", context.tracestate))
        return Question(
            model=settings.name,
            path=PATHS[api],
            headers=headers,
            body=request.written(self._model),
            streams=request.streams,
            seconds=settings.first_token_timeout if request.streams else settings.answer_timeout,
            prefix=request.prefix() if self._caches_matter else (),
            session=f"{context.tenant} {request.session}" if request.session else "",
            redact=Redactor([authorization.removeprefix(_BEARER), *self._secrets]),
            own_key=not settings.client_key,
        )

    def probe_headers(self) -> list[tuple[str, str]]:
        """No client asks here, so a server that wants its clients' keys gets none."""
        key = self._key.value
        return [*self._always, *([("authorization", _BEARER + key)] if key else [])]

    def _authorization(self, context: RequestContext) -> str:
        """ "" for none."""
        if not self._settings.client_key:
            key = self._key.value
            return _BEARER + key if key else ""
        given = context.headers.get(b"authorization", b"").decode("latin-1")
        if not given and b"x-api-key" in context.headers:
            given = _BEARER + context.headers[b"x-api-key"].decode("latin-1")
        return given if given.isascii() and given.isprintable() else ""
