"""Content blocks of requests, and the text that a model reads of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.gateway.anthropic.schemas import Block
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import media_note

_TEXTS = ("title", "context", "url", "tool_name", "text", "stdout", "stderr", "error_code")
"""Fields with text, of blocks that other blocks hold and of what tools of Anthropic's servers return."""
_AS_THEY_ARE = frozenset({"document", "image", "search_result", "tool_reference", "tool_result"})
"""Blocks of which all is shown, or a note says what is not. That others have become text, or nothing, is noted."""


def block_text(block: Block, where: str, context: RequestContext) -> str | None:
    """What a model reads of a block, whatever its type; None: it has no text. Notes what is lost, as all below."""
    if block.type == "text":
        return block.text or ""
    if block.type not in _AS_THEY_ARE:
        context.ignore(where, "blocks of this type are shown as their text, or left out where they have none.")
    texts = (block.title, block.context, block.url, block.tool_name, block.text)
    return _text(block.type, texts, block.source, block.content, where, context)


def content_texts(content: Any, where: str, context: RequestContext) -> list[str]:
    """What a model reads of a block's own content: a text, blocks, or the object that a tool has returned."""
    if isinstance(content, str):
        return [content]
    blocks = [content] if isinstance(content, dict) else content if isinstance(content, list) else []
    found = [_inner_text(block, f"{where}[{number}]", context) for number, block in enumerate(blocks)]
    return [text for text in found if text is not None]


def _inner_text(block: Any, where: str, context: RequestContext) -> str | None:
    """`block`: one that was read as such, or of any type."""
    if isinstance(block, Block):
        return block_text(block, where, context)
    if not isinstance(block, dict):
        context.ignore(where, "this is no block, and left out.")
        return None
    texts = [block.get(name) for name in _TEXTS]
    return _text(block.get("type"), texts, block.get("source"), block.get("content"), where, context)


def _text(
    kind: Any, texts: Iterable[Any], source: Any, content: Any, where: str, context: RequestContext
) -> str | None:
    if kind == "image":
        context.ignore(where, "this model reads text only: a note stands for the image.")
        return media_note("image")
    found = [text for text in texts if isinstance(text, str) and text]
    if source is not None or kind == "document":
        found += _source_texts(kind, source, f"{where}.source", context)
    if content is not None:
        found += content_texts(content, f"{where}.content", context)
    return "\n".join(found) if found else None


def _source_texts(kind: Any, source: Any, where: str, context: RequestContext) -> list[str]:
    """Of a document its text, of a search result where it is from."""
    if isinstance(source, str):
        return [source]
    form = source.get("type") if isinstance(source, dict) else None
    if form == "text" and isinstance(source.get("data"), str):
        return [source["data"]]
    if form == "content":
        return content_texts(source.get("content"), f"{where}.content", context)
    if kind != "document":
        return []
    context.ignore(where, "this model reads text only: a note stands for the document.")
    return [media_note("document")]
