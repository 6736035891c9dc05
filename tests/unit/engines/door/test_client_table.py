"""Who is connected to a door: nothing reaches anybody but the client that asked for it, and nothing is left behind."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    FinishReason,
    RequestOutput,
    ResetPrefixCache,
    SamplingParams,
)
from penstock.engines.door.clients import Client, ClientTable, number_of
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import InvalidRequestError, OverloadedError

SPEC = DoorSpec(
    address="ipc:///nowhere", max_clients=3, max_unread_bytes=1000, max_untaken_bytes=500, client_timeout=10.0
)


def add(*ids: int, arrival: float = 0.0, deadline: float | None = None) -> AddRequest:
    return AddRequest(ids, [1, 2, 3], SamplingParams(max_tokens=4), arrival_time=arrival, deadline=deadline)


class Clients(RuleBasedStateMachine):
    """The engine is a set of the requests that it runs; each knows whose it is."""

    present = Bundle("present")
    """Clients that are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ClientTable(SPEC)
        self.now = 0.0
        self.num_peers = 0
        self.here: list[Client] = []
        self.live: dict[Client, set[int]] = {}
        """Ids as the clients count them."""
        self.engine: dict[int, tuple[Client, int]] = {}
        """What the engine runs: whose, and what that client calls it."""
        self.seen: set[int] = set()
        """All ids that the engine was ever told."""
        self.untaken: dict[Client, list[int]] = {}

    @rule(target=present)
    def connect(self) -> Client | None:
        self.num_peers += 1
        peer = str(self.num_peers).encode()
        if len(self.here) == SPEC.max_clients:
            with pytest.raises(OverloadedError):
                self.table.welcome(peer, "", False, self.now)
            assert self.table.of(peer) is None
            return None
        client = self.table.welcome(peer, "", False, self.now)
        assert client.number not in {number_of(engine_id) for engine_id in self.seen} | {0}
        self.here.append(client)
        self.live[client], self.untaken[client] = set(), []
        return client

    @precondition(lambda self: self.here)
    @rule(client=present, ids=st.sets(st.integers(1, 12), min_size=1, max_size=3))
    def ask(self, client: Client | None, ids: set[int]) -> None:
        if client not in self.here:
            return
        if ids & self.live[client]:
            with pytest.raises(InvalidRequestError):
                client.add(add(*ids), self.now)
            return
        request = client.add(add(*ids), self.now)
        assert not self.engine.keys() & set(request.ids), "the engine runs another request of this id"
        self.engine.update(zip(request.ids, ((client, local) for local in ids), strict=True))
        self.seen.update(request.ids)
        self.live[client] |= ids

    @precondition(lambda self: self.engine)
    @rule(data=st.data(), ends=st.booleans())
    def step(self, data: st.DataObject, ends: bool) -> None:
        """Some of what the engine runs gets tokens, or ends; its client may be gone."""
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.engine)), min_size=1))
        reason = FinishReason.LENGTH if ends else None
        for client in self.here:
            mine = [engine_id for engine_id in sorted(chosen) if number_of(engine_id) == client.number]
            others = [engine_id for engine_id in sorted(chosen) if number_of(engine_id) != client.number]
            outputs = [RequestOutput(engine_id, [engine_id], reason) for engine_id in mine]
            told = client.outputs([*outputs, *(RequestOutput(engine_id, [0]) for engine_id in others)])
            wanted = [engine_id for engine_id in mine if self.engine[engine_id][1] in self.live[client]]
            assert [(o.id, o.token_ids) for o in told] == [(self.engine[i][1], [i]) for i in wanted]
            if ends:
                self.live[client] -= {self.engine[engine_id][1] for engine_id in mine}
        if ends:
            for engine_id in chosen:
                del self.engine[engine_id]

    @rule(client=present, ids=st.lists(st.integers(1, 12), min_size=1, max_size=3))
    def give_up(self, client: Client | None, ids: list[int]) -> None:
        if client in self.here:
            for engine_id in client.abort(AbortRequests(ids)).ids:
                assert engine_id not in self.engine or self.engine[engine_id][0] is client

    @rule(client=consumes(present))
    def leave(self, client: Client | None) -> None:
        if client not in self.here:
            return
        ended = self.table.leave(client)
        mine = {engine_id for engine_id, (whose, _) in self.engine.items() if whose is client}
        assert set(ended.ids if ended is not None else ()) == mine
        assert self.table.of(client.peer) is self.table.numbered(client.number) is None
        self.here.remove(client)

    @rule(client=present, size=st.integers(1, 400))
    def send(self, client: Client | None, size: int) -> None:
        if client not in self.here:
            return
        if sum(self.untaken[client]) + size > SPEC.max_untaken_bytes:
            with pytest.raises(OverloadedError):
                self.table.received(client, size, self.now)
        else:
            self.table.received(client, size, self.now)
        self.untaken[client].append(size)

    @rule()
    def take_in(self) -> None:
        taken = [(client.number, 1, size) for client, sizes in self.untaken.items() for size in sizes]
        self.table.taken_in(taken)
        self.untaken = {client: [] for client in self.untaken}
        assert all(client.untaken_bytes == 0 for client in self.here)

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = [client for client in self.here if self.now - client.heard_at > SPEC.client_timeout]
        assert self.table.silent(self.now) == silent

    @invariant()
    def everybody_is_known(self) -> None:
        assert list(self.table) == self.here
        assert len(self.table) == len(self.here) <= SPEC.max_clients
        assert all(self.table.of(client.peer) is self.table.numbered(client.number) is client for client in self.here)
        for client in self.here:
            assert {client.engine_id(local) for local in self.live[client]} == client.live


Clients.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestClients = Clients.TestCase


@pytest.fixture
def client() -> Client:
    return ClientTable(SPEC).welcome(b"peer", "front 1", False, 0.0)


@pytest.mark.parametrize("ids", [(), (0,), (-1,), (1 << 40,), (1, 1)])
def test_ids_that_no_client_counts_to_end_it(client: Client, ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        client.add(add(*ids), 5.0)
    assert not client.live


def test_no_client_can_name_the_request_of_another() -> None:
    table = ClientTable(SPEC)
    first, second = (table.welcome(peer, "", False, 0.0) for peer in (b"1", b"2"))
    [mine] = first.add(add(7), 0.0).ids
    with pytest.raises(InvalidRequestError):
        second.abort(AbortRequests([mine]))
    assert second.abort(AbortRequests([7])).ids != [mine]


@pytest.mark.parametrize(
    ("arrival", "found"), [(-2.0, 998.0), (0.0, 1000.0), (5.0, 1000.0), (math.nan, 1000.0), (-1e9, -2600.0)]
)
def test_times_are_seconds_from_now(client: Client, arrival: float, found: float) -> None:
    request = client.add(add(1, arrival=arrival, deadline=2.5), 1000.0)
    assert (request.arrival_time, request.deadline) == (found, 1002.5)


def test_a_deadline_that_is_no_number_ends_the_client(client: Client) -> None:
    with pytest.raises(InvalidRequestError):
        client.add(add(1, deadline=math.nan), 0.0)
    assert not client.live


def test_who_does_not_read_is_too_slow() -> None:
    table = ClientTable(SPEC)
    client = table.welcome(b"1", "", False, 0.0)
    table.sent(client, 600)
    with pytest.raises(InvalidRequestError):
        table.read(client, 601, 1.0)
    table.read(client, 600, 1.0)
    table.sent(client, 1000)
    with pytest.raises(OverloadedError):
        table.sent(client, 1)


def test_replies_come_back_with_the_client_s_own_numbers(client: Client) -> None:
    call = client.call(ResetPrefixCache(9)).call
    assert number_of(call) == client.number
    assert client.replies([CallReply(call)]) == [CallReply(9)]
