"""Which of several servers is asked, how often, and when two are."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.engines.kv_events.index import Stored
from penstock.engines.kv_events.settings import KVEventsSource
from penstock.engines.replicas.state import RoutingPolicy
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.errors import UpstreamError, UpstreamRateLimitedError, UpstreamUnavailableError
from penstock.gateway.models.upstream.attempts import OpenAnswer, Question
from penstock.gateway.models.upstream.failures import AttemptFailed, Redactor
from penstock.gateway.models.upstream.fleet import Fleet, RetryBudget
from penstock.gateway.models.upstream.request_writing import UpstreamRequest
from penstock.gateway.models.upstream.server import UpstreamHealth, UpstreamServer

_Events = tuple[str | KVEventsSource, ...]
QUESTION = Question("m", "chat/completions", [], b"{}", True, 1.0, Redactor(()))


class Story:
    """What each attempt at a server comes to: an error, or else an answer."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[Exception | None]] = {}
        self.attempts: list[str] = []
        self.hanging: set[str] = set()
        self.ended: Counter[str] = Counter()

    async def attempt(self, server: UpstreamServer, question: Question) -> OpenAnswer:
        name = server.url.host
        self.attempts.append(name)
        server.in_flight += 1
        try:
            if name in self.hanging:
                await asyncio.Event().wait()
            outcome = self.outcomes.get(name) or [None]
            error = outcome.pop(0)
            if error is not None:
                raise error
        except BaseException:
            server.in_flight -= 1
            self.ended[name] += 1
            raise
        return OpenAnswer(server, _Nothing(), b"")  # type: ignore[arg-type]


class _Nothing:
    """A connection that is closed already."""

    complete, closed, reusable = False, True, False

    def listen(self, sink: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    story = Story()
    monkeypatch.setattr("penstock.gateway.models.upstream.fleet.attempt", story.attempt)
    return story


def fleet(*hosts: str, **given: Any) -> Fleet:
    settings = UpstreamSettings(name="m", url=tuple(f"http://{host}" for host in hosts), **given)
    return Fleet(settings, [UpstreamServer(settings, url, None) for url in settings.urls], chance=lambda: 0.0)


def fails(error: PenstockError | None = None, **given: Any) -> AttemptFailed:
    return AttemptFailed(error or UpstreamError("it failed"), "502", **given)


async def test_equals_take_turns_and_the_least_busy_is_first(story: Story) -> None:
    servers = fleet("a", "b", "c")
    answers = [await servers.ask(QUESTION) for _ in range(6)]
    assert Counter(story.attempts) == {"a": 2, "b": 2, "c": 2}
    answers[0].end("200")
    free = answers[0].server
    assert (await servers.ask(QUESTION)).server is free


def prompt(text: str, session: str = "") -> Question:
    """Of a chat with these words, each of them a block of its own."""
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "".join(each * 256 for each in text)}]})
    return replace(QUESTION, prefix=UpstreamRequest(body, "chat").prefix(), session=session)


async def test_what_a_server_has_cached_draws_requests_until_it_has_too_many(story: Story) -> None:
    servers = fleet("a", "b", "c")
    (await servers.ask(prompt("kept" * 8))).end("200")
    (await servers.ask(prompt("else" * 8))).end("200")
    first, second = story.attempts
    for text in ("kept" * 8 + "more", "kept" * 8 + "again"):
        (await servers.ask(prompt(text))).end("200")
    assert story.attempts == [first, second, first, first]
    busy = [await servers.ask(prompt("kept" * 8)) for _ in range(200)]
    assert {answer.server.url.host for answer in busy} == {"a", "b", "c"}


async def test_a_session_stays_where_it_was(story: Story) -> None:
    servers = fleet("a", "b", "c")
    for session in ("", "s", "", "s", "", "s"):
        (await servers.ask(prompt("x", session))).end("200")
    assert len(set(story.attempts[1::2])) == 1


def tokens(first: int, count: int = 640) -> Question:
    return replace(QUESTION, prefix=list(range(first, first + count)), has_tokens=True)


def go_live(servers: Fleet) -> None:
    for followed in servers.followed.values():
        for rank in followed.ranks:
            rank.live = True


async def test_what_a_server_says_it_has_cached_draws_requests(story: Story) -> None:
    events = ("", "tcp://b:1", {"endpoint": "tcp://c:1", "replay_endpoint": "tcp://c:9", "ranks": 3})
    servers = fleet("a", "b", "c", kv_events=msgspec.convert(events, _Events), tokenizer="a folder")
    assert servers.followed.keys() == {1, 2}
    go_live(servers)
    caches = {name: servers.followed[number].ranks[-1].index for name, number in (("b", 1), ("c", 2))}
    (await servers.ask(tokens(0))).end("200")
    assert story.attempts == ["a"]
    caches["c"].apply([Stored(list(range(40)), None, list(range(1000, 1640)), 16)])
    for first, name in ((1000, "c"), (0, "a"), (1000, "c")):
        (await servers.ask(tokens(first))).end("200")
        assert story.attempts[-1] == name
    assert servers.servers[2].routed_tokens == {"events": 2 * 639, "sent": 0, "no": 2}
    assert servers.servers[0].routed_tokens == {"events": 0, "sent": 639, "no": 641}
    caches["c"].clear()
    caches["b"].apply([Stored(list(range(40)), None, list(range(1000, 1640)), 16)])
    (await servers.ask(tokens(1000))).end("200")
    assert story.attempts[-1] == "b", "what the other one was sent does not count, since it tells that it is gone"
    servers.followed[1].ranks[0].live = False
    (await servers.ask(tokens(1000))).end("200")
    assert story.attempts[-1] != "b"


async def test_prompts_under_way_count_as_cached(story: Story) -> None:
    """Before the server's events can tell: of a burst with one prompt each server computes it once."""
    servers = fleet("a", "b", kv_events=("tcp://a:1", "tcp://b:1"), tokenizer="a folder")
    go_live(servers)
    story.hanging = {"a", "b"}
    burst = [asyncio.create_task(servers.ask(tokens(0, 3200))) for _ in range(5)]
    await asyncio.sleep(0)
    assert Counter(story.attempts) == {"a": 3, "b": 2}
    assert [server.waiting_tokens for server in servers.servers] == [3202, 3201]
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded"])
async def test_other_ways_to_choose_do_not_look_at_prompts(story: Story, routing: str) -> None:
    servers = fleet("a", "b", routing=RoutingPolicy(routing))
    for _ in range(4):
        (await servers.ask(prompt("kept" * 8, "s"))).end("200")
    assert Counter(story.attempts) == {"a": 2, "b": 2}


async def test_a_failure_is_tried_again_elsewhere_and_so_often(story: Story) -> None:
    story.outcomes = {name: [fails() for _ in range(9)] for name in "abcd"}
    servers = fleet("a", "b", "c", "d", retries=2)
    with pytest.raises(UpstreamError, match="it failed"):
        await servers.ask(QUESTION)
    assert len(set(story.attempts)) == len(story.attempts) == 3
    assert servers.retries == 2


async def test_retries_end_with_their_budget(story: Story) -> None:
    """Ten are there at the beginning, and each request brings a hundredth."""
    servers = fleet("a", "b", retry_ratio=0.01, retries=1, eject_after=1000)
    story.outcomes = {name: [fails() for _ in range(100)] for name in "ab"}
    for _ in range(20):
        with pytest.raises(UpstreamError):
            await servers.ask(QUESTION)
    assert (servers.retries, len(story.attempts)) == (10, 30)


@pytest.mark.parametrize(
    "failure",
    [
        fails(InvalidRequestError("yours"), again=False, unhealthy=False),
        fails(UpstreamRateLimitedError("later"), retry_after=30.0, unhealthy=False),
    ],
)
async def test_what_cannot_help_is_not_tried(story: Story, failure: AttemptFailed) -> None:
    story.outcomes = {"a": [failure]}
    with pytest.raises(type(failure.error)):
        await fleet("a").ask(QUESTION)
    assert story.attempts == ["a"]


async def test_nobody_takes_requests(story: Story) -> None:
    servers = fleet("a", eject_after=1, eject_seconds=100)
    servers.servers[0].health.failed(asyncio.get_running_loop().time())
    with pytest.raises(UpstreamUnavailableError) as caught:
        await servers.ask(QUESTION)
    assert 90 < (caught.value.retry_after or 0) <= 100
    assert not story.attempts
    assert not servers.available


async def test_a_slow_server_is_raced(story: Story) -> None:
    story.hanging = {"a"}
    servers = fleet("a", "b", hedge_after=0.001)
    for _ in range(3):
        answer = await servers.ask(QUESTION)
        assert answer.server.url.host == "b"
        answer.end("200")
        await asyncio.sleep(0)
    assert servers.hedges == story.ended["a"] == story.attempts.count("a") > 0
    assert [server.in_flight for server in servers.servers] == [0, 0]


async def test_a_client_that_leaves_a_race_ends_both(story: Story) -> None:
    story.hanging = {"a", "b"}
    servers = fleet("a", "b", hedge_after=0.001)
    asking = asyncio.create_task(servers.ask(QUESTION))
    while len(story.attempts) < 2:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert story.ended == {"a": 1, "b": 1}


async def test_the_slower_of_two_answers_is_given_up(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    both = asyncio.Event()

    async def attempt(server: UpstreamServer, question: Question) -> OpenAnswer:
        story.attempts.append(server.url.host)
        if len(story.attempts) == 2:
            both.set()
        await both.wait()
        server.in_flight += 1
        return OpenAnswer(server, _Nothing(), b"")  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.gateway.models.upstream.fleet.attempt", attempt)
    servers = fleet("a", "b", hedge_after=0.001)
    answer = await servers.ask(QUESTION)
    await asyncio.sleep(0)
    assert sum(server.in_flight for server in servers.servers) == 1
    answer.end("200")
    assert sum(server.in_flight for server in servers.servers) == 0


EJECT_AFTER, SECONDS = 3, 5.0


class HealthMachine(RuleBasedStateMachine):
    """Beside a model that keeps the whole story."""

    def __init__(self) -> None:
        super().__init__()
        self.health = UpstreamHealth(EJECT_AFTER, SECONDS)
        self.now = 0.0
        self.failures = 0
        self.ejected_until: float | None = None
        self.span = SECONDS
        self.rests_until = 0.0
        self.missed = 0

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begins(self) -> None:
        self.health.began()
        self.ejected_until, self.missed = None, 0

    @rule()
    def answers(self) -> None:
        self.health.answered()
        self.failures, self.ejected_until, self.span, self.missed = 0, None, SECONDS, 0

    @rule()
    def fails(self) -> None:
        self.health.failed(self.now)
        self.failures += 1
        on_trial = self.ejected_until is not None and self.now >= self.ejected_until
        if on_trial or (self.ejected_until is None and self.failures >= EJECT_AFTER):
            self.ejected_until = self.now + self.span
            self.span = min(2 * self.span, 60.0)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def asks_for_rest(self, seconds: float) -> None:
        self.health.rests(self.now + seconds)
        self.rests_until = max(self.rests_until, self.now + seconds)

    @rule(there=st.booleans())
    def probed(self, there: bool) -> None:
        self.health.probed(there=there)
        self.missed = 0 if there else self.missed + 1

    @invariant()
    def takes_requests_when_it_should(self) -> None:
        there = self.missed < 2 and self.now >= self.rests_until
        over = self.ejected_until is None or self.now >= self.ejected_until
        assert self.health.takes_requests(self.now, 0) == (there and over)
        assert self.health.takes_requests(self.now, 1) == (there and self.ejected_until is None)
        assert self.health.healthy == (self.ejected_until is None and self.missed < 2)

    @invariant()
    def says_how_long(self) -> None:
        wait = self.health.seconds_until(self.now)
        assert wait == max(0.0, self.rests_until - self.now, (self.ejected_until or 0.0) - self.now)


TestHealth = HealthMachine.TestCase


def test_answers_that_begin_and_break_eject_a_server() -> None:
    health = UpstreamHealth(EJECT_AFTER, SECONDS)
    for _ in range(EJECT_AFTER):
        health.began()
        health.failed(0.0)
    assert not health.takes_requests(SECONDS - 1, 0)
    health.began()  # on trial, again
    health.failed(SECONDS)
    assert health.seconds_until(SECONDS) == 2 * SECONDS


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1))
def test_retries_are_a_part_of_the_requests(story: list[bool], ratio: float) -> None:
    budget = RetryBudget(ratio)
    asked = taken = 0
    for is_request in story:
        if is_request:
            budget.note_request()
            asked += 1
        elif budget.take():
            taken += 1
    assert taken <= (10 + asked * ratio if ratio else 0) + 1e-6
