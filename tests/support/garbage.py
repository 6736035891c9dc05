"""The garbage collector inside of a server's processes: `d` turns it off, `c` collects and gives the number of objects.

A module for support/inside.py.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

from support.inside import answer_commands


def _turn_off() -> None:
    gc.collect()
    gc.disable()


def _collect() -> dict[str, Any]:
    """What only cycles have kept: the number of objects, and which types there are most of."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    found = gc.collect()
    types = Counter(type(one).__qualname__ for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    return {"process": sys.argv[0], "objects": found, "types": dict(types.most_common(8))}


answer_commands({b"d": _turn_off, b"c": _collect})
