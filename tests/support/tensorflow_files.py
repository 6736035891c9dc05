"""TensorFlow's files of a tiny model, written as protocol buffers by hand: Y = X + X, FP32 [-1, 2]."""

from __future__ import annotations


def _number(value: int) -> bytes:
    value %= 1 << 64
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def _field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3]) + _number(value)
    data = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + _number(len(data)) + data


def _attribute(key: str, value: bytes) -> bytes:
    return _field(5, _field(1, key) + _field(2, value))


_FLOAT = 1
_SHAPE = b"".join(_field(2, _field(1, dim)) for dim in (-1, 2))
_TYPE = _field(6, _FLOAT)


def graph_def() -> bytes:
    """A frozen graph: model.pb, model.graphdef."""
    attributes = _attribute("dtype", _TYPE) + _attribute("shape", _field(7, _SHAPE))
    given = _field(1, "X") + _field(2, "Placeholder") + attributes
    total = _field(1, "Y") + _field(2, "AddV2") + _field(3, "X") + _field(3, "X") + _attribute("T", _TYPE)
    return _field(1, given) + _field(1, total)


def saved_model() -> bytes:
    """saved_model.pb, without variables; its signature calls the tensors `in` and `out`."""

    def tensor(kind: int, name: str, place: str) -> bytes:
        return _field(kind, _field(1, name) + _field(2, _field(1, place) + _field(2, _FLOAT) + _field(3, _SHAPE)))

    signature = tensor(1, "in", "X:0") + tensor(2, "out", "Y:0")
    signatures = _field(5, _field(1, "serving_default") + _field(2, signature))
    return _field(1, 1) + _field(2, _field(1, _field(4, "serve")) + _field(2, graph_def()) + signatures)
