"""Files and batches without a server: what happens while models load, when the disk fails, and after a kill -9."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import EngineDeadError, InvalidRequestError, NotFoundError, OverloadedError
from penstock.gateway.apis.batches import batch_store
from penstock.gateway.apis.batches import lines as batch_lines
from penstock.gateway.apis.batches import service as runner
from penstock.gateway.apis.batches.batch_store import StoredBatch
from penstock.gateway.apis.batches.file_store import FileBounds
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.database import Database
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

URL = "/v1/completions"
BOUNDS = FileBounds(bytes=100_000, bytes_of_tenant=60_000, files_of_tenant=20, retention=None)


class Model:
    """The endpoint that answers lines."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.no_room_for = ""
        """First letters of prompts."""
        self.kills = ""
        """First letters of prompts that end the engine, and with it all others that it works on."""
        self.num_deaths = 0
        self.open = asyncio.Event()
        self.open.set()
        self._working: list[asyncio.Event] = []
        """For each prompt, whether its engine has died."""

    async def __call__(self, exchange: Exchange) -> None:
        prompt = json.loads(await exchange.read(1 << 20))["prompt"]
        self.asked.append(prompt)
        if await self._died(prompt):
            raise EngineDeadError("The engine died while it worked on this request.")
        status = 503 if prompt[0] in self.no_room_for else 200
        await exchange.respond(status, b"{}")

    async def _died(self, prompt: str) -> bool:
        if prompt[0] in self.kills:
            self.num_deaths += 1
            for died in self._working:
                died.set()
            return True
        died = asyncio.Event()
        self._working.append(died)
        waits = [asyncio.ensure_future(event.wait()) for event in (self.open, died)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._working.remove(died)
            for wait in waits:
                wait.cancel()
        return died.is_set()


@pytest.fixture
def model() -> Model:
    return Model()


def new_service(folder: Path, model: Model, bounds: FileBounds = BOUNDS) -> BatchService:
    return BatchService(folder, Database(folder / "penstock.sqlite"), bounds, 4, {URL: model}, AppSettings())


def close(service: BatchService) -> None:
    service.batches._database.close()


@pytest.fixture
async def service(tmp_path: Path, model: Model) -> AsyncIterator[BatchService]:
    made = new_service(tmp_path, model)
    yield made
    await made.stop()
    close(made)


async def uploaded(service: BatchService, *names: str, tenant: str = "") -> str:
    lines = [{"custom_id": name, "url": URL, "body": {"prompt": name}} for name in names]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return (await service.files.add(tenant, "in.jsonl", "batch", io.BytesIO(content))).id


async def test_other_users_of_the_machine_can_read_neither_files_nor_the_database(tmp_path: Path, model: Model) -> None:
    umask = os.umask(0o022)  # that of most machines
    try:
        service = new_service(tmp_path, model)  # in a folder that others may look into
        await uploaded(service, "secret")
        await created(service, "another")
        await service.stop()
        entries = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        close(service)
    finally:
        os.umask(umask)
    assert entries.pop("files") == 0o700
    assert {name: oct(mode) for name, mode in entries.items() if mode & 0o077} == {}


async def created(service: BatchService, *names: str, **options: Any) -> StoredBatch:
    batch_id, file_id = f"batch_{uuid.uuid4().hex}", await uploaded(service, *names)
    fields = {"tenant": "", "models": None, "window_s": 3600.0} | options
    batch = StoredBatch(id=batch_id, endpoint=URL, input_file_id=file_id, **fields)
    await service.batches.add(batch)
    service.runner.begin(batch)
    return batch


async def ended(service: BatchService, batch: StoredBatch) -> StoredBatch:
    async with asyncio.timeout(20):
        while (found := await service.batches.find("", batch.id)).is_open:
            await asyncio.sleep(0)
    return found


async def written(service: BatchService) -> list[str]:
    return [file.filename for file in await service.files.of_tenant("", "batch_output")]


async def test_a_batch_that_is_created_while_models_load_waits_for_them(service: BatchService, model: Model) -> None:
    batch = await created(service, "a", "b")
    for _ in range(50):
        await asyncio.sleep(0)
    assert not model.asked
    with pytest.raises(InvalidRequestError, match="has not ended"):
        await service.files.delete("", batch.input_file_id)
    await service.start()
    assert (await ended(service, batch)).status == "completed"
    assert model.asked == ["a", "b"], "each once"
    await service.files.delete("", batch.input_file_id)


async def test_nothing_begins_once_the_server_ends(service: BatchService, model: Model) -> None:
    await service.start()
    await service.stop()
    batch = await created(service, "a")
    assert service.runner.find(batch.id) is None
    assert (await service.batches.find("", batch.id)).is_open, "it is for the next server"


async def test_results_that_the_disk_refuses_are_asked_again(
    service: BatchService, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_DISK_AGAIN_AFTER_S", 0.0)
    keep, left = service.batches.keep_results, [sqlite3.OperationalError("database or disk is full")]

    async def refuse_once(*args: Any, **options: Any) -> None:
        if left:
            raise left.pop()
        await keep(*args, **options)

    monkeypatch.setattr(service.batches, "keep_results", refuse_once)
    await service.start()
    found = await ended(service, await created(service, *"abcdefgh"))
    assert (found.status, found.completed, found.errors) == ("completed", 8, [])
    again = await ended(service, await created(service, *"abcdefgh"))
    assert again.status == "completed", "no seat was lost"


async def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing_there(service: BatchService, tmp_path: Path) -> None:
    class TooLarge(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if data := super().read(4):
                return data
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await service.files.add("", "in.jsonl", "batch", TooLarge(b"some lines"))
    assert not list((tmp_path / "files").iterdir())


async def test_lines_that_find_no_room_keep_no_others_waiting(
    service: BatchService, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_AGAIN_AFTER_S", 0.001)
    model.no_room_for = "x"
    await service.start()
    stuck = await created(service, *[f"x{number}" for number in range(9)])
    async with asyncio.timeout(20):
        while len(model.asked) < 9:
            await asyncio.sleep(0)
    other = await created(service, "a", "b")
    assert (await ended(service, other)).completed == 2
    assert len({name for name in model.asked if name[0] == "x"}) <= 4, "more lines than that are not read"
    model.no_room_for = ""
    assert (await ended(service, stuck)).completed == 9
    again = await ended(service, await created(service, *"abcdefgh"))
    assert again.completed == 8, "no seat was lost"


async def test_a_line_that_kills_engines_fails_and_the_others_are_answered(
    service: BatchService, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_AGAIN_AFTER_S", 0.001)
    model.kills = "x"
    model.open.clear()
    await service.start()
    batch = await created(service, "a", "b", "c", "x", "d")
    async with asyncio.timeout(20):
        while not model.num_deaths:
            await asyncio.sleep(0)
    model.open.set()
    found = await ended(service, batch)
    assert (found.status, found.completed, found.failed) == ("completed", 4, 1)
    assert model.num_deaths == 3
    assert found.error_file_id is not None
    [result] = map(json.loads, service.files.contents.open(found.error_file_id))
    assert (result["custom_id"], result["response"]["status_code"]) == ("x", 503)
    assert result["response"]["body"]["error"]["code"] == "engine_dead"
    assert not await service.batches.deaths(batch.id), "they are forgotten with the results"


async def test_deaths_of_engines_are_counted_beyond_a_restart(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_AGAIN_AFTER_S", 0.001)
    model.kills = "x"
    first = new_service(tmp_path, model)
    await first.start()
    batch = await created(first, "x")
    async with asyncio.timeout(20):
        while not await first.batches.deaths(batch.id):
            await asyncio.sleep(0)
    await first.stop()
    counted = sum((await first.batches.deaths(batch.id)).values())
    close(first)
    before = len(model.asked)
    second = new_service(tmp_path, model)
    await second.start()
    assert (await ended(second, batch)).failed == 1
    assert len(model.asked) == before + 3 - counted
    await second.stop()
    close(second)


async def test_a_line_is_read_when_there_is_a_seat_for_it(
    service: BatchService, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines may have megabytes, and a server thousands of open batches."""
    read: list[int] = []

    def reading(*given: Any) -> Iterator[batch_lines.BatchLine]:
        for line in batch_lines.read_lines(*given):
            read.append(line.number)
            yield line

    monkeypatch.setattr(runner, "read_lines", reading)
    model.open.clear()
    await service.start()
    batches = [await created(service, *"abcdefgh") for _ in range(3)]
    async with asyncio.timeout(20):
        while len(model.asked) < 4:
            await asyncio.sleep(0)
    assert len(read) == 4
    model.open.set()
    assert [(await ended(service, batch)).completed for batch in batches] == [8, 8, 8]


async def test_a_batch_whose_input_is_gone_fails(service: BatchService) -> None:
    batch = await created(service, "a")
    service.files.contents.delete(batch.input_file_id)
    await service.start()
    found = await ended(service, batch)
    assert (found.status, [error["code"] for error in found.errors]) == ("failed", ["server_error"])


@pytest.mark.parametrize(("window_s", "end"), [(3600.0, "completed"), (0.0, "expired")])
async def test_a_server_killed_while_it_writes_the_files_writes_them_again(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, window_s: float, end: str
) -> None:
    first = new_service(tmp_path, model)
    enter = first.runner._enter

    async def die_before_the_end(batch: StoredBatch, status: Any) -> None:
        if status in ("completed", "expired"):
            await asyncio.Event().wait()
        await enter(batch, status)

    monkeypatch.setattr(first.runner, "_enter", die_before_the_end)
    await first.start()
    batch = await created(first, "a", "b", window_s=window_s)
    async with asyncio.timeout(20):
        while not await written(first):
            await asyncio.sleep(0)
    before = await written(first)
    await first.stop()
    close(first)
    second = new_service(tmp_path, model)
    await second.start()
    found = await ended(second, batch)
    assert found.status == end
    assert found.unanswered == (2 if end == "expired" else 0)
    assert found.output_file_id or found.error_file_id
    assert await written(second) == before, "one file, not two"
    await second.stop()
    close(second)


async def test_what_a_killed_server_has_left_is_deleted_at_the_start(tmp_path: Path, model: Model) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("file-of-no-entry", "file-torn.part"):
        (folder / name).write_bytes(b"x")
    service = new_service(tmp_path, model)
    kept = await uploaded(service, "a")
    await service.start()
    assert [path.name for path in folder.iterdir()] == [kept]
    await service.stop()
    close(service)


async def test_a_tenant_cannot_take_the_room_of_others(service: BatchService) -> None:
    async def add(tenant: str, size: int) -> None:
        await service.files.add(tenant, "x", "batch", io.BytesIO(b"x" * size))

    await add("a", 50_000)
    with pytest.raises(OverloadedError, match="room"):
        await add("a", 20_000)
    await add("b", 50_000)
    for tenant in ("b", "c"):
        with pytest.raises(OverloadedError, match="room"):
            await service.files.check_room(tenant, 1, 1)


async def test_files_without_bytes_are_counted(service: BatchService) -> None:
    for _ in range(BOUNDS.files_of_tenant):
        await service.files.add("a", "x", "batch", io.BytesIO())
    with pytest.raises(OverloadedError, match="20 files"):
        await service.files.add("a", "x", "batch", io.BytesIO())
    await service.files.check_room("a", 0, 0)
    await service.files.add("b", "x", "batch", io.BytesIO())


async def test_after_its_time_everything_goes_that_is_not_in_use(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(tmp_path, model, FileBounds(10_000, 10_000, 20, retention=100.0))
    await service.start()
    old = await ended(service, await created(service, "a"))
    model.open.clear()
    running = await created(service, "b", window_s=1e6)
    now = runner.time.time()
    monkeypatch.setattr(runner.time, "time", lambda: now + 200)
    await service.files.delete_expired()
    await service.batches.delete_ended(now + 100)
    with pytest.raises(NotFoundError):
        await service.batches.find("", old.id)
    left = [path.name for path in (tmp_path / "files").iterdir()]
    assert left == [running.input_file_id]
    assert (await service.batches.find("", running.id)).is_open
    await service.stop()
    close(service)


async def test_a_tenant_has_so_many_open_batches(service: BatchService) -> None:
    service.batches._most_open_of_tenant = 2
    for _ in range(2):
        await created(service, "a")
    with pytest.raises(OverloadedError, match="have not ended"):
        await created(service, "a")
    await created(service, "a", tenant="other")


async def test_a_tenant_keeps_so_many_ended_batches(service: BatchService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "_MOST_ENDED_OF_TENANT", 2)
    other = StoredBatch(id="other", tenant="other", models=None, endpoint=URL, input_file_id="", window_s=1.0)
    await service.batches.add(other)
    other.enter("failed")
    await service.batches.save(other)
    await service.start()
    made = [await ended(service, await created(service, "a")) for _ in range(3)]
    made.append(await created(service, "a"))
    assert await service.batches.ids("", "") == [batch.id for batch in made[1:]]
    assert await service.batches.ids("other", "") == ["other"]
