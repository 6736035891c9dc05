from __future__ import annotations

from pathlib import Path

import numpy as np

from backend_candidates.candidate import MAX_BATCH_SIZE, Arrays, Candidate
from support.dali import png, scaled_picture

_CONFIG = f"""
max_batch_size: {MAX_BATCH_SIZE}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}
input {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "PIXELS" data_type: TYPE_UINT8 dims: [ 2, 2, 3 ] }}
dynamic_batching {{ }}
"""


def _write(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.dali").write_bytes(scaled_picture(float(number)).serialize())


def _rows(random: np.random.Generator, count: int) -> Arrays:
    """The first numbers of a row are its picture's colour, and so its answer is known; pictures have all sizes."""
    given = random.integers(0, 256, (count, 4)).astype(np.float32)
    pictures = [png(*random.integers(1, 20, 2).tolist(), colour=row[:3].astype(int).tolist()) for row in given]
    return {"INPUT0": given, "IMAGE": np.array(pictures, np.object_)[:, None]}


def _expect(inputs: Arrays, number: int) -> Arrays:
    colours = inputs["INPUT0"][:, None, None, :3].astype(np.uint8)
    return {"OUTPUT0": inputs["INPUT0"] * number, "PIXELS": np.tile(colours, (1, 2, 2, 1))}


def _poison() -> Arrays:
    return {"INPUT0": np.ones((1, 4), np.float32), "IMAGE": np.array([[b"no picture"]], np.object_)}


CANDIDATE = Candidate(
    backend="dali",
    write=_write,
    config=_CONFIG,
    sparse=None,  # dims are completed as variable ones
    rows=_rows,
    expect=_expect,
    poison=_poison,
    write_broken=lambda folder: (folder / "model.dali").write_bytes(b"no pipeline") and None,
)
