"""How long a request's prompt should stay in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.gateway.anthropic.schemas import Block, MessagesRequest
from penstock.gateway.front.context import RequestContext

_SECONDS = {None: 5 * 60, "5m": 5 * 60, "1h": 60 * 60}


def cache_retention(request: MessagesRequest, context: RequestContext) -> int:
    """In seconds: the longest that any `cache_control` names, for the whole prompt; 0 without any. One that is not of
    Anthropic's form is noted, and keeps nothing longer."""
    return max((_seconds(control, context) for control in _controls(request) if control is not None), default=0)


def _seconds(control: Any, context: RequestContext) -> int:
    is_known = isinstance(control, dict) and control.get("type") == "ephemeral"
    ttl = control.get("ttl") if is_known else ""
    if isinstance(ttl, str | None) and ttl in _SECONDS:
        return _SECONDS[ttl]
    context.ignore("cache_control", "its type is ephemeral, its ttl 5m or 1h.")
    return 0


def _controls(request: MessagesRequest) -> Iterator[Any]:
    yield request.cache_control
    for tool in request.tools or ():
        yield tool.get("cache_control")
    for content in (request.system, *(message.content for message in request.messages)):
        if isinstance(content, list):
            yield from _of_blocks(content)


def _of_blocks(blocks: Iterable[Block]) -> Iterator[Any]:
    """A tool's result has blocks of its own; those further below are not read."""
    for block in blocks:
        yield block.cache_control
        if isinstance(block.content, list):
            for inner in block.content:
                yield inner.cache_control
