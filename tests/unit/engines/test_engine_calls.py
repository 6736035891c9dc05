"""Calls about LoRA adapters on the gateway's side of the border: each gets its reply, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engines.client.base import EngineCalls
from penstock.engines.contract.messages import CallReply, DownMessage, LoadAdapter, RequestError, UnloadAdapter
from penstock.engines.errors import EngineDeadError, OverloadedError


class Line:
    def __init__(self, **loaded: str) -> None:
        self.sent: list[DownMessage] = []
        self.calls = EngineCalls(self.sent.extend, loaded)

    async def begin(self, key: str) -> asyncio.Task[None]:
        """A load whose message has been sent."""
        count = len(self.sent)
        task = asyncio.create_task(self.calls.load_adapter(key, Path("/f")))
        while len(self.sent) == count:
            await asyncio.sleep(0)
        return task


async def test_replies_find_their_calls_in_any_order():
    line = Line()
    first, second = await line.begin("a"), await line.begin("b")
    assert line.sent == [LoadAdapter(1, "a", "/f"), LoadAdapter(2, "b", "/f")]
    line.calls.deliver([CallReply(2), CallReply(77)])
    await second
    assert not first.done()
    line.calls.deliver([CallReply(1, RequestError("overloaded", "full"))])
    with pytest.raises(OverloadedError, match="full"):
        await first
    assert line.calls.loaded == {"b": "/f"}


async def test_what_was_loaded_for_nobody_is_unloaded():
    line = Line()
    task = await line.begin("a")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    line.calls.deliver([CallReply(1)])
    assert line.sent[1:] == [UnloadAdapter(2, "a")]
    assert line.calls.loaded == {}
    line.calls.deliver([CallReply(2)])
    assert len(line.sent) == 2


async def test_a_failed_load_that_nobody_waits_for_is_forgotten():
    line = Line()
    task = await line.begin("a")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    line.calls.deliver([CallReply(1, RequestError("overloaded", "full"))])
    assert len(line.sent) == 1


async def test_an_engine_that_dies_ends_the_calls_and_keeps_what_is_loaded():
    line = Line(old="/o")
    task = await line.begin("a")
    line.calls.fail_all(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await task
    line.calls.deliver([CallReply(1)])
    assert line.calls.loaded == {"old": "/o"}


async def test_unloading_without_an_engine_is_done_at_once():
    line = Line(old="/o")
    await line.calls.unload_adapter("old", inform=False)
    assert line.sent == []
    assert line.calls.loaded == {}


async def test_adapters_unloaded_while_an_engine_started_are_unloaded_there():
    line = Line(a="/a", b="/b")
    given = dict(line.calls.loaded)
    await line.calls.unload_adapter("a", inform=False)
    line.calls.forget(given)
    assert line.sent == [UnloadAdapter(1, "a")]


async def test_adapters_without_files_are_given_up_before_an_engine_starts_again(tmp_path, caplog):
    there = tmp_path / "there"
    there.mkdir()
    (there / "adapter_config.json").write_text("{}")
    line = Line(there=str(there), gone=str(tmp_path / "gone"))
    line.calls.drop_missing()
    assert line.calls.loaded == {"there": str(there)}
    assert "gone has no files any more" in caplog.text
