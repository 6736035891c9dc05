"""Language models that other servers have: as they stand in the configuration file and in a `model.json`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.engines.kv_events.settings import KVEventsSource
from penstock.engines.replicas.state import RoutingPolicy

Api = Literal["chat", "completions", "embeddings"]

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_File = Annotated[_Name, Meta(extra={"metavar": "FILE"})]
_Folder = Annotated[_Name, Meta(extra={"metavar": "DIR"})]
_Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"unit": "s"})]
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")
_PATH = re.compile(r"[\x21-\x7e]*")
_OWN_HEADERS = frozenset(
    {
        *("accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "expect"),
        *("host", "te", "traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade", "x-request-id"),
    }
)
"""Of a request to an upstream: what this server writes itself."""
_MAX_URLS, _MAX_HEADERS, _MAX_FALLBACKS = 64, 32, 8


class BaseUrl(NamedTuple):
    """Where an upstream's API is."""

    secure: bool
    host: str
    """Without the brackets of an IPv6 address."""
    port: int
    path: str
    """Of the API, without a slash at the end: `/v1`."""

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def base_url(text: str) -> BaseUrl:
    """`http://host:8000` means `http://host:8000/v1`. Raises ValueError, without the text: it may hold a password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("upstream: the url has an invalid port or address") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("upstream: the url must not hold a user or password; see api_key_file")
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.hostname.isascii():
        raise ValueError("upstream: the url must be like http://host:8000 or https://host/v1")
    if parts.query or parts.fragment or not _PATH.fullmatch(parts.path):
        raise ValueError("upstream: the url must end with its path")
    secure = parts.scheme == "https"
    return BaseUrl(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/") or "/v1")


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of another server. Raises ValueError for parts that do not fit together."""

    name: _Name
    """What clients ask for."""
    url: str | tuple[str, ...]
    """Of the API, one for each server that has the model."""
    model: _Name | None = None
    """What the other server calls it; None: the same."""
    apis: tuple[Api, ...] = ("chat", "completions")
    """What clients may ask it by."""
    api_key_file: _File | None = None
    """Holds the key for the other server. It is read again when it changes."""
    api_key_env: _Name | None = None
    """The variable that holds the key."""
    client_key: bool = False
    """The other server gets the key that the client sent to this one."""
    headers: dict[str, str] = {}
    """More headers for the other server."""
    ca_file: _File | None = None
    """PEM file with the authorities that may vouch for the other server; None: those of the system."""
    connect_timeout: _Seconds = 5.0
    first_token_timeout: _Seconds = 60.0
    """Of a stream."""
    idle_timeout: _Seconds = 60.0
    """Between two pieces of an answer."""
    answer_timeout: _Seconds = 600.0
    """Until an answer that does not stream begins."""
    routing: RoutingPolicy = RoutingPolicy.PREFIX
    """Which of several servers gets a request."""
    kv_events: str | KVEventsSource | tuple[str | KVEventsSource, ...] = ()
    """Where each of the urls, in their order, publishes what it has cached; "": it does not."""
    tokenizer: _Folder | None = None
    """Has the tokenizer and chat template of the model, for `kv_events`."""
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] = 256
    retries: Annotated[int, Meta(ge=0, le=8)] = 2
    """Of a request, at most."""
    retry_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Retries for each request, over all of them."""
    health: str = "models"
    """What is asked to see whether a server is there: a path behind the url, or from the root if it begins with a
    slash; "": nothing."""
    health_interval: _Seconds = 10.0
    eject_after: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Failures in a row after which a server gets no requests for some time."""
    eject_seconds: _Seconds = 5.0
    """For how long; twice as long each time, up to a minute or this, whichever is more."""
    fallbacks: tuple[_Name, ...] = ()
    """Models that answer instead, in this order, when no server can: of this server or of others."""
    hedge_after: Annotated[float, Meta(ge=0, le=3600, extra={"unit": "s"})] = 0.0
    """Seconds without a first byte after which a second server is asked as well, which counts as a retry; 0: never."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.urls) <= _MAX_URLS:
            raise ValueError(f"upstream {self.name!r}: it needs 1 to {_MAX_URLS} urls")
        bases = [base_url(text) for text in self.urls]
        if len(set(bases)) < len(bases):
            raise ValueError(f"upstream {self.name!r}: a url appears twice")
        if sum((self.api_key_file is not None, self.api_key_env is not None, self.client_key)) > 1:
            raise ValueError(f"upstream {self.name!r}: api_key_file, api_key_env and client_key: only one of them")
        if not self.apis:
            raise ValueError(f"upstream {self.name!r}: apis is empty")
        if self.name in self.fallbacks or len(set(self.fallbacks)) < len(self.fallbacks):
            raise ValueError(f"upstream {self.name!r}: fallbacks must be other models, each once")
        if len(self.fallbacks) > _MAX_FALLBACKS:
            raise ValueError(f"upstream {self.name!r}: at most {_MAX_FALLBACKS} fallbacks")
        if self.hedge_after and (len(self.urls) == 1 or not self.retry_ratio):
            raise ValueError(f"upstream {self.name!r}: hedge_after needs a second url, and a retry_ratio above 0")
        if not _PATH.fullmatch(self.health):
            raise ValueError(f"upstream {self.name!r}: health must be a path")
        self._check_headers()
        self._check_events()

    def _check_headers(self) -> None:
        if len(self.headers) > _MAX_HEADERS:
            raise ValueError(f"upstream {self.name!r}: at most {_MAX_HEADERS} headers")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(f"upstream {self.name!r}: headers: {name[:64]!r} is no header")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"upstream {self.name!r}: headers: {name!r} is written by this server")

    def _check_events(self) -> None:
        if not self.events_of_urls:
            if self.tokenizer is not None:
                raise ValueError(f"upstream {self.name!r}: tokenizer: only kv_events needs it")
            return
        if len(self.events_of_urls) != len(self.urls):
            raise ValueError(f"upstream {self.name!r}: kv_events: it has one entry for each url")
        if len(self.urls) == 1 or self.routing is not RoutingPolicy.PREFIX:
            raise ValueError(f"upstream {self.name!r}: kv_events: only routing by prefix between several urls uses it")
        if self.tokenizer is None:
            raise ValueError(f"upstream {self.name!r}: kv_events: events are about tokens, so it needs a tokenizer")

    @property
    def events_of_urls(self) -> tuple[KVEventsSource | None, ...]:
        """For each url; empty where none publishes. Raises ValueError."""
        entries = self.kv_events if isinstance(self.kv_events, tuple) else (self.kv_events,)
        sources = tuple(
            KVEventsSource(endpoint=item) if item and isinstance(item, str) else item or None for item in entries
        )
        return sources if any(sources) else ()

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


def upstream_fields(text: str) -> object:
    """What a flag or a variable says of one: a JSON object, or NAME=URL. Raises ValueError."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"upstream: it is NAME=URL or a JSON object: {error}") from None
    name, equals, url = text.partition("=")
    if not equals or not name or not url:
        raise ValueError("upstream: it is NAME=URL or a JSON object")
    return {"name": name, "url": url}
