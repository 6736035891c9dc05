"""The context of a request: its caller, roles, id, trace and deadline; made when the first byte has come, and read by
everything below."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Protocol

from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    PenstockError,
    PermissionDeniedError,
    UnsupportedError,
)
from penstock.gateway.requests.intake import BodyBudget
from penstock.gateway.requests.quota import Quota
from penstock.gateway.requests.record import MAX_IGNORED, Outcome, RequestRecord

_WITHOUT_END: AbstractAsyncContextManager[object] = nullcontext()


def until(deadline: float | None, error: PenstockError) -> AbstractAsyncContextManager[object]:
    """`deadline` of time.monotonic(); None: no limit. Raises `error`."""
    return _WITHOUT_END if deadline is None else _until(deadline, error)


@asynccontextmanager
async def _until(deadline: float, error: PenstockError) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise error from None


_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_INDEX = re.compile(r"\[[0-9]+\]")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_REQUEST_ID = 128
_MAX_TRACESTATE = 512
_PROCESS_ID = uuid.uuid4().hex[:20]
_numbers = itertools.count(1)
"""New ids are random for the process and counted within it: a tenth of the cost of a random one for each request."""


class Role(StrEnum):
    """What a route is for. A key has some of these."""

    __hash__ = str.__hash__
    """That of enumerations is Python code, and every request is looked up by this."""

    INFERENCE = "inference"
    METADATA = "metadata"
    """Reading what the server has: models, their configuration, statistics."""
    METRICS = "metrics"
    ADMIN = "admin"
    """Loading and unloading, settings, adapters, shared memory of others, what operators look at."""


ALL_ROLES = frozenset(Role)
USER_ROLES = ALL_ROLES - {Role.ADMIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks, and what that one may do."""

    tenant: str = ""
    """Whom the key belongs to; "" where no keys are asked for."""
    key: str = ""
    """Which key it is: the beginning of its digest, which gives nothing of it away."""
    roles: frozenset[Role] = ALL_ROLES
    models: tuple[str, ...] | None = None
    """Names or patterns with * of the models that it may use; None: all."""
    priority: int = 0
    """Of its requests, where they ask for none or for an earlier one; lower runs first."""
    quota: Quota | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def require_model(self, model: str) -> None:
        """Raises PermissionDeniedError."""
        if not self.may_use(model):
            raise PermissionDeniedError(f"This key may not use the model `{model[:64]}`.", param="model")

    def require(self, role: Role) -> None:
        """Raises PermissionDeniedError, which names the role."""
        if role not in self.roles:
            has = ", ".join(sorted(self.roles)) or "none"
            raise PermissionDeniedError(f"This needs a key with the role '{role}'. The roles of this key: {has}.")


ANYONE = Principal()


class NamedModel(Protocol):
    """What a name means (`models/catalogue.py`)."""

    @property
    def name(self) -> str: ...


class RoutedName(Protocol):
    """A public name with traffic rules, and the target that a request has got."""

    @property
    def name(self) -> str:
        """The public one."""
        ...

    def keep(self, api: str, body: bytes) -> None:
        """The request as `api` has it, for a shadow that has to be asked the same."""

    @property
    def listener(self) -> Callable[[], Callable[[int, str], None] | None]:
        """Gives what is to be called with each choice's number and text as an answer comes, which begins then; None:
        nobody compares it."""
        ...


def new_request_id() -> str:
    return f"{_PROCESS_ID}{next(_numbers):012x}"


@dataclass(slots=True, eq=False, kw_only=True)
class RequestContext:
    """Times are of time.monotonic()."""

    id: str = field(default_factory=new_request_id)
    arrival: float = field(default_factory=time.monotonic)
    """When the request's first byte came."""
    principal: Principal = ANYONE
    background: bool = False
    """Nobody waits for the answer: it is computed while no other request is, and has no time limit of the server's."""
    deadline: float | None = None
    """After this nobody waits for the answer."""
    traceparent: str = ""
    """As in W3C Trace Context: the caller's span, and from the beginning on the request's own where requests are
    traced; "" for none."""
    tracestate: str = ""
    record: RequestRecord = field(default_factory=RequestRecord)
    headers: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    """By lower-case name; of several with the same name the first one."""
    strict: bool = False
    """What `ignore` would note is refused (--strict-requests)."""
    entry: NamedModel | None = None
    """What its model's name means; None: not looked up yet."""
    routed: RoutedName | None = None
    """What stands for the model, where the request's name has several (`traffic/`): chosen once."""
    infers: bool = False
    """It asks a model for work, and has been let in (`count`)."""
    quota: Quota | None = None
    """Where this request is counted, from `count` on."""
    is_handed_over: bool = False
    """Another request does its work, and is the one whose usage counts."""
    _tokens_paid: int = 0
    _bodies: BodyBudget | None = None
    _held: list[int] = field(default_factory=list)
    """Bytes that count in `_bodies`, one number for each `hold_body`: a thread may add one while `end` takes them."""
    _ended: bool = False
    _used: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What is to be called when the request no longer uses a model, by the model's name."""

    @property
    def tenant(self) -> str:
        return self.principal.tenant

    @property
    def ended(self) -> bool:
        return self._ended

    def next_request(self) -> RequestContext:
        """For another request of the same caller on the same stream, which arrives now."""
        record = RequestRecord(protocol=self.record.protocol, method=self.record.method, route=self.record.route)
        fresh: dict[str, Any] = {
            "entry": None,
            "routed": None,
            "_used": {},
            "infers": False,
            "quota": None,
            "_tokens_paid": 0,
        }
        fresh |= {"_bodies": None, "_held": [], "_ended": False, "is_handed_over": False}
        return replace(self, id=new_request_id(), arrival=time.monotonic(), record=record, **fresh)

    def count(self, *, reads: bool = False) -> None:
        """From now until its `end`, the request counts against what its key may use. `reads`: it gets what another
        request works for, which has the place among those at one time. Raises RateLimitedError."""
        self.infers = True
        quota = self.principal.quota
        if quota is not None:
            quota.begin(place=not reads)
            self.quota = None if reads else quota

    def hand_over_to(self, other: RequestContext) -> None:
        """What this request counts against and holds, the other one does from now on: it goes on with its work."""
        self.is_handed_over = True
        other.entry, other.routed = self.entry, self.routed
        other.record.model, other.record.target = self.record.model, self.record.target
        other.quota, self.quota = self.quota, None
        other._bodies, self._bodies = self._bodies, None
        other._held, self._held = self._held, []
        other._used, self._used = self._used, {}

    def ignore(self, path: str, reason: str) -> None:
        """Notes a field that is not used as it was sent: a hint that cannot be followed, or history that is carried
        another way. The answer's headers, the log and the metrics name it. Never for what constrains the answer.

        `path` has the schema's own words and indexes, such as `tools[3].type`, and nothing that the client made up;
        noted without the indexes. `reason` says why, for those who run with --strict-requests: then raises
        UnsupportedError."""
        if self.strict:
            raise UnsupportedError(f"{path}: {reason}", param=path)
        field = _INDEX.sub("[]", path)
        ignored = self.record.ignored
        if field not in ignored and len(ignored) < MAX_IGNORED:
            self.record.ignored = (*ignored, field)

    def require_model(self, model: str) -> str:
        """The name under which the client knows the model. Raises PermissionDeniedError where its key may not use
        that."""
        name = model if self.routed is None else self.routed.name
        self.principal.require_model(name)
        return name

    def uses(self, model: str) -> bool:
        return model in self._used

    def use(self, model: str, end: Callable[[], None]) -> None:
        """The model stays loaded until the request's `end`, which calls this one. Once for a model."""
        self._used[model] = end

    def end_use(self, model: str) -> None:
        """The request does not need this model, after all."""
        end = self._used.pop(model, None)
        if end is not None:
            end()

    def hold_body(self, budget: BodyBudget, size: int, *, small: bool = False) -> None:
        """So many more bytes of the request are in memory, until its `end`. Raises OverloadedError.

        For threads, too: one that still works for a request when that has ended holds nothing, and gets
        CancelledError."""
        budget.take(size, small=small)
        self._bodies = budget
        self._held.append(size)
        if self._ended:  # asked last: `end` may come at any moment, and one of both gives the bytes back
            self._give_back(budget)
            raise CancelledError("the request has ended")

    def hold_more(self, size: int) -> None:
        """`hold_body` in the budget in which the request's body counts; nothing where none counts it."""
        if self._bodies is not None:
            self.hold_body(self._bodies, size)

    def _give_back(self, budget: BodyBudget) -> None:
        size = 0
        with suppress(IndexError):  # nothing is left
            while True:
                size += self._held.pop()
        budget.give_back(size)

    def called(self, model: str, started: float, ended: float) -> None:
        """A model has called another one for this request."""
        self.record.called(model, started, ended)

    def pay_tokens(self, count: int) -> None:
        """What the request is going to use, as far as that is known before its end."""
        if self.quota is not None:
            self._tokens_paid += count
            self.quota.spend_tokens(count)

    def end(self) -> None:
        """Gives back what was paid and not used, and what was held."""
        self._ended = True
        if self._bodies is not None:
            self._give_back(self._bodies)
        while self._used:
            self._used.popitem()[1]()
        if self.quota is None:
            return
        usage = self.record.usage
        if usage is None or self.record.outcome is Outcome.REFUSED:
            used = 0
        else:
            used = usage.prompt_tokens + usage.completion_tokens
        self.quota.spend_tokens(used - self._tokens_paid)
        self.quota.end()
        self.quota = None

    def limit(self, seconds: float) -> None:
        """The request may take so many seconds from its arrival, or less where that was said before."""
        deadline = self.arrival + seconds
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline


def read_context(headers: Mapping[bytes, bytes]) -> RequestContext:
    """A context that begins now, from what both protocols' headers say. Names are in lower case."""
    context = RequestContext(headers=headers)
    request_id = headers.get(b"x-request-id")
    if request_id:
        context.id = _request_id(request_id.decode("latin-1"))
    parent = headers.get(b"traceparent")
    if parent is not None:
        context.traceparent = _trace_parent(parent.decode("latin-1"))
        if context.traceparent:
            context.tracestate = _trace_state(headers.get(b"tracestate", b"").decode("latin-1"))
    return context


def deadline_exceeded() -> DeadlineExceededError:
    return DeadlineExceededError("The request's deadline passed before the model could begin.")


def _request_id(text: str) -> str:
    """The caller's id, cut and cleaned, which is only ever echoed; or a new one."""
    return _NOT_IN_REQUEST_ID.sub("", text[: 4 * _MAX_REQUEST_ID])[:_MAX_REQUEST_ID] or new_request_id()


def timeout_seconds(text: str) -> float:
    """From `X-Request-Timeout`. Raises InvalidRequestError."""
    if not _SECONDS.fullmatch(text) or not float(text):
        raise InvalidRequestError("X-Request-Timeout must be a number of seconds above 0.")
    return float(text)


def _trace_parent(text: str) -> str:
    """The header as it is, or "" where it is not what https://www.w3.org/TR/trace-context/ asks for: a broken one is
    ignored."""
    version, _, rest = text.partition("-")
    trace_id, _, rest = rest.partition("-")
    parent_id = rest.partition("-")[0]
    valid = _TRACEPARENT.fullmatch(text) and version != "ff" and trace_id.strip("0") and parent_id.strip("0")
    return text if valid else ""


def _trace_state(text: str) -> str:
    return text if len(text) <= _MAX_TRACESTATE else ""
