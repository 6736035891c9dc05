"""What a model asks of the server: other models, the control of models, metrics. Any thread may ask."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .connection import Connection, Message, Pack
from .errors import TritonError, TritonModelException
from .response import InferenceResponse

if TYPE_CHECKING:
    from .request import InferenceRequest

_ACKNOWLEDGED = 16
"""Responses of another model's stream that are consumed before the server is told."""

Responses = queue.SimpleQueue[tuple[InferenceResponse, bool]]
"""Of another model's stream; the flag says that one is the last."""


class Host:
    """Questions in flight. There is one in a process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._replies: dict[int, Future[Any]] = {}
        self._streams: dict[int, Responses] = {}
        connection.handlers.update(reply=self._reply, event=self._event)

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
        waiting = self._streams.get(number)
        if waiting is not None:
            waiting.put((response, final))

    def infer(self, request: InferenceRequest) -> tuple[int, Future[Message]]:
        """Its number, by which it can be cancelled, and its reply."""
        number = next(self._numbers)
        about = request.fields()
        return number, self._ask(
            number, "infer", lambda packer: [about, [item.pack(packer) for item in request.inputs()]]
        )

    def cancel(self, number: int) -> None:
        """No one waits for this request to another model any more."""
        self.tell("cancel", number)

    def stream(self, request: InferenceRequest) -> ResponseIterator:
        number = next(self._numbers)
        responses: Responses = queue.SimpleQueue()
        self._streams[number] = responses
        self._connection.read_in_thread()
        try:
            self._connection.send_packed(
                "call",
                lambda packer: [
                    number, "stream", request.fields(), [item.pack(packer) for item in request.inputs()]
                ],
            )  # fmt: skip
        except BaseException:
            self.forget(number)
            raise
        return ResponseIterator(self, number, responses)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def response(self, fields: list[Any], message: Message) -> InferenceResponse:
        return InferenceResponse.unpack(fields, message.tail, self._connection.inbox)


class ResponseIterator:
    """The responses of a decoupled model; the last one may be empty."""

    def __init__(self, host: Host, number: int, responses: Responses) -> None:
        self._host = host
        self._number = number
        self._responses = responses
        self._received = 0
        self._done = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._done:
            raise StopIteration
        response, final = self._responses.get()
        self._received += 1
        if final:
            self._done = True
            self._host.forget(self._number)
        elif self._received % _ACKNOWLEDGED == 0:
            self._host.tell("consumed", self._number, _ACKNOWLEDGED)
        return response

    def cancel(self) -> None:
        """Tells the other model that nobody wants the rest."""
        if not self._done:
            self._host.cancel(self._number)

    def __del__(self) -> None:
        if not self._done:
            self._host.forget(self._number)
            self._host.cancel(self._number)


executing: ContextVar[tuple[int, ...]] = ContextVar("executing", default=())
"""The requests that the model is executing, where it asks from `execute` or a coroutine that this has started."""

current: list[Host] = []
"""The process's host, once it is connected."""


def connected() -> Host:
    if not current:
        raise TritonModelException("The server cannot be asked here: the model is not connected to it.")
    return current[0]


def infer(request: InferenceRequest, decoupled: bool) -> Any:
    host = connected()
    if decoupled:
        return host.stream(request)
    try:
        message = host.infer(request)[1].result()
    except TritonModelException as error:
        return InferenceResponse(error=TritonError(str(error)))
    return host.response(message.fields[0], message)


def infer_async(request: InferenceRequest, decoupled: bool) -> Any:
    host = connected()
    loop = asyncio.get_running_loop()
    if not decoupled:
        return loop.create_task(_response(host, *host.infer(request)))
    found = loop.create_future()
    found.set_result(host.stream(request))
    return found


async def _response(host: Host, number: int, sent: Future[Message]) -> InferenceResponse:
    try:
        message = await asyncio.wrap_future(sent)
    except asyncio.CancelledError:
        host.cancel(number)
        raise
    except TritonModelException as error:
        return InferenceResponse(error=TritonError(str(error)))
    return host.response(message.fields[0], message)
