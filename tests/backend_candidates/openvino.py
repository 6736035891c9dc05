from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from backend_candidates.candidate import (
    HEAVY_ROWS,
    LOOKUP,
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
from backend_candidates.onnxruntime import lookup_model, write_onnx

_LARGE_PRIME = 1009


def _parameter(name: str, shape: list[int], kind: Any) -> Any:
    made = op.parameter(shape, kind, name=name)
    made.output(0).set_names({name})
    return made


def _result(name: str, value: Any) -> Any:
    value.output(0).set_names({name})
    return op.result(value)


def lookup(number: int, rows: int = TABLE_ROWS, batch: int = -1) -> ov.Model:
    """OpenVINO reads zeros beyond the table; here such an index makes a Reshape impossible."""
    given, index = _parameter("INPUT0", [batch, 4], np.float32), _parameter("INDEX", [batch, 1], np.int64)
    beyond = op.convert(op.greater(op.reduce_max(index, np.array([0, 1])), np.int64(TABLE_ROWS)), np.int64)
    width = op.add(op.multiply(beyond, np.int64(4 * (_LARGE_PRIME - 1))), np.int64(4))
    shape = op.concat([np.array([-1]), op.unsqueeze(width, np.int64(0))], 0)
    row = op.gather(table(rows), op.squeeze(index, np.array([1])), np.int64(0))
    times = op.reshape(op.multiply(given, np.float32(number)), shape, False)
    results = [_result("OUTPUT0", op.add(times, row)), _result("OUTPUT1", op.subtract(given, row))]
    return ov.Model(results, [given, index], "lookup")


def strings() -> ov.Model:
    given = _parameter("INPUT0", [-1, 2], ov.Type.string)
    result = op.result(given)
    result.output(0).set_names({"OUTPUT0"})
    return ov.Model([result], [given], "strings")


def write_ir(folder: Path, model: ov.Model) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ov.serialize(model, folder / "model.xml")


IR = Candidate(
    backend="openvino",
    write=lambda folder, number: write_ir(folder, lookup(number)),
    config=LOOKUP,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_heavy=lambda folder: write_ir(folder, lookup(1, HEAVY_ROWS)),
    write_broken=lambda folder: (folder / "model.xml").write_text("no model") and None,
    strings=Extra(write=lambda folder: write_ir(folder, strings()), config=STRINGS),
)

ONNX = Candidate(
    backend="openvino",
    write=lambda folder, number: write_onnx(folder, lookup_model(number)),
    config=LOOKUP,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    write_broken=lambda folder: (folder / "model.onnx").write_bytes(b"no model") and None,
)

CANDIDATE = IR
