"""Runs batches through the model and sends what comes of them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

from . import host
from .cancellation import Cancellation
from .connection import Connection, Message
from .errors import ErrorCode, MisusedError, TritonError, TritonModelException, public_text
from .request import DecoupledRequest, ReceivedRequest
from .response import InferenceResponse, error_fields
from .sender import COMPLETE_FINAL, ResponseSender
from .wire import Packer

Answers = list[tuple[ReceivedRequest, InferenceResponse]]


class Executor:
    """The outlet of its requests' responses, too."""

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
        found = []
        for request, response in answers:
            kept = len(packer.blocks)
            try:
                fields = response.pack(packer, request.requested)
            except Exception as error:
                self._connection.take_back(packer, kept)
                traceback.print_exc()
                fields = error_fields(TritonError(public_text(error)))
            found.append([request.call, *fields])
        answers.clear()
        return found

    def _execute(self, requests: list[ReceivedRequest], answers: Answers) -> None:
        host.executing.set(tuple([request.call for request in requests]))
        try:
            returned = self._model.execute(list(requests))
            if asyncio.iscoroutine(returned):
                future = self._start(returned)
                if self.decoupled:
                    self._in_background(future, requests)
                    return
                returned = future.result()
            answers += self._checked(requests, returned)
        except Exception as error:
            self._failed(requests, error, answers)

    def _failed(self, requests: list[ReceivedRequest], error: Exception, answers: Answers) -> None:
        """The requests of the batch that nobody has begun to answer get another try, one by one."""
        print(f"execute failed for {len(requests)} request(s) of {self._name}:", file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
        text = f"Failed to process the request(s) for model '{self._name}', message: {public_text(error)}"
        error.__traceback__ = None  # its frames hold the requests and their senders
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
                    raise MisusedError("A rescheduled request must have None in the execute return list.")
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

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Coroutines run on one event loop that is never stopped, as a model's background tasks expect."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="penstock-asyncio", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _in_background(self, future: Future[Any], requests: list[ReceivedRequest]) -> None:
        kept = list(requests)

        def ended(done: Future[Any]) -> None:
            error = done.exception()
            answers: Answers = []
            if isinstance(error, Exception):
                self._failed(kept, error, answers)
            elif error is None:
                try:
                    self._checked(kept, done.result())
                except MisusedError as wrong:
                    self._failed(kept, wrong, answers)
            kept.clear()
            if answers:
                self._connection.send_packed("done", lambda packer: [0, self._packed(packer, answers)])

        future.add_done_callback(ended)

    def respond(
        self, call: int, response: InferenceResponse | None, final: bool, requested: Collection[str] | None
    ) -> None:
        if response is None:
            self._connection.send("send", call, None, final)
        else:
            self._connection.send_packed("send", lambda packer: [call, response.pack(packer, requested), final])
        if final:
            self._cancellation.forget([call], kept=False)

    def abandoned(self, call: int) -> None:
        text = (
            f"Failed to process the request(s) for model '{self._name}', message: the model let go of the request "
            "without a final response."
        )
        self._connection.send("send", call, error_fields(TritonError(text, ErrorCode.INTERNAL)), True)

    def cancelled(self, call: int) -> bool:
        return self._cancellation.cancelled(call)

    def stop(self) -> None:
        """After the last batch."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        host.current.clear()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    except BaseException:  # sys.exit() in a coroutine ends the process, as it does in a plain execute
        traceback.print_exc()
        os._exit(1)
