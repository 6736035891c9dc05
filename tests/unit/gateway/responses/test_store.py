"""What is kept of responses, whose it is, and what goes when there is no more room."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.errors import NotFoundError
from penstock.gateway.responses.store import ResponseStore

ROOM = 1 << 20


def text(role: str, said: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": said, "id": said[:9]}


def keep(store: ResponseStore, name: str, *, after: str | None = None, tenant: str = "", said: str = "") -> None:
    previous = None if after is None else store.get(after, tenant)
    response = {"id": name, "output": [text("assistant", said or f"{name} out")]}
    store.keep(tenant, response, [text("user", f"{name} in")], previous)


def names(store: ResponseStore, *tried: str) -> list[str]:
    """Those that are still there; looking at one counts as a use."""
    found = []
    for name in tried:
        try:
            store.get(name, "")
        except NotFoundError:
            continue
        found.append(name)
    return found


def test_a_conversation_is_that_of_all_responses_before() -> None:
    store = ResponseStore(9, ROOM, ROOM)
    keep(store, "a")
    keep(store, "b", after="a")
    keep(store, "c", after="b")
    said = [item.content for item in store.get("c", "").conversation()]
    assert said == ["a in", "a out", "b in", "b out", "c in", "c out"]
    assert [item["id"] for item in store.get("c", "").input_items()] == said[:-1]


def test_a_response_belongs_to_its_tenant() -> None:
    store = ResponseStore(9, ROOM, ROOM)
    keep(store, "a", tenant="red")
    for use in (store.get, store.delete):
        for other in ("blue", ""):
            with pytest.raises(NotFoundError):
                use("a", other)
    assert store.get("a", "red")


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(2, ROOM, ROOM)
    keep(store, "a")
    keep(store, "b")
    store.get("a", "")
    keep(store, "c")
    assert names(store, "a", "b", "c") == ["a", "c"]


def test_bytes_are_bounded_and_counted() -> None:
    store = ResponseStore(9, 10_000, ROOM)
    keep(store, "a", said="x" * 4000)
    alone = store.size
    assert 4000 < alone < 10_000
    keep(store, "b", said="x" * 4000)
    assert names(store, "a", "b") == ["b"]
    assert store.size == alone
    store.delete("b", "")
    assert (store.size, len(store)) == (0, 0)


@pytest.mark.parametrize("bounds", [(20_000, ROOM), (ROOM, 20_000)])
def test_one_that_is_too_large_leaves_the_others_alone(bounds: tuple[int, int]) -> None:
    store = ResponseStore(9, *bounds)
    keep(store, "a")
    keep(store, "b", said="x" * 20_000)
    assert names(store, "a", "b") == ["a"]


def test_what_went_on_from_a_response_keeps_it_and_counts_it() -> None:
    store = ResponseStore(9, ROOM, ROOM)
    keep(store, "a", said="x" * 5000)
    alone = store.size
    keep(store, "b", after="a")
    store.delete("a", "")
    assert store.size > alone, "its texts are still there"
    assert len(store.get("b", "").conversation()) == 4
    assert names(store, "a", "b") == ["b"]
