"""The onnxruntime backend under the shim: dynamic batches, neighbours of a bad request, and the example repository."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto

from penstock.classic.loading import ClassicModel, load_model
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.backend import OnnxRuntimeBackend
from penstock.classic.tensors import Array, Tensor, datatype_of
from penstock.engines.errors import InvalidRequestError
from support.backends import model_context
from support.onnx import identity, save

EXAMPLES = Path(__file__).parents[3] / "examples" / "model_repository"


async def served(config: ModelConfig, version_folder: Path) -> ClassicModel:
    backend = OnnxRuntimeBackend({})
    backend.auto_complete(config, version_folder)
    return await load_model(model_context(config, version_folder), backend)


def request(*outputs: str, **arrays: Array) -> InferRequest:
    tensors = {name: Tensor(name, datatype_of(array.dtype), array) for name, array in arrays.items()}
    return InferRequest(inputs=tensors, outputs=outputs)


@pytest.fixture
async def add_sub() -> AsyncIterator[ClassicModel]:
    """The example, as it lies in the repository."""
    config = ModelConfig(name="add_sub_onnx")
    text_format.Parse((EXAMPLES / "add_sub_onnx" / "config.pbtxt").read_text(), config)
    config.name = "add_sub_onnx"
    model = await served(config, EXAMPLES / "add_sub_onnx" / "1")
    yield model
    await model.stop()


async def test_requests_are_batched_and_answered_each_with_its_own(add_sub: ClassicModel) -> None:
    rows = [np.full((1 + number % 3, 16), number, np.float32) for number in range(40)]
    responses = await asyncio.gather(*(add_sub.infer(request(INPUT0=row, INPUT1=row * 2)) for row in rows))
    for row, response in zip(rows, responses, strict=True):
        found: dict[str, Any] = {tensor.name: tensor.array for tensor in response.outputs or ()}
        np.testing.assert_array_equal(found["OUTPUT0"], row * 3)
        np.testing.assert_array_equal(found["OUTPUT1"], -row)
    assert add_sub.statistics.execution_count < len(rows), "nothing was batched"
    assert max(add_sub.statistics.batches) <= 32


async def test_a_request_gets_what_it_asked_for(add_sub: ClassicModel) -> None:
    row = np.ones((1, 16), np.float32)
    responses = await asyncio.gather(
        add_sub.infer(request("OUTPUT1", INPUT0=row, INPUT1=row)),
        add_sub.infer(request("OUTPUT1", "OUTPUT0", INPUT0=row, INPUT1=row)),
    )
    assert [[tensor.name for tensor in found.outputs or ()] for found in responses] == [
        ["OUTPUT1"],
        ["OUTPUT1", "OUTPUT0"],
    ]


async def test_a_bad_string_fails_alone(tmp_path: Path) -> None:
    config = ModelConfig(name="text", max_batch_size=8)
    model = await served(config, save(identity(TensorProto.STRING), tmp_path / "text"))
    good, bad = (np.array([[b"a", text]], np.object_) for text in (b"b", b"\xff"))
    first, second, third = await asyncio.gather(
        *(model.infer(request(X=array)) for array in (good, bad, good)), return_exceptions=True
    )
    await model.stop()
    assert isinstance(second, InvalidRequestError)
    for response in (first, third):
        assert not isinstance(response, BaseException)
        assert response.outputs is not None
        assert response.outputs[0].array.tolist() == good.tolist()


async def test_scalars_are_batched_through_a_reshape(tmp_path: Path) -> None:
    model = await served(ModelConfig(name="scalars"), save(identity(TensorProto.INT64, ("batch",)), tmp_path / "m"))
    arrays = [np.array([[number]], np.int64) for number in range(8)]
    responses = await asyncio.gather(*(model.infer(request(X=array)) for array in arrays))
    await model.stop()
    assert [found.outputs[0].array.tolist() for found in responses if found.outputs] == [[[n]] for n in range(8)]


def test_the_committed_model_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(EXAMPLES / "make_models.py"))["add_sub"]()
    assert (EXAMPLES / "add_sub_onnx" / "1" / "model.onnx").read_bytes() == made.SerializeToString(deterministic=True)
