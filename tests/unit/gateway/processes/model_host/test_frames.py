"""Frames survive every way in which a socket cuts them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.python.link import BrokenFrameError
from penstock.gateway.processes.model_host.connection import ALIGNMENT, MAX_HEAD_BYTES, frame, frame_splitter

frames = st.lists(st.tuples(st.binary(max_size=70), st.integers(0, 5)), max_size=8)


@given(frames, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent: list[tuple[bytes, int]], cuts: list[int]) -> None:
    pairs = [(head, bytes(range(ALIGNMENT)) * blocks) for head, blocks in sent]
    data = b"".join(frame(head, [tail], len(tail)) for head, tail in pairs)
    reader = frame_splitter()
    found = []
    position = turn = 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        turn += 1
        for head, tail in reader.feed(data[position : position + size]):
            assert np.frombuffer(tail, np.uint8).ctypes.data % ALIGNMENT == 0, "models would have to copy it"
            found.append((bytes(head), bytes(tail)))
        position += size
    assert found == pairs


@pytest.mark.parametrize("lengths", [(2**63, 0), (MAX_HEAD_BYTES + 1, 0), (1, 2**40), (1, 17)])
def test_lengths_that_no_frame_has_are_told_before_anything_is_waited_for(lengths: tuple[int, int]) -> None:
    with pytest.raises(BrokenFrameError):
        frame_splitter().feed(struct.pack("<QQ", *lengths))


def test_a_head_that_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(BrokenFrameError):
        frame(bytes(MAX_HEAD_BYTES + 1))
