"""DLPack capsules. numpy makes them, but for BF16, which it does not know; what it reads it would not write to."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import TritonModelException
from .wire import NUMPY, Array

CPU = 1
_BFLOAT, _BITS = 4, 16
_CODES = {"INT": 0, "UINT": 1, "FP": 2}
_DATATYPES = {(_BFLOAT, _BITS): "BF16", (6, 8): "BOOL"} | {
    (_CODES[name.rstrip("0123456789")], 8 * dtype.itemsize): name
    for name, dtype in NUMPY.items()
    if name not in ("BOOL", "BF16")
}
"""By DLDataTypeCode and bits."""
_NAME, _USED = b"dltensor", b"used_dltensor"


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, with its device and data type written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_raw_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_is = ctypes.pythonapi.PyCapsule_IsValid
_is.restype, _is.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

_exported: dict[int, tuple[Any, ...]] = {}
"""What must live as long as a capsule's consumer, by the address of the managed tensor."""


def _forget(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


_release = _Deleter(_forget)


def _destroy(capsule: int) -> None:
    if _raw_is(capsule, _NAME):  # nobody has consumed it
        _exported.pop(_raw_pointer(capsule, _NAME), None)


_destructor = _Destructor(_destroy)


def capsule(datatype: str, array: Array) -> Any:
    """A capsule over the array's memory, without a copy where the array may be written."""
    if not array.flags.writeable:
        array = array.copy()
    if datatype != "BF16":
        return array.__dlpack__()
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = _DLManagedTensor()
    managed.tensor = _DLTensor(array.ctypes.data, CPU, 0, array.ndim, _BFLOAT, _BITS, 1, shape, None, 0)
    managed.deleter = _release
    address = ctypes.addressof(managed)
    _exported[address] = (array, shape, managed)
    return _new(address, _NAME, _destructor)


def read(tensor: Any) -> tuple[str, Array]:
    """The datatype and the array (BF16 as bits), on the CPU, without a copy where it is there already.

    Raises TritonModelException for what is no DLPack, and what is not contiguous.
    """
    producer = tensor
    if not hasattr(tensor, "__dlpack__"):
        if not _is(tensor, _NAME):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
                "`__dlpack_device__` attributes"
            )
        producer = _Capsule(tensor)
    if producer.__dlpack_device__()[0] != CPU:
        producer = _to_cpu(tensor)
    held = producer.__dlpack__()
    managed = ctypes.cast(_pointer(held, _NAME), ctypes.POINTER(_DLManagedTensor)).contents
    if not _contiguous(managed.tensor):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    datatype = _DATATYPES.get((managed.tensor.code, managed.tensor.bits))
    if datatype is None or managed.tensor.lanes != 1:
        raise TritonModelException("DLPack tensor has a data type that is not supported.")
    return datatype, _consume(held, managed, datatype)


class _Capsule:
    """A capsule as the kind of object that numpy reads."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __dlpack__(self, **_options: Any) -> Any:
        return self._held

    def __dlpack_device__(self) -> tuple[int, int]:
        tensor = ctypes.cast(_pointer(self._held, _NAME), ctypes.POINTER(_DLManagedTensor)).contents.tensor
        return (tensor.device_type, tensor.device_id)


def _to_cpu(tensor: Any) -> Any:
    """Through the framework that is loaded: a tensor on a GPU comes from one."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise TritonModelException("A tensor on a GPU can only be read where torch is loaded.")
    return torch.from_dlpack(tensor).cpu().contiguous()


def _contiguous(tensor: _DLTensor) -> bool:
    if not tensor.strides:
        return True
    expected = 1
    for index in reversed(range(tensor.ndim)):
        if tensor.shape[index] != 1 and tensor.strides[index] != expected:
            return any(tensor.shape[axis] == 0 for axis in range(tensor.ndim))
        expected *= tensor.shape[index]
    return True


def _consume(held: Any, managed: _DLManagedTensor, datatype: str) -> Array:
    """The producer's memory is let go with the array."""
    _rename(held, _USED)
    tensor = managed.tensor
    shape = [tensor.shape[index] for index in range(tensor.ndim)]
    count = int(np.prod(shape, dtype=np.int64))
    size = count * NUMPY[datatype].itemsize
    memory: Any = (ctypes.c_uint8 * size).from_address(tensor.data + tensor.byte_offset) if count else b""
    anchor: Any = np.frombuffer(memory, NUMPY[datatype])
    deleter: Callable[[Any], None] | None = managed.deleter or None
    if deleter is not None:
        weakref.finalize(anchor, deleter, ctypes.pointer(managed)).atexit = False
    return anchor.reshape(shape)  # type: ignore[no-any-return]
