"""The door of an engine process: a thread of its own that speaks with clients, beside the loop that steps.

The loop hands over what a step has brought and takes what has come, both under one lock and in a few microseconds;
decoding, encoding and sending happen in the thread, while the loop's step computes. So a client's signs of life are
answered whatever the step does, and a client that sends nonsense costs the loop nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from penstock.engines.bell import Bell
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    DownMessage,
    EngineStats,
    FinishReason,
    Heartbeat,
    RequestError,
    RequestOutput,
    ResetPrefixCache,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.adapters_known import KnownAdapters
from penstock.engines.door.checks import check_request
from penstock.engines.door.clients import Client, ClientTable, number_of
from penstock.engines.door.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    DoorMessage,
    Farewell,
    Goodbye,
    Hello,
    LoadedAdapters,
    Ping,
    Pong,
    Welcome,
)
from penstock.engines.door.sockets import Guard, door_socket
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import EngineError, InvalidRequestError, NotReadyError, OverloadedError, PenstockError
from penstock.engines.process.wire import encode, receive_all

logger = logging.getLogger(__name__)

_STATS_INTERVAL = 0.1
"""Seconds between two messages to clients that a step has brought nothing."""
_MESSAGES_AT_A_TIME = 256
"""Read before what a step has brought is sent on: one client's flood does not stop the others' tokens."""
_LAST_WORDS_MS = 2000
_JOIN_SECONDS = 3.0
_MOST_NAME_CHARS = 64

_decode: Callable[[bytes], ClientMessage] = msgspec.msgpack.Decoder(ClientMessage).decode
_Socket: TypeAlias = zmq.Socket[bytes]


class _Arrival(NamedTuple):
    """Something that a client has sent for the engine."""

    message: DownMessage
    number: int
    samples: int
    size: int


class _News(NamedTuple):
    """What the loop hands over."""

    outputs: dict[int, list[RequestOutput]]
    """By client."""
    replies: dict[int, list[CallReply]]
    stats: EngineStats
    steps: list[StepRecord]
    taken: list[tuple[int, int, int]]
    """Client, samples and bytes of messages that the engine has taken in."""


class Door:
    """Opened when the model is loaded. `with_clients`, `deliver` and `close` belong to the loop, the rest to the
    thread."""

    def __init__(
        self,
        spec: DoorSpec,
        welcome: Welcome,
        adapters: Iterable[str],
        heartbeat: Callable[[], Heartbeat],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`welcome`: what clients are told; its adapters are those of the moment. Raises EngineError when nothing can
        listen at the address."""
        self._spec = spec
        self._info: ModelInfo = welcome.info
        self._welcome = welcome
        self._heartbeat = heartbeat
        self._clock = clock
        self._clients = ClientTable(spec)
        self._adapters = KnownAdapters(adapters)
        self._told_adapters = self._adapters.keys
        self._lock = threading.Lock()
        """Guards the next three, and both bells."""
        self._arrived: list[_Arrival] = []
        self._news: list[_News] = []
        self._closing: str | None = None
        self._bell, self._thread_bell = Bell(), Bell()
        self._in_use = False
        """A client has been here: some of the engine's outputs may not be the owner's."""
        self._taken: list[tuple[int, int, int]] = []
        self._admitted = 0
        """Samples of clients."""
        self._handed_over_at = clock()
        self._steps: list[StepRecord] = []
        """Not handed over yet."""
        self._stats = EngineStats(num_blocks=self._info.num_blocks, num_free_blocks=self._info.num_blocks)
        """The newest that the thread knows."""
        self._context = zmq.Context()
        try:
            self._guard = Guard(self._context, spec.key) if spec.key else None
            self._socket = door_socket(self._context, spec)
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EngineError(f"the engine's door cannot be at {spec.address}: {error}") from None
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    # -- the loop's side -----------------------------------------------------------------------------------------

    @property
    def wakeup(self) -> int:
        """Readable while there is something for `with_clients` to take."""
        return self._bell.wakeup

    def with_clients(self, own: Iterable[DownMessage]) -> Iterator[DownMessage]:
        """The owner's messages, then what clients have sent."""
        for message in own:
            self._adapters.asked(message)
            yield message
        with self._lock:
            arrived, self._arrived = self._arrived, []
            self._bell.silence()
        for arrival in arrived:
            self._taken.append((arrival.number, arrival.samples, arrival.size))
            self._admitted += arrival.samples
            yield arrival.message

    def deliver(self, message: StepOutputs) -> StepOutputs:
        """Hands over what is for clients; returns the owner's part."""
        for reply in message.replies:
            self._adapters.answered(reply)
        if self._in_use:
            message = self._divided(message)
        message.stats.admitted_of_others = self._admitted
        return message

    def _divided(self, message: StepOutputs) -> StepOutputs:
        own: list[RequestOutput] = []
        theirs: dict[int, list[RequestOutput]] = {}
        for output in message.outputs:
            number = number_of(output.id)
            if number:
                theirs.setdefault(number, []).append(output)
            else:
                own.append(output)
        own_replies: list[CallReply] = []
        replies: dict[int, list[CallReply]] = {}
        for reply in message.replies:
            number = number_of(reply.call)
            (replies.setdefault(number, []) if number else own_replies).append(reply)
        self._steps += message.steps
        now = self._clock()
        news = theirs or replies or self._taken or self._told_adapters is not self._adapters.keys
        if news or now - self._handed_over_at >= _STATS_INTERVAL:
            self._hand_over(_News(theirs, replies, copy(message.stats), self._steps, self._taken), now)
        return StepOutputs(own, message.stats, message.steps, own_replies)

    def _hand_over(self, news: _News, now: float) -> None:
        self._steps, self._taken = [], []
        self._handed_over_at = now
        with self._lock:
            self._news.append(news)
            self._thread_bell.ring()

    def close(self, reason: str) -> None:
        """Sends what there is, tells the clients why it is over, and goes."""
        with self._lock:
            self._closing = reason
            self._thread_bell.ring()
        self._thread.join(_JOIN_SECONDS)
        with self._lock:
            self._bell.close()
            self._thread_bell.close()

    # -- the thread's side ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the engine's door has failed: its clients are cut off")
        finally:
            self._socket.disable_monitor()
            self._socket.close(linger=_LAST_WORDS_MS)
            self._context.destroy()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._events, self._thread_bell.wakeup):
            poller.register(source, zmq.POLLIN)
        if self._guard is not None:
            poller.register(self._guard.socket, zmq.POLLIN)
        look_every = self._spec.client_timeout / 4
        while True:
            events = dict(poller.poll(look_every * 1e3 if len(self._clients) else None))
            if self._guard is not None and self._guard.socket in events:
                self._guard.answer()
            if self._socket in events:
                self._receive()
            if self._events in events:
                self._somebody_left()
            for client in self._clients.silent(self._clock()):
                self._dismiss(client, NotReadyError(f"nothing was heard of it for {self._spec.client_timeout:g} s"))
            closing = self._send_news()
            if closing is not None:
                for client in self._clients:
                    self._send(client, Farewell(RequestError.of(NotReadyError(closing))))
                return

    def _receive(self) -> None:
        for _ in range(_MESSAGES_AT_A_TIME):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = self._clients.of(peer)
            try:
                self._take(peer, client, frames)
            except PenstockError as error:
                self._refuse(peer, client, error)

    def _take(self, peer: bytes, client: Client | None, frames: list[bytes]) -> None:
        """One message. Raises PenstockError for one that ends its client."""
        try:
            [data] = frames
            message = _decode(data)
        except (ValueError, RecursionError) as error:
            hint = "" if client is not None else f" (it speaks version {PROTOCOL_VERSION})"
            raise InvalidRequestError(f"the engine does not understand this message{hint}: {error}") from None
        if client is None:
            self._greet(peer, message)
        elif isinstance(message, Ping):
            self._clients.read(client, message.read_bytes, self._clock())
            self._send(client, Pong(message.sent_at, self._clock(), self._heartbeat()))
        elif isinstance(message, Goodbye):
            self._forget(client, "it has left")
        elif isinstance(message, Hello):
            raise InvalidRequestError("a client says hello once")
        else:
            self._pass_on(client, message, len(data))

    def _greet(self, peer: bytes, message: ClientMessage) -> None:
        if isinstance(message, Goodbye):
            return
        if not isinstance(message, Hello):
            raise NotReadyError("the engine does not know this client (any more)")
        if message.version != PROTOCOL_VERSION:
            raise InvalidRequestError(
                f"the client speaks version {message.version} of the protocol, the engine {PROTOCOL_VERSION}: both "
                "need the same version of Penstock"
            )
        if different := self._spec.model.differs(message.model):
            raise InvalidRequestError(f"the engine runs another model: it has a different {different}")
        name = message.name[:_MOST_NAME_CHARS]
        client = self._clients.welcome(peer, name, message.wants_steps, self._clock())
        self._in_use = True
        self._send(client, msgspec.structs.replace(self._welcome, adapters=list(self._adapters.keys)))
        logger.info("client %d is here: %s", client.number, name or "without a name")

    def _pass_on(self, client: Client, message: AddRequest | AbortRequests | ResetPrefixCache, size: int) -> None:
        now = self._clock()
        self._clients.received(client, size, now)
        if isinstance(message, AddRequest):
            request = client.add(message, now)
            try:
                check_request(request, self._info, self._adapters.keys)
            except PenstockError as error:
                self._reject(client, request.ids, size, error)
            else:
                self._to_engine(_Arrival(request, client.number, len(request.ids), size))
        elif isinstance(message, AbortRequests):
            self._to_engine(_Arrival(client.abort(message), client.number, 0, size))
        else:
            self._to_engine(_Arrival(client.call(message), client.number, 0, size))

    def _reject(self, client: Client, ids: Iterable[int], size: int, error: PenstockError) -> None:
        """Ends a request that the engine never sees; it counts as taken in."""
        wire = RequestError.of(error)
        ends = [RequestOutput(request_id, [], FinishReason.ERROR, error=wire) for request_id in ids]
        self._clients.taken_in([(client.number, len(ends), size)])
        self._send_outputs(client, ends)

    def _to_engine(self, arrival: _Arrival) -> None:
        with self._lock:
            self._arrived.append(arrival)
            self._bell.ring()

    def _send_news(self) -> str | None:
        """What the loop has handed over. Returns why the door closes, if it does."""
        with self._lock:
            news, self._news = self._news, []
            self._thread_bell.silence()
            closing = self._closing
        for each in news:
            self._clients.taken_in(each.taken)
            self._stats = each.stats
            concerned = {*each.outputs, *each.replies, *(number for number, _, _ in each.taken)}
            for client in self._clients:
                client.steps += each.steps if client.wants_steps else ()
                if client.number in concerned or self._clock() - client.told_at >= _STATS_INTERVAL:
                    outputs, replies = each.outputs.get(client.number), each.replies.get(client.number)
                    self._send_outputs(client, outputs or (), replies or ())
        if self._told_adapters is not self._adapters.keys:
            self._told_adapters = self._adapters.keys
            for client in self._clients:
                self._send(client, LoadedAdapters(list(self._told_adapters)))
        return closing

    def _send_outputs(
        self, client: Client, outputs: Sequence[RequestOutput] = (), replies: Sequence[CallReply] = ()
    ) -> None:
        """One message: these, and what else there is to tell."""
        stats = self._stats
        stats.admitted_of_others = stats.admitted - client.admitted
        steps, client.steps = client.steps, []
        client.told_at = self._clock()
        self._send(client, StepOutputs(client.outputs(outputs), stats, steps, client.replies(replies)))

    def _somebody_left(self) -> None:
        """ZeroMQ does not say who, but it refuses to send to them."""
        receive_all(self._events)
        for client in self._clients:
            self._send_outputs(client)

    def _send(self, client: Client, message: DoorMessage) -> None:
        """Dismisses a client that reads too slowly, forgets one that is gone."""
        data = encode(message)
        try:
            self._clients.sent(client, len(data))
            self._socket.send_multipart((client.peer, data), zmq.NOBLOCK)
        except OverloadedError as error:
            self._dismiss(client, error)
        except zmq.Again:
            self._dismiss(client, OverloadedError("too many messages are unread by this client: it is too slow"))
        except zmq.ZMQError as error:
            self._forget(client, f"its connection broke ({error})")

    def _refuse(self, peer: bytes, client: Client | None, error: PenstockError) -> None:
        """Whoever sent this is not served any more."""
        if client is not None:
            self._dismiss(client, error)
        else:
            self._farewell(peer, error)

    def _dismiss(self, client: Client, error: PenstockError) -> None:
        self._farewell(client.peer, error)
        self._forget(client, error.message)

    def _farewell(self, peer: bytes, error: PenstockError) -> None:
        """If there is room for it: who does not get it finds out by silence, or by the next answer."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart((peer, encode(Farewell(RequestError.of(error)))), zmq.NOBLOCK)

    def _forget(self, client: Client, reason: str) -> None:
        abort = self._clients.leave(client)
        num_ended = len(abort.ids) if abort is not None else 0
        logger.info("client %d is gone: %s; %d requests of it end", client.number, reason, num_ended)
        if abort is not None:
            self._to_engine(_Arrival(abort, client.number, 0, 0))
