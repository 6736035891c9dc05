from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.engines.openvino.process_memory import _filled, collapse_filled_memory, prefer_huge_pages

SMAPS = """\
00400000-10400000 r--p 00000000 fe:01 77    /usr/bin/python
Size:             262144 kB
Rss:              262144 kB
20000000-30000000 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:              131072 kB
Anonymous:        131072 kB
30000000-40000000 rw-p 00000000 00:00 0     [stack]
Size:             262144 kB
Rss:              262144 kB
40000000-50000000 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:              131068 kB
50000000-503ff000 rw-p 00000000 00:00 0
Size:               4092 kB
Rss:                4092 kB
55500000-65500000 rw-p 00000000 00:00 0                                  [heap]
Size:             262144 kB
Rss:              262144 kB
7f0000000000-7f0010000000 rw-s 00000000 00:01 9 /dev/zero (deleted)
Size:             262144 kB
Rss:              262144 kB
7f1000000000-7f1010000000 rw-p 00000000 fe:01 9 /models/model.safetensors
Size:             262144 kB
Rss:              262144 kB
"""


def test_only_large_filled_memory_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    assert list(_filled(tmp_path / "smaps")) == [(0x20000000, 0x30000000), (0x55500000, 0x65500000)]


def test_what_is_in_memory_stays() -> None:
    values = np.arange(4 << 20, dtype=np.int32)
    collapse_filled_memory(seconds=5.0)
    assert (values == np.arange(4 << 20, dtype=np.int32)).all()
    fresh = np.zeros(4 << 20, np.int32)
    prefer_huge_pages(fresh.ctypes.data, fresh.nbytes)
    prefer_huge_pages(fresh.ctypes.data + 8, 100)
    assert not fresh.any()
