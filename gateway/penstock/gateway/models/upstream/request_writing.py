"""Requests to other servers: body, headers, and the right key."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.replicas.state import RoutingPolicy
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.upstream_settings import Api, UpstreamSettings, base_url
from penstock.gateway.models.upstream.attempts import Question
from penstock.gateway.models.upstream.failures import Redactor
from penstock.gateway.requests.bounded_json import decode_checked, decode_json
from penstock.gateway.requests.context import RequestContext

_OURS = frozenset({"metadata", "priority", "service_tier", "store", "cache_salt"})
"""Fields by which a client speaks to this server: about its storage, its queues, its cache."""
_MAX_CHOICES = 128
_MOST_EXPECTED = 1 << 20
_PROMPT = ("tools", "messages", "prompt")
"""In the order in which templates render them."""
_MOST_PREFIX = 64 << 10
"""Bytes that are hashed: a few milliseconds."""
_MAX_SESSION = 128
BYTES_OF_TOKEN = 4
"""About: for what a request takes off its key's limits until its answer says how much it was."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Read(msgspec.Struct):
    """What this server has to know of a body."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: float | None = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    store: bool | None = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


class UpstreamRequest:
    """A client's body, read once. Fields that this server does not know pass as they are."""

    def __init__(self, body: bytes, api: Api) -> None:
        """Raises InvalidRequestError, UnsupportedError."""
        self.body = body
        self._fields = decode_json(body, dict[str, msgspec.Raw])
        read = decode_checked(body, _Read)
        if read.store:
            raise UnsupportedError("store: chats with a model of another server are not kept.", param="store")
        if read.n is not None and not 1 <= read.n <= _MAX_CHOICES:
            raise InvalidRequestError(f"n must be from 1 to {_MAX_CHOICES}.", param="n")
        self.streams = bool(read.stream) and api != "embeddings"
        self.shows_usage = read.stream_options is not None and bool(read.stream_options.include_usage)
        self.choices = int(read.n or 1) * (_prompts(read.prompt) if api == "completions" else 1)
        most_tokens = (read.max_completion_tokens or read.max_tokens or 0) * (read.n or 1)
        names = (read.prompt_cache_key, read.safety_identifier, read.user)
        self.session = next((name for name in names if name and isinstance(name, str)), "")[:_MAX_SESSION]
        """The caller's name for requests that belong together, as this server's own models read it."""
        self.prompt_estimate = len(body) // BYTES_OF_TOKEN
        self.expected_tokens = self.prompt_estimate + round(min(max(0.0, most_tokens), _MOST_EXPECTED))

    def prefix(self) -> Sequence[int]:
        """The parts that prompts begin with, as numbers of `BYTES_OF_TOKEN` bytes each; of a long one the beginning."""
        text = b"".join(bytes(self._fields[name]) for name in _PROMPT if name in self._fields)
        return memoryview(text)[: min(len(text), _MOST_PREFIX) // BYTES_OF_TOKEN * BYTES_OF_TOKEN].cast("I")

    def written(self, model: str) -> bytes:
        """For another server, which calls the model so. A stream is asked for its usage in any case."""
        fields: dict[str, Any] = {name: raw for name, raw in self._fields.items() if name not in _OURS}
        fields["model"] = model
        if not self.streams:  # without a stream they mean nothing, and many servers refuse them
            fields.pop("stream_options", None)
        else:
            raw = self._fields.get("stream_options")
            options = None if raw is None else msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None)
            fields["stream_options"] = {**(options or {}), "include_usage": True}
        return msgspec.json.encode(fields)

    def renamed(self, model: str) -> bytes:
        """For another model of this server."""
        return msgspec.json.encode({**self._fields, "model": model})


def _prompts(raw: msgspec.Raw) -> int:
    """A text and a list of token ids are one prompt, a list of these is several."""
    if _first_byte(raw) != b"[":
        return 1
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return len(items) if items and _first_byte(items[0]) in (b'"', b"[") else 1


def _first_byte(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


_LOOK_SECONDS = 5.0
_KEY = re.compile(r"[\x21-\x7e]{1,8192}")


class ApiKey:
    """From a file or a variable; none where neither is given."""

    def __init__(self, file: str | None, variable: str | None) -> None:
        """Raises ConfigError."""
        self._file = None if file is None else Path(file)
        self._stamp: tuple[float, int] | None = None
        self._looked = time.monotonic()
        self._value = ""
        if self._file is not None:
            self._value = _checked(self._read(self._file), f"api_key_file: {self._file}")
        elif variable is not None:
            self._value = _checked(os.environ.get(variable, ""), f"api_key_env: the variable {variable}")

    @property
    def value(self) -> str:
        """ "" for none. A file that has changed is read again; one that cannot be read changes nothing."""
        now = time.monotonic()
        if self._file is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            try:
                stat = self._file.stat()
                if (stat.st_mtime, stat.st_size) != self._stamp:
                    self._value = _checked(self._read(self._file), "")
            except (OSError, ConfigError):
                return self._value
        return self._value

    def _read(self, file: Path) -> str:
        try:
            stat = file.stat()
            self._stamp = (stat.st_mtime, stat.st_size)
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"api_key_file: {file}: {reason}") from None


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{source} holds no key: one word of ASCII characters")
    return key


PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings"}
"""Behind an upstream's url."""
_BEARER = "Bearer "


class RequestWriter:
    """Of one model."""

    def __init__(self, settings: UpstreamSettings, key: ApiKey, user_agent: str) -> None:
        self._settings = settings
        self._key = key
        self._model = settings.model or settings.name
        self._always = [("user-agent", user_agent), *settings.headers.items()]
        self._caches_matter = len(settings.urls) > 1 and settings.routing is RoutingPolicy.PREFIX
        self._secrets = [*settings.headers.values(), *(base_url(url).authority for url in settings.urls)]

    def question(
        self, context: RequestContext, request: UpstreamRequest, api: Api, tokens: Sequence[int] = ()
    ) -> Question:
        """`tokens`: of the prompt, where they are known."""
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
            prefix=tokens or (request.prefix() if self._caches_matter else ()),
            has_tokens=bool(tokens),
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
        value = context.headers.get(b"authorization", b"").decode("latin-1")
        if not value and b"x-api-key" in context.headers:
            value = _BEARER + context.headers[b"x-api-key"].decode("latin-1")
        return value if value.isascii() and value.isprintable() else ""
