"""A file of requests that is answered without a server, when not everything is right."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import EngineDeadError, InvalidRequestError, OverloadedError
from penstock.gateway.apis.batches import lines as batch_lines
from penstock.gateway.apis.batches import run_batch
from penstock.gateway.apis.batches.run_batch import BatchFile
from penstock.gateway.cli import _parser
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

URL = "/v1/completions"


async def busy(exchange: Exchange) -> None:
    raise OverloadedError("There is no model.")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {}}) + "\n")
    return path


async def test_it_ends_when_no_model_can_answer_any_more(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_batch, "_WATCH_S", 0.0)
    looks = iter([True] * 5)
    with pytest.raises(EngineDeadError, match="Run the same command again"):
        await BatchFile(source, tmp_path / "out", 4).answer({URL: busy}, AppSettings(), lambda: next(looks, False))
    assert (tmp_path / "out").read_bytes() == b""


async def test_what_kills_engines_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "_AGAIN_AFTER_S", 0.0)
    asked = 0

    async def deadly(exchange: Exchange) -> None:
        nonlocal asked
        asked += 1
        raise EngineDeadError("The engine died.") if asked < 10 else InvalidRequestError("It was asked too often.")

    await BatchFile(source, tmp_path / "out", 4).answer({URL: deadly}, AppSettings(), lambda: True)
    assert json.loads((tmp_path / "out").read_text())["response"]["body"]["error"]["code"] == "engine_dead"
    assert asked == 3


async def test_lines_that_were_with_a_dead_engine_are_asked_one_at_a_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_AGAIN_AFTER_S", 0.0)
    source.write_text("".join(json.dumps({"custom_id": i, "url": URL, "body": {}}) + "\n" for i in "abcd"))
    num_asked = num_asked_now = 0
    together: list[int] = []

    async def dies_once(exchange: Exchange) -> None:
        nonlocal num_asked, num_asked_now
        num_asked += 1
        if num_asked <= 4:
            raise EngineDeadError("The engine died.")
        num_asked_now += 1
        together.append(num_asked_now)
        for _ in range(10):
            await asyncio.sleep(0)
        num_asked_now -= 1
        await exchange.respond(200, b"{}")

    await BatchFile(source, tmp_path / "out", 4).answer({URL: dies_once}, AppSettings(), lambda: True)
    assert together == [1, 1, 1, 1]


async def test_requests_are_not_taken_for_results(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="something other than results"):
        await BatchFile(source, source, 4).answer({URL: busy}, AppSettings(), lambda: True)
    assert source.read_bytes() == before


async def test_a_folder_that_is_not_there(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await BatchFile(source, tmp_path / "none" / "out", 4).answer({URL: busy}, AppSettings(), lambda: True)


WRONG = [
    (b"{no json", None, "invalid_json_line"),
    (b"\xff", None, "invalid_json_line"),
    (b"[]", None, "invalid_request"),
    (b'{"custom_id": 5, "url": "/v1/completions", "body": {}}', None, "invalid_request"),
    (b'{"custom_id": "", "url": "/v1/completions", "body": {}}', "", "invalid_custom_id"),
    (b'{"custom_id": "no body", "url": "/v1/completions"}', "no body", "invalid_request"),
    (b'{"custom_id": "text", "url": "/v1/completions", "body": "x"}', "text", "invalid_request"),
    (b'{"custom_id": "url", "url": "/v1/nothing", "body": {}}', "url", "mismatched_endpoint"),
    (b'{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}', "get", "invalid_method"),
    (b'{"custom_id": "s", "url": "/v1/completions", "body": {"stream": true}}', "s", "invalid_request"),
    (b'{"custom_id": "a", "url": "/v1/completions", "body": {}}', "a", "duplicate_custom_id"),
    (b'{"custom_id": "' + b"x" * 500 + b'", "url": "/v1/completions", "body": {}}', None, "line_too_long"),
]


async def fine(exchange: Exchange) -> None:
    await exchange.respond(200, b"{}")


async def answered(source: Path, target: Path) -> list[Any]:
    await BatchFile(source, target, 4).answer({URL: fine}, AppSettings(max_body_bytes=300), lambda: True)
    return [json.loads(text) for text in target.read_text().splitlines()]


async def test_lines_that_are_wrong_cost_themselves_alone(source: Path, tmp_path: Path) -> None:
    last = b'{"custom_id": "b", "url": "/v1/completions", "body": {}}'
    source.write_bytes(b"\n\n".join([source.read_bytes().strip(), *(text for text, *_ in WRONG), last]))
    found = await answered(source, tmp_path / "out")
    good = [each for each in found if each["response"] is not None]
    assert [each["custom_id"] for each in good] == ["a", "b"]
    bad = [(each["custom_id"], each["error"]["code"]) for each in found if each["response"] is None]
    assert bad == [(name, code) for _, name, code in WRONG]
    assert [each["error"]["line"] for each in found if each["response"] is None] == list(range(3, 26, 2))


@pytest.mark.parametrize("kept", range(4))
async def test_a_run_goes_on_where_it_stopped_among_lines_that_are_wrong(
    source: Path, tmp_path: Path, kept: int
) -> None:
    source.write_bytes(source.read_bytes() * 2 + b"{no json\n")
    whole = await answered(source, tmp_path / "out")
    written = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(written[:kept]))
    again = await answered(source, tmp_path / "out")

    def keys(found: list[Any]) -> list[Any]:
        return sorted((str(each["custom_id"]), (each["error"] or {"line": 0})["line"]) for each in found)

    assert keys(again) == keys(whole)
    assert len(whole) == 3


async def test_an_empty_file_has_no_results(source: Path, tmp_path: Path) -> None:
    for content in (b"", b"\n \n"):
        source.write_bytes(content)
        assert await answered(source, tmp_path / "out") == []
        assert (tmp_path / "out").exists()


async def test_a_file_with_too_many_lines_is_refused_before_anything_runs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    source.write_text("".join(json.dumps({"custom_id": i, "url": URL, "body": {}}) + "\n" for i in "abc"))
    with pytest.raises(ConfigError, match="at most 2 lines"):
        await answered(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", [["--model", "folder"], ["folder"]])
def test_the_model_is_named_as_in_vllm_or_without_a_flag(model: list[str]) -> None:
    assert _parser().parse_args(["run-batch", "-i", "a", "-o", "b", *model]).model == "folder"
    assert "model" not in _parser().parse_args(["run-batch", "-i", "a", "-o", "b"])


def test_a_file_may_begin_with_a_byte_order_mark(source: Path) -> None:
    line = source.read_bytes()
    source.write_bytes(b"\xef\xbb\xbf" + line)
    opened = partial(source.open, "rb")
    assert batch_lines.check_lines(opened, (URL,), 1000).errors == []
    assert [line.custom_id for line in batch_lines.read_lines(opened, (URL,))] == ["a"]
    source.write_bytes(line + b"\xef\xbb\xbf" + line)
    assert [error["line"] for error in batch_lines.check_lines(opened, (URL,), 1000).errors] == [2]


def test_a_file_of_empty_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "_MAX_LINES_OF_FILE", 10)
    path = tmp_path / "empty"
    path.write_bytes(b"\n" * 1000)
    errors = batch_lines.check_lines(lambda: path.open("rb"), (URL,), 100).errors
    assert [(error["code"], error["line"]) for error in errors] == [("too_many_tasks", 11)]
    path.write_bytes(b"\n" * 10)
    errors = batch_lines.check_lines(lambda: path.open("rb"), (URL,), 100).errors
    assert [error["code"] for error in errors] == ["empty_file"]
