"""Entries of the catalogue of names: what serves a name, by kind of request, and what its traffic rules are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.generation import AcceptedCall, Usage
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.repository.models import LoadedVersions
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange

_POOLS = (
    "The model `{name}` gives embeddings or scores and generates no text; see /v1/embeddings, /v1/rerank, "
    "/v1/score, /v1/classify."
)
_GENERATES = "The model `{name}` generates text and gives no embeddings or scores."


class Kind(Enum):
    """Requests by what they need of a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENS = "tokens"
    """Of a language model of this server: its tokenizer, or its template."""
    EMBEDDINGS = "embeddings"
    SCORES = "scores"
    """Rows of a pooling model of this server, of whatever use."""

    @property
    def pools(self) -> bool:
        return self in (Kind.EMBEDDINGS, Kind.SCORES)

    @property
    def api(self) -> str | None:
        """By which models of other servers are asked; None: they cannot be."""
        return None if self in (Kind.TOKENS, Kind.SCORES) else self.value


@dataclass(frozen=True, slots=True)
class UpstreamChat:
    """A chat request for another server."""

    fields: Mapping[str, Any]
    """Of OpenAI's chat API, without model and stream."""
    show_reasoning: bool = True


class UpstreamAnswer(Protocol):
    """Iterated as a Generation with one choice. The usage is complete with the delta that has the finish reason."""

    usage: Usage

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]: ...

    async def __anext__(self) -> list[ChoiceDelta]: ...


class Upstream(Protocol):
    """A model that answers whole requests: another server's, or one of a repository that takes text as tensors."""

    @property
    def name(self) -> str: ...

    @property
    def apis(self) -> tuple[str, ...]:
        """By which clients may ask it: "chat", "completions" or "embeddings"."""
        ...

    @property
    def created(self) -> int:
        """Unix seconds."""
        ...

    @property
    def root(self) -> str:
        """What the other server calls it."""
        ...

    @property
    def owner(self) -> str:
        """As lists of models name it."""
        ...

    @property
    def folder(self) -> str:
        """Where its files are; "": nowhere on this machine."""
        ...

    @property
    def refusal(self) -> str:
        """The error for requests that no API of another server could answer."""
        ...

    @property
    def gives_way(self) -> bool:
        """It is not another server's, but takes text as tensors: its name stays free for models of other kinds."""
        ...

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        """Answers the request, and returns None. Where a model of this server has to answer instead, returns the body
        for it, and nothing has been sent. Raises PenstockError."""
        ...

    def chat(
        self, exchange: Exchange, chat: UpstreamChat, *, pulse: float | None
    ) -> AbstractAsyncContextManager[UpstreamAnswer | str]:
        """Gives the answer once it has begun, or the name of the model of this server that is to answer instead.
        `pulse`: seconds without anything to show after which the answer has an empty list. Raises PenstockError."""
        ...


Served: TypeAlias = NameHolder | PoolingModel | Upstream


def upstream_of(served: Served | None) -> Upstream | None:
    return None if served is None or isinstance(served, NameHolder | PoolingModel) else served


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name means: in the catalogue, and with the target's model for a request whose name has traffic rules."""

    name: str
    served: Served | None
    """What answers texts and computes rows, also while it is not loaded yet."""
    tensors: LoadedVersions | None = None
    """The versions of the KServe model with this name."""

    @property
    def upstream(self) -> Upstream | None:
        return upstream_of(self.served)

    @property
    def loaded(self) -> bool:
        """Whether requests may use it; False again when it has left the catalogue."""
        if isinstance(self.served, PoolingModel):
            return self.served.loaded
        if not isinstance(self.served, NameHolder):
            return self.served is not None
        model, adapter = self.served
        return model.loaded and (adapter is None or model.adapters.get(adapter.name) is adapter)

    @property
    def first_name(self) -> str:
        """Of the model, for operators and in progress."""
        if isinstance(self.served, NameHolder):
            return self.served.model.names[0]
        return self.served.names[0] if isinstance(self.served, PoolingModel) else self.name

    def check(self, kind: Kind, param: str = "model") -> None:
        """Raises InvalidRequestError for a model of another kind. `param`: the caller's field with the name."""
        upstream = self.upstream
        if upstream is not None:
            refusal = upstream.refusal if kind.api is None else ""
        elif isinstance(self.served, PoolingModel):
            refusal = "" if kind.pools else _POOLS
        else:
            refusal = _GENERATES if kind.pools else ""
        if refusal:
            raise InvalidRequestError(refusal.format(name=self.name[:64]), param=param)


class Traffic(Protocol):
    """Names with traffic rules."""

    def has(self, name: str) -> bool: ...

    def target(self, name: str, kind: Kind, context: RequestContext) -> Target:
        """Chosen once for a request and noted in `context.routed`: the same at each call, even if the rule was removed
        meanwhile. Raises PenstockError."""
        ...

    def serving(self, context: RequestContext, kind: Kind) -> Served:
        """What the request's target is. Raises PenstockError."""
        ...

    def is_upstream(self, name: str, kind: Kind) -> bool:
        """Whether another server may get the requests of this name."""
        ...

    def models(self, name: str) -> list[str]:
        """That a name may lead to, by their own names."""
        ...

    def tensors_target(self, name: str, version: str, context: RequestContext) -> str | None:
        """The model that has to be loaded for the tensors of a request; None: looking the name up says what is
        wrong. `version`: "" for any."""
        ...

    def first(self, name: str) -> Served | None:
        """What describes the name: its first target that is loaded; None: one that a request would load. Raises
        PenstockError where none would serve a request."""
        ...

    def listed(self) -> list[tuple[str, Served | None]]:
        """The names that serve now and are no model's own, each with what describes it."""
        ...

    def rendered(self, context: RequestContext, values: ChatValues, *, cut: bool) -> None:
        """A chat became a prompt for the request's target."""

    def accepted(self, request: GenerateRequest) -> AcceptedCall:
        """The request's target generates."""
        ...

    def accepted_rows(self, context: RequestContext) -> AcceptedCall:
        """The request's target gives rows."""
        ...
