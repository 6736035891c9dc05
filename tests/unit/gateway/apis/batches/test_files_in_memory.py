"""Files and batches of a server without a folder: their bounds, what they free, and what is lost at the end."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.formparsers import MultiPartParser

from penstock.engines.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.gateway.apis.batches.batch_store import StoredBatch
from penstock.gateway.apis.batches.file_store import FileBounds
from penstock.gateway.apis.batches.lines import BatchLine, least_result, unanswered
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.database import Database
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane

URL = "/v1/completions"
MEMORY = 100_000
BOUNDS = FileBounds(bytes=MEMORY, bytes_of_tenant=60_000, files_of_tenant=20, retention=3600.0)


class Model:
    """The endpoint that answers lines."""

    def __init__(self) -> None:
        self.answer = b"{}"
        self.num_asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, exchange: Exchange) -> None:
        self.num_asked += 1
        await self.open.wait()
        await exchange.respond(200, self.answer)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def service(model: Model, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BatchService]:
    def refuse(*given: object, **options: object) -> None:
        raise AssertionError("nothing goes to a temporary folder")

    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp", "_get_candidate_names"):
        monkeypatch.setattr(tempfile, name, refuse)
    monkeypatch.setattr(MultiPartParser, "spool_max_size", 1_000)
    made = BatchService(None, Database(None), BOUNDS, 4, {URL: model}, AppSettings())
    await made.start()
    yield made
    await made.stop()
    made.batches._database.close()


async def added(service: BatchService, content: bytes, tenant: str = "a") -> str:
    return (await service.files.add(tenant, "in.jsonl", "batch", io.BytesIO(content))).id


async def room_left(service: BatchService, tenant: str) -> int:
    """Bytes of a file that the tenant could add now."""
    least, most = 0, MEMORY
    while least < most:
        middle = (least + most + 1) // 2
        try:
            await service.files.check_room(tenant, 1, middle)
            least = middle
        except OverloadedError:
            most = middle - 1
    return least


def lines(*names: str) -> bytes:
    fields = [{"custom_id": name, "url": URL, "body": {"prompt": name}} for name in names]
    return "".join(json.dumps(each) + "\n" for each in fields).encode()


async def created(service: BatchService, content: bytes, tenant: str = "a", **options: Any) -> StoredBatch:
    file_id, batch_id = await added(service, content, tenant), f"batch_{uuid.uuid4().hex}"
    fields = {"models": None, "window_s": 3600.0} | options
    batch = StoredBatch(id=batch_id, tenant=tenant, endpoint=URL, input_file_id=file_id, **fields)
    await service.batches.add(batch)
    service.runner.begin(batch)
    return batch


async def ended(service: BatchService, batch: StoredBatch) -> StoredBatch:
    async with asyncio.timeout(20):
        while (found := await service.batches.find(batch.tenant, batch.id)).is_open:
            await asyncio.sleep(0)
    return found


def results(service: BatchService, file_id: str | None) -> list[Any]:
    assert file_id is not None
    with service.files.contents.open(file_id) as file:
        return [json.loads(text) for text in file]


async def upload(
    service: BatchService, content: bytes, headers: dict[str, str] | None = None, purpose: str = "batch"
) -> AsgiCall:
    part = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    form = part % (b"purpose", purpose.encode()) + part % (b'file"; filename="a', content) + b"--x--\r\n"
    app = build_app(FakeDataPlane(), AppSettings(), batches=service)
    kind = {"content-type": "multipart/form-data; boundary=x"}
    return await call(app, "/v1/files", form, headers=kind | (headers or {}))


async def test_a_batch_is_answered_and_its_objects_say_that_they_are_volatile(service: BatchService) -> None:
    batch = await ended(service, await created(service, lines("a", "b", "c"), volatile=True))
    assert (batch.status, batch.completed) == ("completed", 3)
    assert [each["custom_id"] for each in results(service, batch.output_file_id)] == ["a", "b", "c"]
    assert batch.shown()["volatile"] is True
    for file in await service.files.of_tenant("a", None):
        assert file.shown()["volatile"] is True
        assert file.shown()["expires_at"] is not None


async def test_uploads_are_told_once_that_they_are_lost(
    service: BatchService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    answers = [await upload(service, b"x" * 20_000) for _ in range(2)]
    assert [(answer.status, answer.json()["volatile"]) for answer in answers] == [(200, True)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "files and batches are in memory until the server ends; --data-dir keeps them"
    ]


async def test_what_can_never_fit_is_refused_before_it_is_read(service: BatchService) -> None:
    size = BOUNDS.bytes_of_tenant + (64 << 10)
    announced = await upload(service, b"", {"content-length": str(size + 1)})
    assert (announced.status, announced.json()["error"]["param"]) == (413, "file")
    assert announced.unread
    assert (await upload(service, b"x" * size)).status == 413
    assert (await upload(service, b"x" * (BOUNDS.bytes_of_tenant + 1))).status == 413
    assert await service.files.of_tenant("", None) == []


async def test_a_file_that_finds_no_room_takes_none(service: BatchService) -> None:
    before = await room_left(service, "a")
    await added(service, b"x" * 50_000, "b")
    await added(service, b"x" * 40_000)
    with pytest.raises(OverloadedError, match="--data-memory"):
        await added(service, b"x" * 20_000)
    for file in await service.files.of_tenant("a", None):
        await service.files.delete("a", file.id)
    for file in await service.files.of_tenant("b", None):
        await service.files.delete("b", file.id)
    assert await room_left(service, "a") == before
    assert not service.files.contents.names()


async def test_files_without_bytes_are_bounded_in_number_and_take_room(service: BatchService) -> None:
    before = await room_left(service, "b")
    for _ in range(BOUNDS.files_of_tenant):
        await added(service, b"")
    with pytest.raises(OverloadedError, match="20 files"):
        await added(service, b"")
    for tenant in ("c", "d", "e"):
        for _ in range(BOUNDS.files_of_tenant):
            await added(service, b"", tenant)
    assert before == BOUNDS.bytes_of_tenant
    assert await room_left(service, "b") < 20_000, "nobody can fill the memory with entries"


async def test_other_tenants_find_neither_files_nor_batches(service: BatchService) -> None:
    batch = await ended(service, await created(service, lines("a")))
    for file_id in (batch.input_file_id, batch.output_file_id or ""):
        with pytest.raises(NotFoundError):
            await service.files.find("b", file_id)
        with pytest.raises(NotFoundError):
            await service.files.delete("b", file_id)
    with pytest.raises(NotFoundError):
        await service.batches.find("b", batch.id)
    assert await service.batches.ids("b", "") == []


async def test_files_for_models_are_those_of_the_tenant_and_purpose(service: BatchService) -> None:
    stored = await service.files.add("a", "a.png", "vision", io.BytesIO(b"picture"))
    assert await service.files.image("a", stored.id, 7, "input") == b"picture"
    with pytest.raises(NotFoundError):
        await service.files.image("b", stored.id, 7, "input")
    with pytest.raises(InvalidRequestError, match="more than 6 bytes"):
        await service.files.image("a", stored.id, 6, "input")
    with pytest.raises(InvalidRequestError, match="purpose must be user_data or vision"):
        await service.files.image("a", await added(service, b"x"), 7, "input")


@pytest.mark.parametrize(("purpose", "status"), [("vision", 200), ("user_data", 200), ("evals", 400), ("poetry", 400)])
async def test_purposes(purpose: str, status: int, service: BatchService) -> None:
    answer = await upload(service, b"x", purpose=purpose)
    assert answer.status == status
    assert answer.json().get("purpose", purpose) == purpose


async def test_a_batch_keeps_the_file_that_it_reads(
    service: BatchService, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.open.clear()
    batch = await created(service, lines(*map(str, range(10))))
    async with asyncio.timeout(20):
        while not model.num_asked:
            await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="has not ended"):
        await service.files.delete("a", batch.input_file_id)
    now = batch.created
    monkeypatch.setattr("penstock.gateway.apis.batches.file_store.time.time", lambda: now + 4000.0)
    await service.files.delete_expired()
    model.open.set()
    assert (await ended(service, batch)).completed == 10
    await service.files.delete_expired()
    assert batch.input_file_id not in service.files.contents.names()


async def test_a_download_of_a_file_that_is_deleted_ends(service: BatchService) -> None:
    file_id = await added(service, b"x" * 50_000)
    with service.files.contents.open(file_id) as file:
        assert file.read(10) == b"x" * 10
        await service.files.delete("a", file_id)
        with pytest.raises(NotFoundError, match="deleted"):
            file.read()
    with pytest.raises(NotFoundError, match="deleted"):
        service.files.contents.open(file_id)


async def test_results_that_find_no_room_cost_their_lines(service: BatchService, model: Model) -> None:
    model.answer = json.dumps("y" * 9_000).encode()
    batch = await ended(service, await created(service, lines(*"abcdef")))
    assert (batch.status, batch.completed, batch.failed) == ("completed", 3, 3)
    assert {each["error"]["code"] for each in results(service, batch.error_file_id)} == {"no_room"}
    held = sum(file.bytes for file in await service.files.of_tenant("a", None))
    assert 27_000 < held < BOUNDS.bytes_of_tenant


async def test_the_results_of_an_open_batch_count_twice_until_they_are_in_files(service: BatchService) -> None:
    batch = StoredBatch(id="batch_x", tenant="a", models=None, endpoint=URL, input_file_id="", window_s=1.0)
    line = BatchLine(1, "a", URL, b"{}")
    await service.batches.add(batch)
    before = await room_left(service, "a")
    assert await service.batches.reserve(batch, least_result(line))
    assert await service.batches.keep_results(batch, [(line, b"y" * 9_000)], failed=False)
    assert await room_left(service, "a") == before - 18_000
    other = BatchLine(2, "b", URL, b"{}")
    assert not await service.batches.keep_results(batch, [(other, b"y" * 30_000)], failed=False)
    assert list(await service.batches.answered(batch.id)) == [1]
    batch.enter("completed")
    await service.batches.save(batch)
    assert before - 100 < await room_left(service, "a") <= before


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_with_more_lines_than_there_is_room_for_fails(
    service: BatchService, model: Model, cancelled: bool
) -> None:
    """Also one that is cancelled: every line has a result."""
    batch = await created(service, lines(*map(str, range(100))))
    if cancelled:
        await service.runner.cancel(batch)
    found = await ended(service, batch)
    assert (found.status, [error["code"] for error in found.errors]) == ("failed", ["no_room"])
    assert model.num_asked == 0
    assert len(service.files.contents.names()) == 1


def test_every_result_without_an_answer_is_counted_beforehand() -> None:
    for name in ("a", "ü" * 512, '"\x01\\' * 170):
        line = BatchLine(1, name, URL, b"{}")
        result = unanswered(line, "batch_cancelled", "The batch was cancelled before this line was answered.")
        assert len(result) <= least_result(line)


async def test_ended_batches_are_forgotten_and_leave_room(service: BatchService) -> None:
    errors = [{"message": "x" * 100}]
    for number in range(130):
        batch = StoredBatch(id=f"batch_{number}", tenant="a", models=None, endpoint=URL, input_file_id="", window_s=1.0)
        await service.batches.add(batch)
        batch.errors = errors
        batch.enter("failed")
        await service.batches.save(batch)
    assert len(await service.batches.ids("a", "")) == 101
    for batch_id in await service.batches.ids("a", ""):
        await service.batches.delete(batch_id)
    assert await room_left(service, "a") == BOUNDS.bytes_of_tenant


async def test_at_the_end_open_batches_are_cancelled_and_the_log_says_how_many(
    service: BatchService, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    model.open.clear()
    batches = [await created(service, lines("a")) for _ in range(2)]
    async with asyncio.timeout(20):
        while model.num_asked < 2:
            await asyncio.sleep(0)
    await service.stop()
    assert [(await service.batches.find("a", batch.id)).status for batch in batches] == ["cancelled"] * 2
    assert ["they are in memory: 2 batches" in record.getMessage() for record in caplog.records] == [True]
