from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from backend_candidates.candidate import (
    HEAVY_ROWS,
    MAX_BATCH_SIZE,
    STRINGS,
    TABLE_ROWS,
    Candidate,
    Extra,
    beyond_the_table,
    lookup_answer,
    lookup_rows,
    table,
)


def save(folder: Path, signature: Any, *weights: Any) -> None:
    """A SavedModel with this function as its signature."""
    module = tf.Module()
    module.weights = weights
    tf.saved_model.save(module, str(folder / "model.savedmodel"), signatures=signature)


def _write_lookup(folder: Path, number: int, rows: int = TABLE_ROWS) -> None:
    weights = tf.Variable(table(rows))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32, name="INPUT0"),
            tf.TensorSpec([None, 1], tf.int64, name="INDEX"),
        ]
    )
    def lookup(INPUT0: Any, INDEX: Any) -> Any:
        row = tf.gather(weights, tf.squeeze(INDEX, 1))
        return {"OUTPUT0": INPUT0 * float(number) + row, "OUTPUT1": INPUT0 - row}

    save(folder, lookup, weights)


def _write_strings(folder: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.string, name="INPUT0")])
    def same(INPUT0: Any) -> Any:
        return {"OUTPUT0": tf.identity(INPUT0)}

    save(folder, same)


def _write_broken(folder: Path) -> None:
    (folder / "model.savedmodel").mkdir(parents=True, exist_ok=True)
    (folder / "model.savedmodel" / "saved_model.pb").write_bytes(b"no model")


_SORTED = f"""
max_batch_size: {MAX_BATCH_SIZE}
input [ {{ name: "INDEX" data_type: TYPE_INT64 dims: [ 1 ] }}, {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [
  {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }},
  {{ name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }}
]
dynamic_batching {{ }}
"""
"""The lookup model's configuration in the order in which it is completed: signatures have none."""

CANDIDATE = Candidate(
    backend="tensorflow",
    write=_write_lookup,
    config=_SORTED,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    tolerance=1e-6,
    poison=beyond_the_table,
    write_heavy=lambda folder: _write_lookup(folder, 1, HEAVY_ROWS),
    write_broken=_write_broken,
    strings=Extra(write=_write_strings, config=STRINGS),
)

_OPENVINO = '\nparameters { key: "TF_RUNTIME" value { string_value: "openvino" } }'
THROUGH_OPENVINO = replace(
    CANDIDATE,
    config=_SORTED + _OPENVINO,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}" + _OPENVINO,
    poison=None,  # OpenVINO reads zeros beyond the table
    strings=None,  # it has hardly an operator for them
)
