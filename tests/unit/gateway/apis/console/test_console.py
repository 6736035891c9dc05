"""Who gets the console, who may act in it, and what its stream says: nothing is noted while nobody looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.apis.console import feed
from penstock.gateway.apis.console.routes import console_routes
from penstock.gateway.apis.console.views import ConsoleSources
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.models.traffic.table import TrafficTable
from penstock.gateway.requests.access import ApiKeys
from penstock.gateway.requests.context import USER_ROLES
from penstock.gateway.requests.exposure import check_exposure, shows_console
from penstock.gateway.requests.request_watch import RequestWatch, ServerRequests
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from support.dataplane import Setup
from support.keys import api_keys
from support.kserve import FakeModelStore

MARK = {"x-penstock-console": "1"}
ADMIN = {"authorization": "Bearer sesame"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = ["/console", "/console/app.js", "/console/console.css"]


class Console:
    """An app with a console over this data plane."""

    def __init__(self, keys: ApiKeys | None = None, dataplane: DataPlane | None = None) -> None:
        self.settings = AppSettings(keys=keys or ApiKeys())
        dataplane = dataplane or DataPlane()
        self.watch = RequestWatch(self.settings.journal, self.settings.drain)
        self.traffic = TrafficTable()
        self.sources = ConsoleSources(
            version="9",
            dataplane=dataplane,
            models=FakeModelStore(),
            traffic=self.traffic,
            budget=MemoryBudget(available=lambda: 1 << 30),
            health=ServerHealth(loading=lambda: {"<b>slow": "reading weights, 40 %"}),
            drain=self.settings.drain,
            requests=ServerRequests(self.watch),
        )
        routes = console_routes(self.sources, self.settings.keys)
        self.app = build_app(dataplane, self.settings, extra_routes=routes)

    async def get(self, path: str, **headers: str) -> AsgiCall:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await call(self.app, path, method="GET", headers={"host": "127.0.0.1:8000"} | named)

    @asynccontextmanager
    async def stream(self, query: str = "", **headers: str) -> AsyncIterator[Updates]:
        path = f"/console/live?{query}"
        request = AsgiCall(self.app, path, method="GET", headers={"host": "localhost"} | MARK | headers)
        task = asyncio.create_task(request.run())
        try:
            yield Updates(request, task)
        finally:
            request.disconnect()
            await asyncio.wait_for(task, 20)


class Updates:
    def __init__(self, request: AsgiCall, task: asyncio.Task[AsgiCall]) -> None:
        self.request = request
        self.task = task
        self._seen = 0

    async def section(self, name: str) -> Any:
        """The next one of this name."""
        while True:
            events = b"".join(self.request.bodies).decode().replace("\r\n", "\n").split("\n\n")[:-1]
            for event in events[self._seen :]:
                self._seen += 1
                data = next((line[6:] for line in event.split("\n") if line.startswith("data: ")), "{}")
                if name in json.loads(data):
                    return json.loads(data)[name]
            assert not self.task.done(), self.request.messages[:2]
            self.request.sent.clear()
            await asyncio.wait_for(self.request.sent.wait(), 20)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_INTERVAL", 0.01)
    monkeypatch.setattr(feed, "_ENGINE_SECONDS", 0.0)


@pytest.mark.parametrize("path", FILES)
async def test_files_come_with_the_policy_and_can_be_kept(path: str) -> None:
    console = Console()
    answer = await console.get(path)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await console.get(path, if_none_match=answer.headers["etag"])
    assert again.status == 304
    compressed = await console.get(path, accept_encoding="gzip")
    assert compressed.headers["content-encoding"] == "gzip"
    assert len(compressed.bodies[0]) < len(answer.bodies[0]) or len(answer.bodies[0]) < 200


def test_the_page_is_small_and_asks_nobody_else() -> None:
    folder = Path(feed.__file__).parent / "static"
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert sum(len(text.encode()) for text in texts.values()) <= 150_000
    for name, text in texts.items():
        assert "http://" not in text, name
        assert "https://" not in text, name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write", "style=", "onclick="):
            assert word not in text, name


@pytest.mark.parametrize("path", [*FILES, "/console/live", "/console/cancel"])
@pytest.mark.parametrize(
    "headers",
    [
        {"forwarded": "for=192.0.2.1"},
        {"x_forwarded_for": "192.0.2.1"},
        {"x_forwarded_host": "penstock.example.org"},
        {"x_real_ip": "192.0.2.1"},
        {"via": "1.1 proxy"},
        {"host": "evil.example.org"},
        {"host": "127.0.0.1.evil.example.org"},
        {"host": "192.0.2.7:8000"},
        {"host": "[2001:db8::1]:8000"},
    ],
    ids=lambda headers: "-".join(headers),
)
async def test_without_keys_only_this_machine_looks(path: str, headers: dict[str, str]) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "POST" if path.endswith("cancel") else "GET"
    answer = await call(
        Console().app, path, b'{"id": "x"}', method=method, headers={"host": "localhost"} | MARK | named
    )
    assert answer.status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "127.9.9.9", "localhost."]
)
async def test_loopback_has_several_names(host: str) -> None:
    assert (await Console().get("/console", host=host)).status == 200


async def test_without_keys_another_machine_gets_nothing() -> None:
    app = Console().app

    async def from_elsewhere(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": ("192.0.2.1", 4711)}, receive, send)

    assert (await call(from_elsewhere, "/console", method="GET", headers={"host": "localhost"})).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        MARK | {"sec-fetch-site": "cross-site"},
        MARK | {"sec-fetch-site": "same-site"},
        MARK | {"origin": "http://evil.example.org"},
        MARK | {"origin": "null"},
        MARK | {"origin": "http://localhost:3000"},
    ],
)
@pytest.mark.parametrize("keys", [False, True], ids=["open", "keys"])
async def test_pages_of_others_get_no_data(headers: dict[str, str], keys: bool) -> None:
    console = Console(api_keys({"team": "sesame"}) if keys else None)
    for method, path in (("GET", "/console/live"), ("POST", "/console/cancel")):
        headers = {"host": "localhost:8000"} | ADMIN | headers
        assert (await call(console.app, path, b'{"id": "x"}', method=method, headers=headers)).status == 403


async def test_with_keys_the_files_are_open_and_the_data_is_an_admins() -> None:
    console = Console(api_keys({"team": "sesame"}))
    for path in FILES:
        assert (await console.get(path, host="penstock.example.org", x_forwarded_for="192.0.2.1")).status == 200
    assert (await console.get("/console/live", **MARK)).status == 401
    async with console.stream(**ADMIN | {"host": "penstock.example.org", "via": "1.1 proxy"}) as updates:
        assert (await updates.section("server"))["may_act"] is True
    users = Console(api_keys({"team": "sesame"}, USER_ROLES))
    assert (await users.get("/console/live", **MARK | ADMIN)).status == 403


async def test_a_stream_ends_with_its_key() -> None:
    keys = api_keys({"team": "sesame"})
    async with Console(keys).stream(**ADMIN) as updates:
        await updates.section("server")
        keys.replace({})
        await asyncio.wait((updates.task,), timeout=20)
        assert updates.task.done()


async def test_without_keys_nothing_can_be_ended() -> None:
    for key in ({}, ADMIN):
        headers = {"host": "localhost"} | MARK | key
        answer = await call(Console().app, "/console/cancel", {"id": "x"}, headers=headers)
        assert answer.status == 403
        assert "read-only" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"id": 1}', b'{"id": "x", "more": 1}', b"x" * 5000])
async def test_bad_bodies_are_refused(body: bytes) -> None:
    console = Console(api_keys({"team": "sesame"}))
    answer = await call(console.app, "/console/cancel", body, headers={"host": "localhost"} | MARK | ADMIN)
    assert answer.status in (400, 413)


async def test_a_form_cannot_end_anything() -> None:
    console = Console(api_keys({"team": "sesame"}))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {"host": "localhost", "content-type": kind} | MARK | ADMIN
        assert (await call(console.app, "/console/cancel", b'{"id": "x"}', headers=headers)).status == 415


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.apis.console.routes._MOST_STREAMS", 1)
    console = Console()
    async with console.stream() as updates:
        await updates.section("server")
        assert (await console.get("/console/live", **MARK)).status == 503
    async with console.stream() as updates:
        await updates.section("server")


async def test_a_stream_says_what_is_loading_and_only_what_has_changed() -> None:
    async with Console().stream() as updates:
        [row] = [row for row in await updates.section("models") if row["name"] != "tiny"]
        assert row | {"kinds": []} == {
            "kinds": [],
            "name": "<b>slow",
            "version": "",
            "state": "LOADING",
            "reason": "",
            "loading": "reading weights, 40 %",
        }
        await updates.section("figures")
        later = b"".join(updates.request.bodies[1:])
        await updates.section("figures")
        assert b'"models"' not in later


async def test_a_stream_ends_when_the_server_has_drained() -> None:
    console = Console()
    async with console.stream() as updates:
        await updates.section("server")
        console.settings.drain.begin()
        await asyncio.wait((updates.task,), timeout=20)
        assert updates.task.done()


@contextmanager
def engine(tmp_path: Path, **limits: Any) -> Iterator[Setup]:
    yield Setup(tmp_path, SchedulerConfig(**limits), num_blocks=64, clamp_max_tokens=True)


async def test_live_shows_what_requests_wait_for_and_an_admin_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, max_num_seqs=1) as setup:
        step = setup.engine._step
        # one step for each message: requests advance only while the console reads
        monkeypatch.setattr(setup.engine, "_step", lambda: step() if setup.engine._inbox else None)
        await setup.engine.start()
        setup.plane.models.serve(setup.model)
        console = Console(api_keys({"team": "sesame"}), setup.plane)
        chats = [asyncio.create_task(_chat(console, name)) for name in ("first", "second")]
        async with console.stream("view=live", **ADMIN) as updates:
            waits: dict[str, str] = {}
            while waits != {"first": "", "second": "seat"}:
                shown = await updates.section("engine")
                [part] = shown["parts"]
                waits = {row[0]: row[2] for row in part["requests"]}
            assert part["seats"] == 1
            blank, cached, used, shared, stride, cells = part["blocks"]
            assert blank + cached + used + shared == 64
            assert used > 0
            assert (stride, cells.endswith(".")) == (1, True)
            assert {row["id"] for row in (await updates.section("requests"))["requests"]} == {"first", "second"}
            answer = await call(console.app, "/console/cancel", {"id": "first"}, headers={"host": "x"} | MARK | ADMIN)
            assert answer.status == 200
            ended = await chats[0]
            assert ended.status == 400
            assert ended.json()["error"]["code"] == "cancelled"
            gone = await call(console.app, "/console/cancel", {"id": "nobody"}, headers={"host": "x"} | MARK | ADMIN)
            assert gone.status == 404
        for chat in chats[1:]:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
        await setup.engine.stop()


async def test_an_engine_that_hangs_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_PATIENCE", 0.01)
    calls: list[object] = []

    async def never(since: object) -> None:
        calls.append(since)
        await asyncio.Event().wait()

    with engine(tmp_path) as setup:
        await setup.engine.start()
        setup.plane.models.serve(setup.model)
        monkeypatch.setattr(setup.engine, "inspect", never)
        async with Console(dataplane=setup.plane).stream("view=live") as updates:
            assert (await updates.section("engine"))["problem"] == "The engine does not answer."
            for _ in range(3):
                await updates.section("figures")
        assert len(calls) == 1
        await setup.engine.stop()


@pytest.mark.parametrize(
    "query", ["view=live&model=nobody", "view=%00", "view=live&request=" + "x" * 9000, "view=request"]
)
async def test_odd_queries_are_harmless(query: str) -> None:
    async with Console().stream(query) as updates:
        await updates.section("server")
        await updates.section("figures")


async def _chat(console: Console, name: str) -> AsgiCall:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a question"}],
        "max_tokens": 200,
        "ignore_eos": True,
    }
    return await call(console.app, "/v1/chat/completions", body, headers=ADMIN | {"x-request-id": name})


async def test_a_request_shows_its_waterfall_and_nothing_is_noted_while_nobody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path) as setup:
        await setup.engine.start()
        setup.plane.models.serve(setup.model)
        console = Console(api_keys({"team": "sesame"}), setup.plane)
        await _chat(console, "unseen")
        async with console.stream("view=request&request=seen", **ADMIN) as updates:
            assert (await updates.section("requests"))["ended"] == []
            await _chat(console, "seen")
            detail = None
            while detail is None or not detail["ended"]:
                detail = (await updates.section("requests"))["detail"]
            assert [stage for stage, _ in detail["stages"]][-2:] == ["engine", "decoding"]
            computed = sum(tokens for _, _, tokens in detail["chunks"])
            assert computed == detail["prompt_tokens"] - detail["cached_tokens"] > 0
            assert detail["outcome"] == "ok"
            assert detail["tenant"] == "team"
        began = []
        stop = console.settings.journal.watch(lambda context: began.append(context), lambda context: None)
        monkeypatch.setattr("penstock.gateway.requests.request_watch._PATIENCE", 0.0)
        console.watch._look_again()  # as its timer does
        await _chat(console, "unseen again")
        stop()
        assert [context.record.stages for context in began] == [None]
        await setup.engine.stop()


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True),
        ({"console": False}, False),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0", "allow_anonymous": True}, False),
        ({"api_key": ("k",)}, False),
        ({"admin_key": ("k",), "console": True, "host": "0.0.0.0"}, True),
    ],
)
def test_where_there_is_a_console(settings: dict[str, Any], shown: bool) -> None:
    assert shows_console(ServerConfig(**settings)) is shown


def test_a_console_for_everybody_is_refused() -> None:
    with pytest.raises(ConfigError, match="console: other machines"):
        check_exposure(Config(server=ServerConfig(host="0.0.0.0", allow_anonymous=True, console=True)))
