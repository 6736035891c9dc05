"""The mailbox between an engine and a reader who may be slow, late, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.engines.client.base import StreamTable
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    FinishReason,
    PromptInfo,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engines.errors import EngineDeadError


class Mailbox:
    def __init__(self, *ids: int) -> None:
        self.aborted: list[Sequence[int]] = []
        self.stream = RequestStream(ids, self.aborted.append)

    def put(self, request_id: int, *tokens: int, end: FinishReason | None = None) -> None:
        logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in tokens]
        self.stream.put(RequestOutput(request_id, list(tokens), end, logprobs=logprobs))


def test_outputs_that_nobody_has_read_are_merged() -> None:
    box = Mailbox(1, 2)
    box.stream.put(RequestOutput(1, [5], prompt=PromptInfo(3, 0.5)))
    box.put(2, 8)
    box.put(1, 6)
    box.put(1, 7, end=FinishReason.STOP)
    first, second = box.stream.take()
    assert (first.id, first.token_ids, first.finish_reason) == (1, [5, 6, 7], FinishReason.STOP)
    assert first.prompt == PromptInfo(3, 0.5)
    assert [logprob.token_id for logprob in first.logprobs or ()] == [6, 7]
    assert (second.id, second.token_ids, second.finish_reason) == (2, [8], None)
    assert box.stream.take() == []


def test_nothing_is_delivered_after_the_end() -> None:
    box = Mailbox(1)
    box.put(1, 5, end=FinishReason.LENGTH)
    box.put(1, 6)
    box.stream.end(1, FinishReason.ABORT)
    box.stream.fail(RequestError("engine_dead", "gone"))
    box.put(9, 6)
    (output,) = box.stream.take()
    assert (output.token_ids, output.finish_reason, output.error) == ([5], FinishReason.LENGTH, None)


def test_a_failure_ends_what_is_live_and_keeps_what_came_before() -> None:
    box = Mailbox(1, 2, 3)
    box.put(1, 5, end=FinishReason.STOP)
    box.put(2, 6)
    error = RequestError("engine_dead", "gone")
    box.stream.fail(error)
    outputs = {output.id: output for output in box.stream.take()}
    assert outputs[1].error is None
    assert (outputs[2].token_ids, outputs[2].error) == ([6], error)
    assert (outputs[3].token_ids, outputs[3].error) == ([], error)
    assert not box.stream.live_ids


async def test_a_waiting_reader_is_woken_once_for_all_that_came() -> None:
    box = Mailbox(1, 2)
    reader = asyncio.ensure_future(anext(box.stream))
    await asyncio.sleep(0)
    assert not reader.done()
    box.put(1, 5)
    box.put(2, 6)
    assert [output.id for output in await reader] == [1, 2]


async def test_a_reader_that_gave_up_waiting_loses_nothing() -> None:
    box = Mailbox(1)
    reader = asyncio.ensure_future(anext(box.stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    box.put(1, 5, end=FinishReason.STOP)
    (output,) = await anext(box.stream)
    assert output.token_ids == [5]
    with pytest.raises(StopAsyncIteration):
        await anext(box.stream)


async def test_leaving_aborts_what_is_live_and_nothing_else() -> None:
    box = Mailbox(1, 2)
    async with box.stream:
        box.put(1, end=FinishReason.STOP)
    assert box.aborted == [(2,)]
    box.stream.close()
    assert len(box.aborted) == 1


def request(*ids: int) -> AddRequest:
    return AddRequest(ids, [0], SamplingParams(max_tokens=1), 0.0)


def test_a_table_routes_by_id_and_forgets_what_has_ended() -> None:
    sent: list[DownMessage] = []
    table = StreamTable(sent.extend)
    a, b = table.submit([request(1), request(2)]), table.submit([request(3)])
    table.deliver([RequestOutput(3, [7]), RequestOutput(1, [5], FinishReason.STOP), RequestOutput(99, [1])])
    table.deliver([RequestOutput(1, [6])])
    assert [output.token_ids for output in a.take()] == [[5]]
    assert [output.token_ids for output in b.take()] == [[7]]
    assert len(table) == 2
    table.abort([1, 2, 99])
    table.abort([2])
    assert [output.finish_reason for output in a.take()] == [FinishReason.ABORT]
    assert sent == [request(1), request(2), request(3), AbortRequests([2])]
    assert len(table) == 1


def test_a_stream_that_is_left_aborts_through_its_table() -> None:
    sent: list[DownMessage] = []
    table = StreamTable(sent.extend)
    table.submit([request(1, 2)]).close()
    assert [sorted(message.ids) for message in sent if isinstance(message, AbortRequests)] == [[1, 2]]
    assert len(table) == 0


def test_a_table_fails_each_stream_once() -> None:
    table = StreamTable(lambda messages: None)
    stream = table.submit([request(1, 2)])
    table.fail_all(EngineDeadError("It died.", retry_after=2.0))
    assert [output.error for output in stream.take()] == [RequestError("engine_dead", "It died.", 2.0)] * 2
    assert len(table) == 0


def test_ids_are_never_given_twice() -> None:
    table = StreamTable(lambda messages: None)
    ids = [*table.new_ids(3), *table.new_ids(2)]
    assert len(set(ids)) == 5


async def test_a_nudge_wakes_a_reader_with_nothing_and_loses_nothing() -> None:
    box = Mailbox(1)
    box.stream.nudge()  # nobody waits
    reading = asyncio.ensure_future(anext(box.stream))
    await asyncio.sleep(0)
    box.stream.nudge()
    assert await reading == []
    reading = asyncio.ensure_future(anext(box.stream))
    await asyncio.sleep(0)
    box.stream.nudge()
    box.put(1, 5)
    box.stream.nudge()
    [output] = await reading
    assert output.token_ids == [5]


def test_streams_know_how_many_samples_the_engine_was_sent() -> None:
    sent: list[DownMessage] = []
    table = StreamTable(sent.extend)

    def submit(*samples: int) -> RequestStream:
        return table.submit([AddRequest(table.new_ids(n), [1], SamplingParams(max_tokens=1), 0.0) for n in samples])

    table.new_ids(7)  # never sent
    assert (submit(1).arrival_number, submit(2, 3).arrival_number, submit(1).arrival_number) == (1, 6, 7)
    table.fail_all(EngineDeadError("gone"))
    assert submit(2).arrival_number == 2, "the next engine counts from 0"


class Listening:
    """A listener that takes at once."""

    def __init__(self, table: StreamTable, *ids: int) -> None:
        self.taken: list[list[tuple[int, list[int]]]] = []
        self.stream = table.submit([request(*ids)])
        self.stream.listen(self)

    def __call__(self) -> None:
        self.taken.append([(output.id, output.token_ids) for output in self.stream.take()])


async def test_a_listener_is_called_once_for_each_step() -> None:
    table = StreamTable(lambda messages: None)
    one, two = Listening(table, 1, 2), Listening(table, 3)
    table.deliver([RequestOutput(1, [5]), RequestOutput(3, [8]), RequestOutput(2, [6])])
    table.call_listeners()
    table.deliver([RequestOutput(1, [7], FinishReason.STOP)])
    table.call_listeners()
    assert one.taken == [[(1, [5]), (2, [6])], [(1, [7])]]
    assert two.taken == [[(3, [8])]]


async def test_steps_that_arrive_together_are_one_call() -> None:
    table = StreamTable(lambda messages: None)
    one = Listening(table, 1)
    table.deliver([RequestOutput(1, [5])])
    table.deliver([RequestOutput(1, [6])])
    table.call_listeners()
    assert one.taken == [[(1, [5, 6])]]


async def test_a_listener_hears_of_ends_that_no_step_brings() -> None:
    table = StreamTable(lambda messages: None)
    one = Listening(table, 1, 2)
    table.abort([1, 2])
    assert one.taken == [], "it may be the listener itself that aborts"
    await asyncio.sleep(0)
    assert one.taken == [[(1, []), (2, [])]]


async def test_a_listener_is_told_of_what_came_before_it_and_of_nudges() -> None:
    box = Mailbox(1)
    box.put(1, 5)
    box.put(1, 6)
    calls: list[list[int]] = []
    box.stream.listen(lambda: calls.append([token for output in box.stream.take() for token in output.token_ids]))
    await asyncio.sleep(0)
    box.stream.nudge()
    await asyncio.sleep(0)
    assert calls == [[5, 6], []]


async def test_what_comes_while_nobody_listens_is_merged() -> None:
    box = Mailbox(1)
    calls: list[None] = []
    box.stream.listen(lambda: calls.append(None))
    box.put(1, 5)
    box.stream.listen(None)
    await asyncio.sleep(0)
    box.put(1, 6)
    assert calls == []
    [output] = await anext(box.stream)
    assert output.token_ids == [5, 6]
