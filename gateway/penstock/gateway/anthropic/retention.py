"""How long a request's prompt should stay in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from penstock.gateway.anthropic.schemas import Block, CacheControl, MessagesRequest

_SECONDS = {"5m": 5 * 60, "1h": 60 * 60}
_DEFAULT = "5m"


def cache_retention(request: MessagesRequest) -> int:
    """In seconds: the longest that any `cache_control` names, for the whole prompt; 0 without any. The tools are
    checked already."""
    return max((_SECONDS[control.ttl or _DEFAULT] for control in _controls(request) if control is not None), default=0)


def _controls(request: MessagesRequest) -> Iterator[CacheControl | None]:
    yield request.cache_control
    for tool in request.tools or ():
        yield msgspec.convert(tool.get("cache_control"), CacheControl | None)
    for content in (request.system, *(message.content for message in request.messages)):
        if isinstance(content, list):
            yield from _of_blocks(content)


def _of_blocks(blocks: Iterable[Block]) -> Iterator[CacheControl | None]:
    """A tool's result has blocks of its own, and no more below."""
    for block in blocks:
        yield block.cache_control
        if isinstance(block.content, list):
            for inner in block.content:
                yield inner.cache_control
