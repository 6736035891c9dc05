"""pb_utils.Tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import dlpack
from .arena import Loan, ReceiveArena
from .arguments import text
from .datatypes import datatype_of
from .errors import TritonModelException
from .wire import NUMPY, Array, Packer, decode_strings


class Tensor:
    """A named tensor, always in the memory of the CPU."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str | bytes, numpy_array: Array) -> None:
        found = text(name, "a tensor's name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{found}' needs a numpy array, not {type(numpy_array).__name__}")
        if not found:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = datatype_of(numpy_array.dtype)
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._name = found
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
        found = Tensor(name, array)
        found._datatype = datatype
        return found

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
