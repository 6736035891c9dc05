"""Fields of the Messages API that ask for what this server does not do: some are refused, hints are noted. Each has the
values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.gateway.anthropic.schemas import MessagesRequest
from penstock.gateway.front.context import RequestContext

THREAD = "thread"
"""A conversation that the server keeps."""

UNSUPPORTED: Mapping[str, tuple[str, ...]] = {THREAD: ("null",)}

_HINTS: Mapping[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "context_management": (None, {}, {"edits": []}),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),  # either is what every request gets here
    "speed": (None, "standard"),
}


def note_hints(request: MessagesRequest, context: RequestContext) -> None:
    """Notes the hints that this server does not follow."""
    for name, neutral in _HINTS.items():
        if getattr(request, name) not in neutral:
            context.ignore(name, "this server does not do that.")


def user_id(request: MessagesRequest, context: RequestContext) -> str | None:
    """The only metadata that are used; those of another form are noted."""
    metadata = request.metadata
    user = metadata.get("user_id") if isinstance(metadata, dict) else metadata
    if user is None or (isinstance(metadata, dict) and isinstance(user, str)):
        return user
    context.ignore("metadata", "this is no object with a text as user_id.")
    return None
