"""The form of messages between the server and a model's process."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.python.worker.tensor import deserialize_bytes_tensor
from penstock.classic.python.worker.wire import (
    FRAME,
    INLINE_LIMIT,
    Packer,
    decode,
    decode_strings,
    encode,
    encode_strings,
    frame,
)


class Store:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, data: Any, size: int) -> tuple[int, int]:
        self.sizes.append(size)
        return 3, 64


def test_a_frame_is_its_lengths_the_list_and_the_tail() -> None:
    packer = Packer(Store())
    place = packer.tensor("X", "FP32", np.ones((2, 1), np.float32))
    data = frame(["kind", [], [], [place]], packer)
    head, tail = FRAME.unpack_from(data)
    assert decode(data[12 : 12 + head]) == ["kind", [], [], [["X", "FP32", [2, 1], 0, 8]]]
    assert data[12 + head :] == np.ones(2, np.float32).tobytes() + bytes(8)
    assert tail == 16


def test_parts_of_the_tail_are_aligned() -> None:
    packer = Packer(Store())
    offsets = [packer.tensor("X", "UINT8", np.ones(size, np.uint8))[3] for size in (1, 16, 17, 0, 3)]
    assert offsets == [0, 16, 32, 64, 64]
    assert packer.size == len(b"".join(packer.parts)) == 80


def test_large_tensors_go_to_the_store() -> None:
    store = Store()
    packer = Packer(store)
    limit = np.zeros(INLINE_LIMIT, np.uint8)
    assert len(packer.tensor("X", "UINT8", limit)) == 5
    assert packer.tensor("X", "UINT8", np.zeros((2, INLINE_LIMIT), np.uint8)) == [
        "X", "UINT8", (2, INLINE_LIMIT), 64, 2 * INLINE_LIMIT, 3
    ]  # fmt: skip
    assert packer.data(b"x" * (INLINE_LIMIT + 1)) == [64, INLINE_LIMIT + 1, 3]
    assert store.sizes == [2 * INLINE_LIMIT, INLINE_LIMIT + 1]
    assert packer.size == INLINE_LIMIT


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_strings_there_and_back(items: list[bytes]) -> None:
    array = np.empty((len(items), 1), np.object_)
    array[:, 0] = items
    found = decode_strings(encode_strings(array), [len(items), 1])
    assert found.shape == array.shape
    assert found.ravel().tolist() == items


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1, 1)])
def test_strings_in_odd_shapes(shape: tuple[int, ...]) -> None:
    array = np.full(shape, b"ab", np.object_)
    found = decode_strings(encode_strings(array), list(shape))
    assert found.shape == shape
    assert (found == array).all()


def test_text_and_objects_become_utf8() -> None:
    array = np.array(["ä", b"\xff", 3, None], np.object_)
    assert decode_strings(encode_strings(array), [4]).tolist() == ["ä".encode(), b"\xff", b"3", b"None"]


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(), st.lists, max_leaves=20))
def test_lists_there_and_back(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("data", [b"\1\0\0", b"\5\0\0\0abcd", b"\1\0\0\0a\2\0\0\0b", b"\1\0\0\0a\0"])
def test_texts_that_are_cut_off_are_not_shorter_texts(data: bytes) -> None:
    """Reports server#3801 and #4931, whose lengths came from elsewhere."""
    with pytest.raises(struct.error):
        deserialize_bytes_tensor(data)
    assert deserialize_bytes_tensor(b"\1\0\0\0a\0\0\0\0").tolist() == [b"a", b""]
