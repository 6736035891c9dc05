"""Ragged batches: what a model is told about the requests of a batch, and how its outputs are divided."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.base import Batch
from penstock.classic.batching.batch import QueuedCall, UnaryCall
from penstock.classic.batching.ragged import GeneratedInput, RaggedBatch, ragged_layout
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, Shape
from penstock.engines.errors import EngineError, InvalidRequestError
from support.classic import model_config, output, request, served

CONFIG = """
    name: "r" backend: "test" max_batch_size: 8
    input [
      { name: "R" data_type: TYPE_INT32 dims: [ -1, 2 ] allow_ragged_batch: true },
      { name: "PLAIN" data_type: TYPE_INT32 dims: [ -1 ] },
      { name: "SHAPED" data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
    ]
    output [
      { name: "SCATTERED" data_type: TYPE_INT32 dims: [ -1, 3 ] },
      { name: "FLAT" data_type: TYPE_INT32 dims: [ -1, 3 ] reshape { shape: [ -1, 3, 1 ] } },
      { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
    ]
"""
GENERATED = """
    batch_input [ { kind: BATCH_ITEM_SHAPE target_name: [ "A", "B" ] data_type: TYPE_FP32 source_input: "R" } ]
"""
DIVIDED = 'batch_output [ { target_name: [ "SCATTERED", "FLAT" ] source_input: "R" } ]'

SUMS = """
    name: "sums" backend: "test" max_batch_size: 2
    input { name: "R" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
    output { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }
    batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "R" }
    sequence_batching {
      max_sequence_idle_microseconds: 60000000 direct { }
      control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
    }
"""

Rows = tuple[int, int]
"""A request: its batch size, and the first dimension of R."""


def made(*requests: Rows, more: str = "", outputs: tuple[str, ...] = ()) -> RaggedBatch:
    config = model_config(CONFIG, more)
    layout = ragged_layout(config)
    assert layout is not None
    loop = asyncio.get_running_loop()
    calls: list[QueuedCall] = []
    for number, (size, length) in enumerate(requests):
        arrays = {
            "R": np.full((size, length, 2), number, np.int32),
            "PLAIN": np.full((size, 3), number, np.int32),
            "SHAPED": np.full((size, 4), number, np.int32),
        }
        calls.append(UnaryCall(request(outputs=outputs, **arrays), size, loop.create_future()))
    return RaggedBatch(layout, calls, ModelSignature(config), None)


def values(kind: str, *shapes: Shape, dtype: Any = np.int32) -> Any:
    return GeneratedInput(kind, ("T",), "R", np.dtype(dtype)).values(shapes)


def test_what_the_proto_says_of_each_kind() -> None:
    """A request of two rows of shape [3, 1] and one of one row of shape [2, 2]."""
    batch = (2, 3, 1), (1, 2, 2)
    assert values("BATCH_ELEMENT_COUNT", *batch).tolist() == [6, 4]
    assert values("BATCH_ACCUMULATED_ELEMENT_COUNT", *batch).tolist() == [6, 10]
    assert values("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", *batch).tolist() == [0, 6, 10]
    assert values("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", *batch).shape == (6,)
    assert values("BATCH_ITEM_SHAPE", *batch).tolist() == [[3, 1], [3, 1], [2, 2]]
    assert values("BATCH_ITEM_SHAPE_FLATTEN", *batch).tolist() == [3, 1, 3, 1, 2, 2]


KINDS = [
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_the_kinds_agree_with_each_other(shapes: list[Shape]) -> None:
    found = {kind: values(kind, *shapes) for kind in KINDS}
    counts, ends, bounds, widest, items, flat = found.values()
    assert counts.tolist() == [math.prod(shape) for shape in shapes]
    assert np.diff(bounds).tolist() == counts.tolist()
    assert bounds[1:].tolist() == ends.tolist()
    assert widest.shape == (counts.max(),)
    assert items.shape == (sum(shape[0] for shape in shapes), 2)
    assert math.fsum(map(math.prod, items.tolist())) == ends[-1]
    assert flat.tolist() == items.ravel().tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_have_the_type_of_the_configuration(kind: str, dtype: Any) -> None:
    assert values(kind, (1, 0, 2), dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_dimension_that_32_bits_cannot_hold_is_the_callers_fault(dtype: Any) -> None:
    """An empty tensor may have one: it has no elements."""
    with pytest.raises(InvalidRequestError, match="input 'R' is too large for batch input 'T'"):
        values("BATCH_ITEM_SHAPE", (1, 2**31, 0), dtype=dtype)


def test_a_source_that_the_model_takes_without_dimensions() -> None:
    """By `reshape { }`: each row has a shape of no numbers."""
    assert values("BATCH_ITEM_SHAPE", (2,), (1,)).shape == (3, 0)
    assert values("BATCH_ITEM_SHAPE_FLATTEN", (2,), (1,)).shape == (0,)


async def test_ragged_inputs_are_flat_and_the_others_as_ever() -> None:
    batch = made((1, 2), (2, 1), (1, 0), more=GENERATED)
    found = batch.gather()
    assert found["R"].tolist() == [0] * 4 + [1] * 4
    assert found["PLAIN"].tolist() == [[0] * 3, [1] * 3, [1] * 3, [2] * 3]
    assert found["SHAPED"].shape == (4, 2, 2)
    assert found["A"].tolist() == found["B"].tolist() == [[2, 2], [1, 2], [1, 2], [0, 2]]


async def test_one_request_alone_is_flat_too_and_not_copied() -> None:
    batch = made((2, 3))
    found = batch.gather()["R"]
    assert found.shape == (12,)
    assert np.shares_memory(found, batch.calls[0].request.inputs["R"].array)


async def test_outputs_are_divided_by_the_shapes_of_their_source() -> None:
    batch = made((1, 2), (2, 1), (1, 0), more=DIVIDED)
    # -1 is what R has there, 3 is the output's own
    given = np.arange(6 + 6 + 0, dtype=np.int32)
    batch.scatter({"SCATTERED": given, "FLAT": given.reshape(4, 3), "ROWS": np.arange(4, dtype=np.int32)[:, None]})
    scattered = [output(response, "SCATTERED") for _, response in batch.answers]
    assert [one.shape for one in scattered] == [(1, 2, 3), (2, 1, 3), (1, 0, 3)]
    assert np.concatenate([one.ravel() for one in scattered]).tolist() == given.tolist()
    assert [output(response, "FLAT").shape for _, response in batch.answers] == [(1, 2, 3), (2, 1, 3), (1, 0, 3)]
    assert [output(response, "ROWS").ravel().tolist() for _, response in batch.answers] == [[0], [1, 2], [3]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
async def test_what_is_gathered_is_scattered_to_where_it_came_from(requests: list[Rows]) -> None:
    text = """
        name: "same" max_batch_size: 15
        input { name: "R" data_type: TYPE_INT32 dims: [ -1, 2 ] reshape { shape: [ 2, -1 ] } allow_ragged_batch: true }
        output { name: "SAME" data_type: TYPE_INT32 dims: [ -1, 2 ] reshape { shape: [ 2, -1 ] } }
        batch_output { target_name: "SAME" source_input: "R" }"""
    config = model_config(text)
    layout = ragged_layout(config)
    assert layout is not None
    loop = asyncio.get_running_loop()
    arrays = [np.random.default_rng(size).integers(99, size=(size, n, 2), dtype=np.int32) for size, n in requests]
    calls: list[QueuedCall] = [UnaryCall(request(R=each), len(each), loop.create_future()) for each in arrays]
    batch = RaggedBatch(layout, calls, ModelSignature(config), None)
    batch.scatter({"SAME": batch.gather()["R"]})
    for sent, (_, response) in zip(arrays, batch.answers, strict=True):
        np.testing.assert_array_equal(output(response, "SAME"), sent)


async def test_callers_get_the_outputs_that_they_asked_for() -> None:
    batch = made((1, 1), (1, 2), more=DIVIDED, outputs=("ROWS", "SCATTERED"))
    batch.scatter({"SCATTERED": np.zeros(9, np.int32), "ROWS": np.zeros((2, 1), np.int32)})
    assert [[tensor.name for tensor in response.outputs or ()] for _, response in batch.answers] == [
        ["ROWS", "SCATTERED"]
    ] * 2


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        (np.zeros(8, np.int32), "'SCATTERED' has 8 elements, the requests of the batch need 9"),
        (np.zeros(10, np.int32), "'SCATTERED' has 10 elements"),
        (np.zeros(9, np.int64), "int64, the configuration says INT32"),
        (None, "no output 'SCATTERED'"),
    ],
)
async def test_outputs_that_do_not_fit_are_refused(elements: Any, text: str) -> None:
    batch = made((1, 1), (1, 2), more=DIVIDED, outputs=("SCATTERED",))
    with pytest.raises(ValueError, match=text):
        batch.scatter({} if elements is None else {"SCATTERED": elements})
    assert batch.answers == []


async def test_requests_that_are_executed_again_alone_are_ragged_too() -> None:
    batch = made((1, 2), (1, 1))
    [first, _] = batch.split(batch.close(EngineError("broken")))
    assert first.gather()["R"].shape == (4,)


async def test_requests_of_sequences_are_ragged_too() -> None:
    """A slot without a request gets what is like the request beside it."""
    config = model_config(SUMS)
    batches: list[list[Any]] = []

    def sums(batch: Batch) -> None:
        found = batch.gather()
        batches.append([found["R"].tolist(), found["ENDS"].tolist(), found["READY"].ravel().tolist()])
        batch.scatter({"SUM": found["READY"]})

    async with served(config, sums) as model:
        rows = [np.array([row], np.int32) for row in ([1, 2, 3], [4])]
        both = [
            InferRequest(inputs=request(R=row).inputs, correlation_id=n, sequence_start=True)
            for n, row in enumerate(rows, 1)
        ]
        await asyncio.gather(*map(model.infer, both))
        for row, last in ((rows[0], False), (rows[1], True)):
            await model.infer(InferRequest(inputs=request(R=row).inputs, correlation_id=2, sequence_end=last))
    # and no longer what is like a larger one before it
    assert batches == [
        [[1, 2, 3, 4], [3, 4], [1, 1]],
        [[0, 0, 0, 1, 2, 3], [3, 6], [0, 1]],
        [[0, 4], [1, 2], [0, 1]],
    ]


def shapes_of(config: ModelConfig, **inputs: Any) -> object:
    return ModelSignature(config).shapes(request(**inputs).inputs)


def test_only_inputs_that_are_not_ragged_keep_requests_apart() -> None:
    config = model_config(CONFIG)
    plain = {"PLAIN": np.zeros((1, 3), np.int32), "SHAPED": np.zeros((1, 4), np.int32)}
    other = plain | {"PLAIN": np.zeros((1, 4), np.int32)}
    short, long = (np.zeros((1, length, 2), np.int32) for length in (1, 5))
    assert shapes_of(config, R=short, **plain) == shapes_of(config, R=long, **plain)
    assert shapes_of(config, R=short, **plain) != shapes_of(config, R=short, **other)
    config.input[0].allow_ragged_batch = False
    assert shapes_of(config, R=short, **plain) != shapes_of(config, R=long, **plain)


def test_a_model_with_none_of_it_pays_for_none_of_it() -> None:
    config = model_config(CONFIG)
    config.input[0].allow_ragged_batch = False
    assert ragged_layout(config) is None
