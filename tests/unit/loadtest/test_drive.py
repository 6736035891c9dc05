from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

import pytest

from penstock.loadtest.errors import CONNECT, INTERRUPTED, LoadTestError
from penstock.loadtest.messages import Answer, Call, Session
from unit.loadtest.fakes import FakeClient, Run, answered, call, singles


async def test_a_closed_loop_keeps_its_places_filled() -> None:
    client = FakeClient()
    samples = await Run(client, singles(50), concurrency=4).end()
    assert sorted(sample.index for sample in samples) == list(range(50))
    assert client.most_at_once == 4
    assert all(sample.sent >= sample.intended >= 0 for sample in samples)


async def test_fewer_sessions_than_places() -> None:
    assert len(await Run(FakeClient(), singles(2), concurrency=8).end()) == 2
    assert await Run(FakeClient(), singles(0), concurrency=8).end() == []


async def test_a_ramp_opens_places_one_after_the_other() -> None:
    client = FakeClient()
    client.hold.clear()
    run = Run(client, singles(4), concurrency=4, ramp=0.2)
    while len(client.times) < 4:
        await asyncio.sleep(0.005)
    client.hold.set()
    await run.end()
    assert all(time - run.started >= 0.05 * place - 1e-3 for place, time in enumerate(client.times))


async def test_an_open_loop_sends_whatever_the_server_does() -> None:
    client = FakeClient()
    client.hold.clear()
    run = Run(client, singles(10, every=0.005), concurrency=1)
    while len(client.calls) < 10:
        await asyncio.sleep(0.005)
    client.hold.set()
    samples = await run.end()
    assert client.most_at_once == 10
    assert [sample.intended for sample in sorted(samples, key=lambda sample: sample.index)] == pytest.approx(
        [0.005 * n for n in range(10)]
    )
    assert all(sample.sent >= sample.intended - 1e-4 for sample in samples)
    assert not run.driver.held_up


async def test_a_stall_shows_from_the_intended_times_only() -> None:
    """Coordinated omission: one place, whose first answer takes as long as 20 others are due in."""
    client = FakeClient()
    client.hold.clear()
    run = Run(client, singles(21, every=0.01), max_in_flight=1)
    await asyncio.sleep(0.25)
    client.hold.set()
    samples = await run.end()
    late = [sample.ended - sample.intended for sample in samples[1:]]
    assert min(late) >= 0.04, "the last was due at 0.2 s, and nothing went before 0.25 s"
    assert max(late) >= 0.23
    assert all(sample.ended == sample.sent for sample in samples), "each by itself was answered at once"
    assert run.driver.held_up


async def test_the_end_of_the_time_ends_the_beginning_of_calls() -> None:
    client = FakeClient()
    run = Run(client, singles(1_000_000, every=0.01), seconds=0.1)
    samples = await run.end()
    assert 0 < len(samples) <= 11
    assert all(sample.intended <= 0.1 and not sample.error for sample in samples)


async def test_what_runs_at_the_end_gets_its_grace() -> None:
    client = FakeClient()
    client.hold.clear()
    run = Run(client, singles(100), concurrency=3, grace=60)
    await client.began.wait()
    run.driver.stop()
    client.hold.set()
    samples = await run.end()
    assert len(samples) == 3
    assert not any(sample.error for sample in samples)


@pytest.mark.parametrize("every", [None, 0.0])
async def test_what_outlasts_the_grace_is_left_out(every: float | None) -> None:
    client = FakeClient()
    client.hold.clear()
    before = perf_counter()
    run = Run(client, singles(3, every), concurrency=3, grace=0.02)
    while len(client.calls) < 3:
        await asyncio.sleep(0.005)
    run.driver.stop()
    samples = await run.end()
    assert [sample.error for sample in samples] == [INTERRUPTED] * 3
    assert all(before <= run.started + sample.sent < run.started + sample.ended for sample in samples)
    assert run.driver.in_flight == 0


async def test_stopping_now_does_not_wait() -> None:
    client = FakeClient()
    client.hold.clear()
    run = Run(client, singles(100), concurrency=3, grace=3600)
    await client.began.wait()
    run.driver.stop()
    run.driver.stop(now=True)
    assert {sample.error for sample in await run.end()} == {INTERRUPTED}


async def test_stopped_before_it_starts() -> None:
    client = FakeClient()
    run = Run(client, singles(5))
    run.driver.stop(now=True)
    assert await run.end() == []
    assert client.calls == []


async def test_stopping_wakes_those_who_wait_for_their_time() -> None:
    run = Run(FakeClient(), iter([Session(calls=[call(0)], at=3600.0)]))
    await asyncio.sleep(0.01)
    run.driver.stop()
    assert await run.end() == []


async def test_a_session_goes_on_from_its_answers() -> None:
    client = FakeClient()
    turns = [call(0, "one"), call(1, "two", delay=0.02), call(2, [{"role": "user", "content": "three"}])]
    samples = await Run(client, iter([Session(calls=turns)])).end()
    one, two, three = client.prompts
    assert one == "one"
    assert two == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "two"},
    ]
    assert isinstance(three, list)
    assert three[3:] == [{"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "three"}]
    first, second, third = samples
    assert second.intended == pytest.approx(first.ended + 0.02)
    assert third.intended == pytest.approx(second.ended)
    assert [sample.wanted_prompt_tokens for sample in samples] == [1, None, None], "nobody has counted the answers"


async def test_a_server_that_is_gone_is_not_asked_without_end() -> None:
    """Nor one that refuses: each place waits before it is taken again, unless the run is stopped."""

    def refused(asked: Call) -> Answer:
        answer = answered(asked)
        answer.error = CONNECT if asked.index % 4 < 2 else "http_503"
        return answer

    client = FakeClient(refused)
    run = Run(client, singles(1000), concurrency=2)
    while len(client.times) < 8:
        await asyncio.sleep(0.01)
    run.driver.stop()
    assert len(await run.end()) < 1000
    assert all(client.times[place + 2] - client.times[place] >= 0.09 for place in range(6))


async def test_answers_are_followed_at_once() -> None:
    """As many as would take hours if each were waited for."""
    assert len(await Run(FakeClient(), singles(100_000), concurrency=2).end()) == 100_000


async def test_a_failure_ends_its_session() -> None:
    def fails(asked: Call) -> Answer:
        answer = answered(asked)
        answer.error = "http_500" if asked.index == 1 else ""
        return answer

    sessions = [Session(calls=[call(0), call(1), call(2)]), Session(calls=[call(3)])]
    samples = await Run(FakeClient(fails), iter(sessions)).end()
    assert [(sample.index, sample.error) for sample in samples] == [(0, ""), (1, "http_500"), (3, "")]


async def test_what_makes_a_run_impossible_is_said_plainly() -> None:
    def refuses(asked: Call) -> Answer:
        raise LoadTestError("not this")

    with pytest.raises(LoadTestError, match="not this"):
        await Run(FakeClient(refuses), singles(5), concurrency=2).end()

    def broken() -> Iterator[Session]:
        yield from singles(3)
        raise LoadTestError("row 4")

    with pytest.raises(LoadTestError, match="row 4"):
        await Run(FakeClient(), broken(), concurrency=2).end()


async def test_a_place_is_free_before_its_answer_is_taken_apart() -> None:
    """The long answer is taken apart only when the next call is on its way, and its sample comes complete."""
    others = asyncio.Event()
    loop = asyncio.get_running_loop()

    def deferred(asked: Call) -> Answer:
        answer = answered(asked)
        if asked.index:
            others.set()
            return answer
        answer.reads, answer.output_tokens = 1000, None

        def rest() -> None:
            asyncio.run_coroutine_threadsafe(others.wait(), loop).result()
            answer.output_tokens = 7

        answer.rest = rest
        return answer

    samples = await Run(FakeClient(deferred), singles(2), concurrency=1).end()
    assert {sample.index: sample.output_tokens for sample in samples} == {0: 7, 1: 1}


async def test_short_answers_are_taken_apart_at_once() -> None:
    def deferred(asked: Call) -> Answer:
        answer = answered(asked)
        answer.reads = 2
        answer.rest = lambda: setattr(answer, "output_tokens", 5)
        return answer

    samples = await Run(FakeClient(deferred), singles(3), concurrency=1).end()
    assert [(sample.index, sample.output_tokens) for sample in samples] == [(0, 5), (1, 5), (2, 5)]


async def test_what_taking_apart_raises_is_raised() -> None:
    def deferred(asked: Call) -> Answer:
        answer = answered(asked)
        answer.reads = 1000

        def rest() -> None:
            raise LoadTestError("no way to read it")

        answer.rest = rest
        return answer

    with pytest.raises(LoadTestError, match="no way"):
        await Run(FakeClient(deferred), singles(1)).end()
