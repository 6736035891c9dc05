"""The `h2` package as the other side, and as the judge: conversations of a client and a server that both keep the
rules, and frames in any order, of which both have to think the same."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits, PingRules
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, frame
from penstock.gateway.transports.http2.heads import ConnectionFailed, DataReceived, Event, RequestStarted, StreamReset
from penstock.gateway.transports.http2.hpack import encode_fields
from support.http2 import REQUEST, WHOLE, begin, data, headers, names, read_frames

SIZES = st.one_of(st.integers(0, 40), st.integers(0, 100_000))
FIELDS = st.lists(st.tuples(st.sampled_from([b"a", b"b-bin", b"traceparent"]), st.sampled_from([b"1", b"2" * 50])))


class Conversation(RuleBasedStateMachine):
    """Whatever one side has sent, the other one has got when nothing is on its way any more."""

    @initialize(window=st.sampled_from([0, 1, 100, 65_535, 1 << 20]), table=st.sampled_from([0, 100, 4096]))
    def start(self, window: int, table: int) -> None:
        self.server = Http2Connection(Http2Limits(), 0.0)
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self.client = h2.connection.H2Connection(config)
        codes = h2.settings.SettingCodes
        self.client.local_settings = h2.settings.Settings(
            client=True, initial_values={codes.INITIAL_WINDOW_SIZE: window, codes.HEADER_TABLE_SIZE: table}
        )
        self.client.initiate_connection()
        self.next_id = 1
        self.narrowest = window
        self.asked: dict[int, list[tuple[bytes, bytes]]] = {}
        self.sent: dict[int, bytearray] = {}
        self.got: dict[int, bytearray] = {}
        self.asking: set[int] = set()
        self.known: set[int] = set()
        """Streams of which the server knows and which it has not answered."""
        self.heads: set[int] = set()
        self.answers: dict[int, bytearray] = {}
        self.taken: dict[int, bytearray] = {}
        self.complete: set[int] = set()
        self.over: set[int] = set()
        self.given_up: set[int] = set()
        self.read = True
        self.deliver(1 << 30)

    def _bounded(self, size: int) -> int:
        """Each window that is used up costs the client an update, and it has 10,000 of them."""
        return size if self.narrowest > 100 else min(size, 100 * max(1, self.narrowest))

    def deliver(self, size: int) -> None:
        """Both ways, until nothing more comes."""
        while True:
            outgoing = self.client.data_to_send()
            for start in range(0, len(outgoing), size):
                self.at_server(self.server.receive(outgoing[start : start + size], 0.0))
            incoming = self.server.take_output()[0]
            for start in range(0, len(incoming), size):
                for event in self.client.receive_data(incoming[start : start + size]):
                    self.at_client(event)
            if not outgoing and not incoming:
                break

    def at_server(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, ConnectionFailed), event
            if isinstance(event, RequestStarted):
                fields = [(name, value) for name, value in self.asked[event.stream_id] if name[:1] != b":"]
                assert list(event.head.fields) == fields
                self.known.add(event.stream_id)
                self.got[event.stream_id] = bytearray()
            elif isinstance(event, DataReceived):
                self.got[event.stream_id] += event.data
                self.server.credit(event.stream_id, len(event.data))
            elif isinstance(event, StreamReset):
                assert event.stream_id in self.given_up
                self.known.discard(event.stream_id)

    def at_client(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.taken[event.stream_id] += event.data
            if self.read:
                self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.over.add(event.stream_id)
            self.asking.discard(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            assert event.error_code == 0, "only to stop a request that is answered"
            self.asking.discard(event.stream_id)
        assert not isinstance(event, h2.events.ConnectionTerminated)

    @rule(fields=FIELDS, end=st.booleans())
    def ask(self, fields: list[tuple[bytes, bytes]], end: bool) -> None:
        stream_id, self.next_id = self.next_id, self.next_id + 2
        self.asked[stream_id] = [*REQUEST, *fields]
        self.sent[stream_id], self.taken[stream_id] = bytearray(), bytearray()
        self.client.send_headers(stream_id, self.asked[stream_id], end_stream=end)
        if not end:
            self.asking.add(stream_id)

    @precondition(lambda self: self.asking)
    @rule(choice=st.randoms(use_true_random=False), size=SIZES, padding=st.none() | st.integers(0, 255))
    def send(self, choice, size: int, padding: int | None) -> None:  # type: ignore[no-untyped-def]
        stream_id = choice.choice(sorted(self.asking))
        room = min(self.client.local_flow_control_window(stream_id), self.client.max_outbound_frame_size)
        size = max(0, min(size, room - (padding or 0) - 1))
        if room > 0:
            self.client.send_data(stream_id, b"q" * size, pad_length=padding if size else None)
            self.sent[stream_id] += b"q" * size

    @precondition(lambda self: self.asking)
    @rule(choice=st.randoms(use_true_random=False), trailers=st.booleans())
    def stop_asking(self, choice, trailers: bool) -> None:  # type: ignore[no-untyped-def]
        stream_id = choice.choice(sorted(self.asking))
        if trailers:
            self.client.send_headers(stream_id, [(b"a", b"b")], end_stream=True)
        else:
            self.client.end_stream(stream_id)
        self.asking.remove(stream_id)

    @precondition(lambda self: self.sent.keys() - self.over - self.given_up)
    @rule(choice=st.randoms(use_true_random=False))
    def give_up(self, choice) -> None:  # type: ignore[no-untyped-def]
        stream_id = choice.choice(sorted(self.sent.keys() - self.over - self.given_up))
        self.client.reset_stream(stream_id, Http2ErrorCode.CANCEL)
        self.given_up.add(stream_id)
        self.asking.discard(stream_id)

    @precondition(lambda self: self.known)
    @rule(choice=st.randoms(use_true_random=False), size=SIZES, end=st.sampled_from([None, b"", b"\0\x01a\x01b"]))
    def answer(self, choice, size: int, end: bytes | None) -> None:  # type: ignore[no-untyped-def]
        stream_id = choice.choice(sorted(self.known))
        if stream_id not in self.heads:
            self.heads.add(stream_id)
            self.answers[stream_id] = bytearray()
            self.server.send_headers(stream_id, b"\x88")
        size = self._bounded(size)
        self.server.send_data(stream_id, b"r" * size)
        self.answers[stream_id] += b"r" * size
        if end is not None:
            self.server.end(stream_id, end)
            self.known.remove(stream_id)
            self.complete.add(stream_id)

    @precondition(lambda self: self.known - self.heads)
    @rule(choice=st.randoms(use_true_random=False), sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=2))
    def answer_whole(self, choice, sizes: list[int]) -> None:  # type: ignore[no-untyped-def]
        stream_id = choice.choice(sorted(self.known - self.heads))
        self.heads.add(stream_id)
        sizes = [self._bounded(size) for size in sizes]
        self.answers[stream_id] = bytearray(b"w" * sum(sizes))
        self.server.answer(stream_id, b"\x88", tuple(b"w" * size for size in sizes), b"\0\x01a\x01b")
        self.known.remove(stream_id)
        self.complete.add(stream_id)

    @rule(window=st.sampled_from([0, 10, 65_535, 1 << 20]))
    def change_windows(self, window: int) -> None:
        self.narrowest = min(self.narrowest, window)
        self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})

    @rule(read=st.booleans())
    def start_or_stop_reading(self, read: bool) -> None:
        """Data that came meanwhile is acknowledged never: windows stay smaller."""
        self.read = read

    @rule(size=st.sampled_from([1 << 30, 1000, 7]))
    def exchange(self, size: int) -> None:
        self.deliver(size)

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        if paused:
            self.server.pause()
        else:
            self.server.resume()

    @invariant()
    def nothing_is_made_up(self) -> None:
        if hasattr(self, "server"):
            for stream_id, taken in self.taken.items():
                assert len(taken) <= len(self.answers.get(stream_id, b""))

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        self.server.resume()
        self.read = True
        self.client.increment_flow_control_window((1 << 30) - 1)
        self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        self.deliver(1 << 30)
        for stream_id in self.sent.keys() - self.given_up:
            if stream_id not in self.complete:
                assert self.got[stream_id] == self.sent[stream_id]
            else:
                assert self.taken[stream_id] == self.answers[stream_id]
                assert stream_id in self.over
                assert stream_id not in self.server.streams


Conversation.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestConversation = Conversation.TestCase

BLOCK = encode_fields(REQUEST)


def frames_of(number: int) -> list[bytes]:
    """On one stream."""
    return [
        headers(number),
        headers(number, end=True),
        headers(number, flags=0) + frame(FrameType.CONTINUATION, WHOLE, number),
        headers(number, flags=0) + data(number, b"x"),
        headers(number, [(b"a", b"b")], end=True),
        headers(number, REQUEST[1:]),
        headers(number, [*REQUEST, (b"Up", b"x")]),
        headers(number, [*REQUEST, (b"connection", b"x")]),
        headers(number, [*REQUEST, (b"te", b"x")]),
        headers(number, [*REQUEST, (b"a", b" x")]),
        headers(number, [(b"a", b"b"), *REQUEST]),
        headers(number, [*REQUEST[:2], (b":path", b"")]),
        frame(FrameType.HEADERS, WHOLE, number, b"\xff\xff"),
        frame(FrameType.HEADERS, WHOLE | frames.PADDED, number, b"\xff\x82"),
        data(number, b"abc"),
        data(number, b"abc", end=True),
        data(number, b"", end=True),
        data(number, bytes(16_384)),
        frame(FrameType.DATA, frames.PADDED, number, b"\x02abc\0\0"),
        frame(FrameType.DATA, frames.PADDED, number, b"\x09abc"),
        frames.reset(number, 8),
        frame(FrameType.RST_STREAM, 0, number, bytes(3)),
        frames.window_update(number, 5),
        frames.window_update(number, 0),
        frames.window_update(number, frames.MAX_WINDOW),
        frame(FrameType.PRIORITY, 0, number, NUMBER(9) + b"\0"),
    ]


NUMBER = frames.NUMBER.pack
OTHERS = [
    frames.settings({}),
    frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 9}),
    frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}),
    frames.settings({frames.Setting.MAX_FRAME_SIZE: 9}),
    frames.settings({frames.Setting.ENABLE_PUSH: 2}),
    frame(FrameType.SETTINGS, 0, 1),
    frame(FrameType.SETTINGS, 0, 0, bytes(5)),
    frame(FrameType.SETTINGS, frames.ACK, 0, bytes(6)),
    frame(FrameType.PING, 0, 0, bytes(8)),
    frame(FrameType.PING, frames.ACK, 0, bytes(8)),
    frame(FrameType.PING, 0, 0, bytes(7)),
    frame(FrameType.PING, 0, 1, bytes(8)),
    frames.window_update(0, 5),
    frames.window_update(0, 0),
    frames.window_update(0, frames.MAX_WINDOW),
    frame(0x55, 3, 1, b"unknown"),
    headers(0),
    headers(2),
    data(0, b"x"),
    frame(FrameType.CONTINUATION, WHOLE, 1, BLOCK),
    frame(FrameType.PUSH_PROMISE, WHOLE, 1, NUMBER(2) + BLOCK),
]
FRAMES = st.lists(
    st.one_of(
        st.sampled_from([1, 3, 5, 7]).flatmap(lambda number: st.sampled_from(frames_of(number))),
        st.sampled_from(OTHERS),
    ),
    max_size=12,
)
Judgement = tuple[list[tuple[object, ...]], Http2ErrorCode | None]
"""What was understood, up to the first fault; its code."""


def judged(sent: list[bytes]) -> Judgement:
    """By `h2`."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    found: list[tuple[object, ...]] = []
    for piece in sent:
        try:
            events = server.receive_data(piece)
        except h2.exceptions.ProtocolError as error:
            return found, Http2ErrorCode(error.error_code)
        for event in events:
            match event:
                case h2.events.RequestReceived():
                    found.append(("request", event.stream_id))
                case h2.events.DataReceived() if event.data:
                    found.append(("data", event.stream_id, event.data))
                case h2.events.StreamEnded():
                    found.append(("end", event.stream_id))
                case h2.events.StreamReset():
                    if not event.remote_reset:
                        return found, Http2ErrorCode(event.error_code)
                    found.append(("reset", event.stream_id))
        if (code := _reset_in(server.data_to_send())) is not None:
            return found, code
    return found, None


def ours(sent: list[bytes]) -> Judgement:
    server = Http2Connection(Http2Limits(pings=PingRules(max_strikes=0)), 0.0)
    found: list[tuple[object, ...]] = []
    for piece in sent:
        events = server.receive(piece, 0.0)
        code = _reset_in(server.take_output()[0])
        for event in events:
            match event:
                case RequestStarted():
                    found += [("request", event.stream_id), *([("end", event.stream_id)] if event.ended else [])]
                case DataReceived():
                    found += [("data", event.stream_id, event.data)] if event.data else []
                    found += [("end", event.stream_id)] if event.ended else []
                case StreamReset() if code is None:
                    found.append(("reset", event.stream_id))
                case ConnectionFailed():
                    assume(event.text not in _BY_THE_RFC)
                    return found, event.code
        if code is not None:
            return found, code
    return found, None


def _reset_in(replies: bytes) -> Http2ErrorCode | None:
    found = [payload for kind, _, _, payload in read_frames(replies) if kind == FrameType.RST_STREAM]
    return Http2ErrorCode(int.from_bytes(found[0])) if found else None


_BY_THE_RFC = (
    "RST_STREAM is for no open stream",  # 6.4; `h2` lets it pass
    "CONTINUATION continues nothing",  # 6.10; `h2` may say that the stream is closed
)
"""Errors of the connection, of which `h2` thinks otherwise."""
_OTHER_CODES = {
    Http2ErrorCode.COMPRESSION_ERROR,  # 4.3: of a block that cannot be decoded
    Http2ErrorCode.FRAME_SIZE_ERROR,  # 4.2, 6.5
    Http2ErrorCode.STREAM_CLOSED,  # 5.1: `h2` says that the number is too low
}
"""Where `h2` has PROTOCOL_ERROR."""


@settings(max_examples=300, derandomize=True)
@given(FRAMES)
def test_frames_in_any_order(sent: list[bytes]) -> None:
    """Both understand the same up to the first fault, find it at the same frame, and call it the same. Whether it ends
    a stream or the connection may differ: `h2` ends the connection for any malformed request, as the RFC allows.

    Without lengths of bodies, which `h2` does not compare where trailers come, and without GOAWAY, behind which it
    takes no frame any more."""
    (understood, code), (expected, judge) = ours([begin(), *sent]), judged([begin(), *sent])
    assert understood == expected
    assert code == judge or (code in _OTHER_CODES and judge is Http2ErrorCode.PROTOCOL_ERROR)


@settings(max_examples=200)
@given(FRAMES, st.data())
def test_any_bytes_end_in_an_event_at_worst(sent: list[bytes], draw: st.DataObject) -> None:
    """A byte changed, taken away or put in anywhere, in pieces of any size."""
    whole = bytearray(begin() + b"".join(sent))
    for _ in range(draw.draw(st.integers(1, 4))):
        position = draw.draw(st.integers(0, len(whole)))
        whole[position : position + draw.draw(st.integers(0, 1))] = draw.draw(st.binary(max_size=2))
    server = Http2Connection(Http2Limits(), 0.0)
    size = draw.draw(st.sampled_from([1, 9, 1000]))
    failed = False
    for start in range(0, len(whole), size):
        events = server.receive(bytes(whole[start : start + size]), 0.0)
        assert not (failed and events)
        failed = failed or "ConnectionFailed" in names(events)
        for event in events:
            if isinstance(event, RequestStarted):
                server.send_headers(event.stream_id, b"\x88")
                server.send_data(event.stream_id, b"x" * 100)
                server.end(event.stream_id)
        server.take_output()
    assert server.failed == failed
