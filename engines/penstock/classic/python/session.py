"""One life of a model's process: loaded, executing batches, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.classic.base import Batch, Host, InferCall
from penstock.classic.batching.waits import Execution
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.python.host_calls import HostCalls
from penstock.classic.python.link import Copies, StubLink, pack, unpack_response
from penstock.classic.python.process import Launch, ModelProcess
from penstock.classic.python.worker.wire import Packer, encode_strings
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineDeadError, EngineError, PenstockError
from penstock.engines.host.crash_folder import Crash, keep_evidence, signal_name
from penstock.engines.host.failure_text import one_line

logger = logging.getLogger(__name__)

_INTERVAL = 0.02
"""Seconds between looks at the open requests. There are none for models that never ask."""


class Cancellations:
    def __init__(self, link: StubLink, calls: Mapping[int, InferCall]) -> None:
        self._link = link
        self._calls = calls
        self._announced: set[int] = set()
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """The process wants to know, from now on."""
        self._asked = True
        self._look()

    def watch(self) -> None:
        """There are new requests."""
        if self._asked and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._look)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._announced.intersection_update(self._calls)
        new = [number for number, call in self._calls.items() if call.cancelled and number not in self._announced]
        if new:
            self._announced.update(new)
            self._link.send("cancelled", [new])
        if self._calls:
            self.watch()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_LAST_WORDS = 0.5
"""Seconds to read what a process that has ended had still sent."""
_RETRY_AFTER = 1.0
_MANY_STRINGS = 1 << 14
"""Of one tensor, from which they are encoded in a thread: it would hold up all other requests."""


@dataclass(frozen=True)
class ModelProgram:
    """What a model's process is to run."""

    name: str
    """The instance's."""
    launch: Launch
    init: Mapping[str, Any]
    """The fields of the `init` message."""
    signature: ModelSignature
    host: Host


class Session:
    def __init__(self, program: ModelProgram, process: ModelProcess) -> None:
        self.process = process
        self.has_is_ready = False
        self._program = program
        self._name = program.name
        self._decoupled = program.signature.decoupled
        self._signature = program.signature
        self._has_strings = any(tensor.datatype == "BYTES" for tensor in program.signature.inputs.values())
        self._news: asyncio.Queue[tuple[str, list[Any]]] = asyncio.Queue()
        self._open: dict[int, InferCall] = {}
        self._next_call = 1
        self._batch = 0
        self._batch_executing: Batch | None = None
        self._executing: asyncio.Future[None] | None = None
        self._executed = False
        self._link: StubLink
        self._host_calls: HostCalls
        self._cancellations: Cancellations

    @classmethod
    async def open(cls, program: ModelProgram) -> Session:
        """Starts the process and loads the model. Raises EngineError when either fails."""
        try:
            process = await ModelProcess.spawn(program.launch)
        except OSError as error:
            raise EngineError(f"the process of '{program.name}' cannot be started: {error.strerror}") from error
        session = cls(program, process)
        try:
            await session._load()
        except BaseException as error:
            if process.status is not None and isinstance(error, EngineError):
                session.keep_evidence(error.message)
            session.close()
            await process.end(0)
            raise
        return session

    def keep_evidence(self, reason: str) -> None:
        """Of the process, which has died."""
        program, process = self._program, self.process
        crash = Crash("model", self._name, process.pid, process.status, reason, dict(program.init))
        keep_evidence(program.launch.options.crash_folder, crash, process.box)

    async def _load(self) -> None:
        options = self._program.launch.options
        sizes = (options.shm_default_byte_size, options.shm_growth_byte_size)
        self._link = await StubLink.connect(self.process.socket, self.process.files, sizes, self._on_message)
        self._cancellations = Cancellations(self._link, self._open)
        self._host_calls = HostCalls(
            self._link, self._program.host, self._name, self._cancellations.ask, self._open, self._execution
        )
        try:
            # not wait_for: that of Python 3.11 forgets a cancellation that comes together with the message
            async with asyncio.timeout(options.stub_timeout_seconds):
                await self._heard("hello")
        except TimeoutError:
            raise EngineError(
                f"Stub process '{self._name}' did not start within {options.stub_timeout_seconds:g} s; "
                "--backend-config=python,stub-timeout-seconds=<seconds> gives it more time"
            ) from None
        self._link.send("init", [self._program.init])
        [self.has_is_ready] = await self._heard("ready")

    async def _heard(self, expected: str) -> list[Any]:
        """The next message about the model's state. Raises EngineError when it is not the wanted one."""
        news = asyncio.ensure_future(self._news.get())
        try:
            await asyncio.wait((news, self._link.closed), return_when=asyncio.FIRST_COMPLETED)
            done = news.done()
        finally:
            news.cancel()
        if not done:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _LAST_WORDS)
            how = signal_name(self.process.status) or f"status {self.process.status}"
            hint = self._program.launch.environment.hint if expected == "hello" else ""
            raise EngineError(f"Stub process '{self._name}' ended while it loaded the model ({how}){hint}")
        kind, fields = news.result()
        if kind == "failed":
            text, trace = fields
            logger.debug("%s", trace)
            raise EngineError(one_line(text))
        if kind != expected:
            raise EngineError(f"Stub process '{self._name}' is out of order")
        return fields

    async def execute(self, batch: Batch) -> None:
        """Returns when the process can take the next batch, and the calls of a model that is not decoupled have been
        answered. Raises EngineDeadError when the process ends before."""
        link = self._link
        encoded = await _encoded(batch.calls) if self._has_strings else {}
        if link.closed.done():
            raise self.dead()
        copies = Copies(link.outbox)
        packer = Packer(copies)
        first = self._next_call
        entries = [self._entry(packer, number, call, encoded) for number, call in enumerate(batch.calls, first)]
        if copies.pending:
            await copies.written()
            if link.closed.done():
                raise self.dead()
        self._next_call += len(entries)
        self._open.update(enumerate(batch.calls, first))
        self._batch += 1
        self._batch_executing = batch
        self._executed = False
        self._executing = asyncio.get_running_loop().create_future()
        link.send("batch", [self._batch, entries], packer)
        self._cancellations.watch()
        try:
            await self._executing
        finally:
            self._batch_executing = None

    def _execution(self, made_for: Sequence[InferCall]) -> Execution | None:
        """What waits for a request to another model that is made for these: the batch, if they are in it. A model that
        is not decoupled may ask from a thread that does not know for whom."""
        batch = self._batch_executing
        if batch is None:
            return None
        waits = any(call in batch.calls for call in made_for) if made_for else not self._decoupled
        return batch.execution if waits else None

    def _entry(self, packer: Packer, number: int, call: InferCall, encoded: Mapping[int, bytes]) -> list[Any]:
        """A request for a message: `[call, tensors]`, and what else the caller has said."""
        request = call.request
        signature = self._signature
        traceparent = request.caller.traceparent if request.caller is not None else ""
        if signature.reshapes_inputs:
            tensors = [
                pack(
                    packer,
                    Tensor(name, tensor.datatype, signature.to_model(name, tensor.array)),
                    encoded.get(id(tensor)),
                )
                for name, tensor in request.inputs.items()
            ]
        else:
            tensors = [pack(packer, tensor, encoded.get(id(tensor))) for tensor in request.inputs.values()]
        if (
            request.id
            or request.outputs
            or request.parameters
            or request.correlation_id
            or request.timeout_us
            or request.sequence_start
            or request.sequence_end
            or traceparent
            or call.paced
        ):
            return [number, tensors, [*_details(request, tuple(signature.states), traceparent), call.paced]]
        return [number, tensors]

    def _on_message(self, kind: str, fields: list[Any], tail: memoryview) -> None:
        if kind == "done":
            for number, *response in fields[1]:
                self._answer(number, unpack_response(response, True, tail, self._link.inbox))
            for number in fields[2] if len(fields) > 2 else ():
                if (call := self._open.pop(number, None)) is not None:
                    call.reschedule()
            if fields[0] == self._batch:
                self._executed = True
        elif kind == "send":
            number, content, final = fields
            self._answer(number, unpack_response(content, final, tail, self._link.inbox))
        elif kind == "call":
            self._host_calls.call(fields, tail)
            return
        elif kind == "tell":
            self._host_calls.tell(fields)
            return
        else:
            self._news.put_nowait((kind, fields))
            return
        if self._executed and (self._decoupled or not self._open):
            executing, self._executing = self._executing, None
            if executing is not None and not executing.done():
                executing.set_result(None)

    def _answer(self, number: int, response: InferResponse) -> None:
        call = self._open.pop(number, None) if response.final else self._open.get(number)
        if call is not None:
            call.send(response)

    async def is_ready(self) -> bool:
        """The model's own word. Waits as long as the model does."""
        self._link.send("is_ready", [])
        kind, fields = await self._news.get()
        return kind == "is_ready" and bool(fields[0])

    async def ended(self) -> str:
        """Returns, with the reason, when the process is no more, or talks no more."""
        waiting = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait((waiting, self._link.closed), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((waiting, self._link.closed), timeout=_LAST_WORDS)
        finally:
            waiting.cancel()
        status = self.process.status
        return "its socket was closed" if status is None else f"its process ended (status {status})"

    def dead(self) -> EngineDeadError:
        return EngineDeadError(f"Stub process '{self._name}' is not healthy.", retry_after=_RETRY_AFTER)

    def fail_all(self, error: PenstockError) -> int:
        """Ends what is open; returns how many requests that were."""
        count = len(self._open)
        calls = list(self._open.values())
        self._open.clear()
        for call in calls:
            call.fail(error)
        executing, self._executing = self._executing, None
        if executing is not None and not executing.done():
            executing.set_exception(error)
            executing.exception()  # a caller that was cancelled does not fetch it
        return count

    def finalize(self) -> None:
        """Asks the process to end when it has executed what it has."""
        self._link.send("finalize", [])

    def close(self) -> None:
        if hasattr(self, "_host_calls"):
            self._host_calls.close()
            self._cancellations.close()
        if hasattr(self, "_link"):
            self._link.close()
        else:
            self.process.socket.close()
            self.process.files.close()


async def _encoded(calls: Sequence[InferCall]) -> dict[int, bytes]:
    """Tensors of many strings as they travel, by the tensors' identities."""
    tensors = [tensor for call in calls for tensor in call.request.inputs.values() if _has_many_strings(tensor)]
    if not tensors:
        return {}
    encoded = await asyncio.to_thread(lambda: [encode_strings(tensor.array) for tensor in tensors])
    return dict(zip(map(id, tensors), encoded, strict=True))


def _has_many_strings(tensor: Tensor) -> bool:
    return tensor.datatype == "BYTES" and tensor.array.size >= _MANY_STRINGS


def _details(request: InferRequest, states: tuple[str, ...], traceparent: str) -> list[Any]:
    """`states` are outputs that the server needs, whatever the caller asks for."""
    flags = (1 if request.sequence_start else 0) | (2 if request.sequence_end else 0)
    parameters = "{}"
    if request.parameters:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in request.parameters.items()
        }
        parameters = json.dumps(finite, separators=(",", ":"))
    outputs = request.outputs and request.outputs + states
    return [request.id, request.correlation_id, flags, request.timeout_us, parameters, outputs, traceparent]
