"""Who has sent a request, in the words of the models."""

from __future__ import annotations

from penstock.classic.messages import InferRequest
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Stage


def set_caller(request: InferRequest, context: RequestContext, model: str) -> None:
    """`model` has this name and will get the request. Raises PermissionDeniedError where the caller may not use it."""
    context.principal.require_model(model)
    context.record.model = model
    context.record.enter(Stage.MODEL)
    request.caller = context
    request.tenant = context.tenant
    request.deadline = context.deadline
