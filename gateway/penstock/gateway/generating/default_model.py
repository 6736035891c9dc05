"""The model of a request that names none: the one of --default-model, or the only one that its route and its key can
use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from penstock.engines.errors import InvalidRequestError, PermissionDeniedError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.front.context import RequestContext
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.language_models import LanguageModels

_NONE = (b"null", b'""')


def no_model(detail: str = "") -> InvalidRequestError:
    return InvalidRequestError(f"Missing required parameter: model.{detail}", param="model")


def with_model(body: bytes, error: InvalidRequestError, context: RequestContext, choose: Callable[[], str]) -> bytes:
    """The body of a request that was refused with `error`, with the model that `choose` gives. Raises `error` where
    something else is wrong, and what `choose` raises."""
    if error.param != "model":
        raise error
    fields = decode_json(body, dict[str, msgspec.Raw])
    if "model" in fields and bytes(fields["model"]) not in _NONE:
        raise error
    name = choose()
    context.hold_more(len(body))
    return msgspec.json.encode({**fields, "model": name})


def default_model(
    settings: AppSettings, context: RequestContext, models: Sequence[Sequence[str]], api: str = "chat"
) -> str:
    """`models`: the names of each that the route can use, but for those of other servers, which know `api`. Raises
    InvalidRequestError, and PermissionDeniedError for a key that may use none."""
    may_use = context.principal.may_use
    others = ([name] for name, model in settings.text_models.listed().items() if api in model.apis)
    usable = [names for names in ([*filter(may_use, names)] for names in chain(models, others)) if names]
    default = settings.default_model
    if any(default in names for names in usable):
        return str(default)
    if not usable and context.principal.models is not None:
        raise PermissionDeniedError("This key may use no model that this request could ask.", param="model")
    if len(usable) != 1:
        count = f"{len(usable)} models, one of which it must name" if usable else "no model"
        raise no_model(f" This request can use {count}.")
    return usable[0][0]


def language_model(
    settings: AppSettings, context: RequestContext, models: LanguageModels, api: str | None = None
) -> str:
    """For a route that generates. `api`: as for `default_model`; None: it asks models of other servers by chats."""
    return default_model(settings, context, models.usable(context.principal.may_use), api or "chat")
