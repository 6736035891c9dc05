"""What the conformance suite asks of a backend: a few small models, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.classic.tensors import Array

Arrays = Mapping[str, Array]

MAX_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A model of one more ability."""

    write: Callable[[Path], None]
    """The files of a version, into its folder."""
    config: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The main model is `lookup` below, or any other that takes batches of up to MAX_BATCH_SIZE and has an FP32 input
    with fixed dims."""

    backend: str
    write: Callable[[Path, int], None]
    """The files of a version, into its folder. The model's answers depend on the number (from 1)."""
    config: str
    """Of the main model, without instance groups: complete, with dynamic batching."""
    sparse: str | None
    """As much of it as a file must say for the server to complete the rest; None: nothing is completed."""
    rows: Callable[[np.random.Generator, int], Arrays]
    """Valid inputs of so many inferences."""
    expect: Callable[[Arrays, int], Arrays]
    """The answer to them, of the model with this number."""
    tolerance: float = 0.0
    """Relative, for answers; batches may be summed in another order."""
    numbered: bool = True
    """False: there is only one model, whatever the number."""
    poison: Callable[[], Arrays] | None = None
    """Valid inputs of one inference for which every execution fails."""
    write_heavy: Callable[[Path], None] | None = None
    """Number 1 with HEAVY_BYTES of weights at least; None: its weights are not in this process."""
    write_broken: Callable[[Path], None] | None = None
    """Files of a version that cannot be loaded; None: there are no files."""
    strings: Extra | None = None
    """INPUT0 BYTES[2] to OUTPUT0, the same; batches."""
    decoupled: Extra | None = None
    """INPUT0 INT32[1], n, to n responses with OUTPUT0 INT32[1]: 0, 1, ..., n - 1; no batches."""


HEAVY_BYTES = 16 * 1024 * 1024

# -- the lookup model: OUTPUT0 is INPUT0 times the number, plus the row INDEX of a table; OUTPUT1 is INPUT0 minus that
# row. Row n of the table is n everywhere, so that the answer is known; an INDEX beyond the table fails.

TABLE_ROWS = 10
HEAVY_ROWS = HEAVY_BYTES // 16

LOOKUP = f"""
max_batch_size: {MAX_BATCH_SIZE}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}, {{ name: "INDEX" data_type: TYPE_INT64 dims: [ 1 ] }} ]
output [
  {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }},
  {{ name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }}
]
dynamic_batching {{ }}
"""


def table(rows: int = TABLE_ROWS) -> Array:
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4, axis=1)


def lookup_rows(random: np.random.Generator, count: int) -> Arrays:
    return {
        "INPUT0": random.random((count, 4), np.float32),
        "INDEX": random.integers(0, TABLE_ROWS, (count, 1), np.int64),
    }


def lookup_answer(inputs: Arrays, number: int) -> Arrays:
    found = inputs["INDEX"].astype(np.float32)
    return {"OUTPUT0": inputs["INPUT0"] * np.float32(number) + found, "OUTPUT1": inputs["INPUT0"] - found}


def beyond_the_table() -> Arrays:
    return {"INPUT0": np.ones((1, 4), np.float32), "INDEX": np.full((1, 1), TABLE_ROWS + 3, np.int64)}


STRINGS = f"""
max_batch_size: {MAX_BATCH_SIZE}
input {{ name: "INPUT0" data_type: TYPE_STRING dims: [ 2 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_STRING dims: [ 2 ] }}
dynamic_batching {{ }}
"""

DECOUPLED = """
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
