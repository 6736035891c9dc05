"""Lists in pages: OpenAI's have `limit` and `after`, the id of the last one seen; Anthropic's have `after_id` and
`before_id` in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.errors import InvalidRequestError

QUERY = ("limit", "order", "after")
"""What `page` reads."""


def page(
    items: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, default: int, most: int, order: str = "desc"
) -> dict[str, Any]:
    """The list object. `items` have ids, the oldest first; `order` is the default one. Raises InvalidRequestError."""
    limit, order = page_limit(query.get("limit"), default, most), query.get("order", order)
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc.", param="order")
    left = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in left]
        if after not in ids:
            raise InvalidRequestError("after names nothing in this list.", param="after")
        left = left[ids.index(after) + 1 :]
    shown = left[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": shown, **ends, "has_more": len(left) > limit}


def ids_between(ids: Sequence[str], query: Mapping[str, str], *, default: int, most: int) -> tuple[Sequence[str], bool]:
    """Anthropic's pages: the ids behind `after_id`, or those that end before `before_id`, and whether there are more in
    that direction. Raises InvalidRequestError."""
    limit = page_limit(query.get("limit"), default, most)
    first, end = _position(ids, query, "after_id", -1) + 1, _position(ids, query, "before_id", len(ids))
    if "before_id" in query and "after_id" not in query:
        begin = max(first, end - limit)
        return ids[begin:end], begin > first
    return ids[first:end][:limit], end - first > limit


def _position(ids: Sequence[str], query: Mapping[str, str], name: str, default: int) -> int:
    item_id = query.get(name)
    if item_id is None:
        return default
    if item_id not in ids:
        raise InvalidRequestError(f"{name} names nothing in this list.", param=name)
    return ids.index(item_id)


def page_limit(text: str | None, default: int, most: int) -> int:
    """Raises InvalidRequestError."""
    if text is None:
        return default
    if not (text.isdecimal() and text.isascii() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit must be between 1 and {most}.", param="limit")
    return int(text)
