"""Requests in bodies: decoded, refused where they ask for something that this server does not do, and with a model
where they name none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, PermissionDeniedError, UnsupportedError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Kind
from penstock.gateway.requests.bounded_json import decode_checked, decode_json
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

_LONGEST_NEUTRAL = 64
_LONGEST_OPTIONS = 4096
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_R = TypeVar("_R")


class JsonBody:
    """A body that is a JSON object, divided into its fields."""

    def __init__(self, content: bytes) -> None:
        """Raises InvalidRequestError."""
        self.content = content
        self.fields = decode_json(content, dict[str, msgspec.Raw])

    @property
    def model(self) -> str | None:
        """The name in it; None where there is none, or something else."""
        raw = self.fields.get("model")
        try:
            return None if raw is None else msgspec.json.decode(raw, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def parse(body: bytes | JsonBody, kind: type[_R], unsupported: Mapping[str, tuple[str, ...]]) -> _R:
    """Decodes a body. `unsupported` names fields that are refused, each with the values that ask for nothing. Raises
    InvalidRequestError, UnsupportedError."""
    body = JsonBody(body) if isinstance(body, bytes) else body
    _refuse_unsupported(body.fields, unsupported)
    try:
        return decode_checked(body.content, kind)
    except InvalidRequestError:
        whole = _whole_numbers(body.fields)
        if not whole:
            raise
        return decode_checked(msgspec.json.encode(body.fields | whole), kind)


def _whole_numbers(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Those that are written as floats, such as 1.0, in their shorter form: clients without integers send such. Also
    those in objects of options, which are short."""
    short = {name: _compact(raw) for name, raw in fields.items()}
    whole = {
        name: msgspec.Raw(_as_whole(number).encode()) for name, number in short.items() if _WHOLE.fullmatch(number)
    }
    for name, raw in fields.items():
        if bytes(memoryview(raw)[:1]) == b"{" and memoryview(raw).nbytes <= _LONGEST_OPTIONS:
            options = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            inner = _whole_numbers(options)
            if inner:
                whole[name] = msgspec.Raw(msgspec.json.encode(options | inner))
    return whole


def _as_whole(number: str) -> str:
    whole = _WHOLE.fullmatch(number)
    return whole[1] if whole else number


def _refuse_unsupported(fields: Mapping[str, msgspec.Raw], table: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedError for the first field of a body that asks for something this server does not do."""
    for name in fields:
        neutral = table.get(name)
        if neutral is not None and _as_whole(_compact(fields[name])) not in neutral:
            raise UnsupportedError(f"'{name}' is not supported by this server with that value.", param=name)


def _compact(raw: msgspec.Raw) -> str:
    """The value without white space; anything long is not neutral anyway."""
    if memoryview(raw).nbytes > _LONGEST_NEUTRAL:
        return ""
    return "".join(bytes(raw).decode().split())


def media_note(kind: str) -> str:
    """What the model reads in place of an image, a recording or a file, which is neither fetched nor decoded."""
    return f"[{kind} left out: this model reads text only]"


def texts_or_ids(
    inputs: str | list[str | int | list[int]], vocab_size: int, most: int, param: str
) -> list[str | list[int]]:
    """One text or the token ids of one, or a list of at most `most` of these, all of one kind. Raises
    InvalidRequestError."""
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    texts = [item for item in inputs if isinstance(item, str)]
    token_ids = [item for item in inputs if isinstance(item, int)]
    lists = [item for item in inputs if isinstance(item, list)]
    if len(inputs) not in (len(texts), len(token_ids), len(lists)):
        raise InvalidRequestError(f"{param} must not mix texts and token ids.", param=param)
    if token_ids:
        lists = [token_ids]
    elif len(inputs) > most:
        raise InvalidRequestError(f"{param}: at most {most} {param}s are allowed.", param=param)
    if not all(lists):
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    if any(not 0 <= min(ids) <= max(ids) < vocab_size for ids in lists):
        raise InvalidRequestError(f"{param}: a token id is not in the vocabulary.", param=param)
    return [*texts, *lists]


_MAX_USER = 128
"""Characters by which users are told apart."""


def fair_tenant(context: RequestContext, user: str | None, policy: str) -> str:
    """The tenant of the request's key. On a server without keys that is fair, the user that the request names: it has
    only the callers' word for who they are. Under other policies `user` has no effect: tenants share no cached
    prefixes, which would be expensive for a server with one prompt for all its users."""
    return context.tenant or ((user or "")[:_MAX_USER] if policy == "fair" else "")


# The model of a request that names none: the one of --default-model, or the only one that its route and its key can
# use.

_NONE = (b"null", b'""')


def _no_model(detail: str = "") -> InvalidRequestError:
    return InvalidRequestError(f"Missing required parameter: model.{detail}", param="model")


def default_model(
    settings: AppSettings,
    context: RequestContext,
    models: Catalogue,
    kind: Kind = Kind.TOKENS,
    capabilities: Sequence[str] = (),
) -> str:
    """`capabilities`: as Catalogue.usable has it. Raises InvalidRequestError, and PermissionDeniedError for a key that
    may use none."""
    usable = models.usable(kind, context.principal.may_use, capabilities)
    default = settings.default_model
    if any(default in names for names in usable):
        return str(default)
    if not usable and context.principal.models is not None:
        raise PermissionDeniedError("This key may use no model that this request could ask.", param="model")
    if len(usable) != 1:
        count = f"{len(usable)} models, one of which it must name" if usable else "no model"
        raise _no_model(f" This request can use {count}.")
    return usable[0][0]


class RequestReader(Generic[_R]):
    """Reads the body of a request for a model. One that names none has a model from then on, which everything below
    sees as if its client had named it."""

    def __init__(
        self,
        models: Catalogue,
        parse_body: Callable[[JsonBody], _R],
        model_name: Callable[[_R], str],
        choose: Callable[[RequestContext], str],
        kind: Kind | None = None,
    ) -> None:
        """`choose` gives the model of a request that names none (`default_model`). `kind`: of requests that models of
        other servers are asked with the same body; None: they are not."""
        self._models = models
        self._parse_body = parse_body
        self._model_name = model_name
        self._choose = choose
        self._kind = kind

    async def read(self, exchange: Exchange, content: bytes) -> _R | None:
        """The request for a model of this server; None when another server has answered it. Raises PenstockError."""
        whole = JsonBody(content)
        body = whole if self._kind is None else await self._passed_on(exchange, self._kind, whole)
        if body is None:
            return None
        try:
            request = self._parse_body(body)
            if not self._model_name(request):
                raise _no_model()
        except InvalidRequestError as error:
            return await self.read(exchange, self._with_model(body, error, exchange.context))
        return request

    async def _passed_on(self, exchange: Exchange, kind: Kind, body: JsonBody) -> JsonBody | None:
        """None when another server has answered; else the body for a model of this server. Raises PenstockError."""
        name, context = body.model, exchange.context
        if name is None or not self._models.is_upstream(name, kind):
            return body
        entry = await self._models.find(name, kind, context)
        if context.routed is not None:
            context.routed.keep(kind.value, body.content)
        if entry.upstream is None:
            return body
        rest = await entry.upstream.answer(exchange, kind.value, body.content)
        return None if rest is None else JsonBody(rest)

    def _with_model(self, body: JsonBody, error: InvalidRequestError, context: RequestContext) -> bytes:
        """The body of a request that was refused with `error`, with a model. Raises `error` where something else is
        wrong, and what `choose` raises."""
        if error.param != "model":
            raise error
        if "model" in body.fields and bytes(body.fields["model"]) not in _NONE:
            raise error
        name = self._choose(context)
        context.hold_more(len(body.content))
        return msgspec.json.encode({**body.fields, "model": name})
