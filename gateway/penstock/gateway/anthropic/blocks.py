"""Content blocks of requests, and the text that a model reads of them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.anthropic.schemas import Block
from penstock.gateway.front.context import RequestContext

IMAGE_NOTE = "[image left out: only text is read here]"
"""Stands for an image, which is neither fetched nor decoded."""
DOCUMENT_NOTE = "[document left out: only text is read here]"
"""Stands for a PDF, and for a document that is somewhere else."""
_OUTPUTS = ("stdout", "stderr", "error_code")
"""Of what a tool of Anthropic's servers has returned."""
_AS_THEY_ARE = frozenset({"text", "document", "search_result", "tool_reference", "tool_result"})
"""Blocks whose text is all that there is of them. That others have become text, or nothing, is noted."""


def block_text(block: Block, where: str, context: RequestContext) -> str | None:
    """What a model reads of a block, whatever its type; None: it has no text. Notes what is lost, as all below."""
    if block.type == "text":
        return block.text or ""
    if block.type == "image":
        context.ignore(where, "images are not read here: a note stands for it.")
        return IMAGE_NOTE
    found = [block.title, block.context, block.url, block.tool_name, block.text]
    texts = [each for each in found if isinstance(each, str) and each]
    texts += _source_texts(block, where, context)
    texts += content_texts(block.content, f"{where}.content", context)
    if block.type not in _AS_THEY_ARE:
        context.ignore(where, "blocks of this type are shown as their text, or left out where they have none.")
    return "\n".join(texts) if texts else None


def content_texts(content: str | list[Block] | dict[str, Any] | None, where: str, context: RequestContext) -> list[str]:
    """What a model reads of a block's own content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        return _returned_texts(content, where, context)
    found = [block_text(block, f"{where}[{number}]", context) for number, block in enumerate(content)]
    return [text for text in found if text is not None]


def _source_texts(block: Block, where: str, context: RequestContext) -> list[str]:
    """Of a document its text, of a search result where it is from."""
    source = block.source
    if isinstance(source, str):
        return [source]
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text" and isinstance(source.get("data"), str):
        return [source["data"]]
    if kind == "content":
        return _raw_texts(source.get("content"), f"{where}.source.content", context)
    if block.type != "document":
        return []
    context.ignore(f"{where}.source", "documents other than text are not read here: a note stands for it.")
    return [DOCUMENT_NOTE]


def _returned_texts(returned: dict[str, Any], where: str, context: RequestContext) -> list[str]:
    outputs = [returned.get(name) for name in _OUTPUTS]
    texts = [each for each in outputs if isinstance(each, str) and each]
    return texts + _raw_texts([returned], where, context)


def _raw_texts(content: Any, where: str, context: RequestContext) -> list[str]:
    """Of content that was not read as blocks yet."""
    try:
        return content_texts(msgspec.convert(content, str | list[Block] | None), where, context)
    except msgspec.ValidationError:
        context.ignore(where, "this is no content, and left out.")
        return []
