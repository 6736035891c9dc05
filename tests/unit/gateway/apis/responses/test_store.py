"""What is kept of responses, whose it is, and what goes when there is no more room."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.apis.responses.bounds import ResponseBounds
from penstock.gateway.apis.responses.store import ResponseStore
from penstock.gateway.database import Database

ROOM = 1 << 20
BOUNDS = ResponseBounds(most=9, most_of_tenant=9, most_bytes=ROOM, most_bytes_of_tenant=ROOM, most_bytes_each=ROOM)


@pytest.fixture
def database() -> Iterator[Database]:
    made = Database(None)
    yield made
    made.close()


def new_store(database: Database, **bounds: int) -> ResponseStore:
    return ResponseStore(database, replace(BOUNDS, **bounds))


def text(role: str, said: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": said, "id": said[:9]}


async def keep(
    store: ResponseStore,
    name: str,
    *,
    after: str | None = None,
    tenant: str = "",
    said: str = "",
    is_open: bool = False,
) -> None:
    previous = None if after is None else await store.get(after, tenant)
    response = {"id": name, "output": [text("assistant", said or f"{name} out")]}
    body, items = msgspec.json.encode(response), msgspec.json.encode([text("user", f"{name} in")])
    store.keep(tenant, name, body, items, previous, is_open=is_open)


async def names(store: ResponseStore, *tried: str, tenant: str = "") -> list[str]:
    """Those that are still there; looking at one counts as a use."""
    found = []
    for name in tried:
        try:
            await store.find(name, tenant)
        except NotFoundError:
            continue
        found.append(name)
    return found


async def rows(database: Database) -> list[str]:
    """Of responses, also those that are only there for others' sake."""
    query = "SELECT id FROM responses ORDER BY id"
    return [row[0] for row in await database.run(lambda connection: connection.execute(query).fetchall())]


async def test_a_conversation_is_that_of_all_responses_before(database: Database) -> None:
    store = new_store(database)
    await keep(store, "a")
    await keep(store, "b", after="a")
    await keep(store, "c", after="b")
    last = await store.get("c", "")
    said = [item.content for item in last.conversation()]
    assert said == ["a in", "a out", "b in", "b out", "c in", "c out"]
    assert [item["id"] for item in last.input_items()] == said[:-1]


async def test_a_response_belongs_to_its_tenant(database: Database) -> None:
    store = new_store(database)
    await keep(store, "a", tenant="red")
    for use in (store.get, store.find, store.delete):
        for other in ("blue", ""):
            with pytest.raises(NotFoundError):
                await use("a", other)
    assert await store.get("a", "red")


async def test_the_one_that_was_not_used_for_longest_goes_first(database: Database) -> None:
    store = new_store(database, most=2)
    await keep(store, "a")
    await keep(store, "b")
    await store.get("a", "")
    await keep(store, "c")
    assert await names(store, "a", "b", "c") == ["a", "c"]


async def test_others_do_not_lose_theirs_to_a_tenant_that_keeps_much(database: Database) -> None:
    store = new_store(database, most_of_tenant=2)
    await keep(store, "mine", tenant="red")
    for name in "abc":
        await keep(store, name, tenant="blue")
    assert await names(store, "mine", tenant="red") == ["mine"]
    assert await names(store, "a", "b", "c", tenant="blue") == ["b", "c"]
    small = new_store(database, most_bytes_of_tenant=9000)
    await keep(small, "d", tenant="blue", said="x" * 5000)
    assert await names(small, "b", "c", "d", tenant="blue") == ["d"]
    assert await names(small, "mine", tenant="red") == ["mine"]


async def test_bytes_are_bounded(database: Database) -> None:
    store = new_store(database, most_bytes=10_000)
    await keep(store, "a", said="x" * 4000)
    await keep(store, "b", said="x" * 4000)
    assert await names(store, "a", "b") == ["b"]
    assert await rows(database) == ["b"]


def test_one_that_is_too_large_does_not_fit(database: Database) -> None:
    store = new_store(database, most_bytes_each=20_000)
    assert store.fits(10_000, None)
    assert not store.fits(20_000, None)


async def test_those_before_a_response_count_for_what_fits(database: Database) -> None:
    store = new_store(database, most_bytes_each=20_000)
    await keep(store, "a", said="x" * 10_000)
    assert store.fits(10_000, None)
    assert not store.fits(10_000, await store.get("a", ""))


async def test_what_went_on_from_a_response_keeps_it(database: Database) -> None:
    store = new_store(database)
    await keep(store, "a")
    await keep(store, "b", after="a")
    await keep(store, "c", after="b")
    await store.delete("a", "")
    await store.delete("b", "")
    assert await names(store, "a", "b", "c") == ["c"]
    assert len((await store.get("c", "")).conversation()) == 6
    await store.delete("c", "")
    assert await rows(database) == []


async def test_what_a_request_goes_on_from_may_be_deleted_meanwhile(database: Database) -> None:
    store = new_store(database)
    await keep(store, "a")
    await keep(store, "b", after="a")
    previous = await store.get("b", "")
    await store.delete("a", "")
    await store.delete("b", "")
    store.keep("", "c", msgspec.json.encode({"output": []}), msgspec.json.encode([text("user", "c in")]), previous)
    said = [item.content for item in (await store.get("c", "")).conversation()]
    assert said == ["a in", "a out", "b in", "b out", "c in"]


async def test_one_that_is_being_made_stays_and_cannot_be_gone_on_from(database: Database) -> None:
    store = new_store(database, most=1)
    await keep(store, "a", is_open=True)
    await keep(store, "b")
    assert await names(store, "a", "b") == ["a"]
    with pytest.raises(InvalidRequestError, match="still being made"):
        await store.get("a", "")
    store.end("", "a", b'{"output": []}')
    assert (await store.get("a", "")).response == {"output": []}


async def test_what_is_too_old_is_deleted(database: Database) -> None:
    store = new_store(database)
    for name in "ab":
        await keep(store, name, is_open=name == "b")
    await store.delete_old(time.time() - 100)
    assert await names(store, "a", "b") == ["a", "b"]
    await store.delete_old(time.time() + 100)
    assert await names(store, "a", "b") == ["b"]


async def test_a_restart_keeps_what_has_ended_and_fails_the_rest(tmp_path: Path) -> None:
    first = Database(tmp_path / "db")
    store = new_store(first)
    await keep(store, "a")
    await keep(store, "b", after="a", is_open=True)
    first.close()
    second = Database(tmp_path / "db")
    store = new_store(second)
    assert len((await store.get("a", "")).conversation()) == 2
    failed = msgspec.json.decode(await store.find("b", ""))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "stopped" in failed["error"]["message"]
    second.close()


async def test_a_failing_disk_is_told_in_the_log(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    store = new_store(database)
    await database.run(lambda connection: connection.execute("DROP TABLE responses") and None)
    await keep(store, "a")
    with pytest.raises(sqlite3.OperationalError):
        await store.find("a", "")
    assert "response a could not be kept" in caplog.text


async def test_the_loop_does_not_wait_for_the_database(database: Database) -> None:
    """What was asked for first is done first, however long it takes."""
    store, hold = new_store(database), asyncio.Event()
    loop = asyncio.get_running_loop()
    held = database.submit(lambda _: asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(20), "held")
    await keep(store, "a")
    reading = asyncio.ensure_future(store.find("a", ""))
    await asyncio.sleep(0)
    assert not reading.done()
    hold.set()
    assert await reading
    assert held.done()


async def test_an_end_that_a_full_disk_refuses_is_written_later(database: Database) -> None:
    store = new_store(database)
    await keep(store, "a", is_open=True)
    refuse = "CREATE TRIGGER full BEFORE UPDATE OF open ON responses BEGIN SELECT raise(ABORT, 'disk is full'); END"
    await database.run(lambda connection: connection.execute(refuse) and None)
    with pytest.raises(sqlite3.Error, match="disk is full"):
        await asyncio.wrap_future(store.end("", "a", b'{"status": "completed"}'))
    await database.run(lambda connection: connection.execute("DROP TRIGGER full") and None)
    assert await store.find("a", "") == b'{"status": "completed"}'
    assert (await store.get("a", "")).id == "a", "it is not being made any more"
    assert not store._ends
