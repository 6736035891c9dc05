"""What the supervisor keeps for its fronts: models that they still use, and places in the quotas of keys."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engines.errors import RateLimitedError
from penstock.gateway.models.language.adapters import CallCounter
from penstock.gateway.models.language.images import reader
from penstock.gateway.processes.fronts.messages import Ask, Ended, Granted, Holds, Spent, Table
from penstock.gateway.processes.fronts.model_table import Doors, FrontHolds, Used
from penstock.gateway.processes.fronts.quotas import QuotaClient, QuotaDesk, granted_by, keys_message
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota


def test_a_front_s_door_takes_the_largest_request() -> None:
    door = Doors(Path("folder"), 2).new()
    assert door.max_message_bytes > reader._MOST_PIXEL_BYTES + (32 << 20)
    assert door.max_untaken_bytes > 2 * door.max_message_bytes


class Unloading(RuleBasedStateMachine):
    """A supervisor and a front, with messages on their way in both directions. A model is what a front may use from the
    table that names it to the end of its last request."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[int, CallCounter] = {}
        self.listed: set[int] = set()
        self.revision = 0
        self.holds = FrontHolds()
        self.down: deque[Table] = deque()
        self.up: deque[Holds] = deque()
        self.at_front: set[int] = set()
        """In the newest table that the front has read."""
        self.requests: list[int] = []
        """The models of those that run at the front."""
        self.front_revision = 0

    @rule(number=st.integers(0, 3), there=st.booleans())
    def change(self, number: int, there: bool) -> None:
        (self.listed.add if there else self.listed.discard)(number)
        self.revision += 1
        used = Used()
        for each in self.listed:
            used.models[each] = self.counters.setdefault(each, CallCounter())
        table = Table(revision=self.revision, models=(), routed=tuple(map(str, self.listed)))
        self.holds.sent(table, used)
        self.down.append(table)

    @precondition(lambda self: self.down)
    @rule()
    def front_reads(self) -> None:
        table = self.down.popleft()
        self.at_front = set(map(int, table.routed))
        self.front_revision = table.revision
        self.front_tells()

    @precondition(lambda self: self.at_front)
    @rule()
    def request_begins(self) -> None:
        self.requests.append(min(self.at_front))

    @precondition(lambda self: self.requests)
    @rule()
    def request_ends(self) -> None:
        self.requests.pop()
        self.front_tells()

    def front_tells(self) -> None:
        kept = self.at_front | set(self.requests)
        self.up.append(Holds(revision=self.front_revision, models=tuple(kept), adapters=()))

    @precondition(lambda self: self.up)
    @rule()
    def supervisor_reads(self) -> None:
        self.holds.take(self.up.popleft())

    @invariant()
    def what_the_front_may_use_is_held(self) -> None:
        on_their_way = {int(name) for table in self.down for name in table.routed}
        for number in self.at_front | set(self.requests) | on_their_way:
            assert self.counters[number].held

    @invariant()
    def nothing_else_is_held_when_all_is_told(self) -> None:
        if not self.down and not self.up:
            used = self.at_front | set(self.requests)
            assert all(counter.held == (number in used) for number, counter in self.counters.items())

    def teardown(self) -> None:
        self.holds.close()
        assert not any(counter.held for counter in self.counters.values())


TestUnloading = Unloading.TestCase


class Wired:
    """A front's requests of one key, and the supervisor's desk; messages arrive when they are let through."""

    def __init__(self, limits: Limits) -> None:
        self.quota = Quota(limits, clock=lambda: 0.0)
        self.desk = QuotaDesk(lambda digest: self.quota if digest == b"key" else None)
        self.client = QuotaClient(self._told)
        self.late: list[Granted] = []
        self.holding_back = False
        message = keys_message({b"key": Principal(tenant="t", quota=self.quota)})
        self.principal = (granted_by(message) or {})[b"key"]

    def _told(self, message: Ask | Spent | Ended) -> None:
        match message:
            case Ask():
                self.late.append(self.desk.ask(message))
                if not self.holding_back:
                    asyncio.get_running_loop().call_soon(self.let_through)
            case Spent():
                self.desk.spent(message)
            case Ended():
                self.desk.ended(message)

    def let_through(self) -> None:
        for granted in self.late:
            self.client.answered(granted)
        self.late.clear()

    async def begun(self) -> RequestContext:
        context = RequestContext(principal=self.principal)
        await self.client.count(context)
        return context


async def test_a_front_s_requests_count_against_the_key() -> None:
    wired = Wired(Limits(concurrent_requests=2, tokens_per_minute=100))
    first, second = await wired.begun(), await wired.begun()
    with pytest.raises(RateLimitedError, match="2 requests at one time"):
        await wired.begun()
    first.pay_tokens(60)
    assert (b"x-ratelimit-remaining-tokens", b"40") in wired.quota.headers()
    first.end()
    assert (b"x-ratelimit-remaining-tokens", b"100") in wired.quota.headers()
    assert wired.quota.in_flight == 1
    await wired.begun()
    second.end()
    assert wired.quota.in_flight == 1
    assert wired.principal.quota is not None
    assert (b"x-ratelimit-limit-tokens", b"100") in wired.principal.quota.headers()


@pytest.mark.parametrize("answered", ["after the client has left", "in the same turn of the loop"])
async def test_who_leaves_before_the_answer_holds_nothing(answered: str) -> None:
    wired = Wired(Limits(concurrent_requests=1))
    wired.holding_back = True
    asking = asyncio.create_task(wired.begun())
    await asyncio.sleep(0)
    assert wired.quota.in_flight == 1
    if answered == "in the same turn of the loop":
        wired.let_through()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    wired.let_through()
    assert wired.quota.in_flight == 0


async def test_the_places_of_a_front_that_dies_are_free() -> None:
    wired = Wired(Limits(concurrent_requests=2))
    await wired.begun()
    await wired.begun()
    wired.desk.close()
    assert wired.quota.in_flight == 0


async def test_a_key_without_limits_asks_nobody() -> None:
    wired = Wired(Limits())
    context = RequestContext(principal=Principal(tenant="free"))
    await wired.client.count(context)
    context.end()
    assert not wired.late
