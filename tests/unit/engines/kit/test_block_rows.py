"""Contents that lie in several pieces of memory, read and written as blocks."""

from __future__ import annotations

import numpy as np

from penstock.engines.kit.block_rows import BlockRows, StateParts


def test_a_row_of_states_is_several_blocks() -> None:
    """Rows of 3 and 4 bytes in blocks of 3: each has three parts, the last one with two zeros behind it."""
    pieces = [np.arange(12, dtype=np.uint8).reshape(4, 3), np.arange(100, 116, dtype=np.uint8).reshape(4, 4)]
    parts = StateParts(BlockRows(pieces), 3)
    assert parts.count == 3
    contents = parts.read([3, 4, 5, 0])
    assert contents.tolist() == [[3, 4, 5], [104, 105, 106], [107, 0, 0], [0, 1, 2]]
    parts.write([11, 9, 10, 8], [contents[2], contents[0], contents[1], np.array([7, 0, 0], np.uint8)])
    assert pieces[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [3, 4, 5]]
    assert pieces[1][2:].tolist() == [[108, 109, 110, 7], [104, 105, 106, 107]]
    assert parts.read([]).shape == (0, 3)
