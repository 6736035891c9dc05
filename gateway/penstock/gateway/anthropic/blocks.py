"""Content blocks of requests."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.schemas import Block

_BY_ROLE = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
}
_ELSEWHERE = frozenset(
    {
        "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result", "compaction",
        "container_upload", "document", "image", "mcp_tool_result", "mcp_tool_use", "search_result", "server_tool_use",
        "text_editor_code_execution_tool_result", "tool_reference", "tool_search_tool_result", "web_fetch_tool_result",
        "web_search_tool_result",
    }
)  # fmt: skip
"""Types that Anthropic's servers know."""
_ALL = frozenset.union(*_BY_ROLE.values())


def checked_blocks(content: str | list[Block], role: str, where: str) -> list[tuple[Block, str]]:
    """The blocks, each with its place in the request. Raises InvalidRequestError for types that this role cannot have,
    UnsupportedError for those that this server does not take."""
    if isinstance(content, str):
        return [(Block("text", content), where)]
    found = [(block, f"{where}[{number}]") for number, block in enumerate(content)]
    for block, place in found:
        if block.type in _BY_ROLE[role]:
            continue
        if block.type in _ELSEWHERE:
            raise UnsupportedError(f"{place}: blocks of type '{block.type}' are not supported.", param=place)
        if block.type in _ALL:
            raise InvalidRequestError(f"{place}: {role} content has no blocks of type '{block.type}'.", param=place)
        raise InvalidRequestError(f"{place}.type: no such type of content block.", param=f"{place}.type")
    return found


def field(block: Block, name: str, where: str) -> Any:
    """Raises InvalidRequestError where the block does not have it."""
    value = getattr(block, name)
    if value is None:
        raise InvalidRequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
    return value


def texts(found: list[tuple[Block, str]]) -> list[str]:
    """Of the text blocks."""
    return [field(block, "text", place) for block, place in found if block.type == "text"]
