"""pb_utils.InferenceResponse and its sender. A response in a message is `[outputs or None, parameters or None, error or
None]`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from .errors import ErrorCode, TritonError, TritonModelException, clean, integer, items, of_type
from .tensor import ReceivedTensor, Tensor
from .wire import Packer, ReceiveArena


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Triton's rule: names are text, values are booleans, integers or text."""
    if parameters is not None and not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    checked: dict[str, Any] = {}
    for name, value in (parameters or {}).items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/float/str, found type {type(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise TritonModelException(f"The parameter '{clean(name)}' is no finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TritonModelException(f"The parameter '{clean(name)}' does not fit 64 bits")
        checked[clean(name)] = clean(value) if isinstance(value, str) else value
    return checked


class InferenceResponse:
    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        tensors = items(output_tensors, "output_tensors")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                if tensor is None:
                    raise TritonModelException("Output tensor for inference response should not be empty.")
                of_type(tensor, Tensor, "an output tensor")
        if error is not None:
            of_type(error, TritonError, "error")
        self._outputs = list(tensors)
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """As a JSON object."""
        return json.dumps(self._parameters)

    @property
    def byte_size(self) -> int:
        """Of the tensors of a response that another model has sent, as they travelled."""
        return sum(tensor.byte_size for tensor in self._outputs if isinstance(tensor, ReceivedTensor))

    def pack(self, packer: Packer, requested: Collection[str] | None) -> list[Any]:
        """For a message, with the requested outputs only. Where the model gave none of them, with what it gave: the
        server knows whether that is a mistake."""
        if self._error is not None:
            return error_fields(self._error)
        requested_outputs = [tensor for tensor in self._outputs if requested is None or tensor.name() in requested]
        outputs = [tensor.pack(packer) for tensor in requested_outputs or self._outputs]
        return [outputs, self._parameters or None, None]

    @staticmethod
    def unpack(fields: list[Any], tail: memoryview, arena: ReceiveArena) -> InferenceResponse:
        outputs, parameters, error = fields
        response = InferenceResponse(error=None if error is None else TritonError(error[1], ErrorCode(error[0])))
        response._outputs = [ReceivedTensor(place, tail, arena) for place in outputs or ()]
        response._parameters = parameters or {}
        return response


def error_fields(error: TritonError) -> list[Any]:
    return [None, None, [int(error.code()), error.message()]]


COMPLETE_FINAL = 1
_AHEAD, _AHEAD_BYTES = 1024, 16 * 1024 * 1024
"""Responses, and bytes of their tensors, after which a paced sender looks whether there is room for more."""


class Outlet(Protocol):
    """Where the responses of a request go."""

    decoupled: bool
    iterative: bool
    """Its requests may be rescheduled."""

    def respond(
        self, call: int, response: InferenceResponse | None, final: bool, requested: Collection[str] | None
    ) -> int:
        """Returns the bytes of its tensors."""
        ...

    def wait_for_room(self, call: int) -> None:
        """Returns when not too many responses are unread."""
        ...

    def abandoned(self, call: int) -> None:
        """Nobody can answer the request any more."""
        ...

    def cancelled(self, call: int) -> bool: ...


class ResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, outlet: Outlet, call: int, requested: Collection[str] | None, *, paced: bool = False) -> None:
        """`paced`: a thread that sends much waits for the reader of the responses."""
        self._outlet = outlet
        self._call = call
        self._requested = requested
        self._lock = threading.Lock()
        self.sent = 0
        self.closed = False
        self._paced = paced
        self._ahead = self._bytes_ahead = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Raises TritonModelException, with Triton's texts, for what this request cannot be sent any more."""
        if response is not None:
            of_type(response, InferenceResponse, "response")
        if integer(flags, "flags", 32) not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self.advance(response, flags)
        if self._outlet.decoupled:
            size = self._outlet.respond(self._call, response, flags == COMPLETE_FINAL, self._requested)
            if self._paced and not flags:
                self._keep_pace(size)
        elif response is not None:
            # the one response is the end of the request, whether its flag comes with it, later or never
            self._outlet.respond(self._call, response, True, self._requested)

    def _keep_pace(self, size: int) -> None:
        self._ahead += 1
        self._bytes_ahead += size
        if self._ahead >= _AHEAD or self._bytes_ahead >= _AHEAD_BYTES:
            self._ahead = self._bytes_ahead = 0
            self._outlet.wait_for_room(self._call)

    def advance(self, response: Any, flags: int) -> None:
        """The state after this response. Raises TritonModelException when it must not be sent."""
        with self._lock:
            if not self._outlet.decoupled:
                if response is not None and self.sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self.sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self.closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self.sent += response is not None
            self.closed = flags == COMPLETE_FINAL

    def close(self) -> None:
        """The request has been ended otherwise."""
        self.closed = True

    @property
    def ended(self) -> bool:
        return self.closed or (self.sent > 0 and not self._outlet.decoupled)

    def is_cancelled(self) -> bool:
        return self._outlet.cancelled(self._call)

    def __del__(self) -> None:
        if not self.ended:
            self._outlet.abandoned(self._call)
