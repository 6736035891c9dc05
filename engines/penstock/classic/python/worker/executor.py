"""The execution of batches by the model, and the sending of what comes of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from . import host
from .connection import Connection, Message
from .errors import ErrorCode, MisusedError, TritonError, TritonModelException, public_text, report
from .request import DecoupledRequest, ReceivedRequest
from .response import COMPLETE_FINAL, InferenceResponse, ResponseSender, error_fields
from .wire import Packer


class Cancellation:
    """The server is asked once; from then on it tells what is cancelled as it happens."""

    def __init__(self, connection: Connection) -> None:
        self._cancelled: set[int] = set()
        self._watching = False
        connection.handlers["cancelled"] = self._take_cancelled

    def _take_cancelled(self, message: Message) -> None:
        self._cancelled.update(message.fields[0])

    def cancelled(self, call: int) -> bool:
        if not self._watching:
            host.connected().ask("watch", lambda _: []).result()  # the cancelled ones are told before the reply
            self._watching = True
        return call in self._cancelled

    def forget(self, calls: Iterable[int], *, kept: bool) -> None:
        """`kept`: the calls of a decoupled model live on after their batch."""
        if self._cancelled and not kept:
            self._cancelled.difference_update(calls)


Answers = list[tuple[ReceivedRequest, InferenceResponse]]
Outcome = tuple[Any, BaseException | None]
"""What a coroutine returned, or what it raised."""


class Executor:
    """The outlet of its requests' responses, too. Whatever a model raises, sys.exit() included, fails what it was
    raised for, and the process lives on: as in Triton, only the server ends it."""

    def __init__(self, connection: Connection, model: Any, options: Mapping[str, Any]) -> None:
        """`options` are those of the `init` message."""
        self._connection = connection
        self._model = model
        self._name: str = options["name"]
        self.decoupled: bool = options["decoupled"]
        self.iterative: bool = options["iterative"]
        self._sequences: bool = options["sequences"]
        self._outputs: list[str] = options["outputs"]
        self._request = DecoupledRequest if self.decoupled else ReceivedRequest
        self._cancellation = Cancellation(connection)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def run(self, message: Message) -> None:
        """One batch: `[batch, requests]`. Everything of it that is not answered later is answered by one message."""
        batch, entries = message.fields
        inbox = self._connection.inbox
        requests = [self._request(entry, message.tail, inbox, self, self._outputs) for entry in entries]
        message.tail = memoryview(b"")
        answers: Answers = []
        self._execute(requests, answers)
        calls = [request.call for request in requests]
        again = [request.call for request in requests if request.release()] if self.iterative else []
        self._connection.send_packed(
            "done", lambda packer: [batch, self._packed(packer, answers), *([again] if again else [])], requests.clear
        )
        self._cancellation.forget(again, kept=False)
        self._cancellation.forget(calls, kept=self.decoupled)

    def _packed(self, packer: Packer, answers: Answers) -> list[Any]:
        packed = []
        for request, response in answers:
            kept = len(packer.blocks)
            try:
                fields = response.pack(packer, request.requested)
            except BaseException as error:
                self._connection.take_back(packer, kept)
                report(error)
                fields = error_fields(TritonError(public_text(error)))
            packed.append([request.call, *fields])
        answers.clear()
        return packed

    def _execute(self, requests: list[ReceivedRequest], answers: Answers) -> None:
        host.executing.set(tuple([request.call for request in requests]))
        try:
            returned = self._model.execute(list(requests))
            if asyncio.iscoroutine(returned):
                future = self._start(returned)
                if self.decoupled:
                    self._in_background(future, requests)
                    return
                returned = _result(future)
            answers += self._checked(requests, returned)
        except BaseException as error:
            if self._connection.forked:  # sys.exit() ends a process that the model has forked
                raise
            self._failed(requests, error, answers)

    def _failed(self, requests: list[ReceivedRequest], error: BaseException, answers: Answers) -> None:
        """The requests of the batch that nobody has begun to answer get another try, one by one."""
        report(error, f"execute failed for {len(requests)} request(s) of {self._name}:")
        text = f"Failed to process the request(s) for model '{self._name}', message: {public_text(error)}"
        error.with_traceback(None)  # its frames hold the requests and their senders
        failure = InferenceResponse(error=TritonError(text))
        again = []
        for request in requests:
            request.rescheduled = False
            sender = request.sender
            # Of a sequence the model may have kept something already: as in Triton, the whole batch fails.
            if sender is None and len(requests) > 1 and not self._sequences:
                again.append(request)
            elif sender is None or not sender.ended:
                answers.append((request, failure))
                request.get_response_sender().close()
        for request in again:
            self._execute([request], answers)

    def _checked(self, requests: list[ReceivedRequest], returned: Any) -> Answers:
        """What `execute` returned, by Triton's rules and with its texts."""
        if returned is None:
            if not self.decoupled and any(request.sender is None and not request.rescheduled for request in requests):
                raise MisusedError("Expected a list in the execute return, found type '<class 'NoneType'>'.")
            return []
        if self.decoupled:
            raise MisusedError(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise MisusedError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise MisusedError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        answers: Answers = []
        for request, response in zip(requests, returned, strict=True):
            if request.rescheduled:
                if response is not None:
                    raise MisusedError(
                        "Expected a None object in the execute function return list for reschduled request, found type"
                        f" '{type(response)}'."
                    )
            elif isinstance(response, InferenceResponse):
                if request.sender is not None:
                    self._advance(request.sender, response)
                answers.append((request, response))
            elif response is not None:
                raise MisusedError(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
            elif request.sender is None:
                raise MisusedError(
                    "Expected an 'InferenceResponse' object in the execute function return list, found None for a "
                    "request whose response sender was not used."
                )
        return answers

    @staticmethod
    def _advance(sender: ResponseSender, response: InferenceResponse) -> None:
        try:
            sender.advance(response, COMPLETE_FINAL)
        except TritonModelException as error:
            raise MisusedError(str(error)) from error

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Outcome]:
        """Coroutines run on one event loop that is never stopped, as a model's background tasks expect."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="penstock-asyncio", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """A task that the model has made hands its sys.exit() to the loop, and a coroutine may stop the loop."""
        while not self._stopping:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                report(error)

    def _in_background(self, future: Future[Outcome], requests: list[ReceivedRequest]) -> None:
        kept = list(requests)

        def ended(done: Future[Outcome]) -> None:
            answers: Answers = []
            try:
                self._checked(kept, _result(done))
            except BaseException as error:
                self._failed(kept, error, answers)
            kept.clear()
            if answers:
                self._connection.send_packed("done", lambda packer: [0, self._packed(packer, answers)])

        future.add_done_callback(ended)

    def respond(
        self, call: int, response: InferenceResponse | None, final: bool, requested: Collection[str] | None
    ) -> int:
        size = 0

        def pack(packer: Packer) -> list[Any]:
            nonlocal size
            fields = response.pack(packer, requested) if response is not None else None
            size = sum(place[4] for place in (fields[0] if fields else None) or ())
            return [call, fields, final]

        self._connection.send_packed("send", pack)
        if final:
            self._cancellation.forget([call], kept=False)
        return size

    def wait_for_room(self, call: int) -> None:
        if not self._connection.forked:
            host.connected().ask("has_room", lambda _: [call]).result()

    def abandoned(self, call: int) -> None:
        text = (
            f"Failed to process the request(s) for model '{self._name}', message: the model let go of the request "
            "without a final response."
        )
        self._connection.send("send", call, error_fields(TritonError(text, ErrorCode.INTERNAL)), True)

    def cancelled(self, call: int) -> bool:
        return self._cancellation.cancelled(call)

    def stop(self) -> None:
        """After the last batch. Raises whatever the model's `finalize` raises."""
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        host.current.clear()


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> Outcome:
    """Raises nothing: a task would end the loop with a SystemExit, and take a CancelledError for its own end."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


def _result(future: Future[Outcome]) -> Any:
    returned, error = future.result()
    if error is not None:
        raise error
    return returned
