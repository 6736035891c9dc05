"""The worker's questions to the server: requests to other models, and whatever else has a reply. Any thread may ask."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from .connection import Connection, Message, Pack
from .errors import ErrorCode, TritonError, TritonModelException
from .response import InferenceResponse
from .tensor import Tensor
from .wire import Array, Packer

_ACKNOWLEDGED = 16
"""Responses of another model's stream that are consumed before the server is told."""
KEPT_RESPONSES, KEPT_BYTES = 16_384, 32 * 1024 * 1024
"""Of a stream, for those who iterate over it again: what is kept of a longer one would fill the memory."""

Received = tuple[InferenceResponse, bool]
"""A response of another model's stream, and whether it is the last one."""


class Host:
    """Questions in flight. There is one in a process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._replies: dict[int, Future[Any]] = {}
        self._streams: dict[int, Callable[[Received], None]] = {}
        connection.handlers.update(reply=self._reply, event=self._event)
        relays[:] = [Relay(self)]
        os.register_at_fork(after_in_child=current.clear)

    def ask(self, verb: str, pack: Pack) -> Future[Any]:
        """The future has the reply's message. Its exception is a TritonModelException."""
        return self._ask(next(self._numbers), verb, pack)

    def _ask(self, number: int, verb: str, pack: Pack) -> Future[Any]:
        future: Future[Any] = Future()
        self._replies[number] = future
        self._connection.read_in_thread()
        try:
            self._connection.send_packed("call", lambda packer: [number, verb, *pack(packer)])
        except BaseException:
            del self._replies[number]
            raise
        return future

    def tell(self, verb: str, *fields: Any) -> None:
        """Needs no reply."""
        self._connection.send("tell", verb, *fields)

    def _reply(self, message: Message) -> None:
        number, error, *fields = message.fields
        future = self._replies.pop(number)
        if not future.set_running_or_notify_cancel():
            if error is None and fields:
                self.response(fields[0], message)  # gives its memory back
        elif error is not None:
            future.set_exception(TritonModelException(error))
        else:
            message.fields = fields
            future.set_result(message)

    def _event(self, message: Message) -> None:
        number, fields, final = message.fields
        # made in any case: its memory is given back when nothing refers to it, also when nobody reads it
        response = self.response(fields, message)
        receive = self._streams.get(number)
        if receive is not None:
            receive((response, final))

    def infer(self, pack: Pack) -> tuple[int, Future[Message]]:
        """The number of the request, by which it can be cancelled, and its reply."""
        number = next(self._numbers)
        return number, self._ask(number, "infer", pack)

    def cancel(self, number: int) -> None:
        """No one waits for this request to another model any more."""
        self.tell("cancel", number)

    def stream(self, pack: Pack, arrived: Future[None] | None = None) -> ResponseIterator:
        """`arrived` is done when the first response is there."""
        number = next(self._numbers)
        responses: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._streams[number] = responses.put if arrived is None else partial(_first_of, responses, arrived)
        self._connection.read_in_thread()
        try:
            self._connection.send_packed("call", lambda packer: [number, "stream", *pack(packer)])
        except BaseException:
            self.forget(number)
            raise
        return ResponseIterator(self, number, responses)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def response(self, fields: list[Any], message: Message) -> InferenceResponse:
        return InferenceResponse.unpack(fields, message.tail, self._connection.inbox)


def _first_of(responses: queue.SimpleQueue[Received], arrived: Future[None], received: Received) -> None:
    responses.put(received)
    if not arrived.done() and arrived.set_running_or_notify_cancel():
        arrived.set_result(None)


class ResponseIterator:
    """The responses of a decoupled model; the last one may be empty. As in Triton, a second loop over it gives the same
    responses again if the stream has ended, and otherwise those that are left."""

    def __init__(self, host: Host, number: int, responses: queue.SimpleQueue[Received]) -> None:
        self._host = host
        self._number = number
        self._responses = responses
        self._received = 0
        self._done = False
        self._kept: list[InferenceResponse] | None = []
        """None: they were too many."""
        self._kept_bytes = 0
        self._position = 0
        """Among the kept ones, after the end."""

    def __iter__(self) -> Iterator[InferenceResponse]:
        """Raises TritonModelException when the stream has ended, and was too long to be kept."""
        if self._done and self._kept is None:
            raise TritonModelException(
                f"The responses can be iterated once: they were more than {KEPT_RESPONSES}, or larger than "
                f"{KEPT_BYTES >> 20} MiB together."
            )
        if self._done and self._position >= len(self._kept or ()):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._done:
            return self._again()
        response, final = self._responses.get()
        self._received += 1
        self._keep(response)
        if final:
            self._done = True
            self._position = self._received
            self._host.forget(self._number)
        elif self._received % _ACKNOWLEDGED == 0:
            self._host.tell("consumed", self._number, _ACKNOWLEDGED)
        return response

    def _keep(self, response: InferenceResponse) -> None:
        if self._kept is not None:
            self._kept.append(response)
            self._kept_bytes += response.byte_size
            if len(self._kept) > KEPT_RESPONSES or self._kept_bytes > KEPT_BYTES:
                self._kept = None

    def _again(self) -> InferenceResponse:
        if self._kept is None or self._position >= len(self._kept):
            raise StopIteration
        self._position += 1
        return self._kept[self._position - 1]

    def cancel(self) -> None:
        """Asks the other model to stop. What it still sends comes."""
        if not self._done:
            self._host.tell("ask_to_stop", self._number)

    def let_go(self) -> None:
        """Ends the request, if it has not ended: nobody wants the rest."""
        if not self._done:
            self._done = True
            self._host.forget(self._number)
            self._host.cancel(self._number)

    def __del__(self) -> None:
        self.let_go()


executing: ContextVar[tuple[int, ...]] = ContextVar("executing", default=())
"""The requests that the model is executing, where it asks from `execute` or a coroutine that this has started."""

current: list[Host] = []
"""The process's host, once it is connected."""
relays: list[Relay] = []
"""The process's, or that of the model's process that has forked this one."""


def connected() -> Host:
    if not current:
        raise TritonModelException("The server cannot be asked here: only the model's own process is connected to it.")
    return current[0]


def infer(pack: Pack, decoupled: bool) -> Any:
    """The InferenceResponse to a request to another model; with `decoupled`, an iterator of them. A process that the
    model has forked has the model's own one ask for it, but for streams."""
    if not decoupled and relays and relays[0].forked:
        return relays[0].infer(pack)
    host = connected()
    if decoupled:
        return host.stream(pack)
    try:
        message = host.infer(pack)[1].result()
    except TritonModelException as error:
        return InferenceResponse(error=TritonError(str(error)))
    return host.response(message.fields[0], message)


def infer_async(pack: Pack, decoupled: bool) -> Any:
    """The same as a task."""
    loop = asyncio.get_running_loop()
    if not decoupled and relays and relays[0].forked:
        return loop.create_task(asyncio.to_thread(relays[0].infer, pack))
    host = connected()
    if not decoupled:
        return loop.create_task(_response(host, *host.infer(pack)))
    arrived: Future[None] = Future()
    return loop.create_task(_begun(host.stream(pack, arrived), arrived))


async def _begun(responses: ResponseIterator, arrived: Future[None]) -> ResponseIterator:
    """As in Triton, there is an iterator when there is a response."""
    try:
        await asyncio.wrap_future(arrived)
    except asyncio.CancelledError:
        responses.let_go()
        raise
    return responses


async def _response(host: Host, number: int, sent: Future[Message]) -> InferenceResponse:
    try:
        message = await asyncio.wrap_future(sent)
    except asyncio.CancelledError:
        host.cancel(number)
        raise
    except TritonModelException as error:
        return InferenceResponse(error=TritonError(str(error)))
    return host.response(message.fields[0], message)


# Requests to other models by processes that the model has forked, such as those of a multiprocessing.Pool.
#
# The socket to the server is the model's own process's alone: that one asks for the others. Each request brings a
# connection of its own through a door that all forked processes inherit.

_Fields = tuple[str, str, Array]
"""Name, datatype and bits of a tensor."""


class _Whole(Packer):
    """Leaves tensors as they are."""

    def __init__(self) -> None:
        """It needs no store."""

    def tensor(self, name: str, datatype: str, array: Array, encoded: bytes | None = None) -> list[Any]:
        return [name, datatype, array]


class Relay:
    """There is one in a process. Nothing is opened before the model forks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._doors: tuple[socket.socket, socket.socket] | None = None
        """The model's own end, and that of all others."""
        self.forked = False
        """This process is one of the others."""
        os.register_at_fork(before=self._open, after_in_child=self._leave)

    def _open(self) -> None:
        if self._doors is None and not self.forked:
            self._doors = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            threading.Thread(target=self._accept, args=(self._doors[0],), name="penstock-relay", daemon=True).start()

    def _leave(self) -> None:
        if self._doors is not None and not self.forked:
            self._doors[0].close()
        self.forked = True

    # In a forked process

    def infer(self, pack: Pack) -> InferenceResponse:
        """Raises TritonModelException where the model's own process has gone."""
        assert self._doors is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._doors[1], [b"+"], [theirs.fileno()])
            with _pipe(ours.detach()) as pipe:
                pipe.send(pack(_Whole()))
                outputs, parameters, error = pipe.recv()
        except (OSError, EOFError):
            raise TritonModelException("The model's own process, which asks other models, has ended.") from None
        response = InferenceResponse(
            [_tensor(*fields) for fields in outputs],
            None if error is None else TritonError(error[1], ErrorCode(error[0])),
        )
        response._parameters = parameters
        return response

    # In the model's own process

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                received, descriptors, _, _ = socket.recv_fds(door, 1, 1)
            except OSError:
                return
            if not received:
                return
            for descriptor in descriptors:
                threading.Thread(target=self._serve, args=(descriptor,), name="penstock-relayed", daemon=True).start()

    def _serve(self, descriptor: int) -> None:
        with _pipe(descriptor) as pipe, suppress(OSError, EOFError):  # the other process may end
            about, inputs = pipe.recv()
            pipe.send(self._answer(about, [_tensor(*fields) for fields in inputs]))

    def _answer(self, about: list[Any], inputs: list[Tensor]) -> tuple[list[_Fields], dict[str, Any], Any]:
        try:
            message = self._host.ask(
                "infer", lambda packer: [about, [tensor.pack(packer) for tensor in inputs]]
            ).result()
        except TritonModelException as error:
            return [], {}, (int(ErrorCode.INTERNAL), str(error))
        response = self._host.response(message.fields[0], message)
        error = response.error()
        failure = None if error is None else (int(error.code()), error.message())
        return [_fields(tensor) for tensor in response.output_tensors()], response._parameters, failure


def _pipe(descriptor: int) -> Any:
    from multiprocessing.connection import Connection  # most models fork nothing

    return Connection(descriptor)


def _fields(tensor: Tensor) -> _Fields:
    return tensor.name(), tensor._datatype, tensor._bits()


def _tensor(name: str, datatype: str, bits: Array) -> Tensor:
    tensor = Tensor(name, bits)
    tensor._datatype = datatype
    return tensor
