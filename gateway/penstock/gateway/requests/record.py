"""Records of requests: the layers that one passes fill it in; logs, metrics and spans read it at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol
from urllib.parse import quote

from penstock.engines.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    PermissionDeniedError,
    RateLimitedError,
)
from penstock.gateway.errors import HttpError

UNMATCHED = "unmatched"
"""The route of requests that have none. Their paths are not told: clients may send any."""


QUIET_ROUTES = frozenset(
    {
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/metrics/",
        "/ping",
        "/v2/health/live",
        "/v2/health/ready",
    }
)
"""Probes and scrapers ask for these every few seconds: they are not logged unless they fail."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
OTHER_METHOD = "OTHER"
"""Clients of HTTP/2 may send any word, and metrics count by the method."""
REQUEST_ON_STREAM = "/request"
"""End of the route of a request that is one of several on an RPC."""

_MAX_NOTED = 128
"""Calls of other models, and pieces of prompts, that are noted of a request, which may have any number."""
MAX_IGNORED = 16


class Outcome(StrEnum):
    __hash__ = str.__hash__
    """That of enumerations is Python code, and every request's end is counted by this."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    DENIED = "denied"
    LIMITED = "limited"
    """What its key may use was used up."""
    REFUSED = "refused"
    """The server had no room, or was not ready."""
    CANCELLED = "cancelled"
    """The client left."""
    DEADLINE = "deadline"
    SERVER_ERROR = "server_error"


class Stage(StrEnum):
    """Where a request is."""

    READING = "reading"
    TEMPLATE = "template"
    TOKENIZE = "tokenize"
    ENGINE = "engine"
    """In the engine's queue, or its prompt is being computed."""
    DECODING = "decoding"
    UPSTREAM = "upstream"
    """Another server has it."""
    MODEL = "model"
    """A classic model has it: queued in its batcher, or executing."""


class TokenUsage(Protocol):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Times are of time.monotonic()."""

    protocol: str = "http"
    """http or grpc."""
    http_version: str = ""
    """1.0, 1.1 or 2 of a request that came over HTTP."""
    method: str = ""
    """The HTTP method, one of METHODS or OTHER_METHOD; "" for an RPC."""
    route: str = UNMATCHED
    """As the table of routes has it, or the RPC's full name; never what the client sent."""
    model: str = ""
    """A name that the server knows. For a public name that several models serve, see `target`, too."""
    target: str = ""
    """Which of a public name's targets has the request; "" for a name that is its model's own."""
    stage: Stage = Stage.READING
    stage_since: float = field(default_factory=time.monotonic)
    status: str = ""
    """The HTTP status or the name of the gRPC status; "" when nothing was answered."""
    outcome: Outcome = Outcome.OK
    reason: str = ""
    """The error's code."""
    bytes_in: int = 0
    bytes_out: int = 0
    usage: TokenUsage | None = None
    """The generation's own count, which goes on while it runs."""
    queue_seconds: float = 0.0
    first_token_at: float | None = None
    """When the first token of any choice came."""
    write_seconds: float = 0.0
    """In which its stream waited for a client that read slowly."""
    finish_reasons: tuple[str, ...] = ()
    """Of the choices that have ended, in the order of their ends."""
    stages: list[tuple[Stage, float]] | None = None
    """Each stage with its beginning, of a request that is traced."""
    ignored: tuple[str, ...] = ()
    """Fields that were not used as they were sent, as `RequestContext.ignore` notes them; at most MAX_IGNORED."""
    calls: tuple[tuple[str, float, float], ...] = ()
    """Models that models have called for such a request, each with its beginning and end."""
    prompt_chunks: tuple[tuple[float, float, int], ...] = ()
    """What steps have computed of such a request's prompts: beginning, end, tokens."""

    @property
    def ignored_told(self) -> str:
        """`ignored` as headers can have it."""
        return ", ".join(self.ignored)

    @property
    def warnings(self) -> list[dict[str, str]]:
        """The same where an answer's schema has room for it."""
        return [{"code": "ignored", "param": field} for field in self.ignored]

    @property
    def target_told(self) -> str:
        """`target` as headers can have it."""
        return self.target if self.target.isascii() and self.target.isprintable() else quote(self.target)

    def enter(self, stage: Stage) -> None:
        self.stage = stage
        self.stage_since = time.monotonic()
        if self.stages is not None:
            self.stages.append((stage, self.stage_since))

    def called(self, model: str, started: float, ended: float) -> None:
        if self.stages is not None and len(self.calls) < _MAX_NOTED:
            self.calls += ((model, started, ended),)

    def computed(self, chunks: Iterable[tuple[float, float, int]]) -> None:
        """Steps have computed these pieces of a prompt."""
        self.prompt_chunks = (self.prompt_chunks + tuple(chunks))[:_MAX_NOTED]

    def failed(self, error: BaseException) -> None:
        """The first error counts: what follows it are its consequences."""
        if not self.reason:
            self.outcome = outcome_of(error)
            self.reason = _reason(error)

    def cancelled(self) -> None:
        """The client has left."""
        if not self.reason:
            self.outcome, self.reason = Outcome.CANCELLED, "client_gone"


def outcome_of(error: BaseException) -> Outcome:
    """How a request ends with this error."""
    match error:
        case HttpError():
            return Outcome.CLIENT_ERROR if error.shape.status < 500 else Outcome.SERVER_ERROR
        case AuthenticationError() | PermissionDeniedError():
            return Outcome.DENIED
        case RateLimitedError():
            return Outcome.LIMITED
        case InvalidRequestError():
            return Outcome.CLIENT_ERROR
        case OverloadedError():
            return Outcome.REFUSED
        case DeadlineExceededError():
            return Outcome.DEADLINE
        case CancelledError() | asyncio.CancelledError():
            return Outcome.CANCELLED
    return Outcome.SERVER_ERROR


def _reason(error: BaseException) -> str:
    if isinstance(error, HttpError):
        return error.shape.code or str(error.shape.status)
    return error.code if isinstance(error, PenstockError) else "internal_error"
