from __future__ import annotations

from pathlib import Path

import numpy as np

from backend_candidates.candidate import MAX_BATCH_SIZE, STRINGS, Arrays, Candidate, Extra

_CONFIG = f"""
max_batch_size: {MAX_BATCH_SIZE}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}
input {{ name: "INPUT1" data_type: TYPE_INT64 dims: [ 1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "OUTPUT1" data_type: TYPE_INT64 dims: [ 1 ] }}
dynamic_batching {{ }}
parameters {{ key: "fail_on" value {{ string_value: "13" }} }}
"""


def _rows(random: np.random.Generator, count: int) -> Arrays:
    return {"INPUT0": random.random((count, 4), np.float32), "INPUT1": random.integers(0, 10, (count, 1), np.int64)}


def _poison() -> Arrays:
    return {"INPUT0": np.ones((1, 4), np.float32), "INPUT1": np.full((1, 1), 13, np.int64)}


def _no_files(folder: Path, number: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)


CANDIDATE = Candidate(
    backend="identity",
    write=_no_files,
    config=_CONFIG,
    sparse=None,
    rows=_rows,
    expect=lambda inputs, number: {name.replace("IN", "OUT"): array for name, array in inputs.items()},
    numbered=False,
    poison=_poison,
    strings=Extra(write=_no_files, config=STRINGS),
)
