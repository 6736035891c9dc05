"""pb_utils.Tensor, the datatypes of the protocol, the configuration and numpy, and the plain functions of
triton_python_backend_utils.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from . import dlpack
from .errors import TritonModelException, text
from .wire import NUMPY, Array, Loan, Packer, ReceiveArena, decode_strings

_NAMES = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    **{f"TYPE_{name}": dtype.type for name, dtype in NUMPY.items() if name not in ("BOOL", "BF16")},
    "TYPE_STRING": np.object_,
}
"""Triton's table: Python's bool for TYPE_BOOL, numpy's scalar types otherwise."""

_NUMBERED = [None, np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]]


def datatype_of(dtype: np.dtype[Any]) -> str:
    """`FP32` for float32. Raises TritonModelException for what has no datatype."""
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if dtype.kind in "OS":
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    hint = " Use numpy.object_ for text." if dtype.kind == "U" else ""
    raise TritonModelException(f'NumPy dtype "{dtype}" is not supported.{hint}')


def triton_to_numpy_type(data_type: int) -> Any:
    """numpy's type for a DataType's number; None for an unknown one."""
    return _NUMBERED[data_type] if 1 <= data_type < len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """A DataType's number for numpy's type; None where there is none."""
    if data_type == np.bytes_:
        return 13
    for number, known in enumerate(_NUMBERED):
        if number and data_type == known:
            return number
    return None


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type for `TYPE_FP32`. Raises KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


class Tensor:
    """A named tensor, always in the memory of the CPU."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str | bytes, numpy_array: Array) -> None:
        checked = text(name, "a tensor's name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{checked}' needs a numpy array, not {type(numpy_array).__name__}")
        if not checked:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = datatype_of(numpy_array.dtype)
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._name = checked
        self._datatype = datatype
        self._array: Array | None = numpy_array

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        """The DataType of the model configuration as a number: 11 for TYPE_FP32."""
        return NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._held().shape)

    def as_numpy(self) -> Array:
        """The tensor without a copy; BYTES as objects; BF16 where the model's environment has ml_dtypes."""
        array = self._held()
        if self._datatype == "BF16" and array.dtype == np.uint16:
            try:
                import ml_dtypes
            except ImportError:
                raise TritonModelException(
                    "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
                ) from None
            return array.view(ml_dtypes.bfloat16)
        return array

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the tensor's memory."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: Any) -> Tensor:
        """From a DLPack capsule or an object with `__dlpack__`. What lies on a GPU is copied to the CPU."""
        datatype, array = dlpack.read(tensor)
        result = Tensor(name, array)
        result._datatype = datatype
        return result

    def __dlpack__(self, stream: Any = None, **_options: Any) -> Any:
        if self._datatype == "BYTES":
            raise TritonModelException("TYPE_BYTES tensors cannot be converted to DLPack.")
        return dlpack.capsule(self._datatype, self._bits())

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def _held(self) -> Array:
        if self._array is None:
            raise TritonModelException(f"Tensor '{self._name}' has no data.")
        return self._array

    def _bits(self) -> Array:
        """The array as it travels: BF16 as integers."""
        array = self._held()
        return array.view(np.uint16) if self._datatype == "BF16" and array.dtype != np.uint16 else array

    def pack(self, packer: Packer) -> list[Any]:
        return packer.tensor(self._name, self._datatype, self._bits())


NUMBERS = {name: number for number, name in enumerate([*list(NUMPY)[:-1], "BYTES", "BF16"], start=1)}
"""Datatype to the number of the DataType enumeration."""


class ReceivedTensor(Tensor):
    """A tensor of a message; the array over it is made when it is first asked for."""

    __slots__ = ("_arena", "_loan", "_place", "_tail")

    def __init__(self, place: list[Any], tail: memoryview, arena: ReceiveArena) -> None:
        self._name = place[0]
        self._datatype = place[1]
        self._array = None
        self._place = place
        self._tail = tail
        self._arena = arena
        # the block is given back when neither this tensor nor an array over it is left
        self._loan: Loan | None = arena.loan(place[5], place[3]) if len(place) == 6 else None

    @property
    def byte_size(self) -> int:
        return int(self._place[4])

    def shape(self) -> list[int]:
        return list(self._place[2])

    def _held(self) -> Array:
        array = self._array
        if array is None:
            _, datatype, shape, offset, size, *segment = self._place
            data: Any
            if self._loan is None:
                data = self._tail[offset : offset + size]
            else:
                data = self._arena.array(self._loan, segment[0], offset, size)
            if datatype == "BYTES":
                array = decode_strings(data, shape)
            elif self._loan is None:
                array = np.frombuffer(data, NUMPY[datatype]).reshape(shape)
            else:
                array = data.view(NUMPY[datatype]).reshape(shape)
            self._array = array
        return array


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """The protocol's form of a BYTES tensor: each element behind its length as a 4-byte little-endian integer.

    An empty tensor gives an empty tuple and one that is not of bytes None, as in Triton.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        return None
    parts: list[bytes] = []
    for item in input_tensor.ravel().tolist():
        data = item if isinstance(item, bytes) else str(item).encode()
        parts += (struct.pack("<I", len(data)), data)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The opposite: a flat array of objects. Raises struct.error, as Triton's does, for data that is cut off."""
    items: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, position)
        position += 4
        if length > len(encoded_tensor) - position:
            left = len(encoded_tensor) - position
            raise struct.error(f"an element of {length} bytes at offset {position}, where only {left} bytes are left")
        items.append(bytes(encoded_tensor[position : position + length]))
        position += length
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array


def get_input_tensor_by_name(inference_request: Any, name: str) -> Any:
    """The request's input tensor of this name, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: Any, name: str) -> Any:
    """The response's output tensor of this name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The input of this name in a model configuration, or None."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The output of this name in a model configuration, or None."""
    return _named(model_config.get("output", ()), name)


def _named(entries: Any, name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the configuration makes the model a decoupled one."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
