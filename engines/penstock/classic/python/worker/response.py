"""pb_utils.InferenceResponse and its form in messages: `[outputs or None, parameters or None, error or None]`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .arena import ReceiveArena
from .arguments import clean, items, of_type
from .errors import ErrorCode, TritonError, TritonModelException
from .tensor import ReceivedTensor, Tensor
from .wire import Packer


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Triton's rule: names are text, values are booleans, integers or text."""
    if parameters is not None and not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    found: dict[str, Any] = {}
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
        found[clean(name)] = clean(value) if isinstance(value, str) else value
    return found


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
        wanted = [tensor for tensor in self._outputs if requested is None or tensor.name() in requested]
        outputs = [tensor.pack(packer) for tensor in wanted or self._outputs]
        return [outputs, self._parameters or None, None]

    @staticmethod
    def unpack(fields: list[Any], tail: memoryview, arena: ReceiveArena) -> InferenceResponse:
        outputs, parameters, error = fields
        found = InferenceResponse(error=None if error is None else TritonError(error[1], ErrorCode(error[0])))
        found._outputs = [ReceivedTensor(place, tail, arena) for place in outputs or ()]
        found._parameters = parameters or {}
        return found


def error_fields(error: TritonError) -> list[Any]:
    return [None, None, [int(error.code()), error.message()]]
