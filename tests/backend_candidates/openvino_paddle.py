"""PaddlePaddle's files, which the openvino backend reads: the format of before PIR, `model.pdmodel`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

os.environ.update(FLAGS_enable_pir_api="0")

import paddle

from backend_candidates.candidate import MAX_BATCH_SIZE, Arrays, Candidate

_OUTPUT = "scale_0.tmp_0"
"""Paddle names outputs itself."""


class Scale(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = float(number)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return paddle.scale(x, self.number, 1.0)


def _write(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spec = paddle.static.InputSpec([None, 4], "float32", "x")
    with paddle.utils.unique_name.guard():
        paddle.jit.save(Scale(number), str(folder / "model"), input_spec=[spec])


def _rows(random: np.random.Generator, count: int) -> Arrays:
    return {"x": random.random((count, 4), np.float32)}


CANDIDATE = Candidate(
    backend="openvino",
    write=_write,
    config=f"""
        max_batch_size: {MAX_BATCH_SIZE}
        input {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }}
        output {{ name: "{_OUTPUT}" data_type: TYPE_FP32 dims: [ 4 ] }}
        dynamic_batching {{ }}
    """,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=_rows,
    expect=lambda inputs, number: {_OUTPUT: inputs["x"] * np.float32(number) + np.float32(1)},
    write_broken=lambda folder: (folder / "model.pdmodel").write_bytes(b"no model") and None,
)
