"""pb_utils.InferenceRequest: those that a model makes, and those that it is given."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from . import host
from .errors import TritonModelException, flag, integer, items, of_type, text
from .response import Outlet, ResponseSender, checked_parameters
from .tensor import ReceivedTensor, Tensor
from .wire import Packer, ReceiveArena

RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class MemoryType(enum.IntEnum):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where a model would like another model's outputs. They are always in the memory of the CPU here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = of_type(preferred_memory_type, MemoryType, "preferred_memory_type")
        self.preferred_device_id = integer(preferred_device_id, "preferred_device_id", 64, signed=True)


class InferenceTrace:
    """Stands for a request's trace, to be passed on with requests to other models."""

    def __init__(self, call: int = 0, traceparent: str = "") -> None:
        """`call` is the number of the request that the model has received; 0: none."""
        self.call = call
        self._traceparent = traceparent

    def get_context(self) -> str | None:
        """The W3C context of the request's span, as a JSON object of headers; None where it belongs to no trace."""
        return json.dumps({"traceparent": self._traceparent}) if self._traceparent else None


_REQUIRED: Any = None
"""Arguments behind those that may be left out. None is none of their values."""
_ANYWHERE = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request to another model (business logic scripting)."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Sequence[str | bytes] = _REQUIRED,
        model_name: str | bytes = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANYWHERE,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises TypeError and, where Triton does, TritonModelException."""
        self._request_id = text(request_id, "request_id")
        self._model_name = text(model_name, "model_name")
        about = f"for request with id '{self._request_id}' and model name '{self._model_name}' should not be empty."
        self._inputs = _checked_inputs(inputs, about)
        self._requested = _checked_names(requested_output_names, about)
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._model_version = integer(model_version, "model_version", 64, signed=True)
        self._flags = integer(flags, "flags", 32)
        self._timeout = integer(timeout, "timeout", 64)
        of_type(preferred_memory, PreferredMemory, "preferred_memory")
        self._trace = of_type(trace, InferenceTrace, "trace")
        self._parameters = checked_parameters(parameters)

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = integer(flags, "flags", 32)

    def timeout(self) -> int:
        """Microseconds; 0: none."""
        return self._timeout

    def parameters(self) -> str:
        """As a JSON object."""
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace

    def requested_output_names(self) -> set[str]:
        return set(self._requested)

    def exec(self, decoupled: bool = False) -> Any:
        """Waits for the InferenceResponse; with `decoupled`, gives an iterator of them."""
        return host.infer(self.pack, flag(decoupled, "decoupled"))

    def async_exec(self, decoupled: bool = False) -> Any:
        """The same as an awaitable; of a decoupled model, it is done with the first response."""
        return host.infer_async(self.pack, flag(decoupled, "decoupled"))

    def pack(self, packer: Packer) -> list[Any]:
        """What a message says of it, and its tensors."""
        about = [
            self._model_name,
            self._model_version,
            self._request_id,
            self._correlation_id,
            self._flags,
            self._timeout,
            self._requested,
            self._parameters,
            self._trace.call,
            [self._trace.call] if self._trace.call else host.executing.get(),
        ]
        return [about, [tensor.pack(packer) for tensor in self._inputs]]

    def get_response_sender(self) -> ResponseSender:
        raise TritonModelException("A request to another model has no response sender.")

    def is_cancelled(self) -> bool:
        return False

    def set_release_flags(self, flags: int) -> None:
        raise TritonModelException("A request to another model has no release flags.")


def _checked_inputs(inputs: Sequence[Tensor], about: str) -> list[Tensor]:
    tensors = list(items(inputs, "inputs"))
    for tensor in tensors:
        if tensor is None:
            raise TritonModelException(f"Input tensor {about}")
        of_type(tensor, Tensor, "an input")
    return tensors


def _checked_names(names: Sequence[str | bytes], about: str) -> list[str]:
    checked = [text(name, "the name of an output") for name in items(names, "requested_output_names")]
    if "" in checked:
        raise TritonModelException(f"Requested output name {about}")
    return list(dict.fromkeys(checked))


def _checked_correlation_id(correlation_id: int | str) -> int | str:
    if isinstance(correlation_id, str):
        return text(correlation_id, "correlation_id")
    if correlation_id is None:
        raise TypeError("correlation_id must be an integer or text, not NoneType")
    if not isinstance(correlation_id, int):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= correlation_id < 1 << 64:
        raise TritonModelException(f"Correlation ID {correlation_id} is no number of 64 bits without a sign")
    return int(correlation_id)


class ReceivedRequest(InferenceRequest):
    """A request that the model is to answer."""

    rescheduled = False
    """It is to be executed again in a later batch."""
    _released = False

    # made for every request, so nothing is done here that a model may never ask for
    def __init__(
        self, fields: list[Any], tail: memoryview, arena: ReceiveArena, outlet: Outlet, names: list[str]
    ) -> None:
        self.call: int = fields[0]
        self._inputs = [ReceivedTensor(place, tail, arena) for place in fields[1]]
        self._extra = fields[2] if len(fields) > 2 else None
        self._outlet = outlet
        self._names = names
        self._flags = self._extra[2] if self._extra else 0
        self.sender: ResponseSender | None = None

    def request_id(self) -> str:
        return self._extra[0] if self._extra else ""

    def correlation_id(self) -> int | str:
        return self._extra[1] if self._extra else 0

    def timeout(self) -> int:
        return self._extra[3] if self._extra else 0

    def parameters(self) -> str:
        return self._extra[4] if self._extra else "{}"

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self.call, self._extra[6] if self._extra else "")

    @property
    def requested(self) -> Collection[str] | None:
        """The outputs that the caller named; None: all."""
        return (self._extra[5] or None) if self._extra else None

    def requested_output_names(self) -> set[str]:
        return set(self.requested or self._names)

    def exec(self, decoupled: bool = False) -> Any:
        raise TritonModelException("A request that the model has received cannot be executed; make a new one.")

    def async_exec(self, decoupled: bool = False) -> Any:
        return self.exec(decoupled)

    def get_response_sender(self) -> ResponseSender:
        if self.sender is None:
            paced = bool(self._extra and self._extra[7])
            self.sender = ResponseSender(self._outlet, self.call, self.requested, paced=paced)
        return self.sender

    def is_cancelled(self) -> bool:
        return self._outlet.cancelled(self.call)

    def set_release_flags(self, flags: int) -> None:
        """Raises TritonModelException when the request cannot be rescheduled, or not any more."""
        if integer(flags, "flags", 32) not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unsupported release flags {flags}.")
        if flags == RELEASE_RESCHEDULE and not self._outlet.iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured"
                " to handle such a flag: it needs sequence_batching { iterative_sequence: true }."
            )
        if flags == RELEASE_RESCHEDULE and (self._released or (self.sender is not None and self.sender.ended)):
            raise TritonModelException("The request has ended and cannot be rescheduled.")
        self.rescheduled = flags == RELEASE_RESCHEDULE

    def release(self) -> bool:
        """After `execute`; whether it is rescheduled. Then what is still sent for it comes too late."""
        self._released = True
        if self.rescheduled and self.sender is not None:
            self.sender.close()
        return self.rescheduled


class DecoupledRequest(ReceivedRequest):
    """One that may be answered long after `execute`."""

    def __del__(self) -> None:
        if self.sender is None and not self.rescheduled:
            self._outlet.abandoned(self.call)
