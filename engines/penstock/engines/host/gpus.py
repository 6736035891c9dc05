"""The number of GPUs that a process can use, and the effect of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from pathlib import Path


def visible_gpus(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that CUDA shows to this process; 0 without a driver.

    `root` is where /proc is looked for: asking the driver's library would cost every start without a GPU.
    """
    try:
        present = len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
    return len(shown_gpus(present))


def shown_gpus(present: int) -> list[int | str]:
    """What CUDA_VISIBLE_DEVICES leaves of so many GPUs, in CUDA's order: places in the driver's order, and UUIDs or
    the beginnings of UUIDs where it has those."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(present))
    # CUDA ignores everything from the first device on that it does not know.
    ids = [name.strip() for name in chosen.split(",")]
    valid = next((n for n, name in enumerate(ids) if not name or name == "-1"), len(ids))
    return [int(name) if name.isdecimal() else name for name in ids[:valid]][:present]
