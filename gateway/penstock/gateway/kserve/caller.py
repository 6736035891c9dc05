"""Who has sent a request, in the words of the models."""

from __future__ import annotations

from penstock.classic.messages import InferRequest
from penstock.gateway.front.context import RequestContext


def set_caller(request: InferRequest, context: RequestContext) -> None:
    request.caller = context
    request.tenant = context.tenant
    request.deadline = context.deadline
