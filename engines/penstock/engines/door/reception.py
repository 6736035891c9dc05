"""The thread of a door: it speaks with clients, whatever the engine computes meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import zmq

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    FinishReason,
    Heartbeat,
    RequestError,
    RequestOutput,
    ResetPrefixCache,
    StepOutputs,
)
from penstock.engines.door.clients import Client, ClientTable, check_request
from penstock.engines.door.mail import Arrival, DoorMail, KnownAdapters, News
from penstock.engines.door.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    DoorMessage,
    Farewell,
    Goodbye,
    Hello,
    Leaving,
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

STATS_INTERVAL = 0.1
"""Seconds between two messages to clients with no output in this step."""
_MESSAGES_AT_A_TIME = 256
"""Read before what a step has brought is sent on: one client's flood does not stop the others' tokens."""
_LOOKS, _LOOK_AGAIN_MS = 5, 50
_LAST_WORDS_MS = 2000
_MOST_NAME_CHARS = 64
_GOING = "the engine is being shut down"
_RETRY_AFTER = 2.0

_decode: Callable[[bytes], ClientMessage] = msgspec.msgpack.Decoder(ClientMessage).decode


class Reception:
    """`run` is the thread; made by another one, which does not touch it any more once the thread has begun."""

    def __init__(
        self,
        spec: DoorSpec,
        welcome: Welcome,
        adapters: KnownAdapters,
        mail: DoorMail,
        heartbeat: Callable[[], Heartbeat],
        clock: Callable[[], float],
    ) -> None:
        """Raises EngineError when nothing can listen at the address."""
        self._spec = spec
        self._welcome = welcome
        self._mail = mail
        self._heartbeat = heartbeat
        self._clock = clock
        self._clients = ClientTable(spec)
        self._adapters = adapters
        self._told_adapters = adapters.keys
        blocks = welcome.info.num_blocks
        self._stats = EngineStats(num_blocks=blocks, num_free_blocks=blocks)
        """The newest that have been handed over."""
        self._looks = 0
        """How often it still looks who left."""
        self._leaving = False
        """Clients have been told to find another engine."""
        self.has_met = False
        """A client has been here: some of the engine's outputs may not be the owner's."""
        self._context = zmq.Context()
        try:
            self._guard = Guard(self._context, spec.key) if spec.key else None
            self._socket = door_socket(self._context, spec)
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EngineError(f"the engine's door cannot be at {spec.address}: {error}") from None

    def run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the engine's door has failed: its clients are cut off")
            self._mail.fail()
        finally:
            self._socket.disable_monitor()
            self._socket.close(linger=_LAST_WORDS_MS)
            self._context.destroy()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._events, self._mail.thread_wakeup):
            poller.register(source, zmq.POLLIN)
        if self._guard is not None:
            poller.register(self._guard.socket, zmq.POLLIN)
        look_every_ms = max(1, int(self._spec.client_timeout / 4 * 1e3))
        while True:
            patience = _LOOK_AGAIN_MS if self._looks else look_every_ms
            events = dict(poller.poll(patience if len(self._clients) else None))
            if self._guard is not None and self._guard.socket in events:
                self._guard.answer()
            if self._socket in events:
                self._receive()
            if self._events in events:
                receive_all(self._events)
                self._looks = _LOOKS
            if self._looks:
                self._looks -= 1
                self._look_who_left()
            for client in self._clients.silent(self._clock()):
                self._dismiss(client, NotReadyError(f"nothing was heard of it for {self._spec.client_timeout:g} s"))
            all_news, closing = self._mail.take_news()
            for news in all_news:
                self._send_news(news)
            self._send_changes()
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
        if self._leaving:
            raise NotReadyError(_GOING)
        if message.version != PROTOCOL_VERSION:
            raise InvalidRequestError(
                f"the client speaks version {message.version} of the protocol, the engine {PROTOCOL_VERSION}: both "
                "need the same version of Penstock"
            )
        if different := self._spec.model.differs(message.model):
            raise InvalidRequestError(f"the engine runs another model: it has a different {different}")
        name = "".join(filter(str.isprintable, message.name[:_MOST_NAME_CHARS]))
        client = self._clients.welcome(peer, name, message.wants_steps, self._clock())
        self.has_met = True
        self._send(client, msgspec.structs.replace(self._welcome, adapters=list(self._adapters.keys)))
        logger.info("client %d connected: %s", client.number, name or "without a name")

    def _pass_on(self, client: Client, message: AddRequest | AbortRequests | ResetPrefixCache, size: int) -> None:
        now = self._clock()
        self._clients.received(client, size, now)
        if isinstance(message, AddRequest):
            request = client.add(message, now)
            try:
                check_request(request, self._welcome.info, self._adapters.keys)
                if not self._mail.arrived(Arrival(request, client.number, len(request.ids), size)):
                    raise NotReadyError(_GOING, retry_after=_RETRY_AFTER)
            except PenstockError as error:
                self._reject(client, request.ids, size, error)
        elif isinstance(message, AbortRequests):
            self._mail.arrived(Arrival(client.abort(message), client.number, 0, size))
        else:
            self._mail.arrived(Arrival(client.call(message), client.number, 0, size))

    def _reject(self, client: Client, ids: Iterable[int], size: int, error: PenstockError) -> None:
        """Ends a request that the engine never sees; it counts as taken in."""
        wire = RequestError.of(error)
        ends = [RequestOutput(request_id, [], FinishReason.ERROR, error=wire) for request_id in ids]
        self._clients.taken_in([(client.number, len(ends), size)])
        self._send_outputs(client, ends)

    def _send_news(self, news: News) -> None:
        """What the loop has handed over."""
        self._clients.taken_in(news.taken)
        self._stats = news.stats
        concerned = {*news.outputs, *news.replies, *(number for number, _, _ in news.taken)}
        for client in self._clients:
            client.steps += news.steps if client.wants_steps else ()
            if client.number in concerned or self._clock() - client.told_at >= STATS_INTERVAL:
                self._send_outputs(client, news.outputs.get(client.number, ()), news.replies.get(client.number, ()))

    def _send_changes(self) -> None:
        """Which adapters there are, and that no new requests are taken."""
        if self._told_adapters is not self._adapters.keys:
            self._told_adapters = self._adapters.keys
            for client in self._clients:
                self._send(client, LoadedAdapters(list(self._told_adapters)))
        if self._mail.draining and not self._leaving:
            self._leaving = True
            for client in self._clients:
                self._send(client, Leaving())

    def _send_outputs(
        self, client: Client, outputs: Sequence[RequestOutput] = (), replies: Sequence[CallReply] = ()
    ) -> None:
        """One message: these, and what else there is to tell."""
        stats = self._stats
        stats.admitted_of_others = stats.admitted - client.admitted
        steps, client.steps = client.steps, []
        client.told_at = self._clock()
        self._send(client, StepOutputs(client.outputs(outputs), stats, steps, client.replies(replies)))

    def _look_who_left(self) -> None:
        """ZeroMQ does not say who, but it soon refuses to send to them."""
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
        """The sender is not served any more."""
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
        logger.info("client %d disconnected: %s; requests ended: %d", client.number, reason, num_ended)
        if abort is not None:
            self._mail.arrived(Arrival(abort, client.number, 0, 0))
