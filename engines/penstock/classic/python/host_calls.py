"""Calls of models to the server: other models, the control of models, metrics, log lines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager
from contextvars import Context
from typing import Any, TypeVar

from penstock.classic.base import CancellableStream, Host, InferCall, InferModel, Metric, ResponseStream, paced
from penstock.classic.batching.waits import Execution
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.python.link import StubLink, pack_response, to_error, to_fields, unpack
from penstock.classic.python.worker.wire import Packer
from penstock.engines.errors import (
    CancelledError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    PenstockError,
    UnsupportedError,
)

logger = logging.getLogger(__name__)

_INTERVAL = 0.02
"""Seconds between looks. There are none while no model asks another one."""


class Followers:
    def __init__(self) -> None:
        self._following: dict[asyncio.Task[None], Collection[InferCall]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, task: asyncio.Task[None], calls: Collection[InferCall]) -> None:
        """The task is cancelled when all of these have been."""
        self._following[task] = calls
        task.add_done_callback(self._following.pop)
        if self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for task, calls in list(self._following.items()):
            if all(call.cancelled for call in calls):
                loop.call_soon(task.cancel)  # it must have begun, or nothing would tell the model of its end
        if self._following:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


T = TypeVar("T", bound=Hashable)

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""By pb_utils.Logger.LogLevel."""
_WINDOW = 32
"""Responses of a stream that are on their way to the model before it has consumed some: what bounds memory."""


class HostCalls:
    """Of one process. Each question that takes time is a task; all end with the process."""

    def __init__(
        self,
        link: StubLink,
        host: Host,
        instance: str,
        watch: Callable[[], None],
        calls: Mapping[int, InferCall],
        execution: Callable[[Sequence[InferCall]], Execution | None],
    ) -> None:
        """`watch` is called when the process wants to know what is cancelled; `calls` are the requests that it has not
        answered yet, by their numbers; `execution` gives what it executes now and what waits for a request that is made
        for these."""
        self._link = link
        self._host = host
        self._instance = instance
        self._log = logging.getLogger(f"penstock.models.{instance}")
        self._nobody = Context()
        """For log lines: messages are read in the context of the request that has loaded the model."""
        self._calls = calls
        self._execution = execution
        self._followers = Followers()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, ResponseStream] = {}
        self._windows: dict[int, asyncio.Semaphore] = {}
        self._metrics: list[Metric] = []
        self._numbers: dict[Metric, int] = {}
        """Their places: a model may ask for the same metric with every request."""
        self._verbs: dict[str, Callable[[int, list[Any], memoryview], Awaitable[None]]] = {
            "infer": self._infer,
            "stream": self._stream,
            "load": self._load,
            "unload": self._unload,
            "has_room": self._has_room,
        }
        self._quick: dict[str, Callable[..., Any]] = {
            "model_ready": self._model_ready,
            "metric_family": host.metric_family,
            "metric": self._metric,
            "metric_value": self._metric_value,
            "watch": watch,
        }

    def call(self, fields: list[Any], tail: memoryview) -> None:
        """A question with a reply: `[number, verb, ...]`."""
        number, verb, *arguments = fields
        quick = self._quick.get(verb)
        if quick is not None:
            try:
                self._link.send("reply", [number, None, quick(*arguments)])
            except (PenstockError, ValueError, TypeError) as error:
                self._link.send("reply", [number, _text(error)])
            return
        task = asyncio.get_running_loop().create_task(self._answered(verb, number, arguments, tail))
        self._tasks[number] = task
        if verb in ("infer", "stream") and (outer := self._made_for(arguments[0])):
            self._followers.follow(task, outer)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answered(self, verb: str, number: int, arguments: list[Any], tail: memoryview) -> None:
        try:
            await self._verbs[verb](number, arguments, tail)
        except (PenstockError, ValueError) as error:
            what = f"Failed to {verb} model: Failed to process the request for model '{self._instance}', message: "
            self._link.send("reply", [number, what + _text(error)])
        except Exception:
            logger.exception("a call of a model failed")
            self._link.send("reply", [number, "The server had an error while processing the request."])

    def tell(self, fields: list[Any]) -> None:
        """Something without a reply: `[verb, ...]`."""
        verb, *arguments = fields
        if verb == "log":
            self._nobody.run(self._log.log, _LEVELS[arguments[0]], "%s", arguments[1])
        elif verb == "metric":
            number, operation, value = arguments
            try:
                getattr(self._metrics[number], operation)(value)
            except (PenstockError, ValueError) as error:
                self._log.error("a metric could not be changed: %s", error)
        elif verb == "consumed":
            window = self._windows.get(arguments[0])
            if window is not None:
                for _ in range(arguments[1]):
                    window.release()
        elif verb == "cancel":
            self._cancel(arguments[0])
        elif verb == "ask_to_stop":
            stream = self._streams.get(arguments[0])
            if not isinstance(stream, CancellableStream) or not stream.cancel():
                self._cancel(arguments[0])

    def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:  # it must have begun, or nothing would tell the model of its end
            asyncio.get_running_loop().call_soon(task.cancel)

    def close(self) -> None:
        self._followers.close()
        for task in list(self._tasks.values()):
            task.cancel()
        # these methods would keep the process's memory mapped until the next garbage collection
        self._verbs.clear()
        self._quick.clear()
        self._execution = _no_execution

    def _request(self, arguments: list[Any], tail: memoryview) -> tuple[str, int, InferRequest]:
        about, places = arguments
        name, version, request_id, correlation_id, flags, timeout, requested, parameters, _, _ = about
        tensors = [unpack(place, tail, self._link.inbox) for place in places]
        inputs = {tensor.name: tensor for tensor in tensors}
        if len(inputs) < len(tensors):
            raise InvalidRequestError("the request has several inputs of one name")
        made_for = self._made_for(about)
        outer = [call.request for call in made_for]
        deadlines = [request.deadline for request in outer if request.deadline is not None]
        return (
            name,
            version,
            InferRequest(
                inputs=inputs,
                id=request_id,
                outputs=tuple(requested),
                parameters=parameters,
                priority=_shared((request.priority for request in outer), 0),
                timeout_us=timeout,
                deadline=max(deadlines) if deadlines and len(deadlines) == len(outer) else None,
                correlation_id=correlation_id,
                sequence_start=bool(flags & 1),
                sequence_end=bool(flags & 2),
                tenant=_shared((request.tenant for request in outer), ""),
                asked_in=self._execution(made_for),
                origin=_shared((request.caller or request.origin for request in outer), None),
            ),
        )

    def _made_for(self, about: list[Any]) -> Sequence[InferCall]:
        """The requests that the model has received and for whose sake it asks: the one whose trace it has passed on, or
        those that it was executing."""
        return [self._calls[number] for number in about[-1] if number in self._calls]

    @asynccontextmanager
    async def _model(self, name: str, version: int, request: InferRequest) -> AsyncIterator[InferModel]:
        """For the block, in which the server does not unload it."""
        try:
            end = await self._host.use_model(name, request.deadline)
        except NotReadyError as error:
            raise NotReadyError(f"Failed for execute the inference request. {error.message}") from error
        try:
            yield self._ready_model(name, version, request)
        finally:
            end()

    def _ready_model(self, name: str, version: int, request: InferRequest) -> InferModel:
        try:
            return self._host.model(name, version, request)
        except (ModelNotFoundError, NotReadyError) as error:
            text = f"Failed for execute the inference request. Model '{name}' is not ready."
            raise type(error)(text) from error

    @contextmanager
    def _traced(self, about: list[Any], model: InferModel, request: InferRequest) -> Iterator[None]:
        """How long this block took, where the model has passed on the trace of a request that it has received."""
        call = self._calls.get(about[-2])
        if call is None:
            yield
            return
        caller, trace = call.request.caller, call.request.trace
        if trace is not None:
            request.trace = trace.child(model.name, model.version)
        started = time.monotonic()
        try:
            yield
        finally:
            if caller is not None:
                caller.called(about[0], started, time.monotonic())
            if request.trace is not None:
                request.trace.mark("REQUEST_END", time.monotonic_ns())
                request.trace.finish()

    async def _infer(self, number: int, arguments: list[Any], tail: memoryview) -> None:
        try:
            name, version, request = self._request(arguments, tail)
            async with self._model(name, version, request) as model:
                if not model.takes_infer:
                    raise UnsupportedError(
                        f"Model {name} is using the decoupled. The current BLS request call doesn't support models "
                        "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                        "'async_exec' calls for decoupled models.'"
                    )
                with self._traced(arguments[0], model, request):
                    response = await model.infer(request)
        except asyncio.CancelledError:
            self._reply(number, _failed(arguments[0][0], CancelledError("the request was cancelled")))
            raise
        except Exception as error:
            response = _failed(arguments[0][0], error)
        self._reply(number, response)

    def _reply(self, number: int, response: InferResponse) -> None:
        packer = Packer(self._link.outbox)
        self._link.send("reply", [number, None, pack_response(packer, response)], packer)

    async def _stream(self, number: int, arguments: list[Any], tail: memoryview) -> None:
        window = self._windows[number] = asyncio.Semaphore(_WINDOW)
        final = False
        try:
            name, version, request = self._request(arguments, tail)
            async with self._model(name, version, request) as model:
                with self._traced(arguments[0], model, request), closing(paced(model.stream(request))) as responses:
                    self._streams[number] = responses
                    async for response in responses:
                        await window.acquire()
                        final = response.final
                        self._event(number, response, final)
        except asyncio.CancelledError:
            self._event(number, _failed(arguments[0][0], CancelledError("the request was cancelled")), True)
            raise
        except Exception as error:
            self._event(number, _failed(arguments[0][0], error), True)
        else:
            if not final:
                self._event(number, InferResponse(None), True)
        finally:
            self._streams.pop(number, None)
            del self._windows[number]

    def _event(self, number: int, response: InferResponse, final: bool) -> None:
        packer = Packer(self._link.outbox)
        self._link.send("event", [number, pack_response(packer, response), final], packer)

    async def _load(self, number: int, arguments: list[Any], tail: memoryview) -> None:
        name, config, places = arguments
        files = {
            path.removeprefix("file:"): bytes(unpack(["", "UINT8", [place[1]], *place], tail, self._link.inbox).array)
            for path, place in places.items()
        }
        await self._host.load_model(name, config or None, files)
        self._link.send("reply", [number, None])

    async def _unload(self, number: int, arguments: list[Any], tail: memoryview) -> None:
        await self._host.unload_model(arguments[0], unload_dependents=arguments[1])
        self._link.send("reply", [number, None])

    async def _has_room(self, number: int, arguments: list[Any], tail: memoryview) -> None:
        """For more responses to a request of the model's."""
        call = self._calls.get(arguments[0])
        if call is not None:
            await call.has_room()
        self._link.send("reply", [number, None])

    def _model_ready(self, name: str, version: str) -> bool:
        if version and not (version.isascii() and version.isdigit() and len(version) < 19):
            raise ValueError(f"failed to get model version from specified version string '{version[:64]}'")
        return self._host.model_ready(name, int(version or -1))

    def _metric(self, kind: str, name: str, description: str, labels: dict[str, str], buckets: list[float]) -> int:
        metric = self._host.metric(kind, name, description, labels, buckets)
        number = self._numbers.setdefault(metric, len(self._metrics))
        if number == len(self._metrics):
            self._metrics.append(metric)
        return number

    def _metric_value(self, number: int) -> float:
        return self._metrics[number].value()


def _shared(values: Iterable[T], default: T) -> T:
    """The value that all of them have."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else default


def _text(error: Exception) -> str:
    return error.message if isinstance(error, PenstockError) else str(error)


def _failed(name: str, error: Exception) -> InferResponse:
    """The error of another model, as the model that asked sees it."""
    if not isinstance(error, PenstockError):
        logger.error("a model's request to another model failed", exc_info=error)
    code, message = to_fields(error)
    return InferResponse(None, error=to_error([code, f"Model {name} - Error when running inference: {message}"]))


def _no_execution(made_for: Sequence[InferCall]) -> Execution | None:
    return None
