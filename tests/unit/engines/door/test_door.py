"""The door's own thread: what a client without manners brings upon itself, and upon nobody else."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    CloseDoor,
    FinishReason,
    Grammar,
    LoadAdapter,
    RequestError,
    RequestOutput,
    ResetPrefixCache,
    SamplingParams,
    StepOutputs,
    StepRecord,
    UnloadAdapter,
)
from penstock.engines.door import messages
from penstock.engines.door.clients import check_request, number_of
from penstock.engines.door.door import Door
from penstock.engines.door.keys import new_key
from penstock.engines.door.messages import (
    PROTOCOL_VERSION,
    Farewell,
    Goodbye,
    Hello,
    Leaving,
    LoadedAdapters,
    Ping,
    Pong,
    Welcome,
)
from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.host.content_digest import ModelDigests
from support.door import INFO, RawClient, open_door, taken
from support.server import wait_until


@pytest.fixture
def door() -> Iterator[Door]:
    with open_door(max_clients=3) as door:
        yield door


@pytest.fixture
def connect(door: Door) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def client(to: Door = door) -> RawClient:
            found = RawClient(to.spec.address, to.spec.key)
            stack.callback(found.close)
            return found

        yield client


def request(*ids: int, **params: Any) -> AddRequest:
    return AddRequest(ids, [1, 2, 3], SamplingParams(**{"max_tokens": 4, **params}), arrival_time=0.0)


def step(*outputs: RequestOutput, **fields: Any) -> StepOutputs:
    return StepOutputs(list(outputs), EngineStats(admitted=9), **fields)


def test_a_request_goes_down_and_its_tokens_come_up(door, connect):
    client = connect()
    assert client.hello().info == INFO
    client.tell(request(5))
    [down] = taken(door)
    [engine_id] = down.ids
    assert number_of(engine_id) == 1
    own = RequestOutput(5, [7])
    told = door.deliver(step(own, RequestOutput(engine_id, [8])))
    assert told.outputs == [own]
    assert told.stats.own_admitted == 8
    assert [(o.id, o.token_ids) for o in client.hear(StepOutputs).outputs] == [(5, [8])]
    owner = door.deliver(step(RequestOutput(engine_id, [9], FinishReason.LENGTH)))
    assert owner is None, "it need not wake up for others"
    last = client.hear(StepOutputs)
    assert [(o.id, o.finish_reason) for o in last.outputs] == [(5, FinishReason.LENGTH)]
    assert last.stats.own_admitted == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        [b""],
        [b"\xc1"],
        [b"\x91" * 2000],
        [msgspec.msgpack.encode({"type": "add", "ids": ["one"]})],
        [msgspec.msgpack.encode(LoadAdapter(1, "theirs", "/etc"))],
        [msgspec.msgpack.encode(UnloadAdapter(1, "theirs"))],
        [msgspec.msgpack.encode(Hello(PROTOCOL_VERSION))],
        [msgspec.msgpack.encode(request(0))],
        [msgspec.msgpack.encode(AbortRequests([1 << 50]))],
        [msgspec.msgpack.encode(Ping(0.0, 1 << 40))],
        [msgspec.msgpack.encode(request(7)), b"more"],
    ],
)
def test_nonsense_ends_its_client_and_nobody_else(door, connect, nonsense):
    polite, rude = connect(), connect()
    polite.hello()
    rude.hello()
    polite.tell(request(1))
    [mine] = taken(door)
    rude.tell(request(1))
    [theirs] = taken(door)
    rude.say(*nonsense)
    assert rude.hear(Farewell).error.code == "invalid_request"
    assert taken(door) == [AbortRequests(list(theirs.ids))]
    rude.tell(Ping(0.0, 0))
    assert "does not know" in rude.hear(Farewell).error.message
    door.deliver(step(RequestOutput(mine.ids[0], [3]), RequestOutput(theirs.ids[0], [4])))
    assert [o.token_ids for o in polite.hear(StepOutputs).outputs] == [[3]]


def test_who_does_not_say_hello_is_told_so(door, connect):
    for message in (request(1), Ping(0.0, 0), AbortRequests([1])):
        stranger = connect()
        stranger.tell(message)
        assert stranger.hear(Farewell).error.code == "not_ready"
    stranger.tell(Goodbye())
    stranger.say(b"\xc1")
    assert f"version {PROTOCOL_VERSION}" in stranger.hear(Farewell).error.message


def test_another_version_of_the_protocol_is_refused(door, connect):
    client = connect()
    client.tell({"type": "hello", "version": PROTOCOL_VERSION + 1, "something": "new"})
    assert "the same version of Penstock" in client.hear(Farewell).error.message


def test_another_model_is_refused(connect):
    with open_door(model=ModelDigests("this one")) as door:
        client = connect(door)
        client.tell(Hello(PROTOCOL_VERSION, model=ModelDigests("that one")))
        assert "another model" in client.hear(Farewell).error.message
        client.hello(model=ModelDigests("this one"))


def test_there_are_only_so_many_clients(door, connect):
    clients = [connect() for _ in range(3)]
    for client in clients:
        client.hello()
    one_more = connect()
    one_more.tell(Hello(PROTOCOL_VERSION))
    assert one_more.hear(Farewell).error.code == "overloaded"
    clients[0].tell(Goodbye())

    def comes_in() -> bool:
        """Once the door has read the other client's message."""
        one_more.tell(Hello(PROTOCOL_VERSION))
        return isinstance(one_more.hear(Welcome | Farewell), Welcome)

    wait_until(comes_in)


def test_a_client_that_vanishes_is_noticed_at_once(door, connect):
    client = connect()
    client.hello()
    client.tell(request(1, 2))
    [down] = taken(door)
    client.close()
    assert taken(door) == [AbortRequests(list(down.ids))]


def test_a_client_that_says_nothing_any_more_is_gone(connect):
    with open_door(client_timeout=1.0) as door:
        silent, alive = connect(door), connect(door)
        silent.hello()
        alive.hello()
        silent.tell(request(1))
        [down] = taken(door)
        found: list[Any] = []
        while not found:
            alive.tell(Ping(1.0, 0))
            alive.hear(Pong)
            found = taken(door, 0.01)
        assert found == [AbortRequests(list(down.ids))]
        assert "nothing was heard" in silent.hear(Farewell).error.message


def test_a_client_that_does_not_read_is_cut_off_and_the_others_are_not(connect):
    with open_door(max_unread_bytes=100_000) as door:
        slow, quick = connect(door), connect(door)
        welcomes = [len(msgspec.msgpack.encode(client.hello())) for client in (slow, quick)]
        slow.tell(request(1))
        [theirs] = taken(door)
        quick.tell(request(1))
        [mine] = taken(door)
        read = welcomes[1]
        for _ in range(30):
            door.deliver(step(*(RequestOutput(each.ids[0], [300] * 2000) for each in (theirs, mine))))
            read += len(quick.socket.recv())
            quick.tell(Ping(0.0, read))
            read += len(msgspec.msgpack.encode(quick.hear(Pong)))
        assert taken(door) == [AbortRequests(list(theirs.ids))]
        assert "too slow" in slow.hear(Farewell).error.message


def test_a_client_may_not_fill_the_memory_while_the_engine_is_busy(connect):
    with open_door(max_untaken_bytes=5000) as door:
        flood, other = connect(door), connect(door)
        flood.hello()
        other.hello()
        for number in range(1, 10):
            flood.tell(AddRequest((number,), [300] * 400, SamplingParams(max_tokens=1), arrival_time=0.0))
        assert flood.hear(Farewell).error.code == "overloaded"
        other.tell(request(1))
        while not any(isinstance(each, AddRequest) and number_of(each.ids[0]) == 2 for each in taken(door)):
            pass


def test_a_message_that_is_too_large_ends_its_connection(connect):
    with open_door(max_message_bytes=1000) as door:
        client, other = connect(door), connect(door)
        client.hello()
        other.hello()
        client.tell(request(1))
        [down] = taken(door)
        client.say(b"x" * 2000)
        assert taken(door) == [AbortRequests(list(down.ids))]
        other.tell(Ping(3.0, 0))
        assert other.hear(Pong).sent_at == 3.0


def test_signs_of_life_are_answered_while_the_loop_computes(door, connect):
    client = connect()
    client.hello()
    client.tell(Ping(4.5, 0))
    assert client.hear(Pong).sent_at == 4.5


def test_steps_and_replies_find_their_way(door, connect):
    curious, other = connect(), connect()
    curious.hello(wants_steps=True)
    other.hello()
    curious.tell(ResetPrefixCache(3))
    [call] = taken(door)
    steps = [StepRecord(0.1, 1, 1)]
    own = door.deliver(step(replies=[CallReply(call.call), CallReply(3)], steps=steps))
    assert (own.replies, own.steps) == ([CallReply(3)], steps)
    told = curious.hear(StepOutputs)
    assert (told.replies, told.steps) == ([CallReply(3)], steps)
    told = other.hear(StepOutputs)
    assert (told.replies, told.steps) == ([], [])


def test_adapters_are_told_when_the_owner_has_loaded_them(connect):
    with open_door(adapters=["first:1"]) as door:
        client = connect(door)
        assert client.hello().adapters == ["first:1"]
        list(door.with_clients([LoadAdapter(1, "good:2", "/a"), LoadAdapter(2, "bad:3", "/b")]))
        door.deliver(step(replies=[CallReply(1)]))
        assert client.hear(LoadedAdapters).keys == ["first:1", "good:2"]
        door.deliver(step(replies=[CallReply(2, RequestError("invalid_request", "bad"))]))
        list(door.with_clients([UnloadAdapter(3, "first:1")]))
        door.deliver(step(replies=[CallReply(3)]))
        assert client.hear(LoadedAdapters).keys == ["good:2"]


def test_what_the_engine_could_not_compute_ends_its_request_alone(door, connect):
    client = connect()
    client.hello()
    client.tell(request(1, temperature=math.nan))
    [output] = client.hear(StepOutputs).outputs
    assert (output.id, output.error.code, output.error.param) == (1, "invalid_request", "temperature")
    client.tell(request(1))
    assert len(taken(door)) == 1
    door.deliver(step())
    assert client.hear(StepOutputs).stats.own_admitted == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"presence_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"seed": 1 << 63},
        {"logit_bias": {INFO.vocab_size: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"stop_token_ids": (-1,)},
        {"bad_words": ((),)},
        {"bad_words": ((INFO.vocab_size,),)},
        {"prediction": (INFO.vocab_size,)},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (INFO.vocab_size,)},
        {"logprobs": -1},
        {"grammar": Grammar("regex", "a" * (1 << 20))},
    ],
)
def test_sampling_that_no_engine_can_compute(wrong):
    with pytest.raises(PenstockError):
        check_request(request(1, **wrong), INFO, ())


def test_what_the_gateway_lets_through_is_let_in():
    check_request(request(1, temperature=2.0, top_p=1e-9, seed=-(2**63), logit_bias={0: -100.0}), INFO, ())


def test_a_door_that_is_closed_lets_nothing_new_in(door, connect):
    client = connect()
    client.hello()
    client.tell(request(1))
    [before] = taken(door)
    assert list(door.with_clients([CloseDoor()])) == []
    assert door.replies() == [CallReply(CloseDoor.call)]
    client.hear(Leaving)
    client.tell(request(2))
    [refused] = client.hear(StepOutputs).outputs
    assert (refused.id, refused.error.code) == (2, "not_ready")
    stranger = connect()
    stranger.tell(Hello(PROTOCOL_VERSION))
    assert stranger.hear(Farewell).error.code == "not_ready"
    client.tell(AbortRequests([1]))
    assert taken(door) == [AbortRequests(list(before.ids))]


def test_who_knows_the_engine_s_public_key_only_is_not_let_in(connect):
    key = new_key()
    with open_door(address="tcp://127.0.0.1:*", key=key) as door:
        address = door._reception._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        with contextlib.closing(RawClient(address, key)) as client:
            client.hello()
        public, secret = zmq.curve_keypair()
        stranger = RawClient(address, key, {zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret})
        with contextlib.closing(stranger):
            stranger.tell(Hello(PROTOCOL_VERSION))
            with pytest.raises(AssertionError, match="no Welcome has come"):
                stranger.hear(Welcome, 0.5)


def test_a_change_of_the_messages_is_another_version_of_the_protocol():
    class Ping(messages.Ping):
        new: int = 0

    others = [message for message in messages.MESSAGES if message is not messages.Ping]
    assert len(others) == len(messages.MESSAGES) - 1
    assert messages.protocol_version([*others, messages.Ping]) == PROTOCOL_VERSION
    assert messages.protocol_version([*others, Ping]) != PROTOCOL_VERSION


def test_two_doors_cannot_be_at_one_address():
    with open_door(address="tcp://127.0.0.1:*") as door:
        taken_address = door._reception._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        with pytest.raises(EngineError, match="cannot be at"), open_door(address=taken_address):
            pass


def test_the_process_keeps_no_descriptors_of_a_closed_door(connect):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with open_door():
        pass
    before = descriptors()
    for _ in range(3):
        with open_door() as door:
            client = RawClient(door.spec.address)
            client.hello()
            client.close()
    assert descriptors() <= before
